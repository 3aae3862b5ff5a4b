"""Collects the distributed optimizer's state for a checkpoint, at the right offsets.

Megatron-Core up to 0.19 lays the gathered buckets of a buffer end to end without their padding, but then cuts parameters out by their
offsets *with* padding: with two or more buckets (large models, or tied embeddings over pipeline stages) every parameter beyond the first
bucket is saved from the wrong place. Here the gathered tensors keep the buffer's own coordinates, so that the offsets fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megarl.distributed.device import runtime

STATES = ("param", "exp_avg", "exp_avg_sq")


def gathered_state(
    optimizer: DistributedOptimizer, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
) -> dict[Any, Any]:
    """Stands for ``DistributedOptimizer.get_parameter_state_dp_zero``: for each buffer and dtype, each state as one float32 tensor on the
    CPU.

    A collective over the data-parallel group; always returns on all ranks. With ``empty_data`` the tensors are zeros, to be loaded into.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        buffer = optimizer.buffers[index]
        state[index] = {}
        for dtype, buckets in ranges.items():
            whole: dict[str, Any] = {key: torch.zeros(buffer.grad_data.numel(), dtype=torch.float32) for key in STATES}
            if not empty_data:
                for bucket, bucket_ranges in zip(buffer.buckets, buckets, strict=True):
                    for key, values in _gathered_bucket(optimizer, bucket.grad_data.numel(), bucket_ranges["param_map"]).items():
                        whole[key][bucket.offset : bucket.offset + values.numel()] = values
            state[index][dtype] = whole
    return state


def _gathered_bucket(optimizer: DistributedOptimizer, size: int, param_map: dict[Any, Any]) -> dict[str, torch.Tensor]:
    """Each state of one bucket, padding included: every rank's equal share, end to end."""
    group = optimizer.data_parallel_group
    ranks = dist.get_world_size(group)
    device = runtime().device
    shares = {key: torch.zeros(size // ranks, dtype=torch.float32, device=device) for key in STATES}
    for parameter, ranges in param_map.items():
        mine = slice(ranges["gbuf_local"].start, ranges["gbuf_local"].end)
        values = optimizer._get_main_param_and_optimizer_states(parameter)
        for key in STATES:
            shares[key][mine] = values[key].detach().to(device)
    gathered = {}
    for key, share in shares.items():
        full = torch.empty(size, dtype=torch.float32, device=device)
        dist.all_gather_into_tensor(full, share, group=group)
        gathered[key] = full.cpu()
    return gathered


@contextlib.contextmanager
def exact_offsets() -> Iterator[None]:
    """Inside, Megatron's distributed optimizer collects its state with ``gathered_state``."""
    original = DistributedOptimizer.get_parameter_state_dp_zero
    DistributedOptimizer.get_parameter_state_dp_zero = gathered_state
    try:
        yield
    finally:
        DistributedOptimizer.get_parameter_state_dp_zero = original
