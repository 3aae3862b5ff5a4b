"""``python -m megarl``: runs the command if its script is not on the path."""

import sys

from megarl.cli import main

sys.exit(main())
