"""Implementation of ``megarl status``: print the state of a run as text or JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megarl.config.plan import size_text
from megarl.config.report import output_console
from megarl.observe.launches import ENGINES, WORKERS, Launch, restarts_within
from megarl.observe.series import Series
from megarl.observe.step_line import (
    ACCURACY_NAMES,
    LOSS_NAMES,
    RATED_PHASES,
    REWARD_FAULTS,
    REWARD_NAMES,
    format_number,
    format_seconds,
    format_share,
)
from megarl.observe.timing import ENGINE_IDLE, ROLLOUT_WAIT
from megarl.watch.run_state import RECENT_STEPS, CheckpointState, RunState, read_run_state

MISMATCH = "train/token_mult_prob_error"
ROLLOUT_AGE = "train/rollout_age"
MEMORY, PEAK_MEMORY = "performance/memory_gib", "performance/peak_memory_gib"
KL = "train/kl_penalty"
# (title, metric names in order of preference, whether larger values are better; None if neither is).
SHOWN: tuple[tuple[str, tuple[str, ...], bool | None], ...] = (
    ("reward", REWARD_NAMES, True),
    ("validation accuracy", ACCURACY_NAMES, True),
    ("loss", LOSS_NAMES, None),
    ("validation loss", ("validation/loss",), False),
    ("gradient norm", ("train/grad_norm",), None),
    ("KL penalty", (KL,), None),
    ("response length", ("train/generation_length",), None),
)
_STYLES = {
    "running": "bold green",
    "finished": "bold green",
    "elsewhere": "bold yellow",
    "not started": "bold yellow",
}
BAD = "bold red"
_BLOCKS = "▁▂▃▄▅▆▇█"
_TREND, _BAR = 24, 24
_NAMED = 6
_NOTHING = Series((), ())


def run(directory: str, as_json: bool = False, hashes: bool = False) -> int:
    """Print the status of a run, and return 0 in any state of the run.

    Raises:
        DataError: the directory is not a run.
    """
    state = read_run_state(Path(directory), hashes)
    if as_json:
        sys.stdout.write(json.dumps(as_plain(state), indent=2) + "\n")
        return 0
    console = output_console()
    console.print(render(state))
    return 0


def as_plain(state: RunState) -> dict[str, object]:
    """Return the state as JSON-compatible data.

    The metrics of ``SHOWN``, the mismatch and the memory have their last, first, smallest and largest value.
    ``reward_errors`` and ``reward_timeouts`` are summed over all steps, and omitted if 0.
    """
    fields = asdict(replace(state, series={}))  # ``asdict`` would copy the series number by number.
    del fields["series"]
    wanted = {name: curve for name, curve, _ in shown_metrics(state.series)}
    for name, key in (("mismatch", MISMATCH), ("memory_gib", MEMORY), ("peak_memory_gib", PEAK_MEMORY)):
        if key in state.series:
            wanted[name] = state.series[key]
    fields["metrics"] = {
        name: {
            "last": curve.values[-1],
            "step": curve.steps[-1],
            "first": curve.values[0],
            "min": min(curve.values),
            "max": max(curve.values),
        }
        for name, curve in wanted.items()
    }
    fields["reward_faults"] = {name: sum(curve.values) for name, curve in _fault_curves(state.series).items()}
    # The first launch is not a restart, and a run directory may have no recorded launch.
    fields["restarts"] = max(len(state.launches) - 1, 0)
    fields["worker_restarts"] = restarts_within(state.launches, WORKERS)
    fields["engine_restarts"] = restarts_within(state.launches, ENGINES)
    return fields


def render(state: RunState) -> RenderableType:
    """Return the status as text that fits 80 columns, unless names are longer."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts(state):
        grid.add_row(name, value)
    parts: list[RenderableType] = [grid]
    metrics = shown_metrics(state.series)
    if metrics:
        parts += [Text(), _metrics_table(metrics)]
    if state.phases:
        parts += [Text(), _phase_table(state)]
    if any(f"{phase}_tokens_per_s" in state.rates for phase in RATED_PHASES):
        parts += [Text(), _rate_table(state.rates)]
    return Group(*parts)


def facts(state: RunState) -> Iterator[tuple[str, Text]]:
    """Yield (name, text) for the facts about a run; used by the terminal output and the report page."""
    named = (state.algorithm and state.algorithm.upper(), state.model and f"of {state.model}")
    what = " ".join(filter(None, named))
    yield "run", Text(f"{state.directory}\n{what}{f' on {state.backend}' if state.backend else ''}".rstrip())
    age = (
        f"; last step {format_seconds(state.last_row_age_s)} ago" if state.last_row_age_s is not None else ""
    )
    yield (
        "state",
        Text(state.state, style=_STYLES.get(state.state, BAD)).append(
            f": {state.reason}{age}", style="not bold default"
        ),
    )
    yield "progress", _progress(state)
    if state.launches:
        restarts, last = len(state.launches) - 1, state.launches[-1]
        # A launch that failed early has no first step.
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.start))
        start = (
            "started"
            if not restarts
            else "the last"
            if last.first_step is None
            else f"the last from step {last.first_step}"
        )
        yield "restarts", Text(f"{restarts}; {start} at {since}{_restarts_text(state.launches)}")
    yield "checkpoint", _checkpoint(state)
    if state.tokens_per_s is not None and state.step_s is not None:
        padding, idle = state.rates.get("padding_efficiency"), state.rates.get("idle_s")
        more = "" if padding is None else f"; padding efficiency {format_share(padding)}"
        more += "" if idle is None else f"; idle {format_seconds(idle)}"
        yield (
            "throughput",
            Text(f"{state.tokens_per_s:,.0f} tokens/s, {format_seconds(state.step_s)} a step{more}"),
        )
    if MEMORY in state.series:
        peak = state.series.get(PEAK_MEMORY, state.series[MEMORY]).values[-1]
        now = state.series[MEMORY].values[-1]
        yield "memory", Text(f"{now:.2f} GiB on the fullest rank, {peak:.2f} GiB at its peak")
    if ROLLOUT_AGE in state.series:
        yield "rollouts", Text(_rollouts_text(state))
    if MISMATCH in state.series:
        yield "mismatch", _mismatch(state.series[MISMATCH], state.series.get(ROLLOUT_AGE, _NOTHING))
    faults = _reward_faults(state.series)
    if faults:
        yield "rewards", Text(faults, style=BAD)
    if state.not_finite:
        yield "not finite", Text(_not_finite_text(state), style=BAD)
    yield "disk", Text(f"{size_text(state.free_bytes)} free")


def _rollouts_text(state: RunState) -> str:
    """Describe, for an asynchronous run, the age of responses and how long training and engines wait for each
    other."""
    age, step_s = state.series[ROLLOUT_AGE].values[-1], state.step_s or 0.0
    lead = "" if age is None else f"sampled {age:g} step{'' if age == 1 else 's'} before they are trained on"
    shares = ""
    if step_s:
        wait, idle = state.phases.get(ROLLOUT_WAIT, 0.0), state.phases.get(ENGINE_IDLE, 0.0)
        shares = (
            f"; waiting share of a step: training {format_share(min(wait / step_s, 1.0))} "
            f"and engines {format_share(min(idle / step_s, 1.0))}"
        )
    queue = []
    for what in ("ready", "running", "dropped"):
        series = state.series.get(f"train/rollouts_{what}")
        if series is not None:
            queue.append(f"{series.values[-1]:g} {what}")
    waiting = f"; groups: {', '.join(queue)}" if queue else ""
    return f"{lead}{shares}{waiting}"


def _restarts_text(launches: Sequence[Launch]) -> str:
    """Describe the restarts within launches and the last reason; empty if there were none."""
    counts = {what: restarts_within(launches, what) for what in (WORKERS, ENGINES)}
    if not any(counts.values()):
        return ""
    last = [restart for launch in launches for restart in launch.restarts][-1]
    times = " and ".join(
        f"{what} {count} time{'s' if count > 1 else ''}" for what, count in counts.items() if count
    )
    return f"; within launches {times}, the last because of {last.reason}"


def _progress(state: RunState) -> Text:
    # Without a configuration, neither the share nor the ETA is known.
    if not state.total_steps:
        return Text(f"step {state.step}")
    share = min(state.step / state.total_steps, 1.0)
    text = (
        Text(f"step {state.step} of {state.total_steps} ")
        .append_text(_bar(share))
        .append(f" {int(share * 100)}%")
    )
    if state.eta_s and state.state in {"running", "elsewhere"}:
        text.append(f", ETA {format_seconds(state.eta_s)}")
    # A stopped run has no expected end: show only how much training time its remaining steps need.
    elif state.eta_s and state.step:
        text.append(f", {format_seconds(state.eta_s)} of training left")
    return text


def _not_finite_text(state: RunState) -> str:
    """Return a line with the metrics whose newest value is NaN or infinite, earliest first."""
    # The metric that broke first is nearest to the cause.
    names = sorted(state.not_finite, key=lambda name: (state.not_finite[name], name))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(f"{name} since step {state.not_finite[name]}" for name in names[:_NAMED]) + more


def _checkpoint(state: RunState) -> Text:
    begun = f"; unfinished: {', '.join(state.unfinished)}" if state.unfinished else ""
    if state.checkpoint is None:
        return Text(f"none{begun}")
    checkpoint = state.checkpoint
    text = Text(f"step {checkpoint.step}, ").append_text(_wholeness(checkpoint))
    text.append(f", {size_text(checkpoint.size)}, {format_seconds(checkpoint.age_s)} old")
    # A newer checkpoint than the usable one can only be a damaged one.
    others = [step for step in state.checkpoints if step != checkpoint.step]
    if others:
        text.append(
            f"; {'damaged or older' if max(others) > checkpoint.step else 'older'}: "
            f"{', '.join(map(str, others))}"
        )
    return text.append(begun)


def _wholeness(checkpoint: CheckpointState) -> Text:
    if checkpoint.problems:
        more = f" and {len(checkpoint.problems) - 1} more" if len(checkpoint.problems) > 1 else ""
        return Text(f"damaged ({checkpoint.problems[0]}{more})", style=BAD)
    return Text("complete " + ("(every byte)" if checkpoint.hashed else "(names and sizes)"), style="green")


def _mismatch(curve: Series, ages: Series) -> Text:
    """Describe the ratio between the probabilities of the engine and of training; 1 means equal. If responses
    are several steps old when they are trained on, the weights' change contributes to it."""
    # A ratio below 1 is as bad as one above.
    worst = max(range(len(curve.values)), key=lambda index: abs(curve.values[index] - 1))
    steps_apart = ages.values[-1] if ages.values else None
    whose = f", whose weights are {steps_apart:g} steps apart" if steps_apart else ""
    text = (
        f"{curve.values[-1]:.6f} between generation and training{whose} (1 is none), "
        f"{curve.values[worst]:.6f} at worst, step {curve.steps[worst]}"
    )
    return Text(text, style="" if abs(curve.values[-1] - 1) < 0.05 else BAD)


def _fault_curves(series: Mapping[str, Series]) -> dict[str, Series]:
    """Return metric -> curve of the counts of training responses whose reward failed, without those that are
    always 0."""
    return {
        name: series[f"train/{name}"]
        for name in REWARD_FAULTS
        if any(series.get(f"train/{name}", _NOTHING).values)
    }


def _reward_faults(series: Mapping[str, Series]) -> str:
    """Return a text such as ``reward_errors 12 in all, the last 3 in step 7``; empty if no reward failed."""
    faults = []
    for name, curve in _fault_curves(series).items():
        # Metrics are logged at every step, so the last value is often 0.
        last = max(index for index, value in enumerate(curve.values) if value)
        faults.append(
            f"{name} {sum(curve.values):,.0f} in all, the last {curve.values[last]:,.0f} in step "
            f"{curve.steps[last]}"
        )
    return "; ".join(faults)


def shown_metrics(series: Mapping[str, Series]) -> list[tuple[str, Series, bool | None]]:
    """Return (title, curve, whether larger is better) for the metrics of ``SHOWN`` that a run has."""
    shown = []
    for title, names, better in SHOWN:
        curve = next((series[name] for name in names if name in series), None)
        # Show a reward of 0 throughout, which is news, but not a KL penalty of 0, which is switched off.
        if curve is not None and (better is not None or any(curve.values)):
            shown.append((title, curve, better))
    return shown


def _metrics_table(metrics: Sequence[tuple[str, Series, bool | None]]) -> Table:
    table = _table("metric", ("last", "first", "best"), "trend")
    for title, curve, better in metrics:
        last, first = format_number(curve.values[-1]), format_number(curve.values[0])
        table.add_row(title, last, first, best_of(curve, better), Text(sparkline(curve.values), style="cyan"))
    return table


def best_of(curve: Series, better: bool | None) -> str:
    """Return the best value and its step as text; empty if neither larger nor smaller is better."""
    if better is None:
        return ""
    value = (max if better else min)(curve.values)
    return f"{format_number(value)} at {curve.steps[curve.values.index(value)]}"


def _table(first: str, numbers: Sequence[str], *last: str) -> Table:
    """Return a table without borders: a column of names, columns of numbers, further columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, style="bold", no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in last:
        table.add_column(heading, no_wrap=True)
    return table


def _phase_table(state: RunState) -> Table:
    total = sum(state.phases.values())
    table = _table("phase", ("seconds", "share"), f"mean of the last {min(RECENT_STEPS, state.step)} steps")
    for name, seconds in state.phases.items():
        share = seconds / total if total else 0.0
        table.add_row(Text(name.replace("_", " ")), f"{seconds:.3f}", f"{share:.0%}", _bar(share))
    return table


def _rate_table(rates: Mapping[str, float]) -> Table:
    """Return a table of tokens per second, TFLOP/s and utilisation of each phase and of the step."""
    table = _table("throughput", ("tokens/s", "a device", "TFLOP/s a device", "MFU"))
    for phase, title in (*RATED_PHASES.items(), ("", "whole step")):
        prefix = f"{phase}_" if phase else ""
        if f"{prefix}tokens_per_s" not in rates:
            continue
        tflops, share = rates.get(f"{prefix}tflops"), rates.get(f"{prefix}mfu")
        table.add_row(
            title,
            f"{rates[f'{prefix}tokens_per_s']:,.0f}",
            f"{rates.get(f'{prefix}tokens_per_s_per_device', 0.0):,.0f}",
            "" if tflops is None else format_number(tflops),
            "" if share is None else format_share(share),
        )
    return table


def _bar(share: float) -> Text:
    filled = round(share * _BAR)
    return Text("━" * filled, style="magenta").append("─" * (_BAR - filled), style="bright_black")


def sparkline(values: Sequence[float], width: int = _TREND) -> str:
    """Draw a curve as a line of block characters. Each block is the mean of one of ``width`` equal parts,
    scaled to the range of these means."""
    size = min(width, len(values))
    bounds = [len(values) * index // size for index in range(size + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        # A constant has no range to scale by.
        return _BLOCKS[0] * size
    return "".join(
        _BLOCKS[min(int((value - low) / (high - low) * len(_BLOCKS)), len(_BLOCKS) - 1)] for value in means
    )
