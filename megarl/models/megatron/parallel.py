"""The one importer of Megatron-Core's global ``parallel_state``. Everything else receives :class:`ParallelGroups`."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from megatron.core import parallel_state, tensor_parallel

from megarl.models.engine.groups import ParallelGroups


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Degrees of parallelism; data parallel is what remains of the world."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1


def initialize(sizes: ParallelSizes, timeout: datetime.timedelta = datetime.timedelta(minutes=10)) -> ParallelGroups:
    """Create Megatron's process groups in the already initialised default group and return them.

    A previous set of groups (another layout in the same process) is destroyed first.
    """
    if parallel_state.is_initialized():
        destroy()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
        create_gloo_process_groups=False,
    )
    return ParallelGroups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        data=parallel_state.get_data_parallel_group(with_context_parallel=False),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
    )


def seed_model_parallel(seed: int) -> None:
    """Seed Megatron's random-number tracker: the same stream in a data-parallel group, different ones over tensor parallel."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy() -> None:
    """Destroy Megatron's process groups (not torch's default group)."""
    parallel_state.destroy_model_parallel()
