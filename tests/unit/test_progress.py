"""Phases of a start on a console: one live line on a terminal, plain lines in a pipe."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from megarl.observe import progress
from megarl.observe.console import TrainingConsole
from megarl.observe.progress import Phase, ProgressConsole, phase, progress_shown


class Written(io.StringIO):
    """Text that was written, and an event at each line that holds a word."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word, self.seen = word, threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.word in text:
            self.seen.set()
        return count


def plain(file: io.StringIO) -> Console:
    return Console(file=file, width=100, force_terminal=False, highlight=False)


def without_seconds(text: str) -> list[str]:
    return [re.sub(r"\d+(\.\d+)?s", "#s", line).rstrip() for line in text.splitlines()]


def test_phases_in_a_pipe_are_lines() -> None:
    file = Written("two of them")
    with (
        progress_shown(ProgressConsole(plain(file), every_s=0.01)),
        phase("data.jsonl", "records", 5) as shown,
    ):
        shown.advance(2)
        with phase("inner", is_told=False) as inner:
            inner.detail = "two of them"
            assert file.seen.wait(60)
        shown.advance(3)
        shown.total = None
    lines = without_seconds(file.getvalue())
    # the inner phase speaks for both, and the outer one has the last word
    assert "inner: two of them ... #s" in lines and lines[-1] == "data.jsonl: 5 records  #s"
    assert not any(line.startswith("inner: two of them  #s") for line in lines)


def test_a_phase_with_a_known_end_says_what_is_left() -> None:
    shown = Phase("parity", "cases", 10)
    shown.begun -= 22
    assert shown.time() == "22s"
    shown.advance(2)
    shown.detail = "1 failed"
    assert f"{shown.text()} ... {shown.time()}" == "parity: 2 of 10 cases, 1 failed ... 22s, ETA 1m28s"
    shown.advance(8)
    assert shown.time() == "22s"


def test_nothing_is_shown_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with phase("data", "records") as shown:
        shown.advance()
    progress.note("x")
    assert shown.done == 1 and capsys.readouterr().out == ""


def test_a_phase_that_fails_leaves_no_line_and_no_thread() -> None:
    file = io.StringIO()
    with (
        progress_shown(ProgressConsole(plain(file))),
        pytest.raises(ValueError, match="broken"),
        phase("data"),
    ):
        raise ValueError("broken")
    assert file.getvalue() == "" and not [
        each for each in threading.enumerate() if each.name.startswith("progress of")
    ]


def test_phases_on_a_terminal_are_one_live_line_each() -> None:
    file = io.StringIO()
    console = ProgressConsole(Console(file=file, width=80, force_terminal=True, highlight=False))
    with progress_shown(console), phase("outer") as outer:
        outer.detail = "half"
        with phase("rows", "records", 4) as rows:
            rows.advance(4)
            assert console._live is not None
            console._live.refresh()
    assert console._live is None
    text = file.getvalue()
    assert "4 of 4 records" in text and "━━━" in text and "outer: half" in text
    # the cursor is shown again
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_closed_pipe_is_no_reason_to_stop() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console = ProgressConsole(plain(Closed()))
    with console.phase(Phase("data")):
        pass
    console.say("more")


def test_the_first_step_shows_its_phases_in_a_pipe() -> None:
    file = Written("generation")
    with progress_shown(ProgressConsole(plain(file), every_s=0.01)):
        console = TrainingConsole(3, "GRPO", console=plain(file))
        console.start()
        console.working_on("generation")
        assert file.seen.wait(60)
        console.step(1, {"train/loss": 1.0})
        console.working_on("train")
        console.finish()
    lines = without_seconds(file.getvalue())
    assert lines[0] == "GRPO  3 steps" and "step 1: generation ... #s" in lines
    assert not any("train ..." in line for line in lines) and lines[-1].startswith("finished: step 1/3")


def test_a_run_that_was_stopped_has_not_finished() -> None:
    file = io.StringIO()
    with TrainingConsole(3, "GRPO", console=plain(file)) as console:
        console.step(1, {"train/loss": 1.0})
        console.stopped("stopped after step 1 (SIGTERM); start it again")
    assert "finished" not in file.getvalue() and file.getvalue().rstrip().endswith("start it again")
