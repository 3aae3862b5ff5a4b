"""Runs one case: the reference here, the workers in the pool, and the comparison of the two."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from megarl.parity import jobs
from megarl.parity.batches import Batch, calls_of, token_batch, with_signals
from megarl.parity.case import Case
from megarl.parity.compare import Difference, compare
from megarl.parity.losses import make_loss
from megarl.parity.models import ModelShelf
from megarl.parity.pool import JobError, WorkerPool
from megarl.parity.possible import accepted_config, refusal
from megarl.parity.reference import Expected, ReferenceTrainer, load_model, saved_weights, token_logprobs
from megarl.parity.settings import hyperparameters


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case went.

    Attributes:
        case: the case.
        differences: every quantity that was compared.
        error: what a worker died of; empty when none did.
        seconds: time it took.
    """

    case: Case
    differences: list[Difference] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @property
    def mismatches(self) -> list[Difference]:
        """The quantities that are out of bounds, worst first."""
        return sorted((found for found in self.differences if not found.passes), key=lambda found: -found.error / found.bound)

    @property
    def passes(self) -> bool:
        """Whether all was within bounds."""
        return not self.error and not self.mismatches

    def summary(self, lines: int = 3) -> list[str]:
        """What went wrong, worst first."""
        if self.error:
            return [f"error: {self.error.strip().splitlines()[-1]}"]
        wrong = self.mismatches
        return [*map(str, wrong[:lines]), *([f"and {len(wrong) - lines} more"] if len(wrong) > lines else [])]


class CaseRunner:
    """Runs cases, one after the other.

    Args:
        shelf: makes their models.
        pool: runs their workers.
    """

    def __init__(self, shelf: ModelShelf, pool: WorkerPool) -> None:
        self._shelf = shelf
        self._pool = pool

    def possible(self, case: Case) -> bool:
        """Whether the case can be run."""
        return refusal(case, self._shelf) is None

    def run(self, case: Case, mutation: str | None = None) -> Outcome:
        """Run a case, with a known fault in its workers if one is named.

        Raises:
            ConfigError: the rules refuse the case.
        """
        started = time.monotonic()
        model = self._shelf.complete(case)
        config = accepted_config(case, model)
        reference = load_model(model)
        tokens = token_batch(case)
        logprobs = token_logprobs(reference, tokens, case.temperature)
        batch = with_signals(case, tokens, logprobs)
        expected = _train(case, reference, batch)
        try:
            shares = self._pool.run(case.world, jobs.measure, case, config, batch, mutation)
        except (JobError, TimeoutError) as error:
            return Outcome(case, error=str(error), seconds=time.monotonic() - started)
        found = compare(case, config, batch, shares, logprobs, expected)
        return Outcome(case, found, seconds=time.monotonic() - started)


def _train(case: Case, model: torch.nn.Module, batch: Batch) -> Expected:
    """The reference's training on the same batches."""
    trainer = ReferenceTrainer(model, hyperparameters(case), make_loss(case), case.temperature)
    expected = Expected()
    for number, data in enumerate(calls_of(case, batch)):
        rows = case.global_batch
        steps = [{key: value[first : first + rows] for key, value in data.items()} for first in range(0, len(data["input_ids"]), rows)]
        trainer.call(steps, number, expected)
    expected.weights = saved_weights(model)
    return expected
