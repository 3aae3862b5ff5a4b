"""Generation by replicas that share experts: all of them decode the rows of all, so that their passes meet, and each keeps its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.engine.groups import ParallelGroups


@dataclass(frozen=True)
class CoupledGroups(ParallelGroups):
    """Groups of a replica that learns from the last stage of the first of the coupled replicas.

    All of them compute the same, but in products of other shapes, so that rounding could make two of them draw different tokens and fall
    out of step.
    """

    replicas: dist.ProcessGroup

    def from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """See ``ParallelGroups``."""
        ParallelGroups.from_last_stage(self, values)
        dist.broadcast(values, src=dist.get_global_rank(self.replicas, 0), group=self.replicas)
        return values

    def object_from_last_stage(self, value: Any) -> Any:
        """See ``ParallelGroups``."""
        box = [ParallelGroups.object_from_last_stage(self, value)]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self.replicas, 0), group=self.replicas)
        return box[0]


def decode_together(
    decode_rows: Callable[[ParallelGroups, Mapping[str, Any]], BatchedDataDict[Any]],
    data: Mapping[str, Any],
    groups: ParallelGroups,
    replicas: dist.ProcessGroup,
) -> BatchedDataDict[Any]:
    """What ``decode_rows`` gives for the rows of this replica, run on the rows of all replicas.

    Args:
        decode_rows: decodes rows with some groups.
        data: this replica's rows; it may have none.
        groups: of this replica.
        replicas: those that share experts. A collective over them.
    """
    parts: list[Any] = [None] * dist.get_world_size(replicas)
    dist.all_gather_object(parts, dict(data), group=replicas)
    counts = [part["input_ids"].shape[0] for part in parts]
    coupled = CoupledGroups(**{field.name: getattr(groups, field.name) for field in dataclasses.fields(groups)}, replicas=replicas)
    output = decode_rows(coupled, _joined([part for part, count in zip(parts, counts, strict=True) if count] or parts[:1]))
    first = sum(counts[: dist.get_rank(replicas)])
    mine = {key: value[first : first + counts[dist.get_rank(replicas)]] for key, value in output.items()}
    width = int(mine["unpadded_sequence_lengths"].max()) if len(mine["unpadded_sequence_lengths"]) else 0
    return BatchedDataDict({key: value[:, :width] if value.ndim > 1 else value for key, value in mine.items()})


def _joined(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows of all parts, padded to one width."""
    width = max(part["input_ids"].shape[1] for part in parts)

    def join(key: str) -> Any:
        values = [part[key] for part in parts]
        if not isinstance(values[0], torch.Tensor):
            return [row for value in values for row in value]
        return torch.cat([F.pad(value, (0, width - value.shape[1])) if value.ndim > 1 else value for value in values])

    return {key: join(key) for key in parts[0]}
