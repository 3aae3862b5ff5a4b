"""The plots of a report: the ratios of a case, as lines over the varied parameter or as bars, each with the
range of its repeats."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.marks import is_loaded

Points = Sequence[Mapping[str, Any]]
MOST_PANELS, MOST_BARS, MOST_LINES = 4, 24, 8
INK, RULE = "#222222", "#bbbbbb"
# Colours of Okabe and Ito, darkest first, which colour-blind readers can distinguish too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")


def ratios_of(points: Points) -> list[str]:
    """Return the names of all metrics that are ratios, over all points and in their order."""
    found = dict.fromkeys(
        name
        for point in points
        for name, metric in point["metrics"].items()
        if metric["unit"].startswith("ratio")
    )
    return list(found)


def panels_of(points: Points, in_cpu_seconds: bool) -> list[str]:
    """Return the ratios to plot. If a ratio exists in wall and in CPU seconds, only the chosen one of the two
    is returned."""
    ratios = ratios_of(points)
    twins = {name for name in ratios if f"{name}_cpu" in ratios}
    left_out = twins if in_cpu_seconds else {f"{name}_cpu" for name in twins}
    return [name for name in ratios if name not in left_out][:MOST_PANELS]


def drawn(points: Points, in_cpu_seconds: bool = False) -> str:
    """Return an SVG of the first ratios of a case; empty if there are no ratios, or only one point."""
    ratios = panels_of(points, in_cpu_seconds)
    if not ratios or len(points) < 2:
        return ""
    axis = varied(points)
    return _svg(_lines(points, ratios, axis)) if axis else _svg(_bars(points, ratios))


def varied(points: Points) -> str | None:
    """Return the parameter for the x axis: a number that has several values among otherwise equal points.
    Return None if there is no such parameter."""
    candidates = [
        name
        for name, value in points[0]["parameters"].items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    sizes = {name: _longest_line(points, name) for name in candidates}
    best = max(candidates, key=lambda name: sizes[name], default=None)
    return best if best is not None and sizes[best] >= 2 and len(series(points, best)) <= MOST_LINES else None


def _longest_line(points: Points, axis: str) -> int:
    return max(
        (len({point["parameters"][axis] for point in line}) for line in series(points, axis).values()),
        default=0,
    )


def series(points: Points, axis: str) -> dict[str, list[Mapping[str, Any]]]:
    """Return the points as lines: points that differ only in ``axis`` share a line, which is named by their
    other parameters."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        if axis in point["parameters"]:
            rest = {
                name: value
                for name, value in point["parameters"].items()
                if name != axis and _tells_apart(points, name)
            }
            lines.setdefault(label_of(rest), []).append(point)
    return {name: sorted(line, key=lambda point: point["parameters"][axis]) for name, line in lines.items()}


def label_of(parameters: Mapping[str, Any]) -> str:
    """Return a short label of parameters: text values alone, numbers with their names."""
    words = [
        value if isinstance(value, str) else f"{value:g} {name}".replace("_", " ")
        for name, value in parameters.items()
    ]
    return ", ".join(words)


def _tells_apart(points: Points, name: str) -> bool:
    return len({str(point["parameters"].get(name)) for point in points}) > 1


def _lines(points: Points, ratios: Sequence[str], axis: str) -> Any:
    figure, panels = _figure(len(ratios), height=3.4)
    lines = series(points, axis)
    for panel, ratio in zip(panels, ratios, strict=True):
        for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
            measured = [
                (point["parameters"][axis], point["metrics"][ratio])
                for point in line
                if ratio in point["metrics"]
            ]
            places = [place for place, _ in measured]
            panel.plot(
                places,
                [metric["median"] for _, metric in measured],
                color=colour,
                marker="o",
                markersize=4,
                label=name or None,
            )
            panel.fill_between(
                places,
                *([metric[end] for _, metric in measured] for end in ("min", "max")),
                color=colour,
                alpha=0.15,
                lw=0,
            )
        values = sorted({point["parameters"][axis] for point in points if axis in point["parameters"]})
        if values[0] > 0 and values[-1] / values[0] >= 4:
            panel.set_xscale("log", base=2)
            panel.minorticks_off()
        panel.set_xticks(values, [f"{value:g}" for value in values], rotation=45 if len(values) > 6 else 0)
        panel.set_xlabel(axis.replace("_", " "))
        _finish(panel, _title(points, ratio), panel.set_yscale, panel.axhline)
    handles, labels = panels[0].get_legend_handles_labels()
    if labels:
        # About eleven letters of this size fit into an inch, and each entry also needs room for its sample of
        # the line.
        columns = max(1, int(figure.get_figwidth() * 11 / (max(map(len, labels)) + 8)))
        figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(labels) // columns))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    return figure


def _bars(points: Points, ratios: Sequence[str]) -> Any:
    shown = points[:MOST_BARS]
    names = [
        label_of({key: value for key, value in point["parameters"].items() if _tells_apart(points, key)})
        for point in shown
    ]
    figure, panels = _figure(len(ratios), height=1.2 + 0.26 * len(shown), sharey=True)
    for panel, ratio, colour in zip(panels, ratios, COLOURS, strict=False):
        for row, point in enumerate(shown):
            if ratio in point["metrics"]:
                metric = point["metrics"][ratio]
                panel.barh(row, metric["median"], color=colour, alpha=0.75, height=0.7)
                panel.plot([metric["min"], metric["max"]], [row, row], color=INK, lw=1)
        panel.set_yticks(range(len(shown)), names)
        _finish(panel, _title(points, ratio), panel.set_xscale, panel.axvline)
    # Draw the first point at the top; all panels share this axis.
    panels[0].invert_yaxis()
    return figure


def _title(points: Points, ratio: str) -> str:
    """Return the panel's title: the quantity, and what it is divided by."""
    unit = next(point["metrics"][ratio]["unit"] for point in points if ratio in point["metrics"])
    return f"{ratio.replace('_', ' ')}\n{textwrap.shorten(unit, 46, placeholder=' ...')}"


def _finish(panel: Any, title: str, set_scale: Any, rule: Any) -> None:
    """Add a line at the ratio 1, a logarithmic scale if the values need one, and the panel's title."""
    low, high = panel.dataLim.intervaly if set_scale == panel.set_yscale else panel.dataLim.intervalx
    if low > 0 and high / low > 20:
        set_scale("log")
    rule(1.0, color=INK, lw=1, ls=":")
    panel.set_title(title, fontsize=9, color=INK)
    panel.grid(color=RULE, lw=0.4)
    panel.set_axisbelow(True)


def _figure(count: int, height: float, sharey: bool = False) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.4, 3.6 * count + 0.6), height), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False, sharey=sharey)[0]
    for panel in panels:
        panel.tick_params(labelsize=8, colors=INK)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(panels)


def _svg(figure: Any) -> str:
    """Return the bare SVG element, with searchable text."""
    import matplotlib

    written = io.StringIO()
    # Use fixed ids and no date, so that equal results give equal pages.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "megarl", "font.family": "sans-serif"}
    ):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    return text[text.index("<svg") :]


def all_drawn(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield each result with its plot. Ids are made unique, because all plots are on one page."""
    for place, result in enumerate(results):
        svg = drawn(result["points"], is_loaded(result))
        yield result, _with_own_ids(svg, f"r{place}-")


def _with_own_ids(svg: str, prefix: str) -> str:
    for before in ('id="', 'href="#', "url(#"):
        svg = svg.replace(before, before + prefix)
    return svg
