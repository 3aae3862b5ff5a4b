"""What the pool's processes run to count bytes that a worker allocates and moves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory import Allocations
from megarl.algorithms.loss_functions import NLLLoss
from megarl.models.megatron import checkpoint, state_stream
from megarl.patched import patched
from tests.dist import jobs


def whole_state(stream: Any, optimizer: Any) -> dict[Any, Any]:
    """Stands for ``StateStream.outlines``: every state of every buffer in full on every rank, by another way."""
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        ((dtype, buckets),) = ranges.items()
        whole = {name: torch.zeros(optimizer.buffers[index].grad_data.numel()) for name in state_stream.STATES}
        for bucket in buckets:
            for parameter, found in bucket["param_map"].items():
                kept = optimizer._get_main_param_and_optimizer_states(parameter)
                for name, values in whole.items():
                    values[found["gbuf_world"].start : found["gbuf_world"].end] = kept[name]
        for values in whole.values():
            # a sum of bits, because 0 and -0 added are 0
            dist.all_reduce(values.view(torch.int32), group=optimizer.data_parallel_group)
        state[index] = {dtype: whole}
    return state


def received_on_a_device(source: Any, part: torch.Tensor) -> torch.Tensor:
    """Stands for ``state_stream._Source._received_into`` on a device."""
    return torch.empty(part.shape)


def save_and_count(
    config: Mapping[str, Any], batch: Mapping[str, Any], directory: Path, slice_bytes: int, on_device: bool
) -> dict[str, int]:
    """Save the optimizer's state after a step, once gathered in full (``whole``) and once streamed (``slices``).

    Args:
        config: of the policy.
        batch: what the step trains on.
        directory: holds both afterwards.
        slice_bytes: of a slice.
        on_device: what other ranks send goes by a device's memory.

    Returns:
        The most bytes that either allocates on this rank, by name.
    """
    worker = jobs.build(config, init_reference_model=False)
    worker.train(data=jobs.my_share(worker, batch, config["train_global_batch_size"]), loss_fn=NLLLoss())
    backend = worker.backend
    backend.sync_parameters()
    state = (backend.chunks, backend.optimizer, backend.scheduler, backend.runtime)
    replaced: dict[str, list[Any]] = {
        "whole": [(state_stream.StateStream, "outlines", whole_state)],
        "slices": [(state_stream, "SLICE_BYTES", slice_bytes)],
    }
    if on_device:
        replaced["slices"].append((state_stream._Source, "_received_into", received_on_a_device))
    peaks = {}
    for name, replacements in replaced.items():
        with patched(*replacements), Allocations() as counted:
            checkpoint.save_optimizer(*state, directory / name)
        peaks[name] = counted.peak
    backend.close()
    return peaks
