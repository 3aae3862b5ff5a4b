"""Shared parts of the torch backends (DTensor and FSDP1): transformers' own models with the engine's
attention, read shard by shard.

``attention`` registers the engine's attention with transformers. ``loading`` builds a model without its
weights and checks which tensors belong to it. ``passes`` runs micro-batches through the model, and
``backend`` has the common part of the engine's protocol. Nothing here depends on how parameters are divided.
"""
