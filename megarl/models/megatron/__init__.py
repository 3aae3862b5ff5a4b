"""The Megatron-Core backend.

Megatron-Core warns at import, on every rank, about each optional package that is absent. The choice of layer
spec and optimizer is logged by us, once, so those warnings are silenced before Megatron is imported; and it
chooses at import how its small functions are compiled, and whether there is a Transformer Engine. What later
releases say of their own plans to who builds on them, some of it for every layer, is nothing that a user can
act on; `megarl doctor` and the README say that GPTModel is deprecated.
"""

import logging
import warnings

from megarl.models.megatron.cuda_redirect import without_compiler
from megarl.models.megatron.transformer_engine import find

# How messages begin that are not shown, by the logger that gives them.
_TO_DEVELOPERS = {
    "megatron.core.transformer.transformer_layer": "Rewrapping ModuleSpec",
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": (
        "DistributedDataParallel: full_param_layout not provided"
    ),
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
}


def _hide(name: str, beginning: str) -> None:
    logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith(beginning))


warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.")
for _name, _beginning in _TO_DEVELOPERS.items():
    _hide(_name, _beginning)

# Before the first import of Megatron-Core: a broken Transformer Engine would end that import.
find()
with without_compiler():
    # It binds torch.compile when it is imported, so this import fixes the choice for the process.
    import megatron.core.jit  # noqa: F401
