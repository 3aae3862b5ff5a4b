"""Implementation of ``megarl plot``: write a run's plots as PNG files, and a report page that needs only a
browser."""

from __future__ import annotations

import html
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from converters.files.atomic import whole_file
from megarl import __version__
from megarl.config.places import read_in_time
from megarl.errors import DataError
from megarl.observe.drawing import run_labels
from megarl.observe.launches import Launch
from megarl.observe.metrics_file import FILE_NAME
from megarl.observe.panels import draw_all, run_colours
from megarl.observe.plots import plot_run
from megarl.observe.step_line import format_number
from megarl.redaction import redacted_text
from megarl.watch.configured import CONFIG_FILE
from megarl.watch.run_state import RunState, read_run_state, require_run
from megarl.watch.sample_page import STYLE as SAMPLES_STYLE
from megarl.watch.sample_page import content_policy, samples_panel
from megarl.watch.status import BAD, best_of, facts, shown_metrics

REPORT, COMPARISON = "report.html", "comparison.html"
_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f8; --card: #fff; --inset: #eef1f3; --line: #dfe4e8;
  --text: #22303a; --muted: #5c6a74;
  --good: #1b7f6f; --bad: #b23f22; --bad-page: #fbe3dd; }
@media (prefers-color-scheme: dark) { :root { --page: #12171b; --card: #1b2126; --inset: #2a3238;
  --line: #37424a; --text: #e3e8eb;
  --muted: #9aa7b0; --good: #4fc3ae; --bad: #f08a70; --bad-page: #4a2620; } }
body { margin: 0 auto; max-width: 1400px; padding: 24px; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 24px; margin: 0 0 2px; overflow-wrap: anywhere; } h2 { font-size: 16px; margin: 0 0 6px; }
.from { color: var(--muted); margin: 0 0 18px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
  min-width: 0; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)); gap: 16px;
  margin-top: 16px; }
.scroll { overflow-x: auto; } svg { display: block; width: 100%; height: auto; }
svg text { fill: currentColor; }
.runs { position: sticky; top: 0; margin-top: 16px; max-height: 20vh; overflow-y: auto; font-size: 13px; }
.runs span { display: inline-block; margin-right: 18px; }
.runs i { display: inline-block; width: 18px; height: 4px; margin: 0 6px 3px 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 14px 5px 0; }
td { overflow-wrap: anywhere; min-width: 9em; white-space: pre-line; }
th { color: var(--muted); font-weight: 500; white-space: nowrap; }
tr + tr td, tr + tr th { border-top: 1px solid var(--line); }
.running, .finished { color: var(--good); font-weight: 600; }
.killed, .ended, .not-finite { color: var(--bad); font-weight: 600; }
details { margin-top: 16px; } summary { cursor: pointer; } pre { overflow-x: auto; font-size: 12.5px; }
@media (max-width: 480px) { body { padding: 12px 10px; } .card { padding: 12px 14px; } }
"""


def run(directories: Sequence[str], out: str | None = None) -> int:
    """Plot runs. A single run gets PNG files and ``report.html``; several runs get ``comparison.html``.

    Args:
        directories: run directories, or directories of runs. A run that is given twice, or by a symlink,
            counts once.
        out: path of the page, which is then the only file written; None for the default paths.

    Raises:
        DataError: a directory is not a run, there is nothing to plot, or a file cannot be read or written.
        MegarlError: matplotlib is not installed.
    """
    try:
        run_dirs = read_in_time(lambda: _run_dirs(directories), f"run directory {', '.join(directories)}")
        written = _draw(run_dirs, out)
    except OSError as error:
        fix = "give a file that can be written as --out FILE; ls -ld shows who may read and write"
        raise DataError(
            f"{error.filename2 or error.filename}: {error.strerror or error}. Fix: {fix}"
        ) from error
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


def _draw(run_dirs: Sequence[Path], out: str | None) -> list[Path]:
    if out is not None:
        # A given path asks for the page alone.
        return [write_report(run_dirs, Path(out))]
    if len(run_dirs) == 1:
        return [*plot_run(run_dirs[0]), write_report(run_dirs, run_dirs[0] / REPORT)]
    return [
        write_report(
            run_dirs, Path(os.path.commonpath([path.resolve().parent for path in run_dirs])) / COMPARISON
        )
    ]


def _run_dirs(directories: Sequence[str]) -> list[Path]:
    found: dict[Path, Path] = {}
    for directory in directories:
        for path in _expand(Path(directory)):
            found[path.resolve()] = path
    run_dirs, refusals = list[Path](), list[DataError]()
    for path in found.values():
        try:
            require_run(path)
            run_dirs.append(path)
        except DataError as error:
            # A path that does not exist is a typing error, unlike a directory without a run.
            if not path.exists():
                raise
            refusals.append(error)
    if refusals and not run_dirs:
        raise refusals[0]
    # Only warn: ``runs/*`` also matches files of Slurm jobs and earlier pages.
    for refusal in refusals:
        sys.stderr.write(redacted_text(f"megarl: warning: left out: {refusal}\n"))
    return run_dirs


def _expand(directory: Path) -> list[Path]:
    """Return a run directory itself, or the runs directly below a directory that is not a run."""
    if any(directory.glob("metrics*.jsonl")):
        return [directory]
    # ``require_run`` then reports what the directory lacks.
    return sorted({path.parent for path in directory.glob(f"*/{FILE_NAME}")}) or [directory]


def write_report(run_dirs: Sequence[Path], page: Path) -> Path:
    """Write the report page atomically, and return its path.

    Raises:
        DataError: a directory is not a run, or no run has metrics to show.
    """
    states = list(map(read_run_state, run_dirs))
    directories = [state.directory for state in states]
    labels = run_labels(directories)
    restarts = _steps_of_restarts(states[0].launches) if len(states) == 1 else []
    pictures = draw_all({labels[state.directory]: state.series for state in states}, restarts)
    if not pictures:
        raise DataError(
            f"{', '.join(directories)}: nothing to draw yet. Fix: let the run finish its first step"
        )
    title = labels[directories[0]] if len(states) == 1 else f"{len(states)} runs compared"
    page.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(page, durable=True) as file:
        # Replace lone surrogates, by which Python represents a directory's name that is not UTF-8.
        names = [str(labels[directory]) for directory in directories]
        file.writelines(part.encode(errors="replace") for part in _page(str(title), states, names, pictures))
    return page


def _steps_of_restarts(launches: Sequence[Launch]) -> list[int]:
    """Return the steps from which a run continued with new workers, in a later launch or within one."""
    steps = list[int]()
    for launch in launches:
        if launch.first_step is not None:
            steps.append(launch.first_step)
            steps += (restart.step for restart in launch.restarts if restart.step is not None)
    # The first launch is not a restart.
    return steps[1:]


def _page(
    title: str, states: Sequence[RunState], labels: Sequence[str], pictures: dict[str, str]
) -> Iterator[str]:
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    samples = samples_panel(Path(states[0].directory)) if len(states) == 1 else ""
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    # The page shows text that a model wrote. Allow only megarl's script, and no requests.
    yield f'<meta http-equiv="Content-Security-Policy" content="{content_policy(bool(samples))}">'
    yield f"<title>{html.escape(title)}</title><style>{_STYLE}{SAMPLES_STYLE}</style></head>\n<body>\n"
    yield f'<h1>{html.escape(title)}</h1><p class="from">megarl {__version__}, created {made}</p>\n'
    yield f'<div class="card scroll">{_summary(states, labels)}</div>\n'
    if len(states) > 1:
        names = (
            f'<span><i style="background:{colour}"></i>{html.escape(label)}</span>'
            for colour, label in zip(run_colours(len(labels)), labels, strict=True)
        )
        yield f'<div class="card runs">{"".join(names)}</div>\n'
    yield '<div class="grid">\n'
    for name, picture in pictures.items():
        yield f'<section class="card"><h2>{html.escape(name)}</h2>{picture}</section>\n'
    yield "</div>\n"
    yield samples
    for state, label in zip(states, labels, strict=True):
        config = Path(state.directory) / CONFIG_FILE
        if config.is_file():
            # A config edited by hand may not be valid UTF-8; a replaced character is better than no report.
            text = html.escape(config.read_text(encoding="utf-8", errors="replace"))
            yield (
                '<details class="card"><summary>Configuration of '
                f"{html.escape(label)}</summary><pre>{text}</pre></details>\n"
            )
    yield "</body></html>\n"


def _summary(states: Sequence[RunState], labels: Sequence[str]) -> str:
    """Return an HTML table with a column per run and a row per fact; facts that no run has are omitted."""
    columns = [dict(_facts(state)) for state in states]
    names = list(dict.fromkeys(chain.from_iterable(columns)))
    head = "".join(f"<th>{html.escape(label)}</th>" for label in labels)
    rows = [f"<tr><th></th>{head}</tr>"] if len(states) > 1 else []
    for name in names:
        rows.append(
            f"<tr><th>{name}</th>"
            + "".join(f"<td>{column.get(name, '')}</td>" for column in columns)
            + "</tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def _facts(state: RunState) -> Iterator[tuple[str, str]]:
    """Yield (name, HTML) for the facts and main metrics of a run."""
    for name, text in facts(state):
        shown = html.escape(text.plain)
        if name == "state":
            name_of_style = state.state.replace(" ", "-")
            behind = shown.removeprefix(state.state)
            shown = f'<span class="{name_of_style}">{state.state}</span>{behind}'
        elif text.style == BAD:
            shown = f'<span class="not-finite">{shown}</span>'
        yield name, shown
    for name, curve, better in shown_metrics(state.series):
        if better is not None:
            best = best_of(curve, better).replace(" at ", " at step ")
            yield (
                name,
                f"{format_number(curve.values[-1])} (from {format_number(curve.values[0])}; best {best})",
            )
