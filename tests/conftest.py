"""Choose the tests of a tier: the default one, ``--all`` or ``--part NAME``. See tests/tiers.py."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from typing import Any

import pytest

from tests import tiers

CORES_FOR_TWO_POOLS = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megarl")
    group.addoption(
        "--all",
        action="store_true",
        dest="all_tiers",
        help="every test and every case, not the default tier alone",
    )
    group.addoption(
        "--part", choices=list(tiers.PARTS), help="one part of what --all adds to the default tier"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs with --all or in its --part only")
    config.addinivalue_line("markers", "sampled(cover, always): the default tier runs a sample of the cases")
    config.addinivalue_line(
        "markers", "newest_megatron(**values): runs on the newest Megatron-Core as well, with these values"
    )
    if part := config.getoption("part"):
        os.environ.update(tiers.PARTS[part].variables)
    # the processes of pytest-xdist inherit it: a commit during a run must not change the sample of some of
    # them
    try:
        os.environ.setdefault(tiers.SEED_VARIABLE, str(tiers.sample_seed()))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage: a quarter of the time would go to that, and modules and tests are
    none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("all_tiers"):
        return None
    part = config.getoption("part")
    chosen = f"part {part} of --all: {tiers.PARTS[part].what}" if part else "default tier"
    return f"{chosen}; samples of seed {tiers.sample_seed()} ({tiers.SEED_VARIABLE})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, kept = config.getoption("part"), set(items)
    if part:
        kept = set(tiers.in_part(items, part, tiers.sample_seed()))
    elif not config.getoption("all_tiers"):
        named = set(config.args)  # a case named whole runs in whatever tier it is
        kept = tiers.in_default_tier(items, tiers.sample_seed()) | {
            item for item in items if item.nodeid in named
        }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(optionalhook=True)  # also where pytest-xdist is not loaded
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files to each process, and all distributed tests to one: their ranks work in lockstep, and beside
    those of another process on two cores each waits for its turn at every collective, so that both together
    take longer than one after the other."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OnePoolScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return (
                "tests/dist"
                if scope.startswith("tests/dist/") and (os.cpu_count() or 1) < CORES_FOR_TWO_POOLS
                else scope
            )

    return OnePoolScheduling(config, log)
