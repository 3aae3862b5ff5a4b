"""The output layer and the log-probabilities of its logits, forward and backward, against the ways that a person could take instead.

``log_softmax`` of float32 logits is what a plain loop writes. ``chunked`` passes 64 tokens at a time through both and computes them again
on the way back, so that no more logits are there at once. ``fused`` is torch's ``linear_cross_entropy``, where torch has it.
Values and gradients are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.device import clock_of, peak_of
from benchmarks.memory import MEBIBYTE
from benchmarks.options import Options
from benchmarks.point import Metric, Point, sides
from benchmarks.timing import spent_in_turn
from megarl.models.engine.logprobs import VocabularyShard, vocab_parallel_logprobs

HIDDEN, VOCABULARY, CHUNK = 256, 32_000, 64
# relative, of sums over all tokens; gradients come back in the dtype of the inputs
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden states [T, H], weight [V, H] and targets [T] to the sum of the negative log-probabilities."""


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """Tokens x dtypes."""
    torch.set_num_threads(1)
    for tokens in options.tokens or (96,):
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(tokens)
            hidden = torch.randn(tokens, HIDDEN, generator=generator).to(options.device, dtype)
            weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5).to(options.device, dtype)
            targets = torch.randint(VOCABULARY, (tokens,), generator=generator).to(options.device)
            parameters = {"tokens": tokens, "dtype": str(dtype).removeprefix("torch."), "vocabulary": VOCABULARY}
            yield Point(parameters, _metrics(hidden, weight, targets, 2 if quick else 3, options.device))


def _ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -vocab_parallel_logprobs(hidden @ weight.t(), targets, VocabularyShard(len(weight))).sum()


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -(hidden @ weight.t()).float().log_softmax(-1).gather(-1, targets[:, None]).sum()


def _chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    return torch.stack([checkpoint(_log_softmax, part, weight, expected, use_reentrant=False) for part, expected in parts]).sum()


def _fused(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    # without options it is the plain way in one call; with them, chunks whose size torch chooses
    # of bfloat16 numbers torch adds up its chunks in bfloat16, and a sum of large numbers is some percent off
    return F.linear_cross_entropy(hidden, weight, targets, reduction="mean", options=torch.nn.LinearCrossEntropyOptions()).float() * len(
        targets
    )


def ways() -> dict[str, Way]:
    """Ways by name, megarl's first; torch before 2.13 has no fused one."""
    return {
        "ours": _ours,
        "log_softmax": _log_softmax,
        "chunked": _chunked,
        **({"fused": _fused} if hasattr(F, "linear_cross_entropy") else {}),
    }


def _passed(way: Way, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Value, and gradients of hidden states and weight."""
    leaf, matrix = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    value = way(leaf, matrix, targets)
    value.backward()
    assert leaf.grad is not None and matrix.grad is not None
    return float(value.detach()), leaf.grad, matrix.grad


def _metrics(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, repeats: int, device: str) -> dict[str, Metric]:
    actions = {name: partial(_passed, way, hidden, weight, targets) for name, way in ways().items()}
    metrics = {"difference": Metric.of("largest relative difference of value and gradients", [_difference(actions, hidden.dtype)])}
    spent = spent_in_turn(actions, repeats=repeats, clock=clock_of(device))
    logits = len(targets) * len(weight)
    peaks = {name: [peak_of(action, device) * MEBIBYTE / logits] for name, action in actions.items()}
    for name in [name for name in actions if name != "ours"]:
        metrics |= sides(f"time_to_{name}", spent["ours"], name, spent[name])
        metrics[f"memory_to_{name}"] = Metric.ratio(f"the peak of {name}", peaks["ours"], peaks[name])
    return {**metrics, **{f"{name}_bytes": Metric.of("bytes a logit at the peak", found) for name, found in peaks.items()}}


def _difference(actions: dict[str, partial[tuple[float, torch.Tensor, torch.Tensor]]], dtype: torch.dtype) -> float:
    """Between megarl's and each other way, relative to the largest number of the other.

    Raises:
        AssertionError: it is more than rounding.
    """
    value, *gradients = actions["ours"]()
    largest = 0.0
    for name in [name for name in actions if name != "ours"]:
        other, *others = actions[name]()
        found = [abs(value - other) / abs(other)]
        found += [float((one - two).abs().max() / two.abs().max()) for one, two in zip(gradients, others, strict=True)]
        assert max(found) < TOLERANCE[dtype], f"{name} differs by {found} in value and gradients"
        largest = max(largest, *found)
    return largest
