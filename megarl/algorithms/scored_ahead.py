"""Log-probabilities of complete parts of a batch, computed while engines on other devices still sample the
rest.

Log-probabilities depend, by rounding, on which rows are in a micro-batch; and timing decides which rows
complete first. So a part is a fixed share of the step's prompts, scored as a batch of its own once all its
responses are complete. The result then depends only on the number of parts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TYPE_CHECKING

from megarl.observe.timing import LOGPROBS, LOGPROBS_BESIDE, PhaseTimer, Sequences

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.models.policy.lm_policy import Policy
    from megarl.rollout.trajectory import Segment


class ScoredAhead:
    """Computes log-probabilities part by part in a background thread. Nothing else may use the policy
    meanwhile.

    Args:
        policy: computes the log-probabilities.
        parts: number of parts per batch.
        pad_token_id: token id for padding.
        timer: timer of the step.
    """

    def __init__(self, policy: Policy, parts: int, pad_token_id: int, timer: PhaseTimer) -> None:
        self._policy, self._parts, self._pad, self._timer = policy, parts, pad_token_id, timer
        # A timer serves one thread; its phases are merged into the step's timer in ``take``.
        self._own_timer = PhaseTimer()
        self._thread = ThreadPoolExecutor(1, "logprobs")
        self._segments: Sequence[Segment] = ()
        self._bounds: list[int] = []
        self._missing: list[int] = []
        self._coming: dict[int, Future[Tensor]] = {}

    def begin(self, segments: Sequence[Segment], generations: int) -> None:
        """Start a batch.

        Args:
            segments: one per response; those for the same prompt are adjacent. A segment is complete once
                ``sampled`` reports it.
            generations: number of responses per prompt.
        """
        prompts = len(segments) // generations
        # Divide by prompts, so that the size of a part is known before its responses are sampled.
        bounds = [part * prompts // self._parts * generations for part in range(self._parts + 1)]
        self._segments, self._bounds, self._coming = segments, bounds, {}
        self._missing = [end - start for start, end in pairwise(bounds)]

    def sampled(self, numbers: Iterable[int]) -> None:
        """Mark responses, by index in the batch, as complete. Parts without missing responses are scored."""
        for number in numbers:
            part = bisect_right(self._bounds, number) - 1
            self._missing[part] -= 1
            if not self._missing[part]:
                self._begin_part(part)

    def _begin_part(self, part: int) -> None:
        rows = self._segments[self._bounds[part] : self._bounds[part + 1]]
        self._coming[part] = self._thread.submit(self._scored, rows)

    def wait(self) -> None:
        """Block until the policy is idle."""
        wait(self._coming.values())

    def take(self, width: int) -> Tensor:
        """Wait for the log-probabilities of the whole batch. Return [B, width] float32, 0 except on sampled
        tokens.

        Raises:
            MegarlError: a part could not be scored.
        """
        import torch
        from torch.nn.functional import pad

        for part, missing in enumerate(self._missing):
            if missing:
                # Conversations that the environment could not start have no response, and were never
                # reported.
                self._begin_part(part)
        with self._timer.phase(LOGPROBS):
            found = [self._coming[part].result() for part in sorted(self._coming)]
        self._timer.merge(self._own_timer, {})
        # A part is only as wide as its own longest row.
        return torch.cat([pad(part, (0, width - part.shape[1])) for part in found])

    def close(self) -> None:
        """Start nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _scored(self, rows: Sequence[Segment]) -> Tensor:
        from megarl.algorithms.train_results import scored_tokens
        from megarl.rollout.trajectory import batch_of

        samples = batch_of(rows, self._pad)
        # Leave out the mask of responses: which ones are left out is known only when all are scored.
        inputs = samples.select_columns(("input_ids", "input_lengths", "token_mask"))
        with self._own_timer.phase(LOGPROBS_BESIDE):
            self._policy.prepare_for_lp_inference()
            found: Tensor = self._policy.get_logprobs(inputs, skip_masked=True)["logprobs"]
            self._own_timer.passed(Sequences(samples["input_lengths"].numpy(), scored=scored_tokens(inputs)))
        return found
