"""Which pipeline stage of the policy sends which weights: in the one order of sending, runs of neighbours that one stage holds.

An interleaved pipeline gives a stage several runs; that of the embedding may also hold a tied output layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from megarl.errors import RefitError
from megarl.weight_sync.layout import Group
from megarl.weight_sync.manifest import Manifest, groups_within


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline stages that send.

    Attributes:
        count: of the stages.
        runs: ``(stage, number of weights)`` of every run, in the order of sending; empty where stage 0 sends all.
    """

    count: int = 1
    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, manifest: Manifest, names: Sequence[Sequence[str]]) -> Stages:
        """From the names that each stage sends.

        Args:
            manifest: of all weights.
            names: a list a stage, each in its order of sending.

        Raises:
            RefitError: a weight is sent by no stage or by two, is not in the manifest, or comes in another order.
        """
        owners = {name: stage for stage, own in enumerate(names) for name in own}
        missing = [tensor.name for tensor in manifest.tensors if tensor.name not in owners]
        if missing:
            raise RefitError(f"no pipeline stage sends {missing[0]} and {len(missing) - 1} more weights: {_DEFECT}")
        for stage, own in enumerate(names):
            wanted = [tensor.name for tensor in manifest.tensors if owners[tensor.name] == stage]
            if wanted != list(own):
                raise RefitError(f"pipeline stage {stage} sends {len(own)} weights, of which {len(wanted)} are its own in order: {_DEFECT}")
        in_order = groupby(owners[tensor.name] for tensor in manifest.tensors)
        return cls(len(names), tuple((stage, sum(1 for _ in run)) for stage, run in in_order))

    def parts(self, manifest: Manifest, budget: int) -> Iterator[tuple[int, Group]]:
        """Stages with the groups of weights that they send, at most ``budget`` bytes each, in the order of sending.

        Raises:
            RefitError: a weight alone is larger, or the runs are those of another model.
        """
        runs = self.runs or ((0, len(manifest.tensors)),)
        if sum(count for _, count in runs) != len(manifest.tensors):
            raise RefitError(f"the policy's stages send {sum(count for _, count in runs)} weights of {len(manifest.tensors)}: {_DEFECT}")
        first = 0
        for stage, count in runs:
            for names in groups_within(manifest.padded_sizes[first : first + count], budget):
                yield stage, manifest.group(first, len(names))
                first += len(names)


_DEFECT = "report the model and the layout, this is a fault of the export"
ONE_STAGE = Stages()
