"""Runner of one case: the reference in this process, the workers in the pool, and the comparison of
the two."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megarl.config.policy import PolicyConfig
from megarl.parity import jobs
from megarl.parity.batches import Batch, token_batch, with_signals
from megarl.parity.case import Case
from megarl.parity.compare import Difference, compare
from megarl.parity.faults import Fault
from megarl.parity.models import ModelShelf
from megarl.parity.noise import MEMBERS_TO_CONFIRM, Bounds, bounds_of
from megarl.parity.pool import JobError, WorkerPool
from megarl.parity.possible import accepted_config, refusal
from megarl.parity.reference import Expected, load_model, token_logprobs, trained
from megarl.parity.settings import adapter_directory


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """The outcome of a case.

    Attributes:
        case: the case.
        differences: every quantity that was compared.
        error: the error that ended a worker, or the reason why the results cannot be compared; empty for
            neither.
        timed_out: whether the workers did not reply in time, which shows nothing about their results.
        seconds: time that the case took.
    """

    case: Case
    differences: list[Difference] = field(default_factory=list)
    error: str = ""
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def mismatches(self) -> list[Difference]:
        """Quantities that are out of bounds, worst first."""
        return sorted(
            (found for found in self.differences if not found.passes),
            key=lambda found: -found.error / found.bound,
        )

    @property
    def passes(self) -> bool:
        """True if all quantities are within bounds."""
        return not self.error and not self.mismatches

    def summary(self, lines: int = 3) -> list[str]:
        """Return what failed, worst first, in ``lines`` lines and one that counts the others."""
        if self.error:
            return [f"error: {self.error.strip().splitlines()[-1]}"]
        wrong = self.mismatches
        return [*map(str, wrong[:lines]), *([f"and {len(wrong) - lines} more"] if len(wrong) > lines else [])]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Inputs of the workers, and the figures that they must return."""

    model: Path
    config: PolicyConfig
    batch: Batch
    logprobs: torch.Tensor
    expected: Expected
    bounds: Bounds
    confirms: bool = False


class CaseRunner:
    """Runs cases one after the other.

    Args:
        shelf: creates their models.
        pool: runs their workers.
    """

    def __init__(self, shelf: ModelShelf, pool: WorkerPool) -> None:
        self._shelf = shelf
        self._pool = pool
        self._prepared: tuple[Case, _Prepared] | None = None

    def possible(self, case: Case) -> bool:
        """Return whether the case can run."""
        return refusal(case, self._shelf) is None

    def run(self, case: Case, fault: Fault | None = None) -> CaseOutcome:
        """Run a case, with a fault planted in its workers if one is given.

        Raises:
            ConfigError: the rules refuse the case.
        """
        started = time.monotonic()
        ready = self._prepare(case)
        try:
            shares = self._pool.run(case.world, jobs.measure, case, ready.config, ready.batch, fault)
        except (JobError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            return CaseOutcome(case, error=str(error), timed_out=late, seconds=time.monotonic() - started)
        try:
            outcome = self._judged(case, ready, shares)
        except (
            Exception
        ):  # A fault can return data of another form, which fails this case but must not end the others.
            return CaseOutcome(case, error=traceback.format_exc(), seconds=time.monotonic() - started)
        # A planted fault that the fixed bounds of float32 catch is caught, because its case has passed before
        # without the fault.
        measures = case.has_measured_bounds or fault is None
        if not outcome.passes and measures and not ready.confirms:
            ready = self._keep(case, self._with_more_members(case, ready))
            outcome = self._judged(case, ready, shares)
        return replace(outcome, seconds=time.monotonic() - started)

    @staticmethod
    def _judged(case: Case, ready: _Prepared, shares: list[jobs.Share]) -> CaseOutcome:
        return CaseOutcome(
            case,
            compare(case, ready.config, ready.batch, shares, ready.logprobs, ready.expected, ready.bounds),
        )

    @staticmethod
    def _with_more_members(case: Case, ready: _Prepared) -> _Prepared:
        """Return the same case with bounds from many more runs of the reference.

        A token whose probability ratio is about to be clipped has a gradient that jumps. It jumps in only a
        few of many runs, so the first eight may all miss it. And where gradients of tokens cancel, plain
        transformers in float32 may be farther from float64 than the fixed bound.
        """
        bounds = bounds_of(
            case, ready.model, ready.batch, ready.logprobs, ready.expected, members=MEMBERS_TO_CONFIRM
        )
        return replace(ready, bounds=bounds, confirms=True)

    def _prepare(self, case: Case) -> _Prepared:
        """Return the reference's side of a case. The last result is cached, because a fault is planted in a
        case that has just run without it."""
        if self._prepared is None or self._prepared[0] != case:
            model = self._shelf.complete(case)
            config = accepted_config(case, model)
            reference = load_model(model, adapter=adapter_directory(case, model))
            tokens = token_batch(case)
            logprobs = token_logprobs(reference, tokens, case.sampling)
            batch = with_signals(case, tokens, logprobs)
            expected = trained(case, reference, batch)
            # With adapters, the reference policy is the model without them.
            if case.lora:
                expected.base_logprobs = token_logprobs(load_model(model), tokens, case.sampling)
            bounds = (
                bounds_of(case, model, batch, logprobs, expected) if case.has_measured_bounds else Bounds()
            )
            return self._keep(case, _Prepared(model, config, batch, logprobs, expected, bounds))
        return self._prepared[1]

    def _keep(self, case: Case, ready: _Prepared) -> _Prepared:
        self._prepared = case, ready
        return ready
