"""Runs one case: the reference in this process, the workers in the pool, then the comparison."""

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
    """Outcome of a case.

    Attributes:
        case: the case.
        differences: all compared quantities.
        error: error of a worker, or the reason why the results cannot be compared; empty if there was none.
        timed_out: True if the workers did not reply in time; their results are then unknown.
        seconds: duration of the case.
    """

    case: Case
    differences: list[Difference] = field(default_factory=list)
    error: str = ""
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def mismatches(self) -> list[Difference]:
        """Quantities out of bounds, worst first."""
        return sorted(
            (found for found in self.differences if not found.passes),
            key=lambda found: -found.error / found.bound,
        )

    @property
    def passes(self) -> bool:
        """True if no error occurred and all quantities are within bounds."""
        return not self.error and not self.mismatches

    def summary(self, lines: int = 3) -> list[str]:
        """Return the error, or the ``lines`` worst mismatches and a line that counts the others."""
        if self.error:
            return [f"error: {self.error.strip().splitlines()[-1]}"]
        wrong = self.mismatches
        return [*map(str, wrong[:lines]), *([f"and {len(wrong) - lines} more"] if len(wrong) > lines else [])]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Inputs of the workers and the results that they must return."""

    model: Path
    config: PolicyConfig
    batch: Batch
    logprobs: torch.Tensor
    expected: Expected
    bounds: Bounds
    confirms: bool = False


class CaseRunner:
    """Runs cases one after another.

    Args:
        shelf: creates the models.
        pool: runs the workers.
    """

    def __init__(self, shelf: ModelShelf, pool: WorkerPool) -> None:
        self._shelf = shelf
        self._pool = pool
        # One entry is enough: all faults of a case run one after another.
        self._prepared: tuple[Case, _Prepared] | None = None

    def possible(self, case: Case) -> bool:
        """Return True if the case can run."""
        return refusal(case, self._shelf) is None

    def run(self, case: Case, fault: Fault | None = None) -> CaseOutcome:
        """Run a case; plant ``fault`` in its workers if one is given.

        Raises:
            ConfigError: the case cannot run.
        """
        started = time.monotonic()
        ready = self._prepare(case)
        try:
            shares = self._pool.run(case.world, jobs.measure, case, ready.config, ready.batch, fault)
        except (JobError, TimeoutError) as error:
            # A timeout may come from a slow machine and does not show a wrong result.
            late = isinstance(error, TimeoutError)
            return CaseOutcome(case, error=str(error), timed_out=late, seconds=time.monotonic() - started)
        try:
            outcome = self._judged(case, ready, shares)
        except (
            Exception
        ):  # A fault can return data of the wrong shape. That fails this case but must not end the others.
            return CaseOutcome(case, error=traceback.format_exc(), seconds=time.monotonic() - started)
        # A case has passed without the fault before the fault is planted. So a fault that exceeds the fixed
        # float32 bound is detected, and measured bounds need not confirm it.
        measures = case.has_measured_bounds or fault is None
        if not outcome.passes and measures and not ready.confirms:
            # Keep the better bounds for the faults of this case.
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
        """Return the prepared case with bounds from many more noisy runs of the reference.

        The gradient of a token jumps when its probability ratio reaches a clip bound. Only a few of many
        noisy runs show the jump, so the first eight may all miss it. Also, where gradients of tokens cancel,
        float32 transformers may differ from float64 by more than the fixed bound.
        """
        bounds = bounds_of(
            case, ready.model, ready.batch, ready.logprobs, ready.expected, members=MEMBERS_TO_CONFIRM
        )
        return replace(ready, bounds=bounds, confirms=True)

    def _prepare(self, case: Case) -> _Prepared:
        """Return the reference results and worker inputs of a case.

        The last result is cached, because a fault is planted in a case right after the case ran without it.
        """
        if self._prepared is None or self._prepared[0] != case:
            model = self._shelf.complete(case)
            config = accepted_config(case, model)
            reference = load_model(model, adapter=adapter_directory(case, model))
            tokens = token_batch(case)
            logprobs = token_logprobs(reference, tokens, case.sampling)
            batch = with_signals(case, tokens, logprobs)
            expected = trained(case, reference, batch)
            # With adapters, the reference policy is the base model.
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
