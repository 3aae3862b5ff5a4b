"""The Megatron-Core backend.

Megatron-Core warns at import, on every rank, about each optional package that is absent. The choice of layer spec and optimizer is logged
by us, once, so those warnings are silenced before Megatron is imported.
"""

import warnings

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.")
