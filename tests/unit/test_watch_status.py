"""Where a run stands, by its directory alone, and what a person sees of it."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from megarl.checkpoint.lock import RunLock
from megarl.cli import main
from megarl.env import snapshot
from megarl.errors import DataError, WorkerLostError
from megarl.observe.launches import ENGINES, FINISHED, WORKERS, Launch, read_launches, recorded_launch
from megarl.observe.sinks import open_sinks
from megarl.watch.run_state import read_run_state
from megarl.watch.status import as_plain, render, sparkline
from tests.unit.runs import TOTAL, add_checkpoint, make_run

# Holds the lock of a run until it is killed.
HOLDER = """
import sys
from megarl.checkpoint.lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def shown(run_dir: Path, width: int = 80) -> str:
    stream = io.StringIO()
    console = Console(width=width, file=stream, color_system=None)
    console.print(render(read_run_state(run_dir)))
    return stream.getvalue()


def content_of(run_dir: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run_dir.rglob("*")
        if path.is_file()
    }


def test_a_running_run_is_seen_alive_then_killed(tmp_path: Path) -> None:
    make_run(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        before = content_of(tmp_path)
        state = read_run_state(tmp_path)
        assert (state.state, state.step, state.total_steps) == ("running", 30, TOTAL)
        assert f"process {process.pid}" in state.reason
        assert "ETA" in shown(tmp_path)
        assert content_of(tmp_path) == before, "looking changed the run"
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
    state = read_run_state(tmp_path)
    assert state.state == "killed" and "start it again" in state.reason
    assert "ETA" not in shown(tmp_path) and "of training left" in shown(tmp_path)


def test_what_an_earlier_launch_said_is_not_about_a_later_one(tmp_path: Path) -> None:
    make_run(tmp_path)
    with pytest.raises(SystemExit), recorded_launch(tmp_path, 0, TOTAL):
        raise SystemExit(75)
    assert read_run_state(tmp_path).state == "ended"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    process.kill()
    process.communicate()
    state = read_run_state(tmp_path)
    assert state.state == "killed" and f"process {process.pid}" in state.reason


def test_looking_never_keeps_a_run_from_starting(tmp_path: Path) -> None:
    make_run(tmp_path)
    with RunLock(tmp_path):
        assert read_run_state(tmp_path).state == "running"
    with RunLock(tmp_path):
        pass
    assert read_run_state(tmp_path).state == "ended"


def test_a_launch_of_a_job_may_be_repeated_by_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    make_run(tmp_path, steps=10)
    with pytest.raises(SystemExit), recorded_launch(tmp_path, 0, 50):
        raise SystemExit(75)
    reason = read_run_state(tmp_path).reason
    assert reason == "exit code 75; start it again with the same command, unless Slurm does (job 77)"


def test_a_run_on_another_host_is_not_called_dead(tmp_path: Path) -> None:
    make_run(tmp_path)
    owner = {
        "pid": 1,
        "host": "another-host",
        "boot_id": "b",
        "process_start": 5,
        "job_id": "77",
        "job_restart": 0,
    }
    (tmp_path / "run.lock").write_text(json.dumps(owner))
    state = read_run_state(tmp_path)
    assert state.state == "elsewhere" and "another-host (Slurm job 77)" in state.reason


def test_step_time_phases_and_eta_are_those_of_the_recent_steps(tmp_path: Path) -> None:
    state = read_run_state(make_run(tmp_path, steps=30))
    # steps 11 to 30: eighteen of 3.75 s, and two with 5 s of checkpoint beside
    assert state.step_s == 3.75 and state.eta_s == 10 * 3.75
    assert state.phases == pytest.approx({"generation": 2.0, "train": 1.5, "checkpoint": 0.5, "other": 0.25})
    assert list(state.phases) == ["generation", "train", "checkpoint", "other"]
    assert state.tokens_per_s == pytest.approx(1000 + sum(range(11, 31)) / 20)


def test_launches_are_counted_and_say_how_they_ended(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), recorded_launch(tmp_path, 0, 50):
        raise SystemExit(75)
    assert read_launches(tmp_path)[0].outcome == "exit code 75"
    with pytest.raises(KeyboardInterrupt), recorded_launch(tmp_path, 10, 50):
        raise KeyboardInterrupt
    with pytest.raises(DataError), recorded_launch(tmp_path, 20, 50):
        raise DataError("the file\nis gone")
    with (tmp_path / "launches.jsonl").open("a") as stream:
        stream.write('{"start": 12')
    with recorded_launch(tmp_path, 25, 50):
        pass  # asked to stop, it leaves without an error and without having reached its last step
    with recorded_launch(tmp_path, 30, 50) as outcome:
        assert read_launches(tmp_path)[-1].end is None
        outcome.text = FINISHED
    launches = read_launches(tmp_path)
    assert [launch.first_step for launch in launches] == [0, 10, 20, 25, 30]
    reasons = [
        "exit code 75",
        "interrupted",
        "DataError: the file",
        "stopped before its last step",
        "finished",
    ]
    assert [launch.outcome for launch in launches] == reasons
    assert all(
        isinstance(launch, Launch) and launch.start <= (launch.end or 0) <= time.time() for launch in launches
    )
    make_run(tmp_path)
    state = read_run_state(tmp_path)
    assert (
        state.state == "finished"
        and state.total_steps == 50
        and "restarts    4; the last from step 30" in shown(tmp_path)
    )


def test_what_a_launch_starts_anew_is_counted(tmp_path: Path) -> None:
    make_run(tmp_path)
    with recorded_launch(tmp_path, 0, 50) as outcome:
        outcome.restarted(ENGINES, WorkerLostError("an engine\ndied"))
    with recorded_launch(tmp_path, 10, 50) as outcome:
        outcome.restarted(WORKERS, WorkerLostError("a rank died"), 12)
        with (tmp_path / "launches.jsonl").open("a") as stream:
            # damaged ones, which take neither their launch nor its other restarts along
            stream.write(
                '{"restart": {"what": "engines", "time": "noon"}}\n{"restart": 5}\n{"restart": {"what'
            )
        outcome.restarted(ENGINES, WorkerLostError("again"))
        outcome.text = FINISHED
    one, two = read_launches(tmp_path)
    assert [(restart.what, restart.reason, restart.step) for restart in one.restarts] == [
        (ENGINES, "WorkerLostError: an engine", None)
    ]
    assert [(restart.what, restart.step) for restart in two.restarts] == [
        (WORKERS, 12),
        (ENGINES, None),
    ] and two.outcome == FINISHED
    told = as_plain(read_run_state(tmp_path))
    assert (told["restarts"], told["worker_restarts"], told["engine_restarts"]) == (1, 1, 2)
    said = shown(tmp_path, 200)
    assert (
        "within launches workers 1 time and engines 2 times, the last because of WorkerLostError: again"
        in said
    )


def test_a_run_that_cannot_write_its_record_goes_on(tmp_path: Path) -> None:
    reached = []
    with recorded_launch(tmp_path / "missing", 0, 5):
        reached.append(True)
        (tmp_path / "missing").mkdir()
    assert reached and not list((tmp_path / "missing").iterdir()), (
        "an end without a start would be that of another launch"
    )


def test_the_newest_whole_checkpoint_is_named_and_damage_is_said(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert read_run_state(tmp_path).checkpoint is None
    add_checkpoint(tmp_path, 10)
    newest = add_checkpoint(tmp_path, 20)
    (tmp_path / "checkpoints" / "tmp_step_30").mkdir()
    checkpoint = read_run_state(tmp_path).checkpoint
    assert (
        checkpoint is not None
        and checkpoint.step == 20
        and checkpoint.problems == ()
        and checkpoint.size > 5000
    )
    assert "step 20, complete (names and sizes)" in shown(tmp_path) and "unfinished: tmp_step_30" in " ".join(
        shown(tmp_path).split()
    )
    content = bytearray((newest / "weights").read_bytes())
    content[2500] ^= 1
    (newest / "weights").write_bytes(content)
    by_size, by_hash = read_run_state(tmp_path).checkpoint, read_run_state(tmp_path, hashes=True).checkpoint
    assert by_size is not None and by_size.step == 20
    assert by_hash is not None and by_hash.step == 10 and by_hash.hashed
    (newest / "weights").write_bytes(content[:-1])
    assert "step 10, complete (names and sizes)" in shown(tmp_path) and "damaged or older: 20" in " ".join(
        shown(tmp_path).split()
    )
    (tmp_path / "checkpoints" / "step_10" / "weights").unlink()
    assert "damaged (weights has 4999 bytes" in " ".join(shown(tmp_path).split())


def test_checkpoints_of_a_run_that_was_moved_are_found(tmp_path: Path) -> None:
    add_checkpoint(make_run(tmp_path / "old"), 10)
    (tmp_path / "old").rename(tmp_path / "new")
    assert read_run_state(tmp_path / "new").checkpoints == (10,)


def test_mismatch_is_shown_only_where_it_was_logged(tmp_path: Path) -> None:
    aged = make_run(tmp_path / "aged", token_mult_prob_error=1.25, rollout_age=2.0)
    words = " ".join(shown(aged).split())
    assert "between generation and training, whose weights are 2 steps apart (1 is none)" in words
    assert "\nmismatch" not in shown(make_run(tmp_path / "sft", algorithm="sft"))
    assert "\nmismatch    1.250000" in shown(make_run(tmp_path / "grpo", token_mult_prob_error=1.25))


def test_what_samples_beside_training_is_shown_with_who_waits_and_its_queue(tmp_path: Path) -> None:
    groups = {"rollouts_ready": 5.0, "rollouts_running": 11.0, "rollouts_dropped": 1.0}
    run_dir = make_run(tmp_path / "run", steps=4, rollout_age=1.5, **groups)
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row |= {"timing/rollout_wait_s": 0.375, "timing/engine_idle_s": 1.875}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = " ".join(shown(run_dir, 300).split())
    assert (
        "sampled 1.5 steps before they are trained on; waiting share of a step: training 10% and engines 50%"
        in said
    )
    assert "groups: 5 ready, 11 running, 1 dropped" in said


def test_responses_without_a_reward_are_counted_where_there_are_any(tmp_path: Path) -> None:
    assert "reward_" not in shown(make_run(tmp_path / "healthy"))
    run_dir = make_run(tmp_path / "run", steps=4)
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row |= {"train/reward_errors": {2: 2, 3: 1005}.get(row["step"], 0), "train/reward_timeouts": 0}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "rewards     reward_errors 1,007 in all, the last 1,005 in step 3" in shown(run_dir)
    assert as_plain(read_run_state(run_dir))["reward_faults"] == {"reward_errors": 1007}


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    make_run(tmp_path, steps=0)
    (tmp_path / "metrics.jsonl").write_text("")
    state = read_run_state(tmp_path)
    assert (state.state, state.step, state.eta_s, state.phases) == ("not started", 0, None, {})
    assert "step 0 of 40" in shown(tmp_path)


def test_a_half_written_last_row_is_no_fault(tmp_path: Path) -> None:
    make_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 31, "time": 5, "timing/st')
    assert read_run_state(tmp_path).step == 30


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_the_terminal(tmp_path: Path, width: int) -> None:
    run_dir = make_run(tmp_path, token_mult_prob_error=1.0)
    add_checkpoint(run_dir, 20)
    assert max(map(len, shown(run_dir, width).splitlines())) <= width


def test_what_is_no_run_is_refused_with_what_was_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["status", str(tmp_path / "missing")]) == 2
    assert "does not exist" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "recipe")
    assert main(["status", "recipe"]) == 2
    assert "Fix: write runs/recipe" in capsys.readouterr().err
    make_run(tmp_path / "group" / "one")
    for command in (["status", str(tmp_path)], ["plot", str(tmp_path)]):
        assert main(command) == 2
        message = capsys.readouterr().err
        assert "metrics.jsonl, run.lock, launches.jsonl" in message and "group/one" in message
    assert not list(tmp_path.glob("*.html"))
    (tmp_path / "group" / "one" / "metrics.jsonl").write_text("nonsense\n{}\n")
    assert main(["status", str(tmp_path / "group" / "one")]) == 2


def test_json_has_the_same_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_checkpoint(make_run(tmp_path, token_mult_prob_error=1.5), 20)
    assert main(["status", str(tmp_path), "--json", "--hashes"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 30 and told["total_steps"] == TOTAL and told["restarts"] == 0
    assert told["checkpoint"]["hashed"] and told["checkpoint"]["problems"] == []
    assert told["metrics"]["reward"] == {"last": 0.3, "step": 30, "first": 0.01, "min": 0.01, "max": 0.3}
    assert told["metrics"]["mismatch"]["last"] == 1.5 and told["metrics"]["peak_memory_gib"]["last"] == 7.0


def test_sparkline_follows_the_curve() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0]) == "▁▃▆█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([float(value) for value in range(1000)], 8) == "▁▂▃▄▅▆▇█"


def test_only_the_last_step_makes_a_run_whole(tmp_path: Path) -> None:
    with recorded_launch(make_run(tmp_path), 0, 30):
        pass
    assert "100%" in shown(tmp_path)
    with recorded_launch(tmp_path, 0, 30_001), open_sinks({}, tmp_path) as sinks:
        sinks.log({"timing/step_s": 1.0}, 30_000)
    assert "step 30000 of 30001" in shown(tmp_path) and " 99%" in shown(tmp_path)


def test_a_locale_without_blocks_and_bars_gets_the_numbers(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "ä-\udcff")
    environment = {**snapshot(), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "megarl.cli", "status", str(run_dir)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert answer.returncode == 0, answer.stderr
    assert "step 30 of 40 ????" in answer.stdout and "/?-?" in answer.stdout


def test_metrics_of_before_the_run_started_over_are_not_its_own(tmp_path: Path) -> None:
    """``resume=never`` sets the rows of the earlier run aside in the same directory."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "timing/step_s": 1.0, "train/loss": 0.5}\n')
    (tmp_path / "metrics.before-1.jsonl").write_text('{"step": 9, "timing/step_s": 1.0, "train/loss": 8.0}\n')
    state = read_run_state(tmp_path)
    assert state.step == 1 and state.series["train/loss"].values == (0.5,)
