"""The Megatron-Core backend.

Megatron-Core warns at import, on every rank, about each optional package that is absent. The choice of layer spec and optimizer is logged
by us, once, so those warnings are silenced before Megatron is imported; and it chooses at import how its small functions are compiled.
"""

import warnings

from megarl.models.megatron.cuda_redirect import without_compiler

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.")

with without_compiler():
    import megatron.core.jit  # noqa: F401
