"""Patching: puts a known fault into a process and takes it out again."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.parity.batches import token_batch
from megarl.parity.case import BACKENDS, Case
from megarl.parity.losses import loss_weight
from megarl.patched import patched

Patch = Callable[[contextlib.ExitStack, Case], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A known fault.

    Attributes:
        what: the fault in a few words.
        applies: whether the fault must be seen in a case.
        put_in: puts it in; what it enters on the stack takes it out.
        needs: words of cases that have the feature, to draw fitting ones with.
        backends: on which it can be put in.
    """

    what: str
    applies: Callable[[Case], bool]
    put_in: Patch
    needs: str = ""
    backends: tuple[str, ...] = BACKENDS


def found(place: str) -> Any:
    """The module or class at ``package.module`` or ``package.module:Class``."""
    module, _, name = place.partition(":")
    owner: Any = importlib.import_module(module)
    return getattr(owner, name) if name else owner


def replacing(place: str, name: str, make: Callable[[Any], Any]) -> Patch:
    """Puts ``make(what is there)`` in the place of an attribute of a module or class. A fault may concern Megatron's own modules, which are
    found by name here and imported nowhere."""
    return replacing_for(place, name, lambda original, case: make(original))


def replacing_for(place: str, name: str, make: Callable[[Any, Case], Any]) -> Patch:
    """As ``replacing``, where what comes in depends on the case."""

    def put_in(stack: contextlib.ExitStack, case: Case) -> None:
        owner = found(place)
        stack.enter_context(patched((owner, name, make(getattr(owner, name), case))))

    return put_in


def after_building(change: Callable[[Any, Case], None]) -> Patch:
    """Changes every worker as soon as it is built."""

    def make(original: Any, case: Case) -> Any:
        def init(self: Any, *arguments: Any, **options: Any) -> None:
            original(self, *arguments, **options)
            change(self, case)

        return init

    return replacing_for("megarl.models.engine.worker:EngineWorker", "__init__", make)


LEAST_TOKENS = 3
"""Counted tokens of a step: of one or two of a policy gradient, clipping may leave none a gradient."""


def sees_tokens(case: Case) -> bool:
    """Return whether, in every step, some tokens have a gradient. With few rows and ``masked=some``, no sample of a step may count; of
    preferences, no pair; answers may be alone with their prompts, and importance weights of few rows all be out of bounds."""
    left_out = bool({"icepop", "seq-mask"} & case.loss_options) and case.global_batch < 4
    # most faults concern what models that score have not: log-probabilities, a vocabulary, temperatures; they have faults of their own
    if case.masked not in ("none", "some") or case.length < 5 or case.advantages != "given" or left_out or case.scores:
        return False
    batch = token_batch(case)
    counts = batch["sample_mask"]
    if case.loss_kind == "dpo":
        counts = counts.view(-1, 2).prod(1).repeat_interleave(2)
    tokens = batch["token_mask"][:, 1:].sum(1) * counts
    return bool((tokens.view(case.steps, -1).sum(1) >= LEAST_TOKENS).all())


def many_tokens(case: Case) -> bool:
    """Return whether ``sees_tokens`` holds of steps of several rows."""
    return sees_tokens(case) and case.global_batch >= 2


def is_clipped(case: Case) -> bool:
    """The gradients of every step are longer than the bound; with the small weight that losses have in float16, they need not be."""
    return 0 < case.clip < 0.1 * loss_weight(case) and sees_tokens(case)
