"""Text of the console's step line and throughput line: number formats, the order of the fields, and which
fields are omitted on a narrow screen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from megarl.observe.timing import STEP_SECONDS

LOSS_NAMES = ("train/loss",)
REWARD_NAMES = ("train/reward", "train/reward_mean", "train/mean_reward")
REWARD_FAULTS = ("reward_errors", "reward_timeouts")
"""Metrics that count responses whose reward failed; shown only if not 0."""
EPISODES = "episodes/"
"""Prefix of the metrics that count multi-turn conversations by the reason for their end."""
ACCURACY_NAMES = ("validation/accuracy", "validation/reward")
GRAD_NORM_NAMES = ("train/grad_norm",)
THROUGHPUT_NAMES = ("performance/tokens_per_s", "train/tokens_per_s")
_SHORT_PHASES = {
    "generation": "gen",
    "reward": "rew",
    "logprobs": "logp",
    "reference_logprobs": "ref",
    "values": "values",
    "train_critic": "critic",
    "teacher_logprobs": "teach",
    "train": "train",
    "validation": "val",
    "checkpoint": "ckpt",
    "refit": "refit",
}
_TIMING_PREFIX = "timing/"
RATED_PHASES = {
    "generation": "generation",
    "logprobs": "log-probs",
    "reference_logprobs": "reference",
    "values": "values",
    "train_critic": "critic",
    "train": "training",
}
"""Phases with throughput metrics under ``performance/`` -> displayed name."""


def first_number(metrics: Mapping[str, float], names: Iterable[str]) -> float | None:
    """Return the first metric of ``names`` that is a number, or None."""
    for name in names:
        value = metrics.get(name)
        if value is not None and not isinstance(value, str):
            return float(value)
    return None


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of the top-level phases, longest first, without ``step_s``."""
    seconds: dict[str, float] = {}
    for name, value in metrics.items():
        bare_name = name.removeprefix(_TIMING_PREFIX)
        if bare_name in (name, STEP_SECONDS) or not bare_name.endswith("_s") or "/" in bare_name:
            continue
        seconds[bare_name.removesuffix("_s")] = float(value)
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def format_number(value: float) -> str:
    """Format a number compactly, with two to four significant digits: ``0.0312``, ``-1.25``, ``12.3``,
    ``1,234``, ``2.1e-05``, ``nan``."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0.000"
    if size < 1e-3 or size >= 1e7:
        return f"{value:.1e}"
    if size < 0.1:
        return f"{value:.4f}"
    if size < 10:
        return f"{value:.3f}"
    return f"{value:.1f}" if size < 1000 else f"{value:,.0f}"


def format_seconds(seconds: float) -> str:
    """Format a duration compactly: ``0.42s``, ``4.2s``, ``42s``, ``3m07s``, ``42m``, ``2h05m``, ``3d04h``."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    # From 9.95 s on, one decimal would round to 10.0.
    if seconds < 9.95:
        return f"{seconds:.2f}s" if seconds < 0.995 else f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    # From 59.5 minutes on, minutes would round to 60.
    if whole < 3570:
        return f"{whole // 60}m{whole % 60:02d}s" if whole < 600 else f"{round(whole / 60)}m"
    minutes = round(whole / 60)
    return (
        f"{minutes // 60}h{minutes % 60:02d}m"
        if minutes < 24 * 60
        else f"{minutes // 1440}d{minutes % 1440 // 60:02d}h"
    )


def step_fields(
    step: int, total_steps: int, metrics: Mapping[str, float], eta_s: float | None, width: int
) -> list[tuple[str, str]]:
    """Return the fields of a step's line as (kind, text), to be joined by two spaces.

    Progress, loss, reward, failed rewards and gradient norm are always included. Step time, throughput and
    ETA follow, in this order of priority, as far as they fit into ``width`` columns. Then come the longest
    phases that fit; phases below 0.05 s are omitted.

    Args:
        step: number of the step.
        total_steps: number of the last step.
        metrics: metrics of the step.
        eta_s: estimated remaining seconds; None to omit them.
        width: columns of the line.
    """
    fields = [("progress", f"step {step:>{len(str(total_steps))}}/{total_steps}")]
    loss = first_number(metrics, LOSS_NAMES)
    reward = first_number(metrics, REWARD_NAMES)
    grad_norm = first_number(metrics, GRAD_NORM_NAMES)
    if loss is not None:
        fields.append(("loss", f"loss {format_number(loss):>7}"))
    if reward is not None:
        fields.append(("reward", f"reward {reward:.3f}"))
    for name in REWARD_FAULTS:
        count = first_number(metrics, [f"train/{name}"])
        if count:
            fields.append(("fault", f"{name} {count:.0f}"))
    if grad_norm is not None:
        fields.append(("grad", f"grad {grad_norm:>4.3g}"))
    optional: list[tuple[str, str]] = []
    throughput = first_number(metrics, THROUGHPUT_NAMES)
    if throughput is not None:
        optional.append(("throughput", f"{_thousands(throughput):>4} tok/s"))
    step_seconds = first_number(metrics, [_TIMING_PREFIX + STEP_SECONDS])
    if step_seconds is not None:
        # The step time has the highest priority of the optional fields.
        optional.insert(0, ("time", f"{format_seconds(step_seconds):>5}"))
    if eta_s is not None:
        optional.append(("eta", f"ETA {format_seconds(eta_s)}"))
    for field in optional:
        if _width([*fields, field]) <= width:
            fields.append(field)
    return _with_phases(fields, phase_seconds(metrics), width)


def throughput_line(metrics: Mapping[str, float]) -> str:
    """Return the throughput of the phases as text: ``generation 2.3k tok/s, MFU 12%; training 6.1k tok/s, MFU
    34%; padding efficiency 85%; idle 0.02s``. Empty if no phase has throughput metrics."""
    parts = []
    for phase, title in RATED_PHASES.items():
        tokens = first_number(metrics, [f"performance/{phase}_tokens_per_s"])
        share = first_number(metrics, [f"performance/{phase}_mfu"])
        if tokens is not None:
            parts.append(
                f"{title} {_thousands(tokens)} tok/s"
                + ("" if share is None else f", MFU {format_share(share)}")
            )
    if not parts:
        return ""
    padding = first_number(metrics, ["performance/padding_efficiency"])
    idle = first_number(metrics, ["performance/idle_s"])
    parts += [] if padding is None else [f"padding efficiency {format_share(padding)}"]
    parts += [] if idle is None else [f"idle {format_seconds(idle)}"]
    return "; ".join(parts)


def format_share(share: float) -> str:
    """Format a fraction as a percentage: ``34%``, ``3.4%``, ``0.34%``."""
    percent = 100 * share
    return (
        f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.1f}%" if percent >= 0.995 else f"{percent:.2f}%"
    )


def _with_phases(
    fields: list[tuple[str, str]], phases: Mapping[str, float], width: int
) -> list[tuple[str, str]]:
    """Insert as many of the longest phases as fit, after the step time."""
    position = next((index for index, (kind, _) in enumerate(fields) if kind == "time"), None)
    shown = [
        f"{_SHORT_PHASES.get(name, name)} {_bare_seconds(seconds)}"
        for name, seconds in phases.items()
        if seconds >= 0.05
    ]
    if position is None:
        return fields
    while shown:
        phase_text = ("phases", "(" + " ".join(shown) + ")")
        candidate = [*fields[: position + 1], phase_text, *fields[position + 1 :]]
        if _width(candidate) <= width:
            return candidate
        shown.pop()
    return fields


def _bare_seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 99.95 else f"{seconds:.0f}"


def _thousands(count: float) -> str:
    """Format a count compactly: ``231``, ``2.3k``, ``23k``, ``2.3M``."""
    if not math.isfinite(count):
        return str(count)
    # From 999.5 on, a count would round to 1000, so use the next unit.
    for limit, divisor, unit in ((999.5, 1.0, ""), (999.5e3, 1e3, "k"), (math.inf, 1e6, "M")):
        if count < limit:
            scaled = count / divisor
            return f"{scaled:.1f}{unit}" if unit and scaled < 9.95 else f"{scaled:.0f}{unit}"
    raise AssertionError("the last limit is infinite")


def _width(fields: list[tuple[str, str]]) -> int:
    return sum(len(text) for _, text in fields) + 2 * (len(fields) - 1)
