"""Measured error bounds for cases in which a fixed bound does not work.

The rounding error of a model in bfloat16 or float16, or of a float32 model trained by Adam with a small
epsilon, cannot be predicted. So the reference runs the case ``MEMBERS`` times in the case's precision. In
each run, the output of every module and the inputs of the loss get random relative errors of the size of a
rounding error, in the forward and the backward pass, as another order of computation would cause (Monte Carlo
arithmetic: Parker, Pierce and Eggert, "Monte Carlo arithmetic: how to gamble with floating point and win",
2000). The noise of a quantity is its largest distance from the reference among these runs; a backend may be
``FACTOR`` times as far away. All other float32 cases have one fixed bound for all quantities. Measured bounds
are used for them only after a quantity exceeds the fixed bound.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.models.engine.precision import dtype_of
from megarl.parity.batches import Batch
from megarl.parity.case import Case
from megarl.parity.errors import BOUND, relative_error, root_mean_square, tensor_error, token_errors
from megarl.parity.reference import Expected, load_model, token_logprobs, trained
from megarl.parity.routers import gates_of
from megarl.parity.settings import adapter_directory
from megarl.patched import patched

MEMBERS = 8
MEMBERS_TO_CONFIRM = 48
"""Number of noisy runs that must confirm a failure."""
# A normally distributed error exceeds 4 times the largest of eight others in 1 of 10^4 cases. It is 1 of 10^5
# if the others are larger by sqrt(2), which they are: they contain rounding errors and added errors.
FACTOR = 4.0
SPREAD = 0.25
"""Standard deviation of the added errors, in units of the dtype's epsilon (the distance from 1 to the next
larger number). Rounding alone gives errors of up to half of it."""
ROUTER_FACTOR = 4.0
"""Additional factor on the errors of router inputs. A token's choice of experts is discrete, so a token that
might be routed either way must take both routes among the noisy runs."""
LOSS_SCALES = {"float32": 1.0, "bfloat16": 1.0, "float16": 2.0**16}
"""Initial loss scale by precision, the same for both backends with loss scaling."""
LOGPROBS, LOGPROBS_AFTER, MEAN, WEIGHT = (
    "log-probabilities",
    "log-probabilities after training",
    ", root mean square",
    "weight ",
)
MEAN_LOGPROBS = LOGPROBS + MEAN
LIKELIEST, LIKELIEST_AFTER = "most likely tokens", "most likely tokens after training"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest accepted relative error of each quantity.

    Attributes:
        noise: measured noise by the name of the quantity; quantities that are missing have the fixed bound.
    """

    noise: Mapping[str, float] = field(default_factory=dict)

    def of(self, quantity: str) -> float:
        """Return the bound of a quantity: ``FACTOR`` times its noise, but at least ``BOUND``."""
        return max(BOUND, FACTOR * self.noise.get(quantity, 0.0))


def bounds_of(
    case: Case, model: Path, batch: Batch, logprobs: Tensor, expected: Expected, *, members: int = MEMBERS
) -> Bounds:
    """Return measured bounds for a case.

    Args:
        case: the case.
        model: directory of its transformers model.
        batch: the complete batch.
        logprobs: [B, S] log-probabilities of the float32 model before training.
        expected: reference results of training the float32 model.
        members: number of noisy runs. Run ``i`` does not depend on this number.
    """
    plain = load_model(model, dtype_of(case.precision, "case.precision"), adapter_directory(case, model))
    # Copy the model, because a run trains it in place.
    runs = [_member(case, copy.deepcopy(plain), batch, number) for number in range(members)]
    noise: dict[str, float] = {}
    for found, member in runs:
        for quantity, error in _errors(case, found, member, logprobs, expected).items():
            # Skip infinite errors: they would give a bound that everything passes.
            if math.isfinite(error):
                noise[quantity] = max(noise.get(quantity, 0.0), error)
    floor = _of_one_token([found for found, _ in runs], logprobs)
    for name, error in noise.items():
        if _may_be_missed(name, error):
            noise[name] = max(error, floor)
    return Bounds(noise)


def _may_be_missed(quantity: str, error: float) -> bool:
    """Return True if all noisy runs may, by chance, have too small an error in a metric.

    An error below the float32 bound belongs to a quantity that 16-bit rounding does not affect. An accuracy
    is an exception: its error is 0 until the order of some pair flips.
    """
    return (error > BOUND and not quantity.startswith(WEIGHT)) or quantity.endswith(" accuracy")


def _of_one_token(found: Sequence[Tensor], logprobs: Tensor) -> float:
    """Return the root mean square error of the log-probabilities, over all tokens and noisy runs.

    Eight samples of a single number may all be too small by chance, but many tokens together are not. Errors
    of metrics are relative to the effect of such a log-probability error, so the result is a lower bound for
    their noise.
    """
    return root_mean_square(torch.stack([token_errors(values, logprobs)[logprobs != 0] for values in found]))


def _member(case: Case, model: torch.nn.Module, batch: Batch, number: int) -> tuple[Tensor, Expected]:
    """Return the log-probabilities and training results of one noisy run, in the case's precision. ``model``
    is trained in place."""
    # A seed for each run, so that further runs leave the first ones unchanged.
    generator = torch.Generator().manual_seed(case.seed + 100 + number)
    # Only eager attention calls the softmax that is patched below.
    model.set_attn_implementation("eager")  # type: ignore[operator]
    _make_noisy(model, SPREAD * torch.finfo(dtype_of(case.precision, "case.precision")).eps, generator)
    logprobs = token_logprobs(model, batch, case.sampling)

    def read(scores: Tensor) -> Tensor:
        """Return the inputs of the loss with added float32 rounding errors, which they have in every
        precision.

        For a distribution, gradients that should cancel among the tokens cancel only up to these errors:
        probabilities computed from rounded logarithms do not sum to exactly 1.
        """
        size = float(scores.detach().abs().mean().clamp(min=1.0)) if case.likeliest else 1.0
        return _noisy(scores, SPREAD * size * torch.finfo(torch.float32).eps, generator)

    if case.likeliest:
        # If the teacher is nearly certain, the probability of all other tokens is 1 minus a sum close to 1,
        # where float32 loses digits. So the teacher's logits get rounding errors too.
        teacher = batch["teacher_topk_logits"]
        errors = torch.randn(teacher.shape, generator=generator) * teacher.abs().clamp(min=1.0)
        batch = {**batch, "teacher_topk_logits": teacher + SPREAD * torch.finfo(torch.float32).eps * errors}
    with _noisy_softmax(SPREAD * torch.finfo(dtype_of(case.precision, "case.precision")).eps, generator):
        return logprobs, trained(case, model, batch, LOSS_SCALES[case.precision], read)


class _Noisy(torch.autograd.Function):
    """Identity whose output and gradient are each multiplied by 1 plus a normally distributed error with
    standard deviation ``spread``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, spread: float, generator: torch.Generator) -> Tensor:
        ctx.spread, ctx.generator = spread, generator
        return _disturbed(value, spread, generator)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _disturbed(gradient, ctx.spread, ctx.generator), None, None


class _NoisySoftmax(torch.autograd.Function):
    """Softmax over the last dimension, whose backward pass subtracts two terms that each have an error.

    For a token that attends only to itself the two terms are equal. The gradient of its query and key is then
    exactly 0 in one order of computation and a rounding error in another, which Adam scales up to a
    considerable part of a step.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, spread: float, generator: torch.Generator) -> Tensor:
        shares = scores.softmax(dim=-1)
        ctx.save_for_backward(shares)
        ctx.spread, ctx.generator = spread, generator
        return shares

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        [shares] = ctx.saved_tensors
        mean = _disturbed((shares * gradient).sum(dim=-1, keepdim=True), ctx.spread, ctx.generator)
        return shares * (_disturbed(gradient, ctx.spread, ctx.generator) - mean), None, None


def _noisy_softmax(spread: float, generator: torch.Generator) -> contextlib.AbstractContextManager[None]:
    """Patch ``torch.nn.functional.softmax`` so that the softmax of eager attention and of routers has errors
    in its backward pass."""
    exact = torch.nn.functional.softmax

    def noisy(
        scores: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Tensor:
        # _NoisySoftmax is written for the last dimension, and its errors are in the backward pass only.
        if dim not in (-1, scores.ndim - 1) or not scores.requires_grad:
            return exact(scores, dim=dim, dtype=dtype)
        return _NoisySoftmax.apply(scores.to(dtype), spread, generator)  # type: ignore[no-untyped-call]

    return patched((torch.nn.functional, "softmax", noisy))


def _disturbed(value: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    # Multiply in float32: in 16 bit the factor itself would round to 1.
    return (value.float() * (1 + spread * torch.randn(value.shape, generator=generator))).to(value.dtype)


def _noisy(value: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    """Return the value with random errors in the forward and the backward pass; an integer or boolean tensor
    is returned unchanged."""
    if not value.is_floating_point():
        return value
    return _Noisy.apply(value, spread, generator)  # type: ignore[no-untyped-call]


def _make_noisy(model: torch.nn.Module, spread: float, generator: torch.Generator) -> None:
    """Add errors to the output of every module without children (projections, norms, embeddings, experts) and
    to the inputs of routers."""

    # A router's choice is discrete, so its errors are added to its inputs.
    gates = set(gates_of(model))
    for gate in gates:
        gate.register_forward_pre_hook(
            lambda _, given: (_noisy(given[0], ROUTER_FACTOR * spread, generator),)
        )
    for module in model.modules():
        if module not in gates and not list(module.children()):
            module.register_forward_hook(
                lambda _, given, answer: (
                    _noisy(answer, spread, generator) if isinstance(answer, Tensor) else answer
                )
            )


def _errors(
    case: Case, found: Tensor, member: Expected, logprobs: Tensor, expected: Expected
) -> dict[str, float]:
    """Return the relative errors of a noisy run, by the names that the comparison gives to the quantities."""
    rows = slice(case.logprob_rows)
    by_token = token_errors(found[rows], logprobs[rows])
    errors = {LOGPROBS: float(by_token.max()), MEAN_LOGPROBS: root_mean_square(by_token[logprobs[rows] != 0])}
    after = token_errors(member.logprobs[rows], expected.logprobs[rows])
    errors[LOGPROBS_AFTER] = float(after.max())
    errors[LOGPROBS_AFTER + MEAN] = root_mean_square(after[expected.logprobs[rows] != 0])
    for what, noisy, exact in zip(
        (LIKELIEST, LIKELIEST_AFTER), member.distributions, expected.distributions, strict=False
    ):
        # The workers report only the most likely tokens.
        chosen = exact[rows].topk(case.likeliest).indices
        errors[what] = float(token_errors(noisy[rows].gather(2, chosen), exact[rows].gather(2, chosen)).max())
    for call, (metrics, scales) in enumerate(zip(expected.metrics, expected.scales, strict=True)):
        what, losses = f"call {call} ", member.losses[call]
        for name, value in metrics.items():
            errors[what + name] = relative_error(member.metrics[call][name], value, scales.get(name, 0.0))
        for index, loss in enumerate(losses):
            errors[f"{what}loss {index}"] = relative_error(loss, expected.losses[call][index], scales["loss"])
        for index, norms in enumerate(
            zip(member.norms[call], expected.norms[call], expected.norm_scales[call], strict=True)
        ):
            error = errors[f"{what}grad_norm of global batch {index}"] = relative_error(*norms)
            # The gradient norm of a call is the mean over its global batches, so its error is at most the
            # largest of their errors.
            errors[what + "grad_norm"] = max(errors.get(what + "grad_norm", 0.0), error)
    for name, weight in expected.weights.items():
        errors[WEIGHT + name] = tensor_error(member.weights[name], weight)
    return errors
