"""Check of the engines after a refit: engines and policy score the same tokens, and weights are compared with
engines that can export theirs.

A response shows what its engine computed, but not what it should have computed. With the same weights,
log-probabilities of engine and policy differ only by rounding. Engines that export weights in the policy's
format have them compared bit for bit. For other engines only log-probabilities are compared, and a test over
successive refits tells wrong weights from rounding.
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
"""Metric: mean absolute difference of log-probabilities between engine and policy right after a refit, for
the engine with the largest one."""

# Mean log-probability differences that other kernels cause in each precision. They cover mixture-of-experts
# models, in which rounding sometimes routes a token to another expert.
_FLOORS = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.02}
_REMEMBERED, _DRIFT, _ALARM = 20, math.log(2), math.log(8)
_NAMED = 3


@dataclass
class RoundingTest:
    """Sequential test (CUSUM) of whether the errors of successive refits are still explained by rounding.

    For each error, log(error / median of earlier errors) - log 2 is added to a sum that never falls below 0.
    The alarm is raised at log 8. So a single error of 16 times the median raises it, as do three errors of 4
    times the median in a row.

    Attributes:
        floor: smaller errors count as this.
    """

    floor: float
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED), init=False)
    _sum: float = field(default=0.0, init=False)

    def is_alarmed(self, error: float) -> bool:
        """Add an error. Return whether it is more than rounding."""
        if not math.isfinite(error):
            return True
        counted = max(error, self.floor)
        usual = statistics.median(self._usual) if self._usual else self.floor
        self._sum = max(0.0, self._sum + math.log(counted / usual) - _DRIFT)
        if self._sum >= _ALARM:
            # Reset, so that a run that only warns reports the next fault too.
            self._sum = 0.0
            return True
        # Errors that raise the alarm do not enter the median.
        self._usual.append(counted)
        return False


class ServedCheck:
    """Compares engines on separate devices with the policy after each refit.

    Args:
        section: ``policy.generation.engine_check``.
        policy, engines: what is compared.
        precision: dtype of the weights.
        seed: seed for the choice of sequences.
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
        """Choose the sequences for the next check from a step's samples. The choice depends only on seed and
        step."""
        import torch

        usable = samples["sample_mask"].nonzero().flatten().tolist()
        # A generator seeded by the step, so that a resumed run checks the same sequences.
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
        """Compare engines and policy right after a refit. Before the first batch there are no sequences to
        score, and only weights are compared.

        Raises:
            MismatchError: the engines do not have the policy's weights, and ``on_difference`` is ``stop``.
        """
        self.metrics = {}
        if not self._count:
            return
        # Weights first: different bits are proof at once, while scores need several refits.
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
        """Describe the weights that differ between engines and policy. Return None if all are equal, or if
        the engines cannot export theirs."""
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
        # Take the worst engine: a mean over all would hide one with wrong weights. argmax treats NaN as the
        # largest.
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
