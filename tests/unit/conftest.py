"""How hypothesis tries the unit tests: as long as a slow machine takes, and a failure says how to repeat it."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("megarl", deadline=None, print_blob=True)
hypothesis.settings.load_profile("megarl")
