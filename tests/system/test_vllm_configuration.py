"""The engines of four models as GPUs would get them, against what is written down: a changed argument shows
in what vLLM makes of it."""

from __future__ import annotations

import importlib.util

import pytest

from tests.tiers import slow

pytestmark = [
    slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.mark.parametrize("name", ["1.5B", "7B", "30B-A3B", "671B"])
def test_an_engine_is_configured_as_it_is_written_down(name: str) -> None:
    from tests.system.gpu_engines import RECORDED, configured

    begun = f"{name}: "
    [recorded] = [
        text for text in RECORDED.read_text(encoding="utf-8").split("\n\n") if text.startswith(begun)
    ]
    assert configured(name).strip() == recorded.strip()
