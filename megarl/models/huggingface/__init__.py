"""Parts that the torch backends (DTensor and FSDP1) share: transformers' own models on the engine's
attention, read shard by shard.

``attention`` registers the engine's attention with transformers, ``loading`` builds a model without its
weights and says what belongs into it, ``passes`` runs micro-batches through it, ``backend`` is what both have
of the engine's protocol. Nothing here knows how parameters are divided.
"""
