"""The DTensor backend: transformers' own models, divided by torch's DTensor (tensor and sequence parallelism) and ``fully_shard`` (FSDP2).

``mesh`` makes the device mesh and its groups, ``plans`` and ``styles`` say how modules are divided over tensor-parallel ranks,
``parallelize`` applies them and ``fully_shard``, ``plan_check`` refuses plans that would give wrong gradients, ``shards`` reads a rank's
slices and gathers them again, ``gradients``, ``loss_scale`` and ``optimizer_check`` belong to the
optimizer step, ``mover`` to offloading, ``context_parallel``
to the NeMo-RL policy API's static methods; ``backend`` is the engine's protocol over all of it.
"""

import warnings

# nothing here, and nothing in the heads, writes into what the model returns
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
