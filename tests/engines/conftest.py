"""The local Ray that system tests use."""

from __future__ import annotations

import pytest

from tests.system.conftest import local_ray

__all__ = ["local_ray"]
pytest.register_assert_rewrite("tests.engines.suite")
