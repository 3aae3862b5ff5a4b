"""Implementation of ``megarl samples``: print prompts and responses of a run."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from megarl.config.places import read_in_time
from megarl.config.report import output_console
from megarl.errors import DataError
from megarl.observe.sample_files import DIRECTORY, TRAIN, UNSAFE, Sample, list_samples, read_samples
from megarl.observe.step_line import format_number
from megarl.watch.run_state import require_run

Order = Literal["worst", "best", "longest"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which samples to show.

    Attributes:
        step: training step; None for the newest step with samples.
        kind: ``TRAIN`` or ``VALIDATION``.
        order: sort order; None for the order of the file.
        text: show only samples that contain this text (see ``holds``). If ``step`` is None, search all steps,
            newest first.
        against: another step whose responses to the same prompts are shown side by side.
        number: maximum number of samples.
    """

    step: int | None = None
    kind: str = TRAIN
    order: Order | None = None
    text: str | None = None
    against: int | None = None
    number: int = 5


def run(directory: str, selection: Selection) -> int:
    """Print the selected samples of a run, and return 0.

    Raises:
        DataError: the directory is not a run, no sample is found, or the file system does not respond.
    """
    parts = read_in_time(lambda: list(render(Path(directory), selection)), f"run directory {directory}")
    console = output_console()
    for part in parts:
        # With soft wrap, a pipe gets the lines of a response unbroken.
        console.print(part, soft_wrap=not isinstance(part, Table))
    return 0


def render(run_dir: Path, selection: Selection) -> Iterator[RenderableType]:
    """Yield the selected samples as text. Control characters that a terminal would interpret are shown as
    numbers.

    Raises:
        DataError: as in ``run``.
    """
    require_run(run_dir)
    try:
        files = dict(list_samples(run_dir / DIRECTORY, selection.kind))
        if selection.against is not None:
            yield from _compared(files, selection, run_dir)
        else:
            yield from _listed(_found(files, selection, run_dir))
    except OSError as error:
        raise DataError(
            f"{error.filename}: {error.strerror or error}. Fix: ls -ld shows who may read it"
        ) from error


def _found(files: Mapping[int, Path], selection: Selection, run_dir: Path) -> list[Sample]:
    if selection.text is None:
        rows = read_samples(files[_step(files, selection.step, selection.kind, run_dir)])
        return ordered(rows, selection.order)[: selection.number]
    steps = (
        sorted(files, reverse=True)
        if selection.step is None and files
        else [_step(files, selection.step, selection.kind, run_dir)]
    )
    found = list[Sample]()
    for step in steps:
        found += [row for row in read_samples(files[step]) if holds(row, selection.text)]
        # Older files need not be read.
        if len(found) >= selection.number:
            break
    if not found:
        where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps"
        raise DataError(
            f"no {selection.kind} sample of {where} in {run_dir} holds {selection.text!r}. Fix: give a "
            "shorter text, or another step; a run keeps the first samples of a step (logger.samples)"
        )
    return found[: selection.number]


def holds(row: Sample, text: str) -> bool:
    """Return whether the prompt or the response of a sample contains a text, ignoring case.

    Upper case is compared, because some letters have several lower-case forms. The report page uses the same
    rule.
    """
    return any(text.upper() in row[name].upper() for name in ("prompt", "answer"))


def _step(files: Mapping[int, Path], wanted: int | None, kind: str, run_dir: Path) -> int:
    """Return the wanted step, or the newest one for None.

    Raises:
        DataError: the step has no samples.
    """
    if not files:
        raise DataError(
            f"{run_dir / DIRECTORY} holds no samples of {kind} steps. Fix: let an algorithm that generates "
            "responses finish a step"
            f"{'' if kind == TRAIN else ' and a validation'}, with logger.samples.enabled (the default)"
        )
    step = max(files) if wanted is None else wanted
    if step not in files:
        # A long run has too many steps to list, so name the nearest.
        near = sorted(sorted(files, key=lambda other: abs(other - step))[:8])
        raise DataError(
            f"step {step} has no {kind} samples in {run_dir / DIRECTORY}. Fix: choose one of "
            f"{', '.join(map(str, near))}"
        )
    return step


def ordered(rows: Sequence[Sample], order: Order | None) -> list[Sample]:
    """Sort samples; equal ones keep their order. When sorted by reward, masked samples are omitted, because
    they have no reward."""
    if order is None:
        return list(rows)
    name, sign = ("length", -1) if order == "longest" else ("reward", 1 if order == "worst" else -1)
    scored = rows if order == "longest" else [row for row in rows if row.get("masked") is not True]

    def key(row: Sample) -> tuple[bool, float]:
        number = _number(row.get(name))
        # Samples without a number come last. A NaN as key would make the order arbitrary.
        return math.isnan(number), 0.0 if math.isnan(number) else sign * number

    return sorted(scored, key=key)


def _number(value: Any) -> float:
    """Return a value as a float; NaN if it is not a number."""
    # JSON has no infinity, so it is stored as a string, which ``float`` can read.
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _listed(rows: Sequence[Sample]) -> Iterator[RenderableType]:
    """Yield samples one after the other. A prompt is shown once for consecutive responses to it."""
    before: Any = None
    for row in rows:
        prompt = (row.get("step"), row.get("set"), row["prompt"])
        if prompt != before:
            yield Text()
            yield Text(_place(row), style="bold cyan")
            yield _visible(row["prompt"], "dim")
            before = prompt
        yield Text()
        yield _figures(row)
        yield from _said(row)


def _said(row: Sample) -> Iterator[RenderableType]:
    """Yield the response of a sample or, for a multi-turn conversation, all turns. The environment's turns
    are dimmed like prompts."""
    turns = row.get("turns")
    # An edited or damaged entry still has its response as one text.
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and isinstance(turn.get("text"), str) for turn in turns
    ):
        yield _visible(row["answer"])
        return
    for turn in turns:
        # A new segment means that the chat template changed the tokens of earlier turns.
        if turn.get("segment") is not None:
            yield Text(
                f"segment {_plain(turn['segment'])}: the template writes earlier responses "
                "differently from here on",
                style="cyan",
            )
        yield _visible(turn["text"], "dim" if turn.get("role") == "environment" else "")
        if turn.get("reward"):
            yield Text(f"reward {_plain(turn['reward'])}", style="green")


def _compared(files: Mapping[int, Path], selection: Selection, run_dir: Path) -> Iterator[RenderableType]:
    """Yield the responses to the same prompts at two steps side by side, the earlier step on the left."""
    steps = sorted(
        _step(files, step, selection.kind, run_dir) for step in (selection.step, selection.against)
    )
    left, right = (_by_identity(read_samples(files[step])) for step in steps)
    # A list instead of a set intersection, to keep the order of the file.
    both = [name for name in left if name in right]
    if not both:
        fix = (
            "use --validation, whose prompts are the same each time"
            if selection.kind == TRAIN
            else "choose two other steps"
        )
        raise DataError(
            f"steps {steps[0]} and {steps[1]} of {run_dir} have no prompt in common; training "
            f"prompts repeat only in the next epoch. Fix: {fix}"
        )
    for name in both[: selection.number]:
        one, other = left[name], right[name]
        yield Text()
        yield Text(_place(other, with_step=False), style="bold cyan")
        yield _visible(other["prompt"], "dim")
        table = Table(expand=True, show_lines=False)
        for step, row in zip(steps, (one, other), strict=True):
            table.add_column(Text(f"step {step}\n").append_text(_figures(row)), ratio=1, overflow="fold")
        pairs = zip(one["answer"], other["answer"], strict=False)
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        # Dim the common beginning, so that the eye finds where the two responses diverge.
        table.add_row(
            *(
                _visible(row["answer"][:common], "dim").append_text(_visible(row["answer"][common:]))
                for row in (one, other)
            )
        )
        yield table


def _by_identity(rows: Sequence[Sample]) -> dict[tuple[str, ...], Sample]:
    """Index a step's samples by a key that is comparable across steps: data set, record, prompt, response
    number, and an occurrence counter, because a step may contain a record twice."""
    seen: Counter[tuple[str, ...]] = Counter()
    found: dict[tuple[str, ...], Sample] = {}
    for row in rows:
        shared = tuple(repr(row.get(name)) for name in ("set", "record", "prompt", "generation"))
        # Several responses to one prompt differ only in their order, which is the same at both steps.
        found[(*shared, str(seen[shared]))] = row
        seen[shared] += 1
    return found


def _place(row: Sample, *, with_step: bool = True) -> str:
    """Return a line that names the source of a sample's prompt."""
    parts = [f"step {_plain(row.get('step'))}"] if with_step else []
    parts += [f"set {_plain(row['set'])}"] if row.get("set") is not None else []
    parts.append(f"prompt {_plain(row.get('record'))} of {_plain(row.get('source') or 'the data')}")
    parts += [f"environment {_plain(row['env'])}"] if row.get("env") is not None else []
    return "  ".join(parts)


_SHOWN = ("reward", "accuracy", "advantage", "mismatch")


def _weights(row: Sample) -> str:
    """Return the weight versions that sampled a response: the oldest, and the newest if it differs."""
    oldest, newest = _plain(row["weight_version"]), row.get("newest_weight_version")
    return oldest if newest in (None, row["weight_version"]) else f"{oldest} to {_plain(newest)}"


def _figures(row: Sample) -> Text:
    """Return a line with a sample's reward and other numbers."""
    parts = row.get("rewards") if isinstance(row.get("rewards"), Mapping) else {}
    # Always show the reward, so that a missing one is visible.
    figures = {
        name: row.get(name) for name in _SHOWN if name == "reward" or row.get(name) is not None
    } | dict(parts or {})
    words = [f"{_plain(name)} {_plain(value)}" for name, value in figures.items()]
    words.append(f"{_plain(row.get('length'))} tokens")
    if isinstance(row.get("turns"), list):
        responses = sum(isinstance(turn, dict) and turn.get("role") != "environment" for turn in row["turns"])
        words.append(f"{responses} turns, {_plain(row.get('ended'))}")
    words += [f"weights {_weights(row)}"] if row.get("weight_version") is not None else []
    line = Text(f"response {_plain(row.get('generation'))}  ", style="bold").append(
        "  ".join(words), style="not bold green"
    )
    for name, style in (("truncated", "bold yellow"), ("masked", "bold red")):
        if row.get(name) is True:
            line.append(f"  {name}", style=style)
    if isinstance(row.get("reference"), str):
        line.append("  reference ", style="not bold dim").append_text(
            _visible(" ".join(row["reference"].split()), "not bold")
        )
    return line


def _plain(value: Any) -> str:
    """Format any value of a sample file for a one-line display: no line breaks, unsafe characters escaped."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return format_number(value)
    return UNSAFE.sub(_by_number, str(value)).replace("\n", " ")


def _visible(text: str, style: str = "") -> Text:
    """Return a text in which unsafe characters are replaced by highlighted escapes."""
    shown, end = Text(style=style), 0
    for match in UNSAFE.finditer(text):
        shown.append(text[end : match.start()]).append(_by_number(match), style="reverse")
        end = match.end()
    return shown.append(text[end:])


def _by_number(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"
