"""Grouped matmuls for a rank's experts without Transformer Engine.

Megatron's loop over experts (``SequentialMLP``, the base class here) launches about 25 operations per expert,
forward and backward. The grouped matmul (``torch.nn.functional.grouped_mm``) launches the same few for any
number of experts. Parameter names and checkpoints are those of the loop. On a CPU all results are bitwise
equal to the loop's, except bias gradients and the gradient norm, which are summed in another order. Untested
on GPUs.
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

# torch 2.10 added this function; earlier versions have none, or one for a single dtype and without gradients.
grouped_mm: Callable[..., torch.Tensor] | None = getattr(F, "grouped_mm", None)
# Stride alignment in bytes that the grouped matmul kernels require.
_ALIGNMENT = 16

Linears: TypeAlias = tuple[list[Any], list[Any]]
"""First and last linear layers of a rank's experts: two lists of objects with ``weight`` [N, K] and ``bias``
[N] or None."""


class _FromLast(torch.nn.ModuleList):
    """A module list that registers its modules in reverse order.

    Megatron's parameter and gradient buffers store parameters in reverse registration order. This puts the
    experts' weights there in ascending order and at equal distances, so one tensor can view them all.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__(modules)
        # Keep the experts' indices as keys, so that parameter names and checkpoints do not change.
        self._modules = dict(reversed(self._modules.items()))

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return map(self.__getitem__, range(len(self)))


class GroupedExperts(SequentialMLP):
    """Megatron's ``SequentialMLP`` with grouped matmuls.

    It runs the experts one after another instead if no token arrived, torch has no ``grouped_mm``, the rank
    has one expert, ``moe_apply_probs_on_input`` is set, or a layer width or adapter rank is not a multiple of
    16 bytes.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        experts: Any = self._modules["local_experts"]
        self.local_experts: Any = _FromLast(list(experts))
        self._linears = linears_of(self)

    @functools.cached_property
    def _can_group(self) -> bool:
        # Evaluate this lazily at the first pass: adapters are attached after the constructor.
        return can_group(self._linears) and not self.config.moe_apply_probs_on_input

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the tokens that were dispatched to this rank through its experts.

        Args:
            permuted_local_hidden_states: [t, H], sorted by expert.
            tokens_per_expert: [E] integers for this rank's experts; their sum is t.
            permuted_probs: [t], router weight by which each token's output is multiplied.

        Returns:
            The outputs [t, H] with biases added, and None in place of a bias.
        """
        if not self._can_group or not permuted_local_hidden_states.shape[0]:
            experts: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
                permuted_local_hidden_states, tokens_per_expert, permuted_probs
            )
            return experts
        # Megatron-Core leaves the counts on the host; sent_to copies them without a device synchronization.
        limits = sent_to(tokens_per_expert.cumsum(0, dtype=torch.int32), permuted_local_hidden_states.device)
        return grouped_mlp(
            self.config, self._linears, permuted_local_hidden_states, limits, permuted_probs
        ), None


def linears_of(experts: SequentialMLP) -> Linears:
    """Return the first and the last linear layer of each expert in ``SequentialMLP``."""
    return [expert.linear_fc1 for expert in experts.local_experts], [
        expert.linear_fc2 for expert in experts.local_experts
    ]


def can_group(linears: Linears) -> bool:
    """Return whether ``grouped_mm`` can run these layers: it must exist, there must be several experts, and
    all widths must be multiples of 16 bytes."""
    first, last = (of_layer[0].weight for of_layer in linears)
    # The rank of an adapter is a width of its matmuls, so it must be aligned too.
    ranks = [of_layer[0].adapter.rank for of_layer in linears if hasattr(of_layer[0], ADAPTER)]
    aligned = all(
        width * first.element_size() % _ALIGNMENT == 0 for width in (*first.shape, *last.shape, *ranks)
    )
    return grouped_mm is not None and aligned and len(linears[0]) > 1


def grouped_mlp(
    config: Any, linears: Linears, tokens: torch.Tensor, limits: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """Run tokens through their experts and return the outputs, biases added.

    Args:
        config: Megatron's config of the experts.
        linears: the experts' linear layers.
        tokens: [t, H], sorted by expert.
        limits: [E] int32 on the tokens' device: index after the last token of each expert. Tokens after the
            last limit belong to no expert, and their outputs are undefined.
        probs: [t], router weight by which each token's output is multiplied.

    Returns:
        [t, H] in the dtype of ``tokens``.
    """
    whole = _WholeMLP(config, linears, limits)
    # Call Megatron's forward method on this module, so that activation and router weighting stay Megatron's
    # code.
    output, _ = MLP.forward(whole, tokens, probs)
    if whole.last.bias is not None:
        # Multiply the bias by the router weight too, as Megatron's expert does.
        output = output + whole.last.bias * probs.unsqueeze(-1)
    return output.to(tokens.dtype)


class _WholeMLP(torch.nn.Module):
    """All experts as one MLP, on which Megatron's forward method computes everything between the two
    matmuls."""

    def __init__(self, config: Any, linears: Linears, limits: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.activation_func = config.activation_func
        self.linear_fc1 = _GroupedLinear(linears[0], limits, adds_bias=True)
        self.linear_fc2 = self.last = _GroupedLinear(linears[1], limits, adds_bias=False)


class _GroupedLinear(torch.nn.Module):
    """One linear layer of all experts.

    Attributes:
        bias: [t, N] that the caller must add to the last output; None if the layer has no bias or has already
            added it.
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
    """Grouped matmul: tokens [t, K], sorted by expert, times the weight [N, K] of each token's expert, giving
    [t, N]."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, limits: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        assert grouped_mm is not None
        tokens = _rows(tokens)
        # Save the weights, not the stacked tensor, which may be a copy as large as all experts.
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
    """Gather the bias [N] of each token's expert into [t, N]."""

    @staticmethod
    def forward(ctx: Any, limits: torch.Tensor, tokens: int, *biases: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(limits, *biases)
        # Rows after the last limit belong to no expert but still need an index in range, so the search omits
        # the last limit.
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
        # Sum the rows of each expert by a matmul with ones. Use as few columns of ones as the kernel's
        # alignment allows.
        ones = gradient.new_ones(gradient.shape[0], _ALIGNMENT // gradient.element_size())
        return None, None, *_handed_over(biases, grouped_mm(ones.t(), _rows(gradient), offs=limits)[:, 0])


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with contiguous row-major strides, also in dimensions of size 1, which ``contiguous``
    leaves alone."""
    return tensor.contiguous().view(-1).view(tensor.shape)


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors of one shape in a new first dimension.

    The result is a view if the tensors are at equal distances in one storage, as weights are in the buffers
    of Megatron's distributed optimizer; otherwise it is a copy.
    """
    shown = shared_view(tensors)
    return torch.stack([tensor.detach() for tensor in tensors]) if shown is None else shown


def shared_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a view of several tensors stacked in a new first dimension, or None if they are not at equal
    distances in one storage."""
    first, second = tensors[0], tensors[1]
    step = second.data_ptr() - first.data_ptr()
    size, home = first.element_size(), first.untyped_storage().data_ptr()
    # Accept any equal distance, because the buffer may have padding between parameters.
    even = step >= first.nbytes and step % _ALIGNMENT == 0 and first.data_ptr() % _ALIGNMENT == 0
    if not even or any(
        tensor.data_ptr() != first.data_ptr() + index * step
        or tensor.untyped_storage().data_ptr() != home
        or not tensor.is_contiguous()
        for index, tensor in enumerate(tensors)
    ):
        return None
    # Detach the view: autograd tracks the parameters themselves, which are the function's arguments.
    return first.detach().as_strided((len(tensors), *first.shape), (step // size, *first.stride()))


def _handed_over(parameters: Sequence[torch.Tensor], gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return each parameter's gradient from the stacked gradients [E, ...].

    If the ``main_grad`` tensors of all parameters are at equal distances in Megatron's gradient buffer, add
    the gradients to them in one operation, and mark each parameter so that Megatron's hook does not add them
    again. The sums are the same as Megatron's.
    """
    sums = [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]
    if len(sums) == len(parameters):
        whole = shared_view(sums)
        if whole is not None:
            whole.add_(gradients)
        for parameter in parameters:
            # Also set False: a mark left from the last pass would make the hook drop this gradient.
            parameter.grad_added_to_main_grad = whole is not None
    # Return gradients even if they are already added: autograd calls the hook only for a parameter that has
    # one.
    return gradients.unbind(0)
