"""Divides a model that is still on the meta device: modules over tensor-parallel ranks, then parameters over data and context parallel
ranks, and gives it memory for what this rank keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from megarl.errors import ConfigError
from megarl.models.dtensor.plans import Plan
from megarl.models.huggingface.loading import is_tied, layers_of, tie


def divide_over_tensor_ranks(model: Any, mesh: DeviceMesh, plan: Plan) -> None:
    """Apply a tensor-parallel plan; a tied output layer stays tied.

    Raises:
        ConfigError: heads or rows do not divide.
    """
    ranks, text = mesh.size(), model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(text, name, ranks)
        if count % ranks:
            raise ConfigError(
                f"policy.dtensor_cfg.tensor_parallel_size = {ranks}: does not divide the model's {name} = {count}; write a divisor"
            )
    tied = is_tied(model)
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if tied:
        tie(model)


def shard_fully(model: Any, mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool, pin: bool) -> None:
    """FSDP2 over ``mesh``, a layer at a time. Gradients come out as plain float32 sums over its ranks.

    Logits keep the dtype of the computation: heads compute in float32 chunk by chunk, so that a cast would only double the largest tensor
    there is.

    Args:
        model: with its parameters, perhaps divided over tensor-parallel ranks, on the meta device.
        mesh: one dimension.
        dtype: of parameters and activations in the computation; kept parameters are float32.
        offload: keep parameters, gradients and optimizer state in host memory.
        pin: in page-locked memory.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if offload else OffloadPolicy(),
    }
    for layer in layers_of(model):
        fully_shard(layer, **options)
    if not is_tied(model):
        fully_shard(model.get_input_embeddings(), **options)
    # what is left (the last norm, the output layer, a tied embedding) is needed again as soon as the backward pass starts
    fully_shard(model, reshard_after_forward=False, **options)
    for module in sharded_modules(model):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters ``fully_shard`` gathers together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the next pass gathers them anew, with whatever was written to them meanwhile."""
    for module in sharded_modules(model):
        module.reshard()


@contextlib.contextmanager
def reduced_once(model: nn.Module | None) -> Iterator[Callable[[], None]]:
    """Inside, gradients add up as whole ones until what this gives is called, before the last micro-batch, whose pass reduces them all.

    Args:
        model: with sharded modules; None where each micro-batch's gradients are reduced.
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


def give_memory(model: Any, device: torch.device) -> None:
    """Replace parameters on the meta device by uninitialised memory for this rank's shards; buffers keep their values, on ``device``."""
    tied = is_tied(model)
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items() if buffer is not None]
    model.to_empty(device=device)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer.to(device)
    if tied:
        tie(model)
