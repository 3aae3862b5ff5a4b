"""Log-probabilities of finished parts of a batch, computed while engines on other devices still sample the
rest.

The composition of micro-batches changes log-probabilities by rounding, and timing decides which rows complete
first. So a part is a fixed share of a step's prompts, which is scored as a batch of its own once all its
responses are complete: the result depends only on the number of parts.
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
    """Scores the parts of one batch after another, in a thread; nothing else uses the policy meanwhile.

    Args:
        policy: computes the log-probabilities.
        parts: number of parts of a batch.
        pad_token_id: of token ids.
        timer: of the step.
    """

    def __init__(self, policy: Policy, parts: int, pad_token_id: int, timer: PhaseTimer) -> None:
        self._policy, self._parts, self._pad, self._timer = policy, parts, pad_token_id, timer
        self._own_timer = PhaseTimer()
        self._thread = ThreadPoolExecutor(1, "logprobs")
        self._segments: Sequence[Segment] = ()
        self._bounds: list[int] = []
        self._missing: list[int] = []
        self._coming: dict[int, Future[Tensor]] = {}

    def begin(self, segments: Sequence[Segment], generations: int) -> None:
        """Begin a batch.

        Args:
            segments: one per response, those to a prompt next to each other; complete once ``sampled``
                reports it.
            generations: responses per prompt.
        """
        prompts = len(segments) // generations
        # Divide by whole prompts, so that the size of a part is known before its responses are.
        bounds = [part * prompts // self._parts * generations for part in range(self._parts + 1)]
        self._segments, self._bounds, self._coming = segments, bounds, {}
        self._missing = [end - start for start, end in pairwise(bounds)]

    def sampled(self, numbers: Iterable[int]) -> None:
        """Record that responses are complete, by their numbers in the batch."""
        for number in numbers:
            part = bisect_right(self._bounds, number) - 1
            self._missing[part] -= 1
            if not self._missing[part]:
                self._begin_part(part)

    def _begin_part(self, part: int) -> None:
        rows = self._segments[self._bounds[part] : self._bounds[part + 1]]
        self._coming[part] = self._thread.submit(self._scored, rows)

    def wait(self) -> None:
        """Wait until the policy is not in use."""
        wait(self._coming.values())

    def take(self, width: int) -> Tensor:
        """Wait until all responses are complete, and return the log-probabilities of the batch, [B, width]
        float32, 0 except on sampled tokens.

        Raises:
            MegarlError: a part could not be scored.
        """
        import torch
        from torch.nn.functional import pad

        for part, missing in enumerate(self._missing):
            if missing:
                # Conversations that an environment could not begin have no response.
                self._begin_part(part)
        with self._timer.phase(LOGPROBS):
            found = [self._coming[part].result() for part in sorted(self._coming)]
        self._timer.merge(self._own_timer, {})
        # Each part is as wide as its own longest row.
        return torch.cat([pad(part, (0, width - part.shape[1])) for part in found])

    def close(self) -> None:
        """Begin nothing more."""
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
