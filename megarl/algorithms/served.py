"""Proof of the served policy: after a refit, engines and policy score the same tokens, and engines that can
export
their weights have them compared.

A response shows what its engine computed with, never what it should have. While both hold the same version,
their log-probabilities of given tokens may differ by rounding only. Weights are compared bit for bit if an
engine exports them as a policy does; for other engines only log-probabilities are, and a test over the refits
distinguishes wrong weights from rounding.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.errors import MismatchError

if TYPE_CHECKING:
    from megarl.config.generation import EngineCheckConfig
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.generation.interfaces import RolloutEngine
    from megarl.models.policy.lm_policy import Policy

logger = logging.getLogger(__name__)

ENGINE_CHECK_ERROR = "engine_check_error"
"""Metric: the mean absolute difference between the engine's and the policy's log-probability of a token,
right after a refit, for the engine with the largest one."""

# Differences that other kernels cause in a precision; smaller ones do not count. They include mixtures, in
# which another expert is chosen now and then.
_FLOORS = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.02}
_REMEMBERED, _DRIFT, _ALARM = 20, math.log(2), math.log(8)
_NAMED = 3


@dataclass
class RoundingTest:
    """A sequential test (CUSUM) of the errors of successive refits: whether they still look like the rounding
    of the earlier ones.

    The logarithm of an error over the median of those before it, minus ``log 2``, is summed and never falls
    below 0; ``log 8`` is an alarm. So one error of 16 times the usual is an alarm, or three in a row of 4
    times. An error below ``floor`` counts as ``floor``.

    Attributes:
        floor: see above.
    """

    floor: float
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED), init=False)
    _sum: float = field(default=0.0, init=False)

    def is_alarmed(self, error: float) -> bool:
        """Record an error, and return whether it is more than rounding."""
        if not math.isfinite(error):
            return True
        counted = max(error, self.floor)
        usual = statistics.median(self._usual) if self._usual else self.floor
        self._sum = max(0.0, self._sum + math.log(counted / usual) - _DRIFT)
        if self._sum >= _ALARM:
            # Start from 0 again, so that a run that only warns reports the next fault too.
            self._sum = 0.0
            return True
        # An error after an alarm is not one of the usual errors.
        self._usual.append(counted)
        return False


class ServedCheck:
    """Compares engines on devices of their own with the policy after each refit.

    Args:
        section: ``policy.generation.engine_check``.
        policy, engines: the two sides.
        precision: of the weights.
        seed: seed of the choice of sequences.
    """

    def __init__(
        self, section: EngineCheckConfig, policy: Policy, engines: RolloutEngine, precision: str, seed: int
    ) -> None:
        self._count, self._stops = section["sequences"], section["on_difference"] == "stop"
        self._policy, self._engines, self._seed = policy, engines, seed
        self._test = RoundingTest(_FLOORS[precision])
        self._batch: BatchedDataDict[Any] | None = None
        self.metrics: dict[str, float] = {}

    def remember(self, samples: BatchedDataDict[Any], step: int) -> None:
        """Choose the sequences of the next check from a batch, by the seed and the step."""
        import torch

        usable = samples["sample_mask"].nonzero().flatten().tolist()
        rows = sorted(random.Random(f"{self._seed}:{step}").sample(usable, min(self._count, len(usable))))
        if rows:
            columns = samples.select_columns(("input_ids", "input_lengths", "token_mask"))
            batch = columns.select_indices(rows)
            # An engine that scores a prompt samples a token after it, for which a sequence of maximum length
            # would have no room.
            batch["input_lengths"] = batch["input_lengths"] - 1
            inside = torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]
            batch["input_ids"], batch["token_mask"] = (
                batch["input_ids"] * inside,
                batch["token_mask"] * inside,
            )
            self._batch = batch

    def check(self) -> None:
        """Compare engines and policy, which have the same version now. Before the first batch there is
        nothing to score, and only weights are compared.

        Raises:
            MismatchError: the engines do not compute with the policy's weights, and ``on_difference`` is
                ``stop``.
        """
        self.metrics = {}
        if not self._count:
            return
        # Compare weights first: different bits are proof at once, while scores need a test over several
        # refits.
        fault = self._fault_of_weights()
        if fault is None and self._batch is not None:
            fault = self._fault_of_scores(self._batch)
        if fault is None:
            return
        message = (
            f"{fault}. Right after a refit, at version {self._engines.version}, engines and policy "
            "should compute the same. Nothing was sampled with them. Fix: find out what the engine "
            "does to weights that it loads (another dtype, quantisation, another model family), "
            "start new engines, and report it if the engine is one of megarl's; "
            "policy.generation.engine_check.on_difference: warn continues anyway"
        )
        if self._stops:
            raise MismatchError(message)
        logger.warning("%s", message)

    def _fault_of_weights(self) -> str | None:
        """Return the names of weights that differ in the engines, read there after the load; None if all are
        equal or cannot be compared."""
        theirs = self._engines.weight_digests()
        if theirs is None:
            return None
        ours = self._policy.weight_digests()
        wrong = [name for name in ours if any(digests.get(name) != ours[name] for digests in theirs)]
        wrong += sorted(set().union(*theirs).difference(ours))
        if not wrong:
            return None
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        return (
            f"{len(wrong)} of {len(ours)} weights in the engines differ from the policy's: "
            f"{', '.join(wrong[:_NAMED])}{more}"
        )

    def _fault_of_scores(self, batch: BatchedDataDict[Any]) -> str | None:
        import torch

        theirs = self._engines.score(batch)
        if theirs is None:
            return None
        self._policy.prepare_for_lp_inference()
        ours = self._policy.get_logprobs(batch)["logprobs"]
        counts = batch["token_mask"][:, 1:] != 0
        if not bool(counts.any()):
            return None
        apart = torch.stack([each[:, 1:] - ours[:, 1:] for each in theirs])[:, counts]
        errors = apart.double().abs().mean(dim=1)
        # In a mean over all engines, one with wrong weights would be hidden. NaN counts as the largest error.
        worst = int(errors.argmax())
        error = float(errors[worst])
        self.metrics = {ENGINE_CHECK_ERROR: error}
        if not self._test.is_alarmed(error):
            return None
        which = f"engine {worst}'s" if len(theirs) > 1 else "the engines'"
        return (
            f"{which} log-probabilities of {int(counts.sum())} given tokens differ from the "
            f"policy's by {error:.3g} on average"
        )
