"""The weights of a divided model as full Hugging Face tensors, in one order whatever the layout: the stream of exports and refits.

Where each parameter stands is found out once. After that no names or shapes travel: parameters that neighbour in the order and on the ranks
are gathered together in buckets, and while one bucket is taken apart the next is on its way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel

from converters.architecture import Architecture
from converters.experts import expert_index, is_expert, shift_expert
from converters.joined import join
from converters.rule import Rule
from converters.rules import all_rules, rule_for
from converters.shards import to_hf
from megarl.errors import StateError
from megarl.models.engine.groups import ParallelGroups
from megarl.models.megatron.hf_state import parameters_of
from megarl.models.megatron.parallel import ExpertGroups

# of full tensors that are gathered together, unless one parameter alone is larger
BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one parameter stands: its pipeline stage, its expert-parallel rank (0 where all have it), and a rank's shard of it."""

    rule: Rule
    stage: int
    owner: int
    shape: torch.Size
    dtype: torch.dtype


class _Bucket:
    """Neighbouring parameters with the same ranks and dtype, on their way to all ranks of their pipeline stage, or of all stages.

    Args:
        entries: the parameters.
        held: this rank's shards by name.
        groups, experts: the process groups.
        device: of the shards.
        everywhere: to all stages.
    """

    def __init__(
        self,
        entries: Sequence[_Entry],
        held: dict[str, torch.Tensor],
        groups: ParallelGroups,
        experts: ExpertGroups,
        device: torch.device,
        *,
        everywhere: bool,
    ) -> None:
        self._entries = entries
        first = entries[0]
        of_expert = is_expert(first.rule.megatron_name)
        cut: Any = experts if of_expert else groups
        length = sum(entry.shape.numel() for entry in entries)
        self._full = torch.empty(cut.tensor_size, length, dtype=first.dtype, device=device)
        self._pending: dist.Work | None = None
        if groups.pipeline_rank == first.stage:
            local = self._local(held, length) if cut.tensor_size > 1 else self._local(held, length, self._full[0])
            if of_expert and experts.model_size > 1:
                dist.broadcast(local, src=dist.get_global_rank(experts.model, first.owner), group=experts.model)
            if cut.tensor_size > 1:
                self._pending = dist.all_gather_into_tensor(self._full.view(-1), local, group=cut.tensor, async_op=True)
        if everywhere and groups.pipeline_size > 1:
            self.wait()
            source = dist.get_global_rank(groups.pipeline, first.stage)
            self._pending = dist.broadcast(self._full, src=source, group=groups.pipeline, async_op=True)

    def _local(self, held: dict[str, torch.Tensor], length: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's shards one after the other; of those that it does not have, space for them."""
        flat = into if into is not None else torch.empty(length, dtype=self._full.dtype, device=self._full.device)
        parts = flat.split([entry.shape.numel() for entry in self._entries])
        names = [entry.rule.megatron_name for entry in self._entries]
        pairs = [(part, held[name]) for part, name in zip(parts, names, strict=True) if name in held]
        if pairs:
            torch._foreach_copy_([part.view(shard.shape) for part, shard in pairs], [shard.detach() for _, shard in pairs])
        return flat

    def wait(self) -> None:
        """Until the bucket is there."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def tensors(self, architecture: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and full tensors."""
        self.wait()
        position = 0
        for entry in self._entries:
            shards = self._full[:, position : position + entry.shape.numel()]
            position += entry.shape.numel()
            yield from to_hf(entry.rule, [shard.view(entry.shape) for shard in shards.unbind(0)], architecture)


class WeightStream:
    """Gives all weights of a model, any number of times.

    Args:
        chunks: the bare models of this rank's chunks.
        architecture: the model.
        groups, experts: the process groups.
    """

    def __init__(self, chunks: Sequence[GPTModel], architecture: Architecture, groups: ParallelGroups, experts: ExpertGroups) -> None:
        self._chunks = chunks
        self._architecture = architecture
        self._groups = groups
        self._experts = experts
        self._names: list[str] = []
        self._buckets: list[list[_Entry]] | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and full tensors (in the parameters' dtype, on this rank's device), in the order of the mapping rules.

        Collective: all ranks take as many. Memory beyond the model stays below two buckets of ``BUCKET_BYTES`` (or of the largest
        parameter) and the tensors made of one parameter; a family that stores all experts of a layer together adds those.
        """
        return join(self._by_themselves(everywhere=True), self._architecture)

    def of_stage(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of all weights that this rank's pipeline stage has, in the same order. Collective among the ranks of the stage alone, but
        for the first time, when all ranks have to come."""
        return join(self._by_themselves(everywhere=False), self._architecture)

    def names_by_stage(self) -> list[list[str]]:
        """The names that :meth:`of_stage` gives on each pipeline stage, without a look at a weight: the plan has them. Local.

        Raises:
            StateError: there is no plan before the weights were gone through once.
        """
        if self._buckets is None:
            raise StateError("the names of all stages are known once the weights were gone through: take the refit info first")
        return [[name for name, _ in join(self._without_memory(stage), self._architecture)] for stage in range(self._groups.pipeline_size)]

    def _without_memory(self, stage: int) -> Iterator[tuple[str, torch.Tensor]]:
        """What a stage exports, as tensors of names and shapes alone."""
        for entry in itertools.chain.from_iterable(self._buckets or ()):
            if entry.stage == stage:
                shard = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
                yield from to_hf(entry.rule, [shard] * self._cut(entry).tensor_size, self._architecture)

    @torch.no_grad()
    def _by_themselves(self, *, everywhere: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, before tensors that are stored inside others are put into these."""
        named = list(parameters_of(self._chunks, self._experts))
        if self._buckets is None:
            # Transformer Engine's names become those of the rules
            self._names = [rule_for(name, self._architecture).megatron_name for name, _ in named]
        held = {name: tensor for name, (_, tensor) in zip(self._names, named, strict=True)}
        if self._buckets is None:
            self._buckets = self._plan(held)
        device = next(iter(held.values())).device
        wanted = [entries for entries in self._buckets if everywhere or entries[0].stage == self._groups.pipeline_rank]
        coming: _Bucket | None = None
        try:
            for entries in [*wanted, None]:
                present, coming = coming, None
                if entries is not None:
                    coming = _Bucket(entries, held, self._groups, self._experts, device, everywhere=everywhere)
                if present is not None:
                    yield from present.tensors(self._architecture)
        finally:
            if coming is not None:
                coming.wait()

    def _plan(self, held: dict[str, torch.Tensor]) -> list[list[_Entry]]:
        """All parameters in their order, in buckets; the same on all ranks. The one exchange of names and shapes."""
        listing = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
        stages: list[Any] = [listing]
        if self._groups.pipeline_size > 1:
            stages = [None] * self._groups.pipeline_size
            dist.all_gather_object(stages, listing, group=self._groups.pipeline)
        entries = [self._entry(rule, stages) for rule in all_rules(self._architecture)]
        buckets: list[list[_Entry]] = []
        for _, neighbours in itertools.groupby(entries, key=self._ranks_of):
            room = 0
            for entry in neighbours:
                size = entry.shape.numel() * entry.dtype.itemsize * self._cut(entry).tensor_size
                if not room or size > room:
                    buckets.append([])
                    room = max(BUCKET_BYTES, size)
                buckets[-1].append(entry)
                room -= size
        return buckets

    def _entry(self, rule: Rule, stages: Sequence[dict[str, Any]]) -> _Entry:
        """Where a parameter stands. An expert that another rank holds has the shape of this rank's expert in its place."""
        name, owner = rule.megatron_name, 0
        if is_expert(name):
            share = (self._chunks[0].config.num_moe_experts or 0) // self._experts.model_size
            owner = expert_index(name) // share
            name = shift_expert(name, (self._experts.model_rank - owner) * share)
        stage = next(index for index, listing in enumerate(stages) if name in listing)
        shape, dtype = stages[stage][name]
        return _Entry(rule, stage, owner, torch.Size(shape), dtype)

    def _cut(self, entry: _Entry) -> Any:
        return self._experts if is_expert(entry.rule.megatron_name) else self._groups

    def _ranks_of(self, entry: _Entry) -> tuple[Any, ...]:
        return entry.stage, entry.owner, is_expert(entry.rule.megatron_name), entry.dtype
