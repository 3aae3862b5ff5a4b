"""Tensor-parallel styles that compute on local tensors instead of DTensors.

Parameters and their gradients are DTensors, which ``fully_shard``, checkpoints and refits need. A module's
forward pass uses its rank's local shards and plain torch operations, with a collective of ``regions`` before
or after. torch's own styles send every operation through DTensor's dispatch, which costs more than a small
operation itself. A plan may mix both kinds: inputs from torch's styles may be DTensors. Modules also accept
plain parameters (``whole_parameters``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from megarl.models.dtensor.adapters import AdaptedEmbedding, AdaptedLinear
from megarl.models.dtensor.regions import for_parts, from_runs, own_run, sum_of_parts
from megarl.models.engine.output_layer import answer_requests


class VocabularyEmbedding(ParallelStyle):
    """Style for an embedding that is sharded by rows of the vocabulary.

    torch's row-wise embedding allocates a gradient for the whole vocabulary on every rank; here a rank
    allocates only its own rows.

    Args:
        output_layouts: ``Replicate()``, or ``Shard(1)`` for sequence parallelism.
    """

    def __init__(self, *, output_layouts: Placement | None = None) -> None:
        super().__init__()
        self.output_layouts = output_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding), "this style is for embeddings"
        _divide(module, "weight", device_mesh, Shard(0))
        group, layout = device_mesh.get_group(), self.output_layouts
        if isinstance(module, AdaptedEmbedding):
            _divide(module, "lora_A", device_mesh, Shard(0))
            _divide(module, "lora_B", device_mesh, Replicate())
        # If the output is sharded, a rank computes only a partial gradient of an adapter's B.
        parts = frozenset() if layout.is_replicate() else frozenset({"lora_B"})

        def forward(ids: torch.Tensor) -> torch.Tensor:
            weight = _local(module.weight)
            local = ids - group.rank() * weight.shape[0]
            mine = (local >= 0) & (local < weight.shape[0])
            # For tokens of other ranks look up row 0 and multiply it by 0, which zeroes its gradient too.
            places = local.where(mine, torch.zeros_like(local))
            rows = sum_of_parts(F.embedding(places, weight) * mine[..., None], layout, group)
            if not isinstance(module, AdaptedEmbedding) or not module.switch.is_on:
                return rows
            columns = F.embedding(places, _local(module.lora_A)) * mine[..., None]
            up = _local(module.lora_B, partial="lora_B" in parts)
            return module.adapted(rows, sum_of_parts(columns, layout, group), up)

        return _computing(module, forward, parts)


class WholeInput(ParallelStyle):
    """Style for an attention or MLP module whose input is gathered once for all
    ``ColumnLinear(shared_input=True)`` layers in it, so that the input's gradient is also reduced only
    once.

    Args:
        layout: layout of the input (the first argument, or ``hidden_states``): ``Replicate()`` or
            ``Shard(dimension)``.
    """

    KEYWORD = "hidden_states"

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def bring_together(
            _: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if inputs:
                return (_whole(inputs[0], self.layout, group), *inputs[1:]), keywords
            return inputs, {**keywords, self.KEYWORD: _whole(keywords[self.KEYWORD], self.layout, group)}

        # transformers' models pass hidden states by position or by name.
        module.register_forward_pre_hook(bring_together, with_kwargs=True)
        return module


class ColumnLinear(ColwiseParallel):
    """Style for a linear layer that is sharded by output features. Modules that are not plain linear layers
    get torch's style.

    Args:
        input_layouts: ``Replicate()`` or ``Shard(dimension)``; the layer gathers its full input.
        output_layouts: ``Shard(-1)``, or ``Replicate()`` to gather the output.
        shared_input: an enclosing ``WholeInput`` has already gathered the input.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        shared_input: bool = False,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts)
        self.shared_input = shared_input

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        before, after = self.input_layouts[0], self.output_layouts[0]
        if not _is_linear(module) or not (after.is_replicate() or after == Shard(-1)):
            return super()._apply(module, device_mesh)
        # An adapter's B is sharded like the weight. A is replicated, and each rank computes the partial
        # gradient of A from its rows of B.
        parts = frozenset({"lora_A"}) if isinstance(module, AdaptedLinear) else frozenset()
        for name, _ in list(module.named_parameters(recurse=False)):
            _divide(module, name, device_mesh, Replicate() if name in parts else Shard(0))
        group = device_mesh.get_group()

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            whole = (
                inputs
                if self.shared_input and not isinstance(inputs, DTensor)
                else _whole(inputs, before, group)
            )
            columns = F.linear(whole, _local(module.weight), _local(module.bias))
            if isinstance(module, AdaptedLinear):
                columns = module.adapted(
                    whole, columns, _local(module.lora_A, partial=True), _local(module.lora_B)
                )
            return from_runs(columns, columns.ndim - 1, group) if after.is_replicate() else columns

        return _computing(module, forward, parts)


class OutputLayer(ColumnLinear):
    """Style for a model's output layer, sharded over the vocabulary, that serves output requests
    (``engine.output_layer``).

    Args:
        input_layouts: ``Replicate()`` or ``Shard(dimension)``.
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__(input_layouts=input_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        if _is_linear(module):
            layout, group = self.input_layouts[0], device_mesh.get_group()
            low_rank = None
            if isinstance(module, AdaptedLinear):
                low_rank = lambda rows: module.low_rank_of(  # noqa: E731
                    rows, _local(module.lora_A, partial=True), _local(module.lora_B)
                )
            answer_requests(
                module, whole=lambda inputs: _whole(inputs, layout, group), local=_local, low_rank=low_rank
            )
        return module


class ScoreLayer(ParallelStyle):
    """Style for a replicated score layer, whose full output every rank gets.

    Args:
        input_layouts: ``Replicate()``, or ``Shard(1)`` for sequence parallelism: each rank then computes the
            scores of its part of the sequence, and a partial gradient of the weight.
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert _is_linear(module) and module.bias is None, "this style is for linear layers without a bias"
        _divide(module, "weight", device_mesh, Replicate())
        group, layout = device_mesh.get_group(), self.input_layouts
        parts = frozenset() if layout.is_replicate() else frozenset({"weight"})

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            if isinstance(inputs, DTensor):
                inputs = inputs.redistribute(placements=[layout]).to_local()
            values = F.linear(inputs, _local(module.weight, partial=bool(parts)))
            return from_runs(values, cast(Shard, layout).dim, group) if parts else values

        return _computing(module, forward, parts)


class RowLinear(RowwiseParallel):
    """Style for a linear layer that is sharded by input features. Modules that are not plain linear layers
    get torch's style.

    Args:
        input_layouts: ``Shard(-1)``, or ``Replicate()`` if the layer must select its features from the full
            input.
        output_layouts: ``Replicate()`` or ``Shard(dimension)``.
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        before, after = self.input_layouts[0], self.output_layouts[0]
        if not _is_linear(module) or not (before.is_replicate() or before == Shard(-1)):
            return super()._apply(module, device_mesh)
        _divide(module, "weight", device_mesh, Shard(1))
        if module.bias is not None:
            _divide(module, "bias", device_mesh, Replicate())
        group = device_mesh.get_group()

        if isinstance(module, AdaptedLinear):
            _divide(module, "lora_A", device_mesh, Shard(1))
            _divide(module, "lora_B", device_mesh, Replicate())

        # If the output is sharded, a rank computes only partial gradients of the bias and of an adapter's B.
        parts = frozenset() if after.is_replicate() else frozenset({"bias", "lora_B"})

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            features = _features(inputs, before, group)
            # Add the bias after the sum, so that it counts once, not once per rank.
            output = sum_of_parts(F.linear(features, _local(module.weight)), after, group)
            if isinstance(module, AdaptedLinear):
                up = _local(module.lora_B, partial="lora_B" in parts)
                output = module.adapted(
                    features,
                    output,
                    _local(module.lora_A),
                    up,
                    lambda hidden: sum_of_parts(hidden, after, group),
                )
            return output if module.bias is None else output + _local(module.bias, partial="bias" in parts)

        return _computing(module, forward, parts)


class NormOfParts(ParallelStyle):
    """Style for a norm, or another module with replicated parameters, of which each rank computes a part of
    the output: some of the heads in [n, t, H, D], or a part of the sequence. Gradients of its parameters are
    summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = frozenset(dict(module.named_parameters(recurse=False)))
        for name in names:
            _divide(module, name, device_mesh, Replicate())
        plain = module.forward

        def forward(*inputs: Any, **keywords: Any) -> Any:
            # The norm's own forward reads its attributes, so replace them by local tensors during the call.
            present = dict(module._parameters)
            try:
                module._parameters.update(
                    {name: cast(Any, _local(present[name], partial=True)) for name in names}
                )
                return plain(*inputs, **keywords)
            finally:
                module._parameters.update(present)

        return _computing(module, forward, names)


def _divide(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    parameter = module.get_parameter(name)
    # None disables the broadcast, because the model has no values yet.
    divided = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    # Keep the name, by which checkpoints and refits identify the parameter.
    module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


# Module attribute with the names of replicated parameters whose gradients are partial on each rank.
_PARTS = "names_of_partial_gradients"


def finds_part(module: nn.Module, name: str) -> bool:
    """Return whether each rank computes only a partial gradient of a replicated parameter."""
    return name in getattr(module, _PARTS, ())


def computes_locally(model: nn.Module) -> bool:
    """Return whether every module that owns a sharded parameter has a style of this module. These styles also
    accept plain parameters."""
    for module in model.modules():
        is_divided = any(isinstance(value, DTensor) for value in module._parameters.values())
        if is_divided and not hasattr(module, _PARTS):
            return False
    return True


def _computing(
    module: nn.Module, forward: Callable[..., Any], parts: frozenset[str] = frozenset()
) -> nn.Module:
    """Replace a module's forward method and return the module. ``parts`` names its parameters with partial
    gradients on each rank."""
    # setattr, because mypy does not allow assigning to a method.
    setattr(module, "forward", forward)  # noqa: B010
    setattr(module, _PARTS, parts)
    return module


def _is_linear(module: nn.Module) -> bool:
    # A subclass with its own forward method gets torch's style.
    return isinstance(module, nn.Linear) and type(module).forward in (
        nn.Linear.forward,
        AdaptedLinear.forward,
    )


def _local(parameter: Any, *, partial: bool = False) -> Any:
    """Return this rank's shard of a DTensor; return anything else, such as None, unchanged. ``partial`` marks
    a replicated parameter whose gradient is partial on each rank."""
    if not isinstance(parameter, DTensor):
        return parameter
    # Declare the gradient as partial, so that DTensor sums it over the ranks instead of using one rank's.
    return parameter.to_local(grad_placements=[Partial()] if partial else None)


def _whole(inputs: Any, layout: Placement, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the full input for a layer that computes a part of the output. For a DTensor its own layout is
    used instead of ``layout``."""
    if isinstance(inputs, DTensor):
        return inputs.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return for_parts(inputs, layout, group)


def _features(inputs: Any, layout: Placement, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of the input's last dimension."""
    if isinstance(inputs, DTensor):
        return inputs.redistribute(placements=[Shard(inputs.ndim - 1)]).to_local()
    return own_run(inputs, inputs.ndim - 1, group) if layout.is_replicate() else cast(torch.Tensor, inputs)
