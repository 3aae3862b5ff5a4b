"""Residual addition and norm as one operation: it returns a layer's sum with its residual stream, and the RMS
norm of the sum, which the next products read.

Without Transformer Engine the sum and the norm are separate operations; so are, in the backward pass, the
norm's gradient and the addition of the gradients of both readers of the sum. Here they are one operation
forward and one backward, compiled by ``torch.compile`` on a CUDA device. Megatron-Core's layers stay
unchanged. A layer's function for "bias, dropout and add" is replaced by one that also computes the norm of
the sum and stores it in the next norm module. That module returns the stored norm if it is called with that
very tensor. If anything comes between the two (recomputation, the end of a pipeline stage), the norm module
computes its own.

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
    """Return the sum [T, H] of tokens and residual, its norm [T, H], and the float32 inverse root mean square
    of the sum, [T, 1]."""
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
    """Return the gradients of each summand, [T, H], and of the norm's weight, [H].

    Let x be the sum, r its inverse root mean square and n = x r. The norm's gradient with respect to x is r
    (g - n mean(g n)), where g is weight times the gradient of the norm; the gradient of the weight is the sum
    over all tokens of n times the gradient of the norm.
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
    """Return forward and backward, each compiled into one operation on contiguous rows of tokens, once for
    all numbers of tokens. With three dimensions the compiler would specialise on the relation between two
    strides, which differs with every number of sequences."""
    return torch.compile(_sum_and_norm, dynamic=True), torch.compile(_gradients, dynamic=True)


class SumAndNorm(torch.autograd.Function):
    """``_sum_and_norm`` on [..., H], with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, norm, scale = _compiled()[0](_rows(tokens), _rows(residual), weight, epsilon)
        # Save the sum and one number per token. The norm itself is computed again, which saves an activation.
        ctx.save_for_backward(total, scale, weight)
        # Detach the views: Megatron-Core's layers replace a view by another tensor, for which the stored norm
        # would not be found.
        return total.view(tokens.shape).detach(), norm.view(tokens.shape).detach()

    @staticmethod
    def backward(ctx: Any, of_total: torch.Tensor, of_norm: torch.Tensor) -> tuple[Any, ...]:
        of_sum, of_weight = _compiled()[1](_rows(of_total), _rows(of_norm), *ctx.saved_tensors)
        of_sum = of_sum.view(of_total.shape)
        # A sum passes the same gradient to both of its terms.
        return of_sum, of_sum, of_weight, None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return [..., H] as [T, H], contiguous and detached: for a view, the compiler would specialise on the
    strides of its base tensor too."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous().detach()


class JoinedAdd:
    """A replacement for Megatron-Core's ``get_bias_dropout_add`` in a layer.

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
        # Leave other cases, which the compiled function does not compute, to Megatron-Core; the norm is then
        # computed separately.
        if bias is not None or (training and probability > 0.0) or residual.dtype != tokens.dtype:
            return otherwise(tokens_and_bias, residual, probability)
        # Layers add with gradients enabled even if none are needed, and the norm's weight would then require
        # one.
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and (tokens.requires_grad or residual.requires_grad)
        ):
            # Read the weight in a call of the norm, which waits for it: the rank that holds it may still be
            # sending it.
            total, norm = self._norm(functools.partial(SumAndNorm.apply, tokens, residual))
        self._norm.leave(total, norm)
        return total


def joins_norms(config: TransformerConfig, *, fused: bool) -> bool:
    """Return whether norms are computed together with the sums before them: if functions are compiled,
    without Transformer Engine (``fused``), unless norms are recomputed in the backward pass or are
    zero-centred."""
    if config.layernorm_zero_centered_gamma:
        return False
    return settings.compiles() and not fused and "layernorm" not in (config.recompute_modules or ())


def join_norms(chunks: Sequence[LanguageModule]) -> None:
    """Make each residual addition of the layers also compute the next norm of its chunk."""
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
        # The sum after a layer's attention precedes its MLP's norm, and the sum after its MLP the next
        # layer's norm.
        following = norms[1:] + ([] if last is None else [last])
        for (layer, name), norm in zip(sums, following, strict=False):
            setattr(layer, name, JoinedAdd(norm))
