"""What the two refit cases share: the weights, and what is said of handing them over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from benchmarks.point import Metric

COUNTS = (300, 3_000, 30_000)
BYTES, QUICK_BYTES = 256 * 2**20, 16 * 2**20
REPEATS, QUICK_REPEATS = 7, 2
# of both buffers
BUFFER_GIB = 0.125


def random_weights(nbytes: int, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Bytes, and the same memory as ``count`` bfloat16 weights of one size."""
    flat = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    elements = nbytes // 2 // count
    parts = flat.view(torch.bfloat16)[: elements * count].split(elements)
    return flat, {f"model.layers.{index}.weight": part for index, part in enumerate(parts)}


def metrics_of(nbytes: int, seconds: Mapping[str, Sequence[float]], memory: float) -> dict[str, Metric]:
    """Of one number of tensors.

    Args:
        nbytes: of all weights.
        seconds: a number a repeat of ``flat``, all bytes as one piece; of ``refit``; and of ``each``, every tensor for itself.
        memory: MiB that the refit took above the model.
    """
    return {
        "speed": Metric.of("GB/s", [nbytes / 1e9 / one for one in seconds["refit"]]),
        "against_flat": Metric.ratio("the speed of all bytes as one piece", seconds["flat"], seconds["refit"]),
        "against_each": Metric.ratio("the speed of every tensor for itself", seconds["each"], seconds["refit"]),
        "beyond_flat": Metric.of("ms", [1e3 * (one - flat) for one, flat in zip(seconds["refit"], seconds["flat"], strict=True)]),
        "memory": Metric.of("MiB above the model", [memory]),
        "buffer": Metric.of("MiB configured", [BUFFER_GIB * 1024]),
    }
