"""What a launch has to say of a fault: who it met and where, or how much there was, as the row of the fault
promises it.

Only what was said since the fault counts: the same words may be of an earlier one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from megarl.config.rules.parallel import layout_of
from megarl.config.rules.view import View
from megarl.distributed.deadlines import PHASES as CALLED
from megarl.distributed.deadlines import STEP
from tests.faults.fault import ANY, INIT, MissedError

_LABEL = r"\[[^\]\n]*\]"
# the error that ends a launch, or its workers: what fails as they are ended is told too
_ERROR = r"(?:^megarl: |: workers were lost, restart \d+ of at most \d+: )"
# Engines that die while they sample beside training are not replaced: the weights that they had are gone.
_BESIDE = r"(?:engines were lost while they sampled during training, [^:\n]+: )?"
_DIED = re.compile(
    rf"{_ERROR}{_BESIDE}(?P<who>{_LABEL})(?: node \S+ is lost:)? "
    r"worker process died during (?P<what>[^:\n]+): ",
    re.MULTILINE,
)
_SILENT = re.compile(
    rf"{_ERROR}(?P<what>[^:\n]+): \d+ of \d+ workers (?:do not answer|did not answer within \S+ s): "
    r"[^\n]*?\. "
    r"Silent: (?P<silent>[^\n]*?)\. Fix: ",
    re.MULTILINE,
)
_STOPPED = re.compile(rf"the process of (?P<who>{_LABEL}) is stopped by a signal")
_APART = re.compile(rf"In no collective, while \d+ others wait in one: (?P<who>{_LABEL})\. ")
_NO_MEMORY = re.compile(
    rf"(?P<who>{_LABEL}) out of memory in a training pass, at micro-batch [1-9]\d* of [1-9]\d*: [1-9]\d* "
    r"rows, [1-9]\d* tokens in "
    r"[1-9]\d* positions; peak \d+\.\d\d GiB, limit (?!0\.00)\d+\.\d\d GiB \("
)
_NOT_FINITE = re.compile(
    rf"(?P<who>{_LABEL}) global batch \d+ of this call: loss = (?P<loss>\S+), gradient norm = "
    r"(?P<norm>\S+); seen first: \S[^\n]*\. "
    r"No weight was changed by it\."
)
_ALSO = re.compile(r"^Also failed: (?P<labels>[^\n]*)", re.MULTILINE)
_CONSTRUCTED = re.compile(r"(?:constructor|start) of \S+|rendezvous of rank 0")
_CALLED = re.compile(r"(?P<phase>\w+)(?: \(validation\))?(?:, step (?P<step>\d+))?, of \w+")
_PHASES = frozenset(CALLED) - {STEP} | {"train"}


def coordinates(run_dir: Path) -> list[str]:
    """How messages name the ranks of a run, for example ``pp0 dp0 cp0 tp1``, in their order."""
    layout = layout_of(View(yaml.safe_load((run_dir / "config.yaml").read_text())))
    every = [layout.coordinates(rank) for rank in range(layout.world_size)]
    return [f"pp{each.pipeline} dp{each.data} cp{each.context} tp{each.tensor}" for each in every]


def check_loss_is_told(said: str, who: str, phase: str, step: int, steps: int) -> None:
    """A worker that died: its coordinates, and the call that it died in or, where it was in none, the next
    one.

    Args:
        said: by the launch since.
        who: coordinates of the rank.
        phase: that it was seen in.
        step: that the launch was in when it died.
        steps: number of the last step.

    Raises:
        MissedError: the phase was over before the signal came.
        AssertionError: something else is said, or nothing.
    """
    found = _DIED.search(said)
    assert found is not None, f"it does not say which worker died, and when:\n{said[-3000:]}"
    assert _names(found["who"], who), f"rank {who} died, and it names {found['who']}"
    _check_place(found["what"], phase, step, steps)


def check_engine_is_told(said: str) -> None:
    """An engine that died: the first of its ranks. What it was doing may be for any of the steps ahead."""
    found = _DIED.search(said)
    assert found is not None, f"it does not say that an engine died:\n{said[-3000:]}"
    assert _names(found["who"], "pp0 dp0 cp0 tp0"), f"an engine died, and it names {found['who']}"


def check_standstill_is_told(said: str, who: str) -> None:
    """A worker that waits for ever while the others wait for it: that and no other is pointed out."""
    named = [each["who"] for each in _APART.finditer(said)]
    assert named and all(_names(each, who) for each in named), (
        f"rank {who} stood still, and it names {named}:\n{said[-3000:]}"
    )


def check_silence_is_told(said: str, who: str, phase: str, step: int, steps: int) -> None:
    """A worker that stands still: that and no other is pointed out, with the call; as of
    ``check_loss_is_told``."""
    found = _SILENT.search(said)
    assert found is not None, f"it does not say which worker is silent, and when:\n{said[-3000:]}"
    named = [each["who"] for each in _STOPPED.finditer(found["silent"])]
    assert len(named) == 1 and _names(named[0], who), (
        f"rank {who} stood still, and it says {found['silent']!r}"
    )
    _check_place(found["what"], phase, step, steps)


def check_memory_is_told(said: str, who: str) -> None:
    """A rank without memory: which one, and the sizes of its micro-batch, what was taken and what there is.

    Raises:
        AssertionError: something is missing.
    """
    found = _NO_MEMORY.search(said)
    assert found is not None, (
        f"it does not say the sizes of the micro-batch, the peak and the limit:\n{said[-3000:]}"
    )
    assert _names(found["who"], who), f"rank {who} had no memory, and it names {found['who']}"


def check_not_finite_is_told(said: str, everybody: Sequence[str]) -> None:
    """A batch with a value that is not finite: which one, where it was seen; and that the call ended on all
    ranks.

    Raises:
        AssertionError: something is missing.
    """
    found = _NOT_FINITE.search(said)
    assert found is not None, f"it does not say what is not finite, and where:\n{said[-3000:]}"
    assert not (math.isfinite(float(found["loss"])) and math.isfinite(float(found["norm"]))), (
        f"what it says is finite: {found[0]!r}"
    )
    others = _ALSO.search(said, found.end())
    ended = re.findall(_LABEL, found["who"] + ("" if others is None else others["labels"]))
    missing = [who for who in everybody if not any(_names(label, who) for label in ended)]
    assert not missing, f"the call has not ended on {missing}, only on {ended}"


def _names(label: str, who: str) -> bool:
    """Behind the coordinates comes the host."""
    return label.startswith(f"[{who} ")


def _check_place(what: str, phase: str, step: int, steps: int) -> None:
    if _CONSTRUCTED.fullmatch(what):
        assert phase in (INIT, ANY), (
            f"it was in {phase}, step {step}, and is said to have been in its construction: {what!r}"
        )
        return
    found = _CALLED.fullmatch(what)
    assert found is not None, f"{what!r} is no phase of a run"
    named = found["phase"]
    assert phase != INIT, f"it was in its construction, and is said to have been in {what!r}"
    # the last export comes after all steps
    is_outside = found["step"] is None and (step > steps or named not in _PHASES)
    # what it was doing may have been the last of the step
    last = step if named == phase else step + 1
    assert is_outside or (found["step"] is not None and step <= int(found["step"]) <= last), (
        f"it was in step {step}, not in {what!r}"
    )
    if phase not in (ANY, named):
        raise MissedError(
            f"{phase}, step {step}, was over when the signal came: it is said to have been in {what!r}"
        )
