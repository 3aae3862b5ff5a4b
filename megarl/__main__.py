"""``python -m megarl``: the command, where its script is not on the path."""

import sys

from megarl.cli import main

sys.exit(main())
