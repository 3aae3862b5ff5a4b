"""The Megatron-Core backend.

Megatron-Core warns at import, on every rank, about each optional package that is absent. The choice of layer spec and optimizer is logged
by us, once, so those warnings, and torch's notices about names that its own older releases need, are silenced before Megatron is
imported.
"""

import warnings

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
