"""Vocabulary-parallel log-probabilities on one rank against what a plain loop writes: log_softmax of float32 logits, then gather.

Time and counted memory of the forward pass and of forward and backward; errors of both against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.memory import Allocations
from benchmarks.point import Metric, Point
from benchmarks.timing import in_turn
from megarl.models.engine.logprobs import VocabularyShard, vocab_parallel_logprobs

LogprobFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# of float32 at |logit| up to about 40, with room for sums over the vocabulary
TOLERANCE = 2e-5


def measure(quick: bool) -> Iterator[Point]:
    """Vocabulary sizes of Llama 2 and Qwen2 x tokens x dtype of the logits."""
    torch.set_num_threads(1)
    for vocabulary, tokens in [(32_000, 64)] if quick else [(32_000, 256), (151_936, 128)]:
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(vocabulary)
            logits = (torch.randn(tokens, vocabulary, generator=generator) * 4).to(dtype)
            targets = torch.randint(vocabulary, (tokens,), generator=generator)
            parameters: dict[str, int | str] = {"vocabulary": vocabulary, "tokens": tokens, "logits": str(dtype).removeprefix("torch.")}
            yield Point(parameters, _metrics(logits, targets, repeats=2 if quick else 5))


def _eager(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def _ours(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return vocab_parallel_logprobs(logits, targets, VocabularyShard(logits.shape[-1]))


def _forward(function: LogprobFunction, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return function(logits, targets)


def _forward_backward(function: LogprobFunction, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    leaf = logits.detach().requires_grad_()
    function(leaf, targets).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def _metrics(logits: torch.Tensor, targets: torch.Tensor, repeats: int) -> dict[str, Metric]:
    metrics = _errors(logits, targets)
    logits_bytes = logits.numel() * logits.element_size()
    for name, run in (("forward", _forward), ("forward_backward", _forward_backward)):
        actions = {"ours": partial(run, _ours, logits, targets), "eager": partial(run, _eager, logits, targets)}
        seconds = in_turn(actions, repeats=repeats)
        metrics[f"{name}_time"] = Metric.ratio("eager", seconds["ours"], seconds["eager"])
        peaks = {which: _allocated(action) for which, action in actions.items()}
        metrics[f"{name}_memory"] = Metric.ratio("eager", [peaks["ours"]], [peaks["eager"]])
        metrics[f"{name}_memory_of_logits"] = Metric.of("ratio to the logits' own bytes", [peaks["ours"] / logits_bytes])
    return metrics


def _allocated(action: Callable[[], torch.Tensor]) -> int:
    """Bytes of the tensors that are there at the worst moment, its result among them, counted: where they lie differs by process."""
    with Allocations() as allocations:
        action()
    return allocations.peak


def _errors(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, Metric]:
    """Largest absolute errors, the gradient's relative to the largest gradient; a fast wrong answer ends the case."""
    exact, exact_gradient = _exact(logits, targets)
    gradient = _forward_backward(_ours, logits, targets)
    error = float((_forward(_ours, logits, targets).double() - exact).abs().max())
    eager_error = float((_forward(_eager, logits, targets).double() - exact).abs().max())
    # the gradient is handed back in the dtype of the logits: half a unit in its last place is not ours
    allowed = TOLERANCE + torch.finfo(logits.dtype).eps
    gradient_error = float(((gradient.double() - exact_gradient).abs() / exact_gradient.abs().clamp(min=1e-2)).max())
    assert error < TOLERANCE, f"log-probabilities are off by {error:.2e}"
    assert gradient_error < allowed, f"gradients are off by {gradient_error:.2e}"
    return {
        "error": Metric.of("largest difference from float64", [error]),
        "eager_error": Metric.of("largest difference from float64", [eager_error]),
        "gradient_error": Metric.of("largest relative difference from float64", [gradient_error]),
    }


def _exact(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [T] and their gradient with respect to the logits [T, V], one token at a time in float64."""
    values, gradients = [], []
    for row, target in zip(logits, targets, strict=True):
        leaf = row.double().requires_grad_()
        value = leaf[target] - leaf.logsumexp(0)
        value.backward()
        values.append(value.detach())
        gradients.append(leaf.grad)
    return torch.stack(values), torch.stack(gradients)
