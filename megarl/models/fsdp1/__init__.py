"""The FSDP1 backend: transformers models in torch's FullyShardedDataParallel.

Data parallelism alone: every rank computes whole layers, which are gathered one at a time from the ranks that
each keep a part.
"""
