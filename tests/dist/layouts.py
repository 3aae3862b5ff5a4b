"""Layouts of the three backends over a few ranks, and the rows of the tests that ask the same of each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.models import policy_config
from tests.tiers import slow

LAYOUTS: Mapping[str, Mapping[str, tuple[int, dict[str, Any]]]] = {
    "megatron": {
        "tp1": (1, {}),
        "tp2": (2, {"tp": 2}),
        "tp2-sp": (2, {"tp": 2, "sp": True}),
        "pp2": (2, {"pp": 2, "first": 1, "last": 2}),
        "pp2-uneven": (2, {"pp": 2, "first": 2, "last": 1}),
        "dp2": (2, {}),
        "dp2-overlap": (2, {"overlap": True}),
        "dp4-overlap": (4, {"overlap": True}),
        "tp2-pp2": (4, {"tp": 2, "pp": 2, "first": 1, "last": 2}),
        "tp2-dp2": (4, {"tp": 2}),
        "cp2": (2, {"cp": 2, "multiple": 4}),
        "cp2-tp2-sp": (4, {"cp": 2, "tp": 2, "sp": True, "multiple": 8}),
        "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    },
    "dtensor": {
        "dp1": (1, {}),
        "dp2": (2, {}),
        "dp3": (3, {}),
        "tp2": (2, {"tp": 2}),
        "tp2-sp": (2, {"tp": 2, "sp": True}),
        "cp2": (2, {"cp": 2}),
        "cp2-tp2-sp": (4, {"cp": 2, "tp": 2, "sp": True}),
        "tp2-dp2": (4, {"tp": 2}),
        "cp4-ring": (4, {"cp": 4, "comm": "p2p"}),
    },
    "fsdp1": {"dp1": (1, {}), "dp2": (2, {}), "dp3": (3, {})},
}
CONFIG: Mapping[str, Callable[..., dict[str, Any]]] = {"megatron": policy_config, "dtensor": dtensor_config, "fsdp1": fsdp1_config}
DTENSOR = "dp1 dp2 tp2 tp2-sp cp2 cp2-tp2-sp tp2-dp2 cp4-ring"


def over(marked: bool = True, **layouts: str) -> pytest.MarkDecorator:
    """Parametrize a test by backend and layout.

    Args:
        marked: DTensor over four ranks, which takes many times as long as over two, is left to ``--all``.
        layouts: names of the layouts of each backend.
    """
    rows = [
        pytest.param(backend, layout, marks=[slow] if marked and backend == "dtensor" and LAYOUTS[backend][layout][0] > 3 else [])
        for backend, names in layouts.items()
        for layout in names.split()
    ]
    return pytest.mark.parametrize(("backend", "layout"), rows)


def configured(backend: str, layout: str, model: Path, **changes: Any) -> tuple[int, dict[str, Any]]:
    """Ranks and configuration of the policy."""
    world, placed = LAYOUTS[backend][layout]
    return world, CONFIG[backend](model, **{**placed, **changes})
