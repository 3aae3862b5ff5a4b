"""The Megatron-Core backend.

Megatron-Core warns at import, on every rank, about each optional package that is absent. The choice of layer spec and optimizer is logged
by us, once, so those warnings are silenced before Megatron is imported; and it chooses at import how its small functions are compiled, and
whether there is a Transformer Engine.
"""

import warnings

from megarl.models.megatron.cuda_redirect import without_compiler
from megarl.models.megatron.transformer_engine import find

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.")

find()
with without_compiler():
    import megatron.core.jit  # noqa: F401
