"""The only module that imports Megatron-Core's global ``parallel_state``. All other modules receive
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
    """Degrees of parallelism; the data-parallel size follows from the world size.

    Attributes:
        tensor, pipeline, context: number of ranks that share a layer, the layers, a sequence.
        virtual: model chunks of one pipeline stage.
        expert, expert_tensor: number of ranks that share the experts, and one expert.
        ring: context-parallel ranks send keys and values in a ring instead of gathering them.
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
    """The process groups that share experts. Megatron maps expert groups onto the ranks of a pipeline stage
    independently: ranks that are tensor, context or data parallel for the rest of the model may be expert or
    expert-tensor parallel for its experts.

    Attributes:
        model: ranks that the experts are divided over.
        tensor: ranks that one expert is sharded over.
        tensor_and_model: ranks that have shards of any experts; those of one expert are adjacent.
        same_sequences: ranks that hold parts of the same sequences, tensor and context parallel.
        replicas: data-parallel replicas that share experts, so that they have to run the model in lockstep;
            each is represented by one rank, here by this process. None if this replica shares no experts.
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
    """Return the group of data- and context-parallel ranks that hold the same parameters as this rank, of
    experts or of the rest of the model."""
    if of_experts:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def expert_groups(groups: ParallelGroups) -> ExpertGroups:
    """Return the expert groups of the layout that ``initialize`` created. A collective over the world."""
    model, tensor = (
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    )
    replica = groups.tensor_size * groups.context_size
    # Within a pipeline stage, the ranks of a replica are consecutive, and so are those that exchange tokens.
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
    """Create Megatron's process groups in the already initialised default group and return them.

    Previous groups (another layout in the same process) are destroyed first.
    """
    # Tests and megarl parity build several layouts, one after another, in the same processes.
    if parallel_state.is_initialized():
        destroy()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        # This is the order of NamedSharding and of the driver's batches, which are divided by data-parallel
        # rank.
        order="tp-cp-ep-dp-pp",
        # Megatron-Core takes whole minutes, and a shorter timeout must not become 0.
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
        # Only Megatron-Core's own gathering of optimizer state needs gloo groups, and state_stream replaces
        # it.
        create_gloo_process_groups=False,
    )
    return ParallelGroups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        # Exclude context parallelism, whose ranks share rows, so that their losses would be counted twice.
        data=parallel_state.get_data_parallel_group(with_context_parallel=False),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        ring=sizes.ring,
    )


def seed_model_parallel(seed: int) -> None:
    """Seed Megatron's random-number tracker: ranks of a data-parallel group get the same stream,
    tensor-parallel ranks get different ones."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy() -> None:
    """Destroy Megatron's process groups (not torch's default group)."""
    parallel_state.destroy_model_parallel()
