"""The training engine, which all backends share: micro-batches, heads, forward and backward passes, and the
worker's methods.

It also silences torch's deprecation warnings about collective functions, because older torch releases know
only the deprecated names.
"""

import warnings

warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
