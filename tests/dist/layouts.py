"""Layouts of the three backends over a few ranks, and the rows of the tests that ask the same of each of
them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.models import policy_config
from tests.tiers import slow


def layout(name: str, *, torch: bool = False, padded: bool = False) -> tuple[int, dict[str, Any]]:
    """Ranks, and changes of a policy's configuration, that a layout's name says: ``tp2-sp-ep2-dp2``.

    Sizes are those of ``policy_config``, and ``dp``; ``sp``, ``overlap`` and ``ring`` are switches. Of three
    layers the first of two stages has one, or where the layout is ``uneven``, two.

    Args:
        name: parts joined by hyphens.
        torch: of DTensor or FSDP1, which cut sequences of any length.
        padded: sequences have a multiple of the ranks of sequence parallelism as their length.
    """
    parts = dict(re.findall(r"([a-z]+)(\d*)", name))
    sizes = {key: int(parts.get(key, 1)) for key in ("tp", "pp", "vpp", "cp", "ep", "etp")}
    changes: dict[str, Any] = {key: size for key, size in sizes.items() if size > 1}
    changes |= {key: True for key in ("sp", "overlap") if key in parts}
    if "ring" in parts:
        changes["comm"] = "p2p"
    if sizes["pp"] == 2 and sizes["vpp"] == 1:
        changes |= {"first": 2, "last": 1} if "uneven" in parts else {"first": 1, "last": 2}
    within = sizes["tp"] if "sp" in parts else 1
    if not torch and (sizes["cp"] > 1 or (padded and within > 1)):
        changes["multiple"] = within * (2 * sizes["cp"] if sizes["cp"] > 1 else 1)
    ranks_of_stage = max(sizes["tp"] * sizes["cp"], sizes["ep"] * sizes["etp"])
    return sizes["pp"] * ranks_of_stage * int(parts.get("dp", 1)), changes


MEGATRON = "tp1 tp2 tp2-sp pp2 pp2-uneven dp2 dp2-overlap dp4-overlap tp2-pp2 tp2-dp2 cp2 cp2-tp2-sp pp2-vpp2"
DTENSOR = "dp1 dp2 tp2 tp2-sp cp2 cp2-tp2-sp tp2-dp2 cp4-ring"
LAYOUTS: Mapping[str, Mapping[str, tuple[int, dict[str, Any]]]] = {
    "megatron": {name: layout(name) for name in MEGATRON.split()},
    "dtensor": {name: layout(name, torch=True) for name in DTENSOR.split()},
    "fsdp1": {name: layout(name) for name in ("dp1", "dp2", "dp3")},
}
CONFIG: Mapping[str, Callable[..., dict[str, Any]]] = {
    "megatron": policy_config,
    "dtensor": dtensor_config,
    "fsdp1": fsdp1_config,
}


def over(marked: bool = True, **layouts: str) -> pytest.MarkDecorator:
    """Parametrize a test by backend and layout.

    Args:
        marked: DTensor over four ranks, which takes many times as long as over two, is left to ``--all``.
        layouts: names of the layouts of each backend.
    """
    rows = [
        pytest.param(
            backend,
            name,
            marks=[slow] if marked and backend == "dtensor" and LAYOUTS[backend][name][0] > 3 else [],
        )
        for backend, names in layouts.items()
        for name in names.split()
    ]
    return pytest.mark.parametrize(("backend", "layout"), rows)


def configured(backend: str, name: str, model: Path, **changes: Any) -> tuple[int, dict[str, Any]]:
    """Ranks and configuration of the policy."""
    world, placed = LAYOUTS[backend][name]
    return world, CONFIG[backend](model, **{**placed, **changes})
