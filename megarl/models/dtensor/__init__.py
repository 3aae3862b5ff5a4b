"""The DTensor backend: transformers models sharded by torch's DTensor (tensor and sequence parallelism) and
``fully_shard`` (FSDP2).

``mesh`` builds the device mesh and its groups. ``plans`` and ``styles`` define how modules are sharded over
tensor-parallel ranks, and ``regions`` the collectives between these ranks. ``parallelize`` applies a plan and
``fully_shard``; ``shards`` loads a rank's slices and gathers them. ``backend`` implements the engine's
protocol with all of these.
"""

import warnings

# Ignore the warning about views: neither this package nor the heads write to the model's outputs in place.
warnings.filterwarnings(
    "ignore", message=r"FSDP2-wrapped module .* returned a view tensor", category=UserWarning
)
