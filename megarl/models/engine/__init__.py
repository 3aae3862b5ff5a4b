"""The engine that all backends share: micro-batches, heads, passes, the worker's methods.

For every backend, it silences torch's warnings about collective functions whose names older releases of torch
still need.
"""

import warnings

warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
