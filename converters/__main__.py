"""Entry point of ``python -m converters``."""

import sys

from converters.command import main

sys.exit(main())
