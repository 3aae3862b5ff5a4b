"""Shared code of the torch backends (DTensor and FSDP1): transformers models with the engine's attention,
loaded shard by shard.

``attention`` registers the engine's attention with transformers. ``loading`` builds a model without weights
and checks that a checkpoint matches it. ``passes`` runs micro-batches, and ``backend`` has the common part of
the engine's protocol. Nothing here depends on how parameters are sharded.
"""
