"""vLLM, on the policy's devices and on others."""

from __future__ import annotations

import importlib.util

import pytest

from tests.engines.served import vllm_apart, vllm_colocated
from tests.engines.suite import Suite, served
from tests.tiers import slow

__all__ = ["served"]
pytestmark = [
    slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.parametrize("served", [vllm_colocated, vllm_apart], indirect=True)
class TestVllm(Suite):
    pass
