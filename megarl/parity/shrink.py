"""Reduction of a failing case to a smaller one: remove features first, then reduce sizes, one change at a
time in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from megarl.parity.case import DEFAULTS, DENSE, SPARSE, SPARSE_FIELDS, Case, Fields
from megarl.parity.options import joined

MOST_TRIALS = 300
SMALL = 8
# A case with another backend or seed is a different case, not a simpler one.
_KEPT = ("backend", "seed")
# Most expensive first: ranks, then whole features, then sizes.
_ORDER = [
    *("tp", "sp", "plan", "pp", "vpp", "layout", "first", "last", "cp", "comm", "ep", "etp", "dp"),
    *(
        "model_class",
        "paths",
        "chunk",
        "offload",
        "stacks",
        "outer",
        "lora",
        "overlap",
        "bucket",
        "distopt",
        "recompute",
        "wide",
        "precision",
        "reference",
        "evaluate",
        "together",
        "warmup",
    ),
    *("schedule", "decay", "steps", "eps", "lr", "clip", "optimizer"),
    *("nucleus", "keep", "temperature", "masked", "segments", "packer", "round", "pad", "room", "batching"),
    *("advantages", "loss", "rope", "window", "tied"),
    *("family", "dispatcher", "balance", "zloss", "freeze", "router", "experts", "topk", "expert"),
    *("rows", "lpbs", "micro", "mbs", "layers", "length", "group", "kv", "head", "width", "ffn", "vocab"),
]
assert sorted([*_ORDER, *_KEPT]) == sorted(DEFAULTS), "every field has its place in the order"

# Fields that are only valid together change together.
_TOGETHER: dict[str, Callable[[Case], Fields]] = {
    "tp": lambda case: {"tp": 1, "sp": False, "etp": 1, "plan": "built-in"},
    "pp": lambda case: {"pp": 1, "vpp": 1, "first": 0, "last": 0, "layout": ""},
    "vpp": lambda case: {"vpp": 1, "layers": case.pp},
    "first": lambda case: {"first": 0, "last": 0, "layers": case.pp},
    "overlap": lambda case: {"overlap": False, "bucket": 0},
    "batching": lambda case: {"batching": "fixed", "room": 0, "round": 1, "packer": ""},
    "family": lambda case: {
        "family": DENSE[0],
        "window": 0,
        **{name: DEFAULTS[name] for name in SPARSE_FIELDS},
    },
    "layout": lambda case: {"layout": "", "layers": case.pp},
    "cp": lambda case: {"cp": 1, "ep": 1, "comm": "all_gather"},
    "precision": lambda case: {"precision": "float32", "wide": False},
    "dp": lambda case: {"dp": 1, "ep": 1},
}


def simpler(case: Case) -> Iterator[Case]:
    """Yield all cases that are one change simpler."""
    for name in _ORDER:
        yield from _simpler_in(case, name)


def _simpler_in(case: Case, name: str) -> Iterator[Case]:
    """Yield cases that are simpler in one field and in the fields that depend on it."""
    value, default = getattr(case, name), DEFAULTS[name]
    if case.family in SPARSE and name in ("experts", "topk", "expert"):
        # A mixture-of-experts model with fewer than two experts is not valid.
        default = min(value, 2)
    if value == default:
        return
    if name in _TOGETHER:
        yield replace(case, **_TOGETHER[name](case))
    if name == "loss":
        for loss in _simpler_losses(case):
            yield replace(case, loss=loss, **_advantages_of(case, loss))
    elif name == "advantages":
        yield replace(case, advantages=default)
        for advantages in _without_one_word(value):
            yield replace(case, advantages=advantages)
    elif isinstance(value, int) and not isinstance(value, bool):
        for smaller in _smaller(value, default):
            # Rotary embeddings rotate pairs, so a head has an even width.
            if name != "head" or smaller % 2 == 0:
                yield _changed(case, name, smaller)
    else:
        yield _changed(case, name, default)


def _advantages_of(case: Case, loss: str) -> Fields:
    """Return the change to the advantages that a new loss requires; empty if the loss can use the current
    ones."""
    kept = loss.startswith("pg") or (loss.startswith("value") and case.advantages_kind in ("given", "gae"))
    return {} if kept else {"advantages": DEFAULTS["advantages"]}


def _changed(case: Case, name: str, value: Any) -> Case:
    changes: Fields = {name: value}
    return replace(case, **changes)


def _smaller(value: int, default: int) -> Iterator[int]:
    """Yield candidates below a number, none below the default: the default itself, one half, three quarters
    and, for small numbers, one less."""
    tried = {value}
    for smaller in (default, value // 2, 3 * value // 4, value - 1 if value <= SMALL else value):
        if smaller not in tried and smaller >= default:
            tried.add(smaller)
            yield smaller


def _simpler_losses(case: Case) -> Iterator[str]:
    if case.loss_kind != "nll":
        yield "nll"
    yield from _without_one_word(case.loss)


def _without_one_word(text: str) -> Iterator[str]:
    """Yield a loss or estimator without one of its options, then without the numbers of one option."""
    kind, *options = text.split("+")
    for option in options:
        yield joined(kind, (other for other in options if other != option))
    for option in options:
        if ":" in option:
            yield joined(kind, (other.partition(":")[0] if other == option else other for other in options))


def shrink(case: Case, still_fails: Callable[[Case], bool], possible: Callable[[Case], bool]) -> Case:
    """Return a smaller case that still fails and that no single change makes simpler.

    Fields are tried in a fixed order, and again from the start until nothing changes or ``MOST_TRIALS`` cases
    have been tried.

    Args:
        case: a failing case.
        still_fails: runs a case and returns True if it fails.
        possible: returns True if a case can run; other cases are skipped.
    """
    tried: set[Case] = {case}

    def fails(candidate: Case) -> bool:
        # Different changes may lead to the same case, and each trial takes seconds.
        if candidate in tried or len(tried) > MOST_TRIALS or not possible(candidate):
            return False
        tried.add(candidate)
        return still_fails(candidate)

    before = None
    # A change that did not keep the failure may do so after another one.
    while before != case:
        before = case
        for name in _ORDER:
            while (found := next(filter(fails, _simpler_in(case, name)), None)) is not None:
                case = found
    return case
