"""The DTensor backend: transformers' own models, divided by torch's DTensor (tensor and sequence parallelism)
and ``fully_shard`` (FSDP2).

``mesh`` makes the device mesh and its groups, ``plans`` and ``styles`` say how modules are divided over
tensor-parallel ranks, and ``regions`` what these send each other; ``parallelize`` applies a plan and
``fully_shard``, ``shards`` reads a rank's slices and gathers them again; ``backend`` is the engine's protocol
over all of it.
"""

import warnings

# nothing here, and nothing in the heads, writes into what the model returns
warnings.filterwarnings(
    "ignore", message=r"FSDP2-wrapped module .* returned a view tensor", category=UserWarning
)
