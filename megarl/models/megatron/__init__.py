"""The Megatron-Core backend.

At import, Megatron-Core warns on every rank about each optional package that is absent. We log the chosen
layer spec and optimizer ourselves, once, so this package silences those warnings before it imports
Megatron-Core. At import, Megatron-Core also chooses how its small functions are compiled, and whether
Transformer Engine is present. Later releases log their own deprecation plans, some for every layer; users
cannot act on these, so they are hidden as well. `megarl doctor` and the README state that GPTModel is
deprecated.
"""

import logging
import warnings

from megarl.models.megatron.cuda_redirect import without_compiler
from megarl.models.megatron.transformer_engine import find

# The beginnings of messages that are hidden, by the logger that emits them.
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

# Call this before the first import of Megatron-Core, which a broken Transformer Engine would make fail.
find()
with without_compiler():
    # This module binds torch.compile when it is imported, so that this import fixes the choice for the
    # process.
    import megatron.core.jit  # noqa: F401
