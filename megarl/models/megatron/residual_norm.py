"""Fuses each residual addition with the RMS norm that follows it, compiled by ``torch.compile`` on CUDA.

Without Transformer Engine, sum and norm are separate operations, and so are, in the backward pass, the norm's
gradient and the addition of the gradients of the sum's two readers. Here each direction is one operation.
Megatron-Core's layers stay unchanged: a layer's "bias, dropout and add" function is replaced by one that also
computes the norm of the sum and stores it in the next norm module. That module returns the stored norm if it
is called with the very same tensor. If anything comes between (recomputation, the end of a pipeline stage),
it computes the norm itself.

The sum is rounded to the layers' dtype; in a compiled operation the norm may be that of the unrounded sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.models.megatron import settings
from megarl.models.megatron.specs import PortableRMSNorm


def _sum_and_norm(
    tokens: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of tokens and residual [T, H], its norm [T, H], and the inverse root mean square of the
    sum [T, 1] in float32."""
    total = residual + tokens
    wide = total.to(_wide(total))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return total, (wide * scale * weight).to(total.dtype), scale


def _gradients(
    of_total: torch.Tensor,
    of_norm: torch.Tensor,
    total: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of each summand [T, H] and of the norm's weight [H].

    Let x be the sum, r its inverse root mean square and n = x r. The norm's gradient with respect to x is r
    (g - n mean(g n)), where g is the weight times the norm's gradient; the gradient of the weight is the sum
    over all tokens of n times the norm's gradient.
    """
    normed = total.to(scale.dtype) * scale
    gradient = of_norm.to(scale.dtype)
    weighted = gradient * weight
    of_sum = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True)) + of_total
    return of_sum.to(total.dtype), (gradient * normed).sum(0).to(weight.dtype)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@functools.cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``_sum_and_norm`` and ``_gradients``, compiled once for all numbers of tokens.

    They take contiguous rows of tokens: with three dimensions the compiler would specialise on the ratio of
    two strides, which changes with every number of sequences.
    """
    return torch.compile(_sum_and_norm, dynamic=True), torch.compile(_gradients, dynamic=True)


class SumAndNorm(torch.autograd.Function):
    """``_sum_and_norm`` on tensors [..., H], with gradients."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, norm, scale = _compiled()[0](_rows(tokens), _rows(residual), weight, epsilon)
        # Save the sum and one value per token. The backward pass computes the norm again, which saves an
        # activation.
        ctx.save_for_backward(total, scale, weight)
        # Detach, because Megatron-Core's layers replace a view by a new tensor, and the stored norm is found
        # by tensor identity.
        return total.view(tokens.shape).detach(), norm.view(tokens.shape).detach()

    @staticmethod
    def backward(ctx: Any, of_total: torch.Tensor, of_norm: torch.Tensor) -> tuple[Any, ...]:
        of_sum, of_weight = _compiled()[1](_rows(of_total), _rows(of_norm), *ctx.saved_tensors)
        of_sum = of_sum.view(of_total.shape)
        # A sum passes the same gradient to both summands.
        return of_sum, of_sum, of_weight, None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return [..., H] as [T, H], contiguous and detached: for a view, the compiler would specialise on the
    strides of its base tensor."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous().detach()


class JoinedAdd:
    """A replacement for Megatron-Core's ``get_bias_dropout_add`` that also computes the following norm.

    Args:
        norm: the norm that follows the addition.
    """

    def __init__(self, norm: PortableRMSNorm) -> None:
        self._norm = norm

    def __call__(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Return the function for bias, dropout and add: ``((tokens, bias or None), residual, probability) ->
        sum``."""
        return functools.partial(self._add, get_bias_dropout_add(training, fused), training)

    def _add(
        self,
        otherwise: Callable[..., torch.Tensor],
        training: bool,
        tokens_and_bias: tuple[torch.Tensor, torch.Tensor | None],
        residual: torch.Tensor,
        probability: float,
    ) -> torch.Tensor:
        tokens, bias = tokens_and_bias
        # The compiled function supports neither bias, dropout nor mixed dtypes; Megatron-Core computes these,
        # and the norm separately.
        if bias is not None or (training and probability > 0.0) or residual.dtype != tokens.dtype:
            return otherwise(tokens_and_bias, residual, probability)
        # Layers add with gradients enabled even if no input requires one; the norm's weight would then get an
        # unnecessary gradient.
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and (tokens.requires_grad or residual.requires_grad)
        ):
            # Read the weight through a call of the norm, whose hook waits until the weight has been gathered.
            total, norm = self._norm(functools.partial(SumAndNorm.apply, tokens, residual))
        self._norm.leave(total, norm)
        return total


def joins_norms(config: TransformerConfig, *, fused: bool) -> bool:
    """Return whether residual additions also compute the next norm.

    This requires compiled functions and portable layers (not ``fused``), norms that are not recomputed in the
    backward pass, and norms that are not zero-centred.
    """
    if config.layernorm_zero_centered_gamma:
        return False
    return settings.compiles() and not fused and "layernorm" not in (config.recompute_modules or ())


def join_norms(chunks: Sequence[LanguageModule]) -> None:
    """Make each residual addition also compute the next norm of its chunk."""
    for chunk in chunks:
        sums, norms = [], []
        for layer in chunk.decoder.layers:
            for name, norm in (
                ("self_attn_bda", layer.input_layernorm),
                ("mlp_bda", layer.pre_mlp_layernorm),
            ):
                if not isinstance(norm, IdentityOp):
                    sums.append((layer, name))
                    norms.append(norm)
        last = getattr(chunk.decoder, "final_layernorm", None) or getattr(chunk.decoder, "final_norm", None)
        # The sum after a layer's attention precedes its MLP's norm; the sum after its MLP precedes the next
        # layer's norm.
        following = norms[1:] + ([] if last is None else [last])
        for (layer, name), norm in zip(sums, following, strict=False):
            setattr(layer, name, JoinedAdd(norm))
