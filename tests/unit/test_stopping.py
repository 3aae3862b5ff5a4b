"""A run that is asked to stop saves and says so, and the next start ends it like one that nobody stopped."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.console import TrainingConsole
from megarl.run.run import run
from megarl.run.stopping import (
    INTERRUPTED,
    LAST_CHECKPOINT_FILE,
    STOP_FILE,
    STOPPED,
    Attempt,
    StopRequest,
    listening_for_stop,
    this_attempt,
)
from megarl.run.time_left import TimeLeft
from tests.tiers import sampled
from tests.unit.driver_runs import STEPS, PolicyMaker, check_same, comparable, make_config

WAYS = ["SIGTERM", "SIGUSR1", "file of the run", "file of the attempt", "SIGINT", "SIGHUP"]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """The signals are not ignored, as they are in what a shell runs in the background."""
    before = [signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGHUP)]
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: str, data: str) -> dict[str, Path]:
    """A run of each algorithm that nobody stopped."""
    runs = {algorithm: tmp_path_factory.mktemp("whole") / algorithm for algorithm in ("sft", "grpo")}
    for algorithm, run_dir in runs.items():
        assert run(make_config(algorithm, run_dir, model, data), PolicyMaker()) == 0
    return runs


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that a launcher shares with the run."""
    directory = tmp_path / "attempt"
    directory.mkdir()
    monkeypatch.setenv("MEGARL_ATTEMPT_DIR", str(directory))
    return directory


def ask(way: str, run_dir: Path, attempt: Path) -> None:
    if way.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[way])
    else:
        (run_dir if way == "file of the run" else attempt).joinpath(STOP_FILE).touch()


def at(call: int, action: Callable[[], None]) -> Callable[[int], None]:
    return lambda number: action() if number == call else None


@sampled(2)
@pytest.mark.parametrize(
    ("algorithm", "step", "way"),
    [
        ("sft", 1, WAYS[0]),
        ("sft", 2, WAYS[1]),
        ("sft", 3, WAYS[2]),
        ("sft", 1, WAYS[3]),
        ("grpo", 3, WAYS[1]),
        ("sft", 2, WAYS[4]),
        ("grpo", 1, WAYS[5]),
    ],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    algorithm: str,
    step: int,
    way: str,
    tmp_path: Path,
    attempt: Path,
    model: str,
    data: str,
    whole: dict[str, Path],
    capfd: Any,
) -> None:
    run_dir = tmp_path / "run"
    config = make_config(algorithm, run_dir, model, data)
    code = run(config, PolicyMaker(at_call=at(step, lambda: ask(way, run_dir, attempt))))
    assert code == (INTERRUPTED if way == "SIGINT" else STOPPED)
    said = capfd.readouterr()
    assert f"stopped after step {step} ({way if way.startswith('SIG') else ''}" in said.out + said.err
    assert comparable(run_dir)[-1]["step"] == step
    assert (run_dir / "checkpoints" / f"step_{step}").is_dir()
    assert (attempt / LAST_CHECKPOINT_FILE).read_text() == f"{step}\n"
    assert not (run_dir / "hf").exists()
    assert not list(tmp_path.rglob(STOP_FILE))
    assert run(config, PolicyMaker()) == 0
    assert (attempt / LAST_CHECKPOINT_FILE).read_text() == f"{STEPS}\n"
    check_same(run_dir, whole[algorithm])


@pytest.mark.parametrize("way", ["SIGUSR1", "file of the run"])
def test_a_request_during_the_last_step_lets_the_run_end(
    way: str, tmp_path: Path, attempt: Path, model: str, data: str
) -> None:
    maker = PolicyMaker(at_call=at(STEPS, lambda: ask(way, tmp_path / "run", attempt)))
    assert run(make_config("sft", tmp_path / "run", model, data), maker) == 0
    assert (tmp_path / "run" / "hf").is_dir()
    assert not list(tmp_path.rglob(STOP_FILE))


def test_a_file_that_lay_there_before_counts_for_nothing(tmp_path: Path, model: str, data: str) -> None:
    (tmp_path / STOP_FILE).touch()
    assert run(make_config("sft", tmp_path, model, data), PolicyMaker()) == 0


def test_a_request_of_the_launcher_before_the_first_step(
    tmp_path: Path, attempt: Path, model: str, data: str
) -> None:
    (attempt / STOP_FILE).touch()
    maker = PolicyMaker()
    assert run(make_config("sft", tmp_path / "run", model, data), maker) == STOPPED
    assert maker.policies[0].trained_steps == 0
    assert not (attempt / LAST_CHECKPOINT_FILE).exists()


def test_without_checkpoints_nothing_can_go_on(
    tmp_path: Path, attempt: Path, model: str, data: str, capfd: Any
) -> None:
    config = make_config("sft", tmp_path / "run", model, data)
    config["checkpointing"]["enabled"] = False
    assert run(config, PolicyMaker(at_call=at(1, lambda: ask("SIGTERM", tmp_path, attempt)))) == 1
    assert "checkpointing.enabled is false: nothing was saved" in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_second_signal_ends_the_run_at_once_and_its_workers_too(
    second: signal.Signals, tmp_path: Path, model: str, data: str
) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), second)

    maker = PolicyMaker(at_call=at(1, twice))
    heard = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(each) for each in heard]
    with pytest.raises(SystemExit) as caught:
        run(make_config("sft", tmp_path, model, data), maker)
    assert caught.value.code == 128 + second
    assert maker.policies[0]._prepared == "shut down"
    assert not list((tmp_path / "checkpoints").glob("*step_*"))
    assert [signal.getsignal(each) for each in heard] == before


def test_outside_of_the_loop_a_signal_ends_the_run_at_once(tmp_path: Path, model: str, data: str) -> None:
    def terminated(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        run(make_config("sft", tmp_path, model, data), terminated)  # type: ignore[arg-type]
    assert caught.value.code == STOPPED


@contextmanager
def nobody_reads() -> Iterator[None]:
    """Standard error is a pipe whose other end is closed, as that of a run whose srun was killed."""
    kept, (reading, writing) = os.dup(2), os.pipe()
    os.close(reading)
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_a_request_is_heard_also_when_nobody_can_be_told() -> None:
    request = StopRequest()
    with nobody_reads(), pytest.raises(SystemExit) as caught:
        request.receive(signal.SIGTERM, None)
    assert caught.value.code == STOPPED
    with nobody_reads(), request.deferred():
        request.receive(signal.SIGTERM, None)
        assert request.reason == "SIGTERM"
        with pytest.raises(SystemExit) as caught:
            request.receive(signal.SIGUSR1, None)
    assert caught.value.code == 128 + signal.SIGUSR1


def test_the_exit_code_is_the_one_that_was_meant_whatever_becomes_of_it(tmp_path: Path) -> None:
    """Ray turns what ends a program inside one of its calls into exit code 1 (``test_signals.py``)."""
    with pytest.raises(SystemExit) as caught, listening_for_stop(tmp_path, Attempt()) as request:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            raise SystemExit(1) from None
    assert caught.value.code == STOPPED
    with pytest.raises(SystemExit) as caught, request.keeping_exit_code(), StopRequest().keeping_exit_code():
        raise SystemExit(3)
    assert caught.value.code == STOPPED, "outside of the other one, which knows of no signal"
    with pytest.raises(SystemExit) as caught, StopRequest().keeping_exit_code():
        raise SystemExit(3)
    assert caught.value.code == 3


def test_notice_that_is_too_short_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGARL_STOP_NOTICE_S", "100")
    with listening_for_stop(tmp_path, this_attempt()) as request, caplog.at_level(logging.WARNING):
        request.save_took(50.0, 30.0)
        assert not caplog.records
        request.save_took(70.0, 11.0)
        request.save_took(90.0, 20.0)
    [record] = caplog.records
    assert "70.0 s + 11.0 s" in record.message and "100 s before its end" in record.message
    assert "--signal=B:USR1@222 and MEGARL_STOP_NOTICE_S=222" in record.message


def test_a_launcher_that_cannot_be_told_of_a_checkpoint_costs_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Attempt(tmp_path / "removed").checkpoint_committed(7)
    [record] = caplog.records
    assert "step 7" in record.message and str(tmp_path / "removed") in record.message


def test_a_wrong_notice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_STOP_NOTICE_S", "soon")
    with pytest.raises(ValueError, match="MEGARL_STOP_NOTICE_S = 'soon'"):
        this_attempt()


def test_the_files_name_the_reason(tmp_path: Path) -> None:
    request = StopRequest([tmp_path / "a", tmp_path / "b"])
    assert request.reason is None
    (tmp_path / "b").touch()
    assert request.reason == str(tmp_path / "b")
    request.forget_files()
    assert request.reason is None


@pytest.mark.parametrize(("second_step_s", "code"), [(4000.0, STOPPED), (1600.0, 0)])
def test_a_run_stops_while_there_is_time_for_it(
    second_step_s: float,
    code: int,
    tmp_path: Path,
    model: str,
    data: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    """The end of its Slurm job is an hour away, and the second step takes longer than that; or less than
    half, and its save, of which nothing is known before the first, turns out to be so quick that others
    fit."""
    now = [1_000_000.0]
    monkeypatch.setattr(
        "megarl.run.run.time_left", lambda stop_at: TimeLeft(stop_at, "limit", lambda: now[0])
    )
    step_took = StopRequest.step_took

    def slow_second_step(request: StopRequest, seconds: float) -> None:
        step_took(request, second_step_s if len(request._time_left._steps) == 1 else seconds)  # type: ignore[union-attr]

    monkeypatch.setattr(StopRequest, "step_took", slow_second_step)
    config = make_config("sft", tmp_path / "run", model, data)
    config["checkpointing"]["save_period"] = 1000
    assert run(config, PolicyMaker(), stop_at=now[0] + 3600.0) == code
    assert ("stopped after step 2 (limit " in " ".join(capfd.readouterr().out.split())) == (code == STOPPED)
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert saved == (["step_2"] if code == STOPPED else ["step_2", f"step_{config['sft']['max_num_steps']}"])


def test_ctrl_c_outside_of_the_loop_is_what_it_always_is() -> None:
    with pytest.raises(KeyboardInterrupt):
        StopRequest().receive(signal.SIGINT, None)


def test_a_stop_between_two_steps_names_the_later_one(
    tmp_path: Path, model: str, data: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The row of step 1 is being written, too late to save it: step 2 is trained and saved."""
    shown = TrainingConsole.step

    def interrupted(console: TrainingConsole, step: int, metrics: Any) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        shown(console, step, metrics)

    monkeypatch.setattr(TrainingConsole, "step", interrupted)
    assert run(make_config("sft", tmp_path, model, data), PolicyMaker()) == INTERRUPTED
    said = capfd.readouterr()
    assert "SIGINT: stopping after step 2; a second" in said.err
    assert "stopped after step 2 (SIGINT" in said.out + said.err


def test_a_closing_terminal_may_say_so_again_and_again() -> None:
    request = StopRequest()
    with request.deferred():
        for _ in range(3):
            request.receive(signal.SIGHUP, None)
        assert request.reason == "SIGHUP" and request.exit_code == STOPPED
        with pytest.raises(SystemExit):
            request.receive(signal.SIGTERM, None)
    asked = StopRequest()
    with asked.deferred():
        asked.receive(signal.SIGINT, None)
        asked.receive(signal.SIGHUP, None)
        assert asked.reason == "SIGINT" and asked.exit_code == INTERRUPTED


def test_a_signal_that_the_program_was_started_to_ignore_stays_ignored(tmp_path: Path) -> None:
    """As ``nohup`` does with SIGHUP, and a shell with SIGINT for what runs in the background."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening_for_stop(tmp_path, Attempt()) as request, request.deferred():
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.reason is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


ON_A_TERMINAL = """
import sys
from pathlib import Path
from megarl.run.stopping import Attempt, listening_for_stop
from megarl.observe.console import TrainingConsole

directory = Path(sys.argv[1])
shown = TrainingConsole(3, "a run")
with listening_for_stop(directory, Attempt()) as stop, stop.deferred(), shown as console:
    (directory / "ready").touch()
    while stop.reason is None:
        pass
    console.step(1, {"train/loss": 1.0})
    print("a line", flush=True)
    print("another one", file=sys.stderr, flush=True)
(directory / "said").write_text(stop.reason)
print("the last line, which Python writes when it ends")
sys.exit(stop.exit_code)
"""


def test_a_program_whose_terminal_closes_ends_in_order(tmp_path: Path) -> None:
    """Its lines go nowhere: as errors they would end the step that it is to finish, or change its exit
    code."""
    master, terminal = os.openpty()

    def take_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    program = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, str(tmp_path)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(terminal)
    try:
        while not (tmp_path / "ready").exists():
            assert program.poll() is None
        os.close(master)
        assert program.wait(60) == STOPPED
        assert (tmp_path / "said").read_text() == "SIGHUP"
    finally:
        program.kill()
        program.wait()
