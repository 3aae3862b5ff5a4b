"""The FSDP1 backend: transformers models in torch's FullyShardedDataParallel.

It supports only data parallelism: parameters are sharded over all ranks, and one layer at a time is gathered
for the computation.
"""
