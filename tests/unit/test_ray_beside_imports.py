"""Ray starts beside the imports of the driver, before anything is read, and is ended by whatever ends the
run."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray

from megarl import env
from megarl.config import complete_run
from megarl.distributed import ray_runtime
from megarl.errors import ClusterError, DataError
from megarl.run import run as algorithms_run
from megarl.run import start
from tests.unit.config_samples import raw_grpo

LONGEST = 60


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No Ray; what ends one is noted here."""
    calls: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    return calls


def test_imports_go_on_while_ray_starts(
    ended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other, so that one after the other would never end."""
    begun, imported = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "events_of_this_test", (begun, imported), raising=False)
    (tmp_path / "slow_to_import.py").write_text(
        "import threading\nbegun, imported = threading.events_of_this_test\nassert "
        f"begun.wait({LONGEST})\nimported.set()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(start, "_DRIVER_IMPORTS", ("no_such_module", "slow_to_import"))

    def init_ray(timeout_s: float, silent_s: float) -> None:
        begun.set()
        assert imported.wait(LONGEST), "nothing is imported while Ray starts"

    monkeypatch.setattr(ray_runtime, "init_ray", init_ray)
    with ExitStack() as stack:
        start.start_ray(stack)
        assert ended == []
    assert ended == ["shutdown"]


STARTED = """
from contextlib import ExitStack
from megarl import env
from megarl.distributed import ray_runtime
from megarl.run import start

ray_runtime.init_ray = lambda **_: print("of Ray's processes:", env.text("OMP_WAIT_POLICY"))
start._DRIVER_IMPORTS = ("torch",)
with ExitStack() as stack:
    start.start_ray(stack)
"""


@pytest.mark.parametrize(("own", "sleeps"), [(None, True), ("active", False)])
def test_threads_of_torch_sleep_in_the_driver(own: str | None, sleeps: bool) -> None:
    """OpenMP shows its settings when it is loaded, so that torch has no other copy of it."""
    variables = {**env.snapshot(), "OMP_DISPLAY_ENV": "verbose"}
    variables.pop("OMP_WAIT_POLICY", None)
    if own is not None:
        variables["OMP_WAIT_POLICY"] = own
    done = subprocess.run(
        [sys.executable, "-c", STARTED], env=variables, capture_output=True, text=True, timeout=LONGEST
    )
    [spins] = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert (spins == "0") is sleeps, done.stderr
    assert f"of Ray's processes: {own}\n" in done.stdout


def test_a_ray_that_does_not_start_is_ended_too(ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(timeout_s: float, silent_s: float) -> None:
        raise ClusterError("no raylet")

    monkeypatch.setattr(start, "_DRIVER_IMPORTS", ())
    monkeypatch.setattr(ray_runtime, "init_ray", fail)
    with pytest.raises(ClusterError, match="no raylet"), ExitStack() as stack:
        start.start_ray(stack)
    assert ended == ["shutdown"]


def test_data_are_refused_after_ray_began_and_before_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    def start_ray(stack: ExitStack, timeout_s: float, least_s: float) -> None:
        happened.append("ray")
        stack.callback(happened.append, "ray ended")

    def read_inputs(config: Any, stack: ExitStack) -> None:
        happened.append("inputs")
        raise DataError("no records")

    monkeypatch.setattr(algorithms_run, "start_ray", start_ray)
    monkeypatch.setattr(algorithms_run, "read_inputs", read_inputs)
    monkeypatch.setattr(algorithms_run, "require_this_machine", lambda _: happened.append("machine"))
    monkeypatch.setattr(algorithms_run, "start_policy", lambda *arguments: happened.append("workers"))
    config: Any = {**complete_run(raw_grpo(), "run"), "run_dir": str(tmp_path / "run")}
    with pytest.raises(DataError, match="no records"):
        algorithms_run.run(config)
    assert happened == ["machine", "ray", "inputs", "ray ended"]
