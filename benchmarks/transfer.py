"""What the two refit cases share: the weights, and what is said of handing them over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from benchmarks.point import Metric
from megarl.models.engine.gather_stream import FullTensor, GatherStream, InFlightBucket, UnshardPlan, in_buckets
from megarl.weight_sync.layout import Copy
from megarl.weight_sync.manifest import BUCKET_BYTES

COUNTS = (300, 10_000)
BYTES, QUICK_BYTES = 128 * 2**20, 16 * 2**20
REPEATS, QUICK_REPEATS = 5, 2
# of both buffers
BUFFER_GIB = 0.125


class RandomWeights:
    """bfloat16 weights of one size.

    Args:
        nbytes: of all of them, and of what is left over.
        count: of the weights.

    Attributes:
        flat: uint8, all bytes.
        named: weights in that memory by name.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self.flat = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        elements = nbytes // 2 // count
        memory = self.flat.view(torch.bfloat16)[: elements * count]
        names = [f"model.layers.{index}.weight" for index in range(count)]
        self.named = dict(zip(names, memory.split(elements), strict=True))
        buckets = list(in_buckets(names, lambda name: self.named[name].nbytes, BUCKET_BYTES))
        shards = memory.split([elements * len(bucket) for bucket in buckets])
        self._buckets = [(_lying_together(bucket, elements), part.view(1, -1)) for bucket, part in zip(buckets, shards, strict=True)]

    def delivery(self) -> GatherStream:
        """All weights as Megatron and DTensor give them: in buckets of which it is known where each weight lies. Here none of them has to
        be put together from shards first; ``refit.export`` measures that."""
        return GatherStream(InFlightBucket(assembly, shards, None) for assembly, shards in self._buckets)

    def singly(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights as FSDP1 gives them."""
        return iter(self.named.items())


def _lying_together(names: Sequence[str], elements: int) -> UnshardPlan:
    return UnshardPlan(FullTensor(name, (elements,), (Copy.run_of(elements, index * elements, 0),)) for index, name in enumerate(names))


def metrics_of(nbytes: int, seconds: Mapping[str, Sequence[float]], memory: float) -> dict[str, Metric]:
    """Of one number of tensors.

    Args:
        nbytes: of all weights.
        seconds: a number a repeat of ``flat``, all bytes as one piece; of ``refit``; of ``singly``, a refit whose weights come one by one;
            and of ``each``, every tensor handed over for itself.
        memory: MiB that the refit took above the model.
    """
    return {
        "speed": Metric.of("GB/s", [nbytes / 1e9 / one for one in seconds["refit"]]),
        "against_flat": Metric.ratio("the speed of all bytes as one piece", seconds["flat"], seconds["refit"]),
        "singly_against_flat": Metric.ratio("the speed of all bytes as one piece", seconds["flat"], seconds["singly"]),
        "against_each": Metric.ratio("the speed of every tensor for itself", seconds["each"], seconds["refit"]),
        "beyond_flat": Metric.of("ms", [1e3 * (one - flat) for one, flat in zip(seconds["refit"], seconds["flat"], strict=True)]),
        "memory": Metric.of("MiB above the model", [memory]),
        "buffer": Metric.of("MiB configured", [BUFFER_GIB * 1024]),
    }
