"""Directories of runs that are damaged, unreadable, hostile, or change while they are looked at."""

from __future__ import annotations

import json
import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.lock import RunLock
from megarl.checkpoint.manager import CheckpointManager
from megarl.cli import main
from megarl.errors import DataError
from megarl.observe.launches import FINISHED, Launch, read_launches, recorded_launch
from megarl.observe.sinks import open_sinks
from megarl.watch import run_state
from megarl.watch.run_state import read_run_state
from tests.tiers import slow
from tests.unit.runs import TOTAL, add_checkpoint, make_run

LAUNCH = {"start": 5.0, "first_step": 0, "total_steps": 9, "host": "h", "process": 1}


@pytest.mark.parametrize(
    "metrics", ["", "\n", '{"step": 1, "time": 5, "timi'], ids=["empty", "blank", "half a row"]
)
def test_a_run_without_a_whole_row_has_not_made_a_step(tmp_path: Path, metrics: str) -> None:
    make_run(tmp_path, steps=0, algorithm="sft")
    (tmp_path / "metrics.jsonl").write_text(metrics)
    state = read_run_state(tmp_path)
    assert (state.state, state.step, state.last_row_age_s) == ("not started", 0, None)


@pytest.mark.parametrize(
    "config",
    [
        "policy: text",
        "policy: {megatron_cfg: 5, model_name: 2024-01-01}",
        "algorithm: grpo\ngrpo: 5",
        'algorithm: grpo\ngrpo: {max_num_steps: "many"}',
        "algorithm: grpo\ngrpo: {max_num_steps: true}",
        "algorithm: [grpo]",
        "checkpointing: yes",
        "- a list",
        "a: [1",
        "\x00",
    ],
)
def test_a_configuration_that_nobody_can_use_costs_only_what_it_would_have_said(
    tmp_path: Path, config: str, capsys: Any
) -> None:
    make_run(tmp_path)
    (tmp_path / "config.yaml").write_text(config)
    assert main(["status", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["status", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 30 and told["total_steps"] is None and told["model"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": "soon"},
        {"start": 1e30},
        {"start": math.nan},
        {"total_steps": "<script>"},
        {"total_steps": 2.5},
        {"process": True},
    ],
    ids=str,
)
def test_a_launch_of_wrong_types_is_left_out(tmp_path: Path, wrong: dict[str, Any]) -> None:
    make_run(tmp_path)
    (tmp_path / "launches.jsonl").write_text(
        json.dumps(LAUNCH | wrong) + "\n" + json.dumps(LAUNCH | {"of_a_later_megarl": 1}) + "\n"
    )
    assert read_launches(tmp_path) == [Launch(**LAUNCH)]
    assert main(["status", str(tmp_path)]) == 0


@slow
def test_nothing_of_a_file_becomes_an_element_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    evil = "<script>alert(1)</script>"
    run_dir = make_run(tmp_path / "<img src=x>", **{evil: 1.0})
    config = {
        "algorithm": evil,
        evil: {"max_num_steps": 9},
        "policy": {"model_name": evil},
        "comment": f"</pre>{evil}",
    }
    (run_dir / "config.yaml").write_text(json.dumps(config))
    (run_dir / "launches.jsonl").write_text(
        json.dumps(LAUNCH | {"host": evil, "job_id": evil, "outcome": evil}) + "\n"
    )
    with open_sinks({}, run_dir) as sinks:
        sinks.log({f"timing/{evil}_s": 1.0, f"train/{evil}": math.nan, "timing/step_s": 1.0}, 31)
    other = make_run(tmp_path / "<img src=y>", steps=1)
    for runs in ([str(run_dir)], [str(run_dir), str(other)]):
        assert main(["plot", *runs, "--out", str(tmp_path / "page.html")]) == 0
        page = (tmp_path / "page.html").read_text()
        assert page.lower().count("<script") == page.count("<img") == 0 and page.count("&lt;script&gt;") >= 5


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "launches.jsonl", "run.lock"])
def test_what_cannot_be_read_is_named_and_nothing_is_guessed(tmp_path: Path, name: str, capsys: Any) -> None:
    make_run(tmp_path)
    with RunLock(tmp_path), recorded_launch(tmp_path, 0, TOTAL):
        pass
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(name)  # a link to itself: not even root can read it
    assert main(["status", str(tmp_path)]) == 2
    assert f"{tmp_path / name} cannot be read" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_may_not_be_looked_into(tmp_path: Path, capsys: Any) -> None:
    run_dir = make_run(tmp_path / "run")
    run_dir.chmod(0)
    try:
        assert main(["status", str(run_dir)]) == 2
        assert "Permission denied" in capsys.readouterr().err
    finally:
        run_dir.chmod(0o755)


def test_a_checkpoint_alone_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("algorithm: sft\n")
    with pytest.raises(DataError, match="is not the directory of a run"):
        read_run_state(tmp_path)
    make_run(tmp_path / "quickstart" / "seed-1" / "grpo")
    with pytest.raises(DataError, match="Fix: give one of the runs in it: quickstart/seed-1/grpo"):
        read_run_state(tmp_path)


def test_a_run_that_ends_while_it_is_looked_at_is_never_called_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path)
    run = ExitStack()
    run.enter_context(RunLock(tmp_path))
    outcome = run.enter_context(recorded_launch(tmp_path, 0, TOTAL))
    for name in ("read_owner", "read_launches"):
        real = getattr(run_state, name)

        def then_end(run_dir: Path, real: Any = real) -> Any:
            found = real(run_dir)
            outcome.text = FINISHED
            run.close()
            return found

        monkeypatch.setattr(run_state, name, then_end)
    assert read_run_state(tmp_path).state == "running"
    assert read_run_state(tmp_path).state == "finished"


def test_a_checkpoint_that_is_pruned_while_it_is_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path)
    add_checkpoint(tmp_path, 10)
    real = run_state.faults_of_checkpoint

    def save_the_next(path: Path, *arguments: Any) -> list[str]:
        monkeypatch.setattr(run_state, "faults_of_checkpoint", real)
        manager = CheckpointManager({"checkpoint_dir": tmp_path / "checkpoints", "keep_top_k": 1})
        manager.finalize_checkpoint(manager.init_tmp_checkpoint(20, {"step": 20}))
        return real(path, *arguments)

    monkeypatch.setattr(run_state, "faults_of_checkpoint", save_the_next)
    state = read_run_state(tmp_path, hashes=True)
    assert state.checkpoints == (20,) and state.checkpoint is not None
    assert (state.checkpoint.step, state.checkpoint.problems) == (20, ())


def test_checkpoints_under_another_name_move_with_the_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "old")
    config = {"run_dir": "old", "checkpointing": {"checkpoint_dir": "old/saved/here"}}
    (run_dir / "config.yaml").write_text(json.dumps(config))
    add_checkpoint(run_dir, 10)
    (run_dir / "saved").mkdir()
    (run_dir / "checkpoints").rename(run_dir / "saved" / "here")
    run_dir.rename(tmp_path / "new")
    assert read_run_state(tmp_path / "new").checkpoints == (10,)


@pytest.mark.parametrize("configured", ["runs/a", "./runs/a", "."])
@pytest.mark.parametrize("working", ["", "project", "project/runs", "project/runs/a"])
def test_checkpoints_elsewhere_are_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, working: str, configured: str
) -> None:
    """Their path is relative to the directory that the run was started in."""
    run_dir = make_run(tmp_path / "project/runs/a")
    add_checkpoint(run_dir, 10).parent.rename(tmp_path / "project/saved")
    saved = "../../saved" if configured == "." else "saved"
    config = {"run_dir": configured, "checkpointing": {"checkpoint_dir": saved}}
    (run_dir / "config.yaml").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path / working)
    seen = os.path.relpath(run_dir)
    assert read_run_state(seen).checkpoints == (10,)


def test_a_loss_that_became_nan_is_said_beside_its_last_number(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    make_run(tmp_path)
    with open_sinks({}, tmp_path) as sinks:
        for step in (31, 32):
            sinks.log(
                {
                    "train/loss": math.nan,
                    "train/grad_norm": math.inf,
                    "train/never": math.nan,
                    "timing/step_s": 1.0,
                },
                step,
            )
        sinks.log({"train/grad_norm": 1.0, "timing/step_s": 1.0}, 33)
    assert main(["status", str(tmp_path)]) == 0
    assert "not finite  train/loss since step 31, train/never since step 31" in capsys.readouterr().out
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_finite"] == {"train/loss": 31, "train/never": 31}
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert "train/loss since step 31" in (tmp_path / "page.html").read_text()


def test_a_clock_that_was_set_back_or_is_missing_gives_no_wrong_age(tmp_path: Path) -> None:
    make_run(tmp_path)
    ages = []
    for entry in ('"time": 9e12', '"time": NaN', '"time": "soon"', '"no_time": 1'):
        with (tmp_path / "metrics.jsonl").open("a") as stream:
            stream.write(f'{{"step": 31, {entry}, "timing/step_s": 1.0}}\n')
        ages.append(read_run_state(tmp_path).last_row_age_s)
    assert ages == [0.0, None, None, None]
