"""A validation that goes on beside the next step leaves the log and the checkpoints of a run that waits for
it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megarl.checkpoint.manager import CheckpointManager
from megarl.checkpoint.node_memory import OwnMemory
from megarl.config.plugins import ACTOR
from megarl.errors import ConfigError, StateError
from megarl.observe.console import TrainingConsole
from megarl.observe.metrics_file import FILE_NAME, read_metrics
from megarl.observe.sinks import MetricsFileSink, MetricSinks
from megarl.observe.timing import VALIDATION_BESIDE, PhaseTimer
from megarl.run.loop import Reporting, Schedule, run_loop
from megarl.run.resume import CheckpointWriter
from megarl.run.stopping import StopRequest

STEPS = 5
SCHEDULE = Schedule(STEPS, val_period=2, val_at_start=True, val_at_end=True)


class Played:
    """An algorithm whose figures tell which weights were validated.

    Args:
        beside: a validation goes on beside the next step.
        during: called in each step.
    """

    def __init__(self, beside: bool, during: Callable[[int], object] = lambda step: None) -> None:
        self._beside, self._during = beside, during
        self._trained = 0
        self._wanted: int | None = None
        self._found: dict[str, float] | None = None
        self.sampler = SimpleNamespace(state=lambda: {"position": self._trained})
        self.waited_for: list[int] = []

    def step(self, step: int) -> dict[str, float]:
        wanted, self._wanted = self._wanted, None
        self._found = None if wanted is None else {"accuracy": wanted / 8}
        self._during(step)
        self._trained = step
        return {"num_tokens": 1, "loss": float(step)}

    def is_warming_up(self, step: int) -> bool:
        del step
        return False

    def validate(self) -> dict[str, float]:
        self.waited_for.append(self._trained)
        return {"accuracy": self._trained / 8}

    def validate_beside(self) -> bool:
        self._wanted = self._trained if self._beside else None
        return self._beside

    def validated_beside(self) -> dict[str, float] | None:
        self._wanted = None
        return self._found


class Saved:
    """A model that is one file."""

    def save_checkpoint(self, weights_path: str, optimizer_path: str, tokenizer_path: str) -> None:
        del optimizer_path, tokenizer_path
        Path(weights_path).mkdir(parents=True)
        (Path(weights_path) / "weights").write_text("weights")


def trained(
    run_dir: Path,
    algorithm: Played,
    *,
    first_step: int = 0,
    stop: StopRequest | None = None,
    in_memory: bool = False,
    metric: str = "validation/accuracy",
    timer: PhaseTimer | None = None,
) -> int:
    """Run the loop with its real log and checkpoints, of which each step makes one."""
    manager = CheckpointManager({"checkpoint_dir": run_dir / "checkpoints", "metric_name": metric})
    memory = OwnMemory(manager.checkpoint_dir) if in_memory else None
    writer = CheckpointWriter(manager, {ACTOR: Saved()}, 1, memory=memory)  # type: ignore[dict-item]
    with MetricSinks([MetricsFileSink(run_dir)]) as sinks:
        sinks.truncate_after(first_step if first_step else -1)
        reporting = Reporting(
            sinks, TrainingConsole(STEPS, "", console=Console(quiet=True)), timer or PhaseTimer()
        )
        try:
            return run_loop(algorithm, SCHEDULE, reporting, writer, first_step, stop)  # type: ignore[arg-type]
        except BaseException as error:
            writer.leave(type(error), error, None)
            raise


def log(run_dir: Path) -> list[dict[str, Any]]:
    """The rows without clock readings."""
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("time", "timing/", "performance/"))
        }
        for row in read_metrics(run_dir / FILE_NAME)
    ]


def infos(run_dir: Path) -> dict[str, Mapping[str, Any]]:
    """What is said in each checkpoint that could be resumed from."""
    paths = sorted((run_dir / "checkpoints").glob("step_*/training_info.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


def test_log_and_checkpoints_are_those_of_a_run_that_waits(tmp_path: Path) -> None:
    waiting, beside = Played(beside=False), Played(beside=True)
    assert trained(tmp_path / "waiting", waiting) == trained(tmp_path / "beside", beside) == STEPS
    assert waiting.waited_for == [0, 2, 4, 5] and beside.waited_for == [5]
    assert log(tmp_path / "beside") == log(tmp_path / "waiting")
    assert infos(tmp_path / "beside") == infos(tmp_path / "waiting")
    assert [row["step"] for row in log(tmp_path / "beside")] == list(range(STEPS + 1))
    assert infos(tmp_path / "beside")["step_4"]["metrics"]["val_accuracy"] == 0.5


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_checkpoint_is_seen_with_its_figures_alone(tmp_path: Path, in_memory: bool) -> None:
    seen: dict[int, list[str]] = {}
    beside = Played(True, lambda step: seen.update({step: sorted(infos(tmp_path))}))
    trained(tmp_path, beside, in_memory=in_memory)
    if not in_memory:
        assert seen[3] == ["step_1"] and seen[4] == ["step_1", "step_2", "step_3"]
    assert "step_2" not in seen[3] and "step_4" not in seen[5]
    assert {name: info["metrics"].get("val_accuracy") for name, info in infos(tmp_path).items()} == {
        "step_1": None,
        "step_2": 0.25,
        "step_3": None,
        "step_4": 0.5,
        "step_5": 0.625,
    }


@pytest.mark.parametrize("when", ["in the step", "before its save"])
def test_a_stop_waits_for_the_figures(when: str, tmp_path: Path) -> None:
    """Where it comes before the save, the validation was to go on beside a step that does not follow."""
    file = tmp_path / "stop"
    beside = Played(True, lambda step: step == 4 and when == "in the step" and file.touch())
    position = beside.sampler.state
    beside.sampler.state = lambda: (file.touch() if position() == {"position": 4} else None) or position()
    assert trained(tmp_path, beside, stop=StopRequest([file])) == 4
    assert beside.waited_for == [4] and log(tmp_path)[-1]["validation/accuracy"] == 0.5
    assert infos(tmp_path)["step_4"]["metrics"]["val_accuracy"] == 0.5


def test_a_time_limit_leaves_room_for_what_a_stop_would_wait_for(tmp_path: Path) -> None:
    """A validation beside a step takes none of its time, and the end of a save is in another step."""
    steps, saves = list[float](), list[tuple[float, float]]()

    class Told(StopRequest):
        def step_took(self, seconds: float) -> None:
            steps.append(seconds)

        def save_took(self, step_s: float, save_s: float) -> None:
            saves.append((step_s, save_s))

    class Timed(Played):
        timer = PhaseTimer(lambda: 0.0)

        def step(self, step: int) -> dict[str, float]:
            if self._wanted is not None:
                self.timer.merge(PhaseTimer(lambda: 0.0), {VALIDATION_BESIDE: 900.0})
            return super().step(step)

    trained(tmp_path, Timed(True), stop=Told(), timer=Timed.timer)
    assert [seconds > 900 for seconds in steps] == [False, True, False, False, True, False, False, True]
    # each step, and again where it was held back
    assert len(saves) == STEPS + 2 and all(
        second > first for (_, first), (_, second) in (saves[1:3], saves[4:6])
    )


def test_a_step_that_fails_leaves_the_row_before_it_and_no_checkpoint_without_figures(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise StateError("broken")

    with pytest.raises(StateError, match="broken"):
        trained(tmp_path, Played(True, fail))
    assert [row["step"] for row in log(tmp_path)] == [0, 1, 2]
    assert "validation/accuracy" not in log(tmp_path)[-1] and list(infos(tmp_path)) == ["step_1"]
    assert not list((tmp_path / "checkpoints").glob("tmp_*"))
    # whoever goes on has them all in the end
    trained(tmp_path, Played(True), first_step=1)
    trained(tmp_path / "undisturbed", Played(False))
    assert log(tmp_path) == log(tmp_path / "undisturbed")


def test_a_metric_that_no_validation_has_is_refused_when_its_figures_come(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="validation/accuracy"):
        trained(tmp_path, Played(True), metric="validation/acuracy")
    assert trained(tmp_path / "of training", Played(True), metric="train/loss") == STEPS
