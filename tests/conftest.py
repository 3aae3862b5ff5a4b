"""The choice for the second run: ``--newest-megatron`` leaves what is marked ``newest_megatron``."""

from __future__ import annotations

import pytest

MARK = "newest_megatron"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--newest-megatron", action="store_true", help="only what another Megatron-Core could change")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}(**values): runs again on the newest Megatron-Core, with these values of its parameters")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--newest-megatron"):
        return
    chosen = [item for item in items if any(_fits(item, mark) for mark in item.iter_markers(MARK))]
    lost = {_function(item) for item in items if item.get_closest_marker(MARK)} - set(map(_function, chosen))
    if lost:
        raise pytest.UsageError(f"no case has the values in the {MARK} mark of {', '.join(sorted(lost))}; correct the mark")
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def _fits(item: pytest.Item, mark: pytest.Mark) -> bool:
    """Whether the parameters of a test are among the values that its mark names."""
    callspec = getattr(item, "callspec", None)
    return all(callspec is not None and callspec.params.get(name) in values for name, values in mark.kwargs.items())


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
