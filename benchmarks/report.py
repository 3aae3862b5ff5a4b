"""The report of a run: a self-contained page of tables and plots, with whole runs first and marked results
named."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import whole_runs
from benchmarks.drawings import all_drawn, ratios_of
from benchmarks.marks import marks_of
from benchmarks.tables import number

Result = Mapping[str, Any]
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 1180px;
  padding: 0 1rem }
h1 { font-size: 1.6rem }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-top: 1px solid #ddd; padding-top: 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0 }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #e4e4e4;
  vertical-align: top }
th { font-weight: 600; color: #444 } td small { color: #666; white-space: nowrap } .wide { overflow-x: auto }
.mark { color: #9a3b00 } .marks { border-left: 4px solid #d55e00; padding: .1rem 0 .1rem .8rem }
.facts { color: #555 }
svg { max-width: 100%; height: auto } summary { cursor: pointer; color: #555; margin: .3rem 0 }
pre { white-space: pre-wrap }
"""


def page(results: Sequence[Result]) -> str:
    """Return the self-contained HTML page."""
    sections = [_section(result, svg) for result, svg in all_drawn(results)]
    body = ["<h1>Benchmarks</h1>", _where(results), _marked(results), _whole_runs(results), *sections]
    head = f'<meta charset="utf-8"><title>Benchmarks of megarl</title><style>{STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _where(results: Sequence[Result]) -> str:
    """Return a table of machines, versions and commits without duplicates."""
    # Use a dict instead of a set, so that the rows keep the order of the results.
    rows = dict.fromkeys(_surroundings(result) for result in results)
    head = (
        "processor",
        "cores",
        "device",
        "Python",
        "torch",
        "Megatron-Core",
        "transformers",
        "Ray",
        "commit",
    )
    return (
        "<p>Every ratio is of two things measured in turn in one run. Absolute numbers belong to this "
        "machine.</p>"
    ) + _table(head, rows)


def _surroundings(result: Result) -> tuple[str, ...]:
    known = result.get("environment", {})
    names = ("cpu", "cores", "device", "python", "torch", "megatron-core", "transformers", "ray")
    commit, plus, rest = str(result.get("commit", "unknown")).partition("+")
    return (*(str(known.get(name, "")) for name in names), commit[:12] + plus + rest)


def _marked(results: Sequence[Result]) -> str:
    lines = [
        f"<li>{_text(result['case'])}: {_text('; '.join(marks))}</li>"
        for result in results
        if (marks := marks_of(result))
    ]
    if not lines:
        return ""
    return (
        f'<div class="marks"><p><b>{len(lines)} of {len(results)} results are not to be '
        f"quoted:</b></p><ul>{''.join(lines)}</ul></div>"
    )


def _whole_runs(results: Sequence[Result]) -> str:
    rows = whole_runs.whole_runs(results)
    return f"<h2>Whole runs</h2>{_table(whole_runs.HEAD, rows)}" if rows else ""


def _section(result: Result, svg: str) -> str:
    marks = marks_of(result)
    parts = [
        f"<h2>{_text(result['case'])}</h2>",
        f"<p>{_text(result.get('about', ''))}</p>",
        f'<p class="facts">{_text(_facts(result))}</p>',
    ]
    if marks:
        parts.append(f'<p class="mark">Not to be quoted: {_text("; ".join(marks))}.</p>')
    if result.get("error"):
        parts.append(f"<pre>{_text(result['error'])}</pre>")
    return "\n".join([*parts, svg, *_tables(result["points"])])


def _facts(result: Result) -> str:
    """Return the time, load and options of a case as text."""
    known = result.get("environment", {})
    others = known.get("others")
    facts = [
        f"{number(result['seconds'])} s" if "seconds" in result else "",
        f"{number(result['cpu_seconds'])} CPU s" if "cpu_seconds" in result else "",
        f"load {known.get('load_before', '?')} before and {known.get('load_after', '?')} after",
        "" if others is None else f"other programs kept {others:g} cores busy",
        *(f"--{name} {value}" for name, value in result.get("options", {}).items()),
    ]
    return ", ".join(fact for fact in facts if fact)


def _tables(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of every point's ratios, and a collapsed table of all other metrics."""
    ratios = ratios_of(points)
    others = list(dict.fromkeys(name for point in points for name in point["metrics"] if name not in ratios))
    tables = [_of_points(points, ratios)] if ratios else []
    if others:
        rest = _of_points(points, others)
        tables.append(
            f"<details><summary>seconds, sizes and errors</summary>{rest}</details>" if ratios else rest
        )
    return tables


def _of_points(points: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> str:
    parameters = list(dict.fromkeys(name for point in points for name in point["parameters"]))
    units = {name: metric["unit"] for point in points for name, metric in point["metrics"].items()}
    head = [_text(name.replace("_", " ")) for name in parameters]
    head += [f"{_text(name.replace('_', ' '))}<br><small>{_text(units[name])}</small>" for name in metrics]
    rows = [
        [
            *(_text(point["parameters"].get(name, "")) for name in parameters),
            *(_cell(point["metrics"].get(name)) for name in metrics),
        ]
        for point in points
    ]
    return _raw_table(head, rows)


def _cell(metric: Mapping[str, Any] | None) -> str:
    if metric is None:
        return ""
    if metric["repeats"] == 1:
        return number(metric["median"])
    return f"{number(metric['median'])} <small>{number(metric['min'])} to {number(metric['max'])}</small>"


def _table(head: Sequence[str], rows: Any) -> str:
    return _raw_table([_text(cell) for cell in head], [[_text(cell) for cell in row] for row in rows])


def _raw_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells}</tr>{lines}</table></div>'


def _text(value: Any) -> str:
    return html.escape(str(value))
