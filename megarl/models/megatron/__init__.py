"""The Megatron-Core backend.

Importing the package hides Megatron-Core's warnings that users cannot act on: missing optional packages (one
warning per rank) and deprecation plans of later releases. megarl logs the chosen layer spec and optimizer
itself, once. `megarl doctor` and the README state that GPTModel is deprecated.

Importing Megatron-Core also fixes for the process how its small functions are compiled and whether
Transformer Engine is used, so both choices are made here.
"""

import logging
import warnings

from megarl.models.megatron.cuda_redirect import without_compiler
from megarl.models.megatron.transformer_engine import find

# Prefixes of the log messages to hide, by the name of their logger.
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

# Look for Transformer Engine before the first import of Megatron-Core, because that import fails if the
# installed Transformer Engine is broken.
find()
with without_compiler():
    # Import this module here: it binds torch.compile on import, and the binding stays for the whole process.
    import megatron.core.jit  # noqa: F401
