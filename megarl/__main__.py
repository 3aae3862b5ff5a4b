"""Entry point of ``python -m megarl``, for environments in which the script ``megarl`` is not on the path."""

import sys

from megarl.cli import main

sys.exit(main())
