"""Process groups. The only module that uses Megatron-Core's global ``parallel_state``; all others receive
``ParallelGroups``."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megarl.models.engine.groups import ParallelGroups


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Sizes of the parallel dimensions; the data-parallel size follows from the world size.

    Attributes:
        tensor, pipeline, context: tensor-, pipeline- and context-parallel size.
        virtual: model chunks per pipeline stage.
        expert, expert_tensor: number of ranks over which the experts are divided, and over which one expert
            is sharded.
        ring: context-parallel ranks send keys and values in a ring instead of all-gathering them.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int = 1
    ring: bool = False


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Process groups for experts.

    Megatron maps expert groups onto the ranks of a pipeline stage independently of the other groups: ranks
    that are tensor, context or data parallel for the rest of the model may be expert or expert-tensor
    parallel for its experts.

    Attributes:
        model: ranks over which the experts are divided.
        tensor: ranks over which one expert is sharded.
        tensor_and_model: product of both; the ranks of one expert are adjacent.
        same_sequences: ranks that split the same sequences (tensor and context parallel).
        replicas: one rank from each of the data-parallel replicas that share experts and must run in
            lockstep, including this process. None if this replica shares no experts.
    """

    model: dist.ProcessGroup
    tensor: dist.ProcessGroup
    tensor_and_model: dist.ProcessGroup
    same_sequences: dist.ProcessGroup
    replicas: dist.ProcessGroup | None

    @property
    def model_rank(self) -> int:
        return dist.get_rank(self.model)

    @property
    def model_size(self) -> int:
        return dist.get_world_size(self.model)

    @property
    def tensor_rank(self) -> int:
        return dist.get_rank(self.tensor)

    @property
    def tensor_size(self) -> int:
        return dist.get_world_size(self.tensor)


def holders(*, of_experts: bool) -> dist.ProcessGroup:
    """Return the group of data- and context-parallel ranks that hold the same parameters as this rank, either
    of experts or of the rest of the model."""
    if of_experts:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def expert_groups(groups: ParallelGroups) -> ExpertGroups:
    """Return the expert groups of the layout that ``initialize`` created. Collective over the world."""
    model, tensor = (
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    )
    replica = groups.tensor_size * groups.context_size
    # Within a pipeline stage the ranks of a replica are consecutive, and so are the ranks that exchange
    # tokens.
    coupled = math.lcm(dist.get_world_size(model) * dist.get_world_size(tensor), replica) // replica
    replicas = None
    if coupled > 1:
        # Every rank lists all subgroups, even those it is not in, because creating groups is a collective.
        members = []
        for first in range(0, dist.get_world_size(), coupled * replica):
            for place in range(replica):
                members.append(list(range(first + place, first + coupled * replica, replica)))
        replicas, _ = dist.new_subgroups_by_enumeration(members)
    both = parallel_state.get_expert_tensor_and_model_parallel_group()
    return ExpertGroups(model, tensor, both, parallel_state.get_tensor_and_context_parallel_group(), replicas)


def initialize(
    sizes: ParallelSizes, timeout: datetime.timedelta = datetime.timedelta(minutes=10)
) -> ParallelGroups:
    """Create Megatron's process groups within the initialised default group, and return them. Existing ones
    are destroyed first."""
    # Tests and megarl parity build several layouts in the same processes.
    if parallel_state.is_initialized():
        destroy()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        # NamedSharding and the driver's batch plan, which divides batches by data-parallel rank, rely on this
        # order.
        order="tp-cp-ep-dp-pp",
        # Megatron-Core takes whole minutes; a shorter timeout must not become 0.
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
        # Gloo groups are needed only for Megatron-Core's gathering of optimizer state, which state_stream
        # replaces.
        create_gloo_process_groups=False,
    )
    return ParallelGroups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        # Exclude context parallelism: its ranks share rows, whose losses would be counted twice.
        data=parallel_state.get_data_parallel_group(with_context_parallel=False),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        ring=sizes.ring,
    )


def seed_model_parallel(seed: int) -> None:
    """Seed Megatron's random-number tracker: equal streams within a data-parallel group, different ones on
    tensor-parallel ranks."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy() -> None:
    """Destroy Megatron's process groups, but not torch's default group."""
    parallel_state.destroy_model_parallel()
