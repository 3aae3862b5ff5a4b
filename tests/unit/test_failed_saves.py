"""Whole runs whose checkpoints cannot be written, on a disk that is full: they go on, keep what is there, and
say what is missing."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.checkpoint import background
from megarl.checkpoint.manager import CheckpointManager
from megarl.errors import WORKER_TRACE, CheckpointError, ConfigError, DeadlineError
from megarl.run import run as run_module
from megarl.run.run import run
from megarl.run.stopping import STOP_FILE
from tests.unit.driver_runs import STEPS, PolicyMaker, comparable, final_weights, make_config
from tests.unit.reference_policy import ReferencePolicy


class DiskFull(PolicyMaker):
    """Policies of which some saves, counted from 1, meet a full disk when a part is written; ``/dev/full``
    says what such a disk says."""

    def __init__(
        self, failing: Collection[int], at_save: Callable[[int], None] = lambda number: None
    ) -> None:
        super().__init__()
        self.failing, self.at_save, self.saves = failing, at_save, 0

    def __call__(self, *arguments: Any, **options: Any) -> ReferencePolicy:
        policy = super().__call__(*arguments, **options)
        save = policy.save_checkpoint

        def save_or_not(weights_path: str, **others: Any) -> None:
            self.saves += 1
            self.at_save(self.saves)
            if self.saves in self.failing:
                save(weights_path)
                with open("/dev/full", "wb", buffering=0) as full:
                    full.write(b"weights")
            save(weights_path, **others)

        policy.save_checkpoint = save_or_not  # type: ignore[method-assign]
        return policy


def config_of(run_dir: Path, model: str, data: str, **changes: Any) -> dict[str, Any]:
    config = make_config("sft", run_dir, model, data)
    config["checkpointing"] |= {"save_period": 1, **changes}
    return config


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name != "run.lock")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: str, data: str) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    assert run(config_of(run_dir, model, data), PolicyMaker()) == 0
    return run_dir


def test_workers_that_stand_still_in_a_save_end_the_run(tmp_path: Path, model: str, data: str) -> None:
    """They are no save that failed: the run would go on with workers that answer no call, and end with
    another error."""

    def hang(number: int) -> None:
        if number == 2:
            raise DeadlineError("save_checkpoint: 1 of 2 workers do not answer")

    with pytest.raises(DeadlineError, match="save_checkpoint: 1 of 2"):
        run(config_of(tmp_path, model, data, max_failed_saves=3), DiskFull((), hang))
    assert "step_1" in checkpoints(tmp_path) and "step_2" not in checkpoints(tmp_path)


def test_a_run_goes_on_without_checkpoints_that_have_no_room(
    tmp_path: Path, model: str, data: str, undisturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(config_of(tmp_path, model, data, max_failed_saves=2), DiskFull({1, 3})) == 0
    assert checkpoints(tmp_path) == ["step_2", "step_4"], "the unfinished ones are gone"
    assert CheckpointManager({"checkpoint_dir": tmp_path / "checkpoints"}).latest_and_damaged()[1] == {}
    assert comparable(tmp_path) == comparable(undisturbed)
    weights = final_weights(undisturbed)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in final_weights(tmp_path).items())
    warned = [record.message for record in caplog.records if "could not be written" in record.message]
    assert [re.search(r"step (\d)", text)[1] for text in warned] == ["1", "3"]  # type: ignore[index]
    for text, kept in zip(warned, ("there is no earlier one", "step_2 is the newest one"), strict=True):
        assert kept in text and os.strerror(errno.ENOSPC) in text
        assert re.search(
            r"no space: a checkpoint takes about [\d.]+ [MG]iB, [\d.]+ [MG]iB are free in ", text
        )


def test_the_commit_of_a_checkpoint_may_have_no_room_either(
    tmp_path: Path, model: str, data: str, undisturbed: Path
) -> None:
    real, calls = background.write_manifest, []

    def full_at_first(root: Path, known: Any = None) -> dict[str, Any]:
        calls.append(root)
        if len(calls) == 1:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(root, known)

    with mock.patch.object(background, "write_manifest", full_at_first):
        assert run(config_of(tmp_path, model, data), PolicyMaker()) == 0
    assert checkpoints(tmp_path) == ["step_2", "step_3", "step_4"]
    assert comparable(tmp_path) == comparable(undisturbed)


def test_so_many_failures_in_a_row_end_the_run_and_another_start_goes_on(
    tmp_path: Path, model: str, data: str, undisturbed: Path
) -> None:
    config = config_of(tmp_path, model, data, max_failed_saves=2)
    with pytest.raises(
        CheckpointError,
        match=r"step 3 .*step_1 is the newest one, and 2 in a row, checkpointing\.max_failed_saves = 2",
    ):
        run(config, DiskFull({2, 3}))
    assert checkpoints(tmp_path) == ["step_1"]
    assert run(config, PolicyMaker()) == 0
    assert comparable(tmp_path) == comparable(undisturbed)


def test_a_last_checkpoint_that_cannot_be_written_is_no_success(
    tmp_path: Path, model: str, data: str
) -> None:
    with pytest.raises(
        CheckpointError, match=rf"step {STEPS} .*step_3 is the newest one, and no later save follows"
    ):
        run(config_of(tmp_path, model, data), DiskFull({STEPS}))
    assert [row["step"] for row in comparable(tmp_path)] == [1, 2, 3, 4], (
        "the row of the step is logged all the same"
    )


def test_a_stop_whose_checkpoint_cannot_be_written_is_no_stop(tmp_path: Path, model: str, data: str) -> None:
    def ask(number: int) -> None:
        if number == 2:
            (tmp_path / STOP_FILE).touch()

    with pytest.raises(
        CheckpointError, match=r"step 2 .*step_1 is the newest one, and no later save follows"
    ):
        run(config_of(tmp_path, model, data), DiskFull({2}, ask))


def test_of_a_full_disk_no_traceback_is_told(
    tmp_path: Path, model: str, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(number: int) -> None:
        raise CheckpointError(
            f"[tp0] {os.strerror(errno.ENOSPC)}{WORKER_TRACE}\nTraceback (most recent call last):\n  File 1"
        )

    with pytest.raises(CheckpointError, match="no space: a checkpoint takes about") as caught:
        run(config_of(tmp_path, model, data, max_failed_saves=2), DiskFull((), fill))
    warned = next(record.message for record in caplog.records if "no space" in record.message)
    for text in (str(caught.value), warned):
        assert (
            f"[tp0] {os.strerror(errno.ENOSPC)}" in text
            and "Traceback" not in text
            and len(text.splitlines()) == 1
        )


@pytest.mark.parametrize("what", ["_write_config", "open_sinks", "SampleFiles", "SkippedBatches"])
def test_first_files_that_cannot_be_written_are_named(
    what: str, tmp_path: Path, model: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "file"))

    monkeypatch.setattr(run_module, what, refuse)
    with pytest.raises(
        ConfigError,
        match=rf"run_dir = .*No space left on device \({tmp_path / 'file'}\)\. Fix: give a directory",
    ):
        run(make_config("grpo", tmp_path / "run", model, data), PolicyMaker())
