"""The engine that all backends share: micro-batches, heads, passes, the worker's methods.

torch's notices about collectives by names that its older releases need are silenced here, for every backend.
"""

import warnings

warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
