"""Training passes over a mixture of experts, whose routers are recorded and balanced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel

from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.model_input import ModelInput
from megarl.models.megatron.moe_record import BalanceSettings, RoutingRecord
from megarl.models.megatron.moe_router import connect, release
from megarl.models.megatron.moe_tokens import sequence_numbers, take_census
from megarl.models.megatron.parallel import ExpertGroups
from megarl.models.megatron.schedule import forward_backward


def _nothing(logits: torch.Tensor, model_input: ModelInput) -> HeadOutput:
    """The head of a pass of which only the routing counts."""
    return HeadOutput()


class RecordedPasses:
    """Runs training passes and keeps the figures of the last global batch.

    Args:
        chunks: this rank's model.
        settings: how its routers are balanced.
        groups, experts: its groups.
        device: where counts are kept.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        settings: BalanceSettings,
        groups: ParallelGroups,
        experts: ExpertGroups,
        device: torch.device,
    ) -> None:
        self._chunks = chunks
        self._settings = settings
        self._groups = groups
        self._record = RoutingRecord(settings, experts.same_sequences, device)
        connect(chunks, self._record)

    def forward_backward(self, inputs: Sequence[ModelInput], head: Head) -> list[HeadOutput]:
        """One pass with gradients over a global batch; before it one without, where the balancing loss asks for counts of it all."""
        sequences = [sequence_numbers(model_input) for model_input in inputs]
        self._record.open(take_census(inputs, self._groups))
        try:
            if self._settings.counts_ahead:
                self._record.count_ahead(True)
                with torch.no_grad():
                    forward_backward(self._chunks, inputs, _nothing, backward=False, sequences=sequences)
                self._record.count_ahead(False)
            return forward_backward(self._chunks, inputs, head, backward=True, sequences=sequences)
        finally:
            self._record.close()
            release(self._chunks)

    def metrics(self) -> dict[str, float]:
        """See ``RoutingRecord.metrics``. A collective over the world."""
        return self._record.metrics()
