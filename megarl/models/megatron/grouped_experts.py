"""A rank's experts as grouped matrix products without Transformer Engine: each product of Megatron's loop
over experts is computed for all experts at once.

The loop launches some twenty-five operations per expert, forward and backward; the grouped product
(``torch.nn.functional.grouped_mm``) launches the same few for any number of experts. Parameters, their names
and their checkpoints are those of Megatron's loop (``SequentialMLP``), which is the base class here. On a CPU
torch's grouped product computes the products of the loop, and all results are bitwise equal except gradients
of biases and the gradient norm, which are summed in another order. On a GPU it has not been run yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP

from megarl.distributed.device import sent_to
from megarl.models.megatron.hf_state import ADAPTER

# torch has grouped_mm since 2.10; earlier versions had none, or one for a single dtype and without gradients.
grouped_mm: Callable[..., torch.Tensor] | None = getattr(F, "grouped_mm", None)
# Alignment of strides, in bytes, that the kernels of the grouped product require.
_ALIGNMENT = 16

Linears: TypeAlias = tuple[list[Any], list[Any]]
"""The first and the last linear layer of each expert of a rank: objects with ``weight`` [N, K], and ``bias``
[N] or None."""


class _FromLast(torch.nn.ModuleList):
    """A list of modules that are registered from the last to the first.

    Megatron's buffers of weights and gradients hold parameters in the reverse of their order. So the weights
    of these modules are there in the order of the experts, at equal distances, and one tensor can view all of
    them.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__(modules)
        # Keep the experts' numbers as keys, so that names and checkpoints do not change.
        self._modules = dict(reversed(self._modules.items()))

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return map(self.__getitem__, range(len(self)))


class GroupedExperts(SequentialMLP):
    """Megatron's experts of a rank, with grouped products.

    The experts run one after another if no token arrived, torch has no grouped product, the rank has one
    expert, ``moe_apply_probs_on_input`` is set, or one of their widths (an adapter's rank among them) is not
    a multiple of 16 bytes.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        experts: Any = self._modules["local_experts"]
        self.local_experts: Any = _FromLast(list(experts))
        self._linears = linears_of(self)

    @functools.cached_property
    def _can_group(self) -> bool:
        # Evaluate this at the first pass, when the layers already have their adapters.
        return can_group(self._linears) and not self.config.moe_apply_probs_on_input

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the tokens that were sent to this rank through its experts.

        Args:
            permuted_local_hidden_states: [t, H], sorted by expert.
            tokens_per_expert: [E of this rank] integers whose sum is t.
            permuted_probs: [t], the factor of each token's result.

        Returns:
            [t, H], biases included; and None, because no bias is left to add.
        """
        if not self._can_group or not permuted_local_hidden_states.shape[0]:
            experts: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
                permuted_local_hidden_states, tokens_per_expert, permuted_probs
            )
            return experts
        # Megatron-Core leaves the counts on the host, and sent_to does not wait.
        limits = sent_to(tokens_per_expert.cumsum(0, dtype=torch.int32), permuted_local_hidden_states.device)
        return grouped_mlp(
            self.config, self._linears, permuted_local_hidden_states, limits, permuted_probs
        ), None


def linears_of(experts: SequentialMLP) -> Linears:
    """Return the first and the last linear layer of each expert in Megatron's loop over experts."""
    return [expert.linear_fc1 for expert in experts.local_experts], [
        expert.linear_fc2 for expert in experts.local_experts
    ]


def can_group(linears: Linears) -> bool:
    """Return whether torch can group the products of these layers: it needs a grouped product, several
    experts and widths that are multiples of 16 bytes."""
    first, last = (of_layer[0].weight for of_layer in linears)
    # An adapter's products have its rank as a width, which the kernel requires to be aligned too.
    ranks = [of_layer[0].adapter.rank for of_layer in linears if hasattr(of_layer[0], ADAPTER)]
    aligned = all(
        width * first.element_size() % _ALIGNMENT == 0 for width in (*first.shape, *last.shape, *ranks)
    )
    return grouped_mm is not None and aligned and len(linears[0]) > 1


def grouped_mlp(
    config: Any, linears: Linears, tokens: torch.Tensor, limits: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """Return the experts' outputs for their tokens, biases included.

    Args:
        config: Megatron's config of the experts.
        linears: the linear layers of the experts.
        tokens: [t, H], sorted by expert.
        limits: [E] int32 on the device of the tokens, the number of tokens up to the end of each expert's.
            Tokens after the last limit go to no expert, and their results are undefined.
        probs: [t], the factor of each token's result.

    Returns:
        [t, H] in the dtype of ``tokens``.
    """
    whole = _WholeMLP(config, linears, limits)
    # Call Megatron's own forward on this module, so that activation and weighting by probs stay Megatron's.
    output, _ = MLP.forward(whole, tokens, probs)
    if whole.last.bias is not None:
        # Weight the bias like the rest of the result, as Megatron's expert does.
        output = output + whole.last.bias * probs.unsqueeze(-1)
    return output.to(tokens.dtype)


class _WholeMLP(torch.nn.Module):
    """All experts as a single MLP for Megatron's forward pass, which computes everything between the
    products."""

    def __init__(self, config: Any, linears: Linears, limits: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.activation_func = config.activation_func
        self.linear_fc1 = _GroupedLinear(linears[0], limits, adds_bias=True)
        self.linear_fc2 = self.last = _GroupedLinear(linears[1], limits, adds_bias=False)


class _GroupedLinear(torch.nn.Module):
    """The linear layers of all experts.

    Attributes:
        bias: [t, N] to be added to the last result; None if the layers have no biases, or if these are added
            already.
    """

    def __init__(self, linears: Sequence[Any], limits: torch.Tensor, *, adds_bias: bool) -> None:
        super().__init__()
        # Keep plain lists: registered here, the parameters would have a second name.
        self._weights, self._biases, adapters = [], [], []
        for linear in linears:
            self._weights.append(linear.weight)
            # Transformer Engine's layers without a bias have an empty one.
            if linear.bias is not None and linear.bias.numel():
                self._biases.append(linear.bias)
            if hasattr(linear, ADAPTER):
                adapters.append(linear.adapter)
        self._adapters = adapters if adapters and adapters[0].switch.is_on else []
        self._limits, self._adds_bias = limits, adds_bias
        self.bias: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        product = self._product(tokens, self._weights)
        if self._adapters:
            product = product + self._adapters[0].added(tokens, self._adapters, self._product)
        if self._biases:
            of_tokens: torch.Tensor = _OfTokens.apply(  # type: ignore[no-untyped-call]
                self._limits, tokens.shape[0], *self._biases
            )
            if self._adds_bias:
                return product + of_tokens, None
            self.bias = of_tokens
        return product, None

    def _product(self, tokens: torch.Tensor, weights: Iterable[torch.Tensor]) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            tokens, self._limits, *weights
        )
        return product


class _Product(torch.autograd.Function):
    """The product [t, N] of tokens [t, K] and the weights [N, K] of each token's expert."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, limits: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        assert grouped_mm is not None
        tokens = _rows(tokens)
        # Save the weights instead of a stack of them, which may be a copy as large as all experts.
        ctx.save_for_backward(tokens, limits, *weights)
        return grouped_mm(tokens, stacked(weights).transpose(1, 2), offs=limits)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert grouped_mm is not None
        tokens, limits, *weights = ctx.saved_tensors
        gradient = _rows(gradient)
        of_tokens = grouped_mm(gradient, stacked(weights), offs=limits) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return of_tokens, None, *[None] * len(weights)
        return of_tokens, None, *_handed_over(weights, grouped_mm(gradient.t(), tokens, offs=limits))


class _OfTokens(torch.autograd.Function):
    """The biases [N] of each token's expert, as [t, N]."""

    @staticmethod
    def forward(ctx: Any, limits: torch.Tensor, tokens: int, *biases: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(limits, *biases)
        # Rows behind the last limit also need some bias.
        expert = torch.searchsorted(
            limits[:-1], torch.arange(tokens, dtype=limits.dtype, device=limits.device), right=True
        )
        return stacked(biases)[expert]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        limits, *biases = ctx.saved_tensors
        if not any(ctx.needs_input_grad[2:]):
            return None, None, *[None] * len(biases)
        assert grouped_mm is not None
        # Multiply by ones to sum the rows of each expert, with the fewest columns of ones that the kernel
        # accepts.
        ones = gradient.new_ones(gradient.shape[0], _ALIGNMENT // gradient.element_size())
        return None, None, *_handed_over(biases, grouped_mm(ones.t(), _rows(gradient), offs=limits)[:, 0])


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as contiguous rows, with contiguous strides even in a dimension of size 1."""
    return tensor.contiguous().view(-1).view(tensor.shape)


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors of one shape in a new first dimension. The result is a view if the tensors are at equal
    distances in one storage, as weights are in the buffers of Megatron's distributed optimizer, otherwise a
    copy."""
    shown = shared_view(tensors)
    return torch.stack([tensor.detach() for tensor in tensors]) if shown is None else shown


def shared_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one tensor that views the memory of several, stacked in a new first dimension; None unless they
    follow each other at equal distances in one storage."""
    first, second = tensors[0], tensors[1]
    step = second.data_ptr() - first.data_ptr()
    size, home = first.element_size(), first.untyped_storage().data_ptr()
    # The buffer may have padding between parameters, so that any equal distance is accepted.
    even = step >= first.nbytes and step % _ALIGNMENT == 0 and first.data_ptr() % _ALIGNMENT == 0
    if not even or any(
        tensor.data_ptr() != first.data_ptr() + index * step
        or tensor.untyped_storage().data_ptr() != home
        or not tensor.is_contiguous()
        for index, tensor in enumerate(tensors)
    ):
        return None
    # Detach the view, because autograd sees the parameters, which the function takes as arguments.
    return first.detach().as_strided((len(tensors), *first.shape), (step // size, *first.stride()))


def _handed_over(parameters: Sequence[torch.Tensor], gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradient of each parameter from the gradients [E, ...] of all parameters.

    If Megatron's gradient buffer holds their sums at equal distances, all gradients are added there at once,
    and each parameter is marked so that Megatron's hook does not add them again. The sums are the same as
    Megatron's own.
    """
    sums = [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]
    if len(sums) == len(parameters):
        whole = shared_view(sums)
        if whole is not None:
            whole.add_(gradients)
        for parameter in parameters:
            # Set False too: the mark of the last pass would make the hook drop this gradient.
            parameter.grad_added_to_main_grad = whole is not None
    # Return gradients even if they were already added: without a gradient autograd would not call the hook.
    return gradients.unbind(0)
