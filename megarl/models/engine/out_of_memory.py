"""A pass that runs out of memory: what is said of its micro-batch, and the same pass once more in halves of it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megarl.distributed.device import is_out_of_memory, runtime
from megarl.errors import LOGPROB, TRAINING, MicroBatchMemoryError
from megarl.models.engine.backend import Backend
from megarl.models.engine.batching import Chunk
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.model_input import ModelInput, lay_out_all
from megarl.models.engine.output_layer import Request

logger = logging.getLogger(__name__)
_ADVICE = {
    TRAINING: "policy.train_micro_batch_size, or train_mb_tokens of dynamic_batching or sequence_packing",
    LOGPROB: "policy.logprob_batch_size, or logprob_mb_tokens of dynamic_batching or sequence_packing",
}


class _Watched:
    """A head that notes which micro-batch was asked for last."""

    def __init__(self, head: Head, inputs: Sequence[ModelInput]) -> None:
        self._head, self._places = head, {id(model_input): place for place, model_input in enumerate(inputs)}
        self.last = 0

    def asks(self, model_input: ModelInput) -> Request | None:
        """See ``Head``."""
        self.last = self._places.get(id(model_input), self.last)
        return self._head.asks(model_input)

    def __call__(self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None) -> HeadOutput:
        """See ``Head``."""
        return self._head(output, model_input, request)


@dataclass
class MicroBatchMemory:
    """What follows where a micro-batch has no room: ``policy.on_oom``.

    Attributes:
        splits: go on with each micro-batch in two.
        passes_alone: a pass may be begun anew by this rank alone (``Backend.passes_alone``). Elsewhere other ranks wait in a collective for
            one that has left it, and nobody can tell them: the call fails, and a new start goes on with smaller micro-batches.
        halvings: how often that was done, by the kind of pass; passes that follow begin so.
    """

    splits: bool = False
    passes_alone: bool = True
    halvings: dict[str, int] = field(default_factory=dict)

    def run(
        self, backend: Backend, chunk: Chunk, head: Head, kind: str, *, backward: bool = False, together: int = 1
    ) -> tuple[list[HeadOutput], Chunk, int]:
        """``backend.forward_backward`` over the micro-batches of a chunk.

        Args:
            backend: the model.
            chunk: the rows and how they are cut.
            head: as for ``forward_backward``.
            kind: ``TRAINING`` or ``LOGPROB``.
            backward: gradients are left in the backend, and are clear before.
            together: neighbouring rows that a micro-batch has as a whole.

        Returns:
            What the head returned, the chunk as it was cut in the end, and the positions of its micro-batches.

        Raises:
            MicroBatchMemoryError: a micro-batch has no room, and is not to be split, or is a single row (``together`` of them).
        """
        for _ in range(self.halvings.get(kind, 0)):
            chunk = chunk.halved(together) or chunk
        while True:
            inputs = lay_out_all(chunk.micro_batches(backend.shapes), backend.groups.context_share, backend.shapes)
            watched = _Watched(head, inputs)
            try:
                outputs = backend.forward_backward(inputs, watched, backward=backward)
                return outputs, chunk, sum(each.micro_batch.positions for each in inputs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = _error_of(error, kind, inputs, watched.last)
                smaller = chunk.halved(together) if self.splits else None
                failure.may_go_on_smaller = smaller is not None
                if smaller is None or not self.passes_alone:
                    raise failure from error
            # here the error is gone, and with its frames what the pass held
            self.halvings[kind] = self.halvings.get(kind, 0) + 1
            logger.warning("rank %d: %s Trying again with each micro-batch in two, from now on", dist.get_rank(), failure)
            del failure, inputs, watched
            if backward:
                backend.zero_grad()
            gc.collect()
            runtime().empty_cache()
            chunk = smaller


def _error_of(error: BaseException, kind: str, inputs: Sequence[ModelInput], number: int) -> MicroBatchMemoryError:
    micro_batch, here = inputs[number].micro_batch, runtime()
    rows, tokens, positions = micro_batch.size, sum(micro_batch.lengths), micro_batch.positions
    peak, limit = here.memory().peak_reserved_mb / 1024, here.memory_limit() / 2**30
    first_line = next(iter(str(error).splitlines()), "")
    failure = MicroBatchMemoryError(
        f"out of memory in a {kind} pass, at micro-batch {number + 1} of {len(inputs)}: {rows} rows, {tokens} tokens in {positions} "
        f"positions; peak {peak:.2f} GiB, limit {limit:.2f} GiB ({type(error).__name__}: {first_line}). No weight was changed by it. "
        f"Fix: policy.on_oom=split; a smaller {_ADVICE[kind]}; policy.logprob_chunk_size; recomputed activations; or more ranks that "
        "share a layer.",
        kind,
    )
    failure.figures = {"rows": rows, "tokens": tokens, "positions": positions, "peak_gib": peak, "limit_gib": limit}
    return failure
