"""Shards a model on the meta device: modules over tensor-parallel ranks, then parameters over data- and
context-parallel ranks. Also allocates memory for this rank's shards, and controls ``fully_shard`` during
passes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from megarl.errors import ConfigError
from megarl.models.dtensor.plans import Plan
from megarl.models.dtensor.styles import finds_part
from megarl.models.huggingface.loading import is_tied, layers_of, tie


def divide_over_tensor_ranks(model: Any, mesh: DeviceMesh, plan: Plan) -> None:
    """Apply a tensor-parallel plan. A tied output layer stays tied.

    Raises:
        ConfigError: the number of attention heads is not divisible by the number of ranks.
    """
    ranks, text = mesh.size(), model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(text, name, ranks)
        if count % ranks:
            raise ConfigError(
                f"policy.dtensor_cfg.tensor_parallel_size = {ranks}: does not divide the model's {name} = "
                f"{count}; write a divisor"
            )
    tied = is_tied(model)
    # None disables the broadcast, because the model has no values yet.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if tied:
        tie(model)


def shard_fully(model: Any, mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool, pin: bool) -> None:
    """Apply FSDP2 over ``mesh``, layer by layer. Gradients are summed (not averaged) over its ranks in
    float32.

    Logits stay in the computation's dtype: loss heads convert them to float32 chunk by chunk, because
    converting all at once would double the largest tensor.

    Args:
        model: model on the meta device; its parameters may already be sharded over tensor-parallel ranks.
        mesh: mesh with one dimension.
        dtype: dtype of parameters and activations in the computation.
        offload: keep parameters, gradients and optimizer state in host memory.
        pin: use page-locked host memory.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if offload else OffloadPolicy(),
    }
    # Shard inner modules first: fully_shard of an outer module takes the parameters that are left.
    for layer in layers_of(model):
        fully_shard(layer, **options)
    if not is_tied(model):
        # A tied embedding stays in the root group, with the output layer, because a parameter can be in one
        # group only.
        fully_shard(model.get_input_embeddings(), **options)
    # Keep the remaining parameters (last norm, output layer, tied embedding) gathered, because the backward
    # pass starts with them.
    fully_shard(model, reshard_after_forward=False, **options)
    for module in sharded_modules(model):
        # FSDP2 averages by default, but losses are already divided by counts over the whole global batch.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules to which ``fully_shard`` was applied."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def frozen_shards(model: nn.Module) -> dict[str, Sequence[torch.Tensor]]:
    """Return, by parameter name, the tensors through which ``fully_shard`` refers to a frozen parameter's
    shard: the one that it gathers from, and the parameter's local tensor."""
    found: dict[str, Sequence[torch.Tensor]] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for module in sharded_modules(model):
        group = module._get_fsdp_state()._fsdp_param_group
        for each in () if group is None else group.fsdp_params:
            parameter: Any = each.sharded_param
            if parameter in names and not parameter.requires_grad:
                found[names[parameter]] = each._sharded_param_data, parameter._local_tensor
    return found


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the next pass gathers them again and sees later changes of the
    shards."""
    for module in sharded_modules(model):
        module.reshard()


@contextlib.contextmanager
def reduced_once(model: nn.Module | None) -> Iterator[Callable[[], None]]:
    """Accumulate unreduced gradients over micro-batches within the context. Yield a function to call before
    the last micro-batch, whose backward pass then reduces them.

    Args:
        model: model with sharded modules; None to reduce the gradients of every micro-batch.
    """
    modules = [] if model is None else sharded_modules(model)

    def reduce(now: bool) -> None:
        for module in modules:
            module.set_requires_gradient_sync(now, recurse=False)

    reduce(False)
    try:
        yield lambda: reduce(True)
    finally:
        reduce(True)


@contextlib.contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """Within the context, run ``model`` on plain parameters that share this rank's memory; on exit, move
    their gradients to the DTensors.

    ``fully_shard`` wraps parameters even on a single rank, where its hooks copy every parameter before every
    use. If parameters are stored in the computation's dtype, modules can use plain parameters instead, with
    the hooks disabled.

    Args:
        model: model sharded over a single rank; if a plan was applied, it must satisfy ``computes_locally``.
    """
    places: list[tuple[nn.Module, str, Any]] = []
    # Use the parameter as the key, so that tied modules, which share one, still share one afterwards.
    whole: dict[DTensor, nn.Parameter] = {}
    partial: set[DTensor] = set()
    for module in model.modules():
        for name, divided in module._parameters.items():
            if isinstance(divided, DTensor):
                places.append((module, name, divided))
                whole[divided] = nn.Parameter(_memory_of(divided), requires_grad=divided.requires_grad)
                if finds_part(module, name):
                    partial.add(divided)
    with _hooks_at_rest(model):
        for module, name, parameter in places:
            module._parameters[name] = whole[parameter]
        try:
            yield
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter
    for parameter, plain in whole.items():
        if plain.grad is not None:
            _add_gradient(parameter, plain.grad, partial=parameter in partial)


def _memory_of(parameter: DTensor) -> torch.Tensor:
    return parameter.to_local().detach()


@torch.no_grad()
def _add_gradient(parameter: DTensor, gradient: torch.Tensor, *, partial: bool) -> None:
    """Add this rank's gradient to the gradient of a sharded parameter.

    Args:
        parameter: the sharded parameter, with any placement.
        gradient: gradient with the shape of this rank's shard.
        partial: the parameter is replicated over tensor-parallel ranks, each of which computed only a part of
            the gradient.
    """
    if partial:
        # Mesh dimension 1 is tensor parallelism.
        dist.all_reduce(gradient, group=parameter.device_mesh.get_group(1))
    if isinstance(parameter.grad, DTensor):
        _memory_of(parameter.grad).add_(gradient)
        return
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    parameter.grad = DTensor.from_local(
        gradient, mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


@contextlib.contextmanager
def _hooks_at_rest(model: nn.Module) -> Iterator[None]:
    """Disable the forward hooks of ``fully_shard`` within the context."""
    kept: list[tuple[OrderedDict[int, Any], list[tuple[int, Any]]]] = []
    for module in sharded_modules(model):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):  # type: ignore[attr-defined]
            kept.append((hooks, list(hooks.items())))
            own = [
                number
                for number, hook in hooks.items()
                if getattr(hook, "__self__", None) is module._get_fsdp_state()
            ]
            # If one of fully_shard's hooks stayed active, gradients would go to parameters that are never
            # read.
            assert len(own) == 1, (
                f"fully_shard has {len(own)} hooks around {type(module).__name__}, expected one "
                "before and one after it"
            )
            del hooks[own[0]]
    try:
        yield
    finally:
        for hooks, all_of_them in kept:
            # Restore all hooks, because their order matters.
            hooks.clear()
            hooks.update(all_of_them)


def give_memory(model: Any, device: torch.device) -> None:
    """Replace meta parameters by uninitialised memory for this rank's shards. Buffers keep their values and
    move to ``device``."""
    _without_values(model, device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def take_memory(model: Any) -> None:
    """Move parameters back to the meta device, the reverse of ``give_memory``. Buffers are not moved."""
    _without_values(model, torch.device("meta"))


def _without_values(model: Any, device: torch.device) -> None:
    tied = is_tied(model)
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    # Restore the buffers' values below, because to_empty gives buffers new memory as well.
    model.to_empty(device=device)
    for module, values in buffers:
        module._buffers.update(values)
    if tied:
        tie(model)
