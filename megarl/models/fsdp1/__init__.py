"""The FSDP1 backend: transformers models in torch's FullyShardedDataParallel.

It has only data parallelism: every rank computes whole layers. Each rank keeps a part of every layer, and one
layer is gathered at a time.
"""
