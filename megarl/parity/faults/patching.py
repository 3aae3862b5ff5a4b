"""Patching: puts a known fault into a process and takes it out again."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megarl.parity.batches import token_batch
from megarl.parity.case import BACKENDS, Case
from megarl.parity.faults.first_step import first_step_of
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
        needs: words of cases that have the feature, to draw fitting ones with; of a loss or an estimator what it has at least. Several
            lines where there are several losses that it is to be seen in.
        backends: on which it can be put in.
    """

    what: str
    applies: Callable[[Case], bool]
    put_in: Patch
    needs: str | tuple[str, ...] = ""
    backends: tuple[str, ...] = BACKENDS

    @property
    def each_need(self) -> tuple[str, ...]:
        """The lines of ``needs``."""
        return (self.needs,) if isinstance(self.needs, str) else self.needs


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


def built_otherwise(place: str, **attributes: Any) -> Patch:
    """Objects of a class have other attributes than they were made with.

    Raises:
        AttributeError: when one is made: it has no such attribute.
    """

    def make(original: Any) -> Any:
        def init(self: Any, *given: Any, **options: Any) -> None:
            original(self, *given, **options)
            for name, value in attributes.items():
                getattr(self, name)
                setattr(self, name, value)

        return init

    return replacing(place, "__init__", make)


def with_data(place: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patch:
    """A loss reads other data than it is given."""
    return replacing(
        place,
        "__call__",
        lambda original: lambda self, data, *normalizers, **given: original(self, {**data, **change(dict(data))}, *normalizers, **given),
    )


def normalised_by_micro_batch(original: Any) -> Any:
    """A loss divides a micro-batch by what counts in it."""

    def call(
        self: Any, data: Any, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor, *scores: torch.Tensor, **named: Any
    ) -> Any:
        rows = data["sample_mask"].sum().to(global_valid_seqs)
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum().to(global_valid_toks)
        return original(self, data, rows, tokens, *scores, **named)

    return call


def in_several_micro_batches(case: Case) -> bool:
    """Whether in the first step more than one micro-batch has tokens that count, and all have as many rows."""
    if case.batching != "fixed" or case.micro < 2:
        return False
    batch = token_batch(case)
    tokens = (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None])[: case.global_batch].view(-1, case.mbs, case.length - 1)
    return int((tokens.sum((1, 2)) > 0).sum()) > 1


LEAST_TOKENS = 3
"""Counted tokens of a step: of one or two of a policy gradient, clipping may leave none a gradient."""


def sees_tokens(case: Case) -> bool:
    """Return whether, in every step, some tokens have a gradient. With few rows and ``masked=some``, no sample of a step may count; of
    preferences, no pair; answers may be alone with their prompts, and importance weights of few rows all be out of bounds."""
    left_out = bool({"icepop", "seq-mask"} & case.loss_options) and case.global_batch < 4
    # most faults concern what models that score have not: log-probabilities, a vocabulary, temperatures; they have faults of their own
    if case.masked not in ("none", "some") or case.length < 5 or case.advantages != "given" or left_out or case.scores:
        return False
    if case.loss_kind == "pg" and int(first_step_of(case).moving.sum()) < LEAST_TOKENS:
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
