"""Rounding noise of cases that no fixed bound fits, measured case by case on plain transformers.

The rounding error of a model in bfloat16 or float16, or of one in float32 that Adam trains with a small
epsilon, cannot be predicted. So the reference itself computes the case in its precision, ``MEMBERS`` times.
Each time a random relative error of the size of a rounding error is added to the output of every module and
to the inputs of the loss, forward and backward, as another order of computation would do (Monte Carlo
arithmetic: Parker, Pierce and Eggert, "Monte Carlo arithmetic: how to gamble with floating point and win",
2000). The noise of each quantity is the largest distance of these results from the reference; a backend may
be ``FACTOR`` times as far away. Other cases in float32 have one bound for all quantities, and use measured
bounds only if they miss it.
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
"""Number of members that confirm the failure of a case."""
# A normally distributed error exceeds 4 times the largest of eight others in 1 of 10^4 cases, or in 1 of 10^5
# if the others are larger by the root of two, as the added errors make them.
FACTOR = 4.0
SPREAD = 0.25
"""Standard deviation of the random errors, in units of the distance from 1 to the next number; rounding alone
gives errors of up to half of that distance."""
ROUTER_FACTOR = 4.0
"""Factor on the errors of routers. A token goes to one expert or to another, without intermediate results, so
a token that might go either way must go both ways among the members."""
LOSS_SCALES = {"float32": 1.0, "bfloat16": 1.0, "float16": 2.0**16}
"""Initial loss scale by precision, the same in both backends that scale the loss."""
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
    """The largest relative error that each quantity may have.

    Attributes:
        noise: noise of each quantity, by its name; other quantities have none.
    """

    noise: Mapping[str, float] = field(default_factory=dict)

    def of(self, quantity: str) -> float:
        """Return the bound of a quantity."""
        return max(BOUND, FACTOR * self.noise.get(quantity, 0.0))


def bounds_of(
    case: Case, model: Path, batch: Batch, logprobs: Tensor, expected: Expected, *, members: int = MEMBERS
) -> Bounds:
    """Return the bounds of a case.

    Args:
        case: the case.
        model: its transformers model.
        batch: the whole batch.
        logprobs: [B, S] of the model in float32, before training.
        expected: results of training the model in float32.
        members: number of runs with random errors; the first ones are the same whatever their number.
    """
    plain = load_model(model, dtype_of(case.precision, "case.precision"), adapter_directory(case, model))
    runs = [_member(case, copy.deepcopy(plain), batch, number) for number in range(members)]
    noise: dict[str, float] = {}
    for found, member in runs:
        for quantity, error in _errors(case, found, member, logprobs, expected).items():
            # Leave out infinite errors, which would make a bound that everything passes.
            if math.isfinite(error):
                noise[quantity] = max(noise.get(quantity, 0.0), error)
    floor = _of_one_token([found for found, _ in runs], logprobs)
    for name, error in noise.items():
        if _may_be_missed(name, error):
            noise[name] = max(error, floor)
    return Bounds(noise)


def _may_be_missed(quantity: str, error: float) -> bool:
    """Return whether all members may have too small an error of a metric by chance. Errors below the float32
    bound belong to quantities that 16-bit rounding does not affect. An accuracy is the exception: it does not
    change until a pair changes sides."""
    return (error > BOUND and not quantity.startswith(WEIGHT)) or quantity.endswith(" accuracy")


def _of_one_token(found: Sequence[Tensor], logprobs: Tensor) -> float:
    """Return the root mean square error of the log-probabilities, over all tokens and members. Eight samples
    of a single number may all be too small by chance. Metrics are scaled by the effect of such an error, so
    it is a lower bound for theirs too."""
    return root_mean_square(torch.stack([token_errors(values, logprobs)[logprobs != 0] for values in found]))


def _member(case: Case, model: torch.nn.Module, batch: Batch, number: int) -> tuple[Tensor, Expected]:
    """Return the log-probabilities and training results of the model, in the precision of the case, with
    random errors. The model is trained in place."""
    generator = torch.Generator().manual_seed(case.seed + 100 + number)
    # Only its eager attention calls a softmax that can have errors.
    model.set_attn_implementation("eager")  # type: ignore[operator]
    _make_noisy(model, SPREAD * torch.finfo(dtype_of(case.precision, "case.precision")).eps, generator)
    logprobs = token_logprobs(model, batch, case.sampling)

    def read(scores: Tensor) -> Tensor:
        """Return the inputs of the loss with rounding errors of float32, which they have in every precision.
        Gradients of a distribution's tokens that should cancel do so only up to these errors: if
        probabilities come from logarithms, their sum differs from 1 by the rounding of the logarithms."""
        size = float(scores.detach().abs().mean().clamp(min=1.0)) if case.likeliest else 1.0
        return _noisy(scores, SPREAD * size * torch.finfo(torch.float32).eps, generator)

    if case.likeliest:
        # If the teacher is nearly certain, the probability of the other tokens is 1 minus a sum, which
        # float32 rounds; so the teacher's logits get rounding errors too.
        teacher = batch["teacher_topk_logits"]
        errors = torch.randn(teacher.shape, generator=generator) * teacher.abs().clamp(min=1.0)
        batch = {**batch, "teacher_topk_logits": teacher + SPREAD * torch.finfo(torch.float32).eps * errors}
    with _noisy_softmax(SPREAD * torch.finfo(dtype_of(case.precision, "case.precision")).eps, generator):
        return logprobs, trained(case, model, batch, LOSS_SCALES[case.precision], read)


class _Noisy(torch.autograd.Function):
    """A value and its gradient, each multiplied by 1 plus a normally distributed error of size ``spread``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, spread: float, generator: torch.Generator) -> Tensor:
        ctx.spread, ctx.generator = spread, generator
        return _disturbed(value, spread, generator)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _disturbed(gradient, ctx.spread, ctx.generator), None, None


class _NoisySoftmax(torch.autograd.Function):
    """A softmax over the last axis, whose backward pass subtracts two numbers that each have an error.

    For a token that sees only itself the two are equal, and the gradient of queries and keys is exactly 0 in
    one order of computation and a rounding error in another, which Adam turns into a part of a step.
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
    """Give the softmax of transformers' eager attention, and of its routers, an error in the backward
    pass."""
    exact = torch.nn.functional.softmax

    def noisy(
        scores: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Tensor:
        if dim not in (-1, scores.ndim - 1) or not scores.requires_grad:
            return exact(scores, dim=dim, dtype=dtype)
        return _NoisySoftmax.apply(scores.to(dtype), spread, generator)  # type: ignore[no-untyped-call]

    return patched((torch.nn.functional, "softmax", noisy))


def _disturbed(value: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    # Multiply in float32, because a factor so near to 1 rounds to 1 in 16 bit.
    return (value.float() * (1 + spread * torch.randn(value.shape, generator=generator))).to(value.dtype)


def _noisy(value: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    """Return the value with errors, forward and backward; a tensor that is not floating-point is returned
    unchanged."""
    if not value.is_floating_point():
        return value
    return _Noisy.apply(value, spread, generator)  # type: ignore[no-untyped-call]


def _make_noisy(model: torch.nn.Module, spread: float, generator: torch.Generator) -> None:
    """Add errors to the output of every innermost module (projections, norms, embeddings, experts) and to the
    input of routers."""

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
    """Return the relative errors of a member, by the names of quantities in the comparison."""
    rows = slice(case.logprob_rows)
    by_token = token_errors(found[rows], logprobs[rows])
    errors = {LOGPROBS: float(by_token.max()), MEAN_LOGPROBS: root_mean_square(by_token[logprobs[rows] != 0])}
    after = token_errors(member.logprobs[rows], expected.logprobs[rows])
    errors[LOGPROBS_AFTER] = float(after.max())
    errors[LOGPROBS_AFTER + MEAN] = root_mean_square(after[expected.logprobs[rows] != 0])
    for what, noisy, exact in zip(
        (LIKELIEST, LIKELIEST_AFTER), member.distributions, expected.distributions, strict=False
    ):
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
            # The norm of the whole call is the mean of these norms, so its error is at most the largest of
            # theirs.
            errors[what + "grad_norm"] = max(errors.get(what + "grad_norm", 0.0), error)
    for name, weight in expected.weights.items():
        errors[WEIGHT + name] = tensor_error(member.weights[name], weight)
    return errors
