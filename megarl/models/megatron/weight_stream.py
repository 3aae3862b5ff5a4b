"""The weights of a divided model as full Hugging Face tensors, in one order whatever the layout: the stream of exports and refits.

Where each parameter stands is found out once. After that no names or shapes travel: parameters that neighbour in the order and on the
ranks are gathered together in buckets, and while one bucket is taken apart the next is on its way. A mixture of many experts has tens of
thousands of tensors; Python for each of them would take longer than the copies, so there is a call for each at the most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel

from converters.errors import ConversionError
from converters.mapping.layouts import ShardLayout, shard_layout
from converters.mapping.rule import Kind, Rule, expert_index, is_expert, shift_expert
from converters.mapping.rules import all_rules, hf_tensors, rule_for
from converters.mapping.shards import join
from converters.model_config.architecture import Architecture
from megarl.errors import StateError
from megarl.models.engine.gather_stream import FullTensor, GatherStream, InFlightBucket, SpareMemory, UnshardPlan, in_buckets
from megarl.models.engine.groups import ParallelGroups
from megarl.models.megatron.hf_state import TensorPlace, places_of
from megarl.models.megatron.parallel import ExpertGroups
from megarl.weight_sync.layout import Copy
from megarl.weight_sync.slices import Slice, Slices


def assembly_of(rules: Sequence[Rule], shapes: Sequence[Sequence[int]], ranks: int, architecture: Architecture) -> UnshardPlan:
    """The Hugging Face tensors of parameters whose shards lie one after the other, the same way on all ranks.

    Args:
        rules: of the parameters.
        shapes: of a shard of each, the same on all ranks.
        ranks: that have shards.
        architecture: the model.

    Raises:
        ConversionError: the shards do not have the shapes that the architecture asks for.
    """
    return UnshardPlan(_wholes(rules, shapes, ranks, architecture))


def _wholes(rules: Sequence[Rule], shapes: Sequence[Sequence[int]], ranks: int, architecture: Architecture) -> Iterator[FullTensor]:
    lengths = [math.prod(shape) for shape in shapes]
    of_rank = sum(lengths)
    position = 0
    for rule, shape, length in zip(rules, shapes, lengths, strict=True):
        if rule.emits:
            layouts = _layouts(rule, tuple(shape), ranks, architecture)
            layouts = layouts[:1] if rule.kind is Kind.REPLICATED else layouts
            for number, part in enumerate(rule.parts):
                begins = range(position, position + len(layouts) * of_rank, of_rank)
                places = zip(layouts, begins, strict=True)
                yield FullTensor(
                    part.name, part.shape, tuple(copy for layout, begin in places for copy in _copies(layout, number, part.shape, begin))
                )
        position += length


def slices_of(
    rules: Sequence[Rule], shapes: Sequence[Sequence[int]], rank: int, ranks: int, architecture: Architecture, slices: Slices
) -> UnshardPlan:
    """What an engine's rank reads of parameters, out of the shards of one rank, which has all of it (``is_cut_alike``).

    Args:
        rules, shapes, ranks, architecture: as ``assembly_of`` takes them.
        rank: whose shards are there.
        slices: that are read.
    """
    return UnshardPlan(_sliced(rules, shapes, rank, ranks, architecture, slices))


def _sliced(
    rules: Sequence[Rule], shapes: Sequence[Sequence[int]], rank: int, ranks: int, architecture: Architecture, slices: Slices
) -> Iterator[FullTensor]:
    position = 0
    for rule, shape in zip(rules, shapes, strict=True):
        if rule.emits:
            layout = _layouts(rule, tuple(shape), ranks, architecture)[rank]
            for number, part in enumerate(rule.parts):
                where = slices.get(part.name)
                read = part.shape if where is None else where.shape_of(part.shape)
                yield FullTensor(part.name, read, tuple(_copies(layout, number, part.shape, position, where)))
        position += math.prod(shape)


def is_cut_alike(rule: Rule, layouts: Sequence[ShardLayout], wanted: Sequence[Slices]) -> bool:
    """Whether every rank has, in its own shard of a parameter, all that the engine's rank beside it reads of it.

    Args:
        rule: of the parameter.
        layouts: of the shards, by rank.
        wanted: by rank, what the engine's rank beside it reads.
    """
    parts = enumerate(rule.parts) if rule.emits else ()
    return all(
        part.alone and _has(layout, number, part.shape, slices.get(part.name))
        for number, part in parts
        for layout, slices in zip(layouts, wanted, strict=True)
    )


def _has(layout: ShardLayout, number: int, whole: Sequence[int], where: Slice | None) -> bool:
    """Whether a shard has a slice of part ``number``, or all of it; where it does, its spans do not overlap."""
    start, stop = (where.start, where.stop) if where is not None and where.dim == layout.axis else (0, whole[layout.axis])
    found = (min(span.stop, stop) - max(span.start, start) for span in layout.spans if span.part == number)
    return sum(count for count in found if count > 0) == stop - start


def layouts_of(rule: Rule, ranks: int, padded_vocab: int, architecture: Architecture) -> list[ShardLayout]:
    """Return the layouts of a parameter's shards, by rank; ``padded_vocab`` are the rows of the padded embedding over all ranks."""
    return [shard_layout(rule, architecture.head_dim, rank, ranks, padded_vocab) for rank in range(ranks)]


def _layouts(rule: Rule, shape: tuple[int, ...], ranks: int, architecture: Architecture) -> list[ShardLayout]:
    """Return the layouts of shards that have a shape."""
    layouts = layouts_of(rule, ranks, shape[0] * ranks if rule.kind is Kind.VOCAB else 0, architecture)
    for rank, layout in enumerate(layouts):
        if layout.shape != shape:
            raise ConversionError(
                f"{rule.megatron_name}: the shard of rank {rank} is {list(shape)}, expected {list(layout.shape)}",
                "build the model from the architecture that its weights are exported for",
            )
    return layouts


def _copies(layout: ShardLayout, number: int, whole: Sequence[int], begin: int, where: Slice | None = None) -> Iterator[Copy]:
    """Return what of part ``number``, of shape ``whole``, or of a slice of it lies in one shard that begins at ``begin``.

    Shard and slice are seen as matrices, whose columns are all dimensions but the first.
    """
    wanted = [range(whole[0]), range(math.prod(whole[1:]))]
    if where is not None:
        if where.dim and len(whole) > 2:
            raise ConversionError(f"a slice of dimension {where.dim} of a weight of shape {list(whole)}", "report the model")
        wanted[where.dim] = range(where.start, where.stop)
    width, position = math.prod(layout.shape[1:]), 0
    for span in layout.spans:
        if span.part == number:
            here = [range(whole[0]), range(width)]
            here[layout.axis] = range(span.start, span.stop)
            both = [range(max(one.start, other.start), min(one.stop, other.stop)) for one, other in zip(here, wanted, strict=True)]
            # the spans before it lie before it
            first = [common.start - own.start for common, own in zip(both, here, strict=True)]
            first[layout.axis] += position
            source = begin + first[0] * width + first[1]
            target = (both[0].start - wanted[0].start) * len(wanted[1]) + both[1].start - wanted[1].start
            rows, columns = map(len, both)
            if rows * columns and columns == width == len(wanted[1]):
                yield Copy.run_of(rows * columns, source, target)
            elif rows * columns:
                yield Copy(source, target, (rows, columns), (width, 1), (len(wanted[1]), 1))
        position += span.length


@dataclass(frozen=True, slots=True)
class _Entry:
    """Entry: where one parameter stands: its pipeline stage, its expert-parallel rank (0 where all have it), and a rank's shard of it."""

    rule: Rule
    stage: int
    owner: int
    shape: torch.Size
    dtype: torch.dtype


class _Bucket:
    """Neighbouring parameters with the same ranks and dtype.

    Args:
        entries: the parameters.
        ranks: that each is cut over.
        architecture: the model.
        own: rank whose shards suffice, and what is read of them; None where all ranks' shards are gathered.
    """

    def __init__(self, entries: Sequence[_Entry], ranks: int, architecture: Architecture, own: tuple[int, Slices] | None = None) -> None:
        self.first = entries[0]
        self.ranks = ranks if own is None else 1
        self.of_expert = is_expert(self.first.rule.megatron_name)
        self.names = [entry.rule.megatron_name for entry in entries]
        self.length = sum(entry.shape.numel() for entry in entries)
        rules, shapes = [entry.rule for entry in entries], [entry.shape for entry in entries]
        if own is None:
            self.unshard_plan = assembly_of(rules, shapes, ranks, architecture)
        else:
            rank, slices = own
            self.unshard_plan = slices_of(rules, shapes, rank, ranks, architecture, slices)


@torch.no_grad()
def _set_out(
    bucket: _Bucket,
    held: Mapping[str, torch.Tensor],
    groups: ParallelGroups,
    experts: ExpertGroups,
    spare: SpareMemory,
    *,
    everywhere: bool,
) -> InFlightBucket:
    """Send a bucket to all ranks of its pipeline stage, or of all stages.

    Args:
        bucket: which.
        held: this rank's shards by name.
        groups, experts: the process groups.
        spare: memory for it.
        everywhere: to all stages.
    """
    tensor_group = experts.tensor if bucket.of_expert else groups.tensor
    device = next(iter(held.values())).device
    shards = spare.empty(bucket.ranks * bucket.length, bucket.first.dtype, device).view(bucket.ranks, bucket.length)
    pending: dist.Work | None = None
    if groups.pipeline_rank == bucket.first.stage:
        own = shards[dist.get_rank(tensor_group) if bucket.ranks > 1 else 0]
        if not bucket.of_expert or experts.model_rank == bucket.first.owner:
            torch.cat([held[name].flatten() for name in bucket.names], out=own)
            if len(own) != bucket.length:  # torch.cat resizes what it writes to
                raise StateError(
                    f"{bucket.names[0]} or one of the {len(bucket.names) - 1} parameters behind it has changed its shape: make a new policy"
                )
        if bucket.of_expert and experts.model_size > 1:
            dist.broadcast(own, src=dist.get_global_rank(experts.model, bucket.first.owner), group=experts.model)
        if bucket.ranks > 1:
            pending = dist.all_gather_into_tensor(shards.view(-1), own, group=tensor_group, async_op=True)
    if everywhere and groups.pipeline_size > 1:
        if pending is not None:
            pending.wait()
        source = dist.get_global_rank(groups.pipeline, bucket.first.stage)
        pending = dist.broadcast(shards, src=source, group=groups.pipeline, async_op=True)
    return InFlightBucket(bucket.unshard_plan, shards, pending, spare)


def engine_ranks(pairs: Sequence[tuple[int, int]], size: int) -> list[int]:
    """The rank of an engine that reads beside the ranks with each of ``size`` shards; empty where that is none, or not one.

    Args:
        pairs: of each rank of the policy, which shard it has, and the rank of an engine that reads there, -1 for none.
        size: of the shards.
    """
    beside = [{engine for shard, engine in pairs if shard == number} for number in range(size)]
    return [engine for [engine] in beside] if all(len(found) == 1 and -1 not in found for found in beside) else []


class WeightStream:
    """Gives all weights of a model, any number of times.

    Args:
        chunks: the bare models of this rank's chunks.
        architecture: the model.
        groups, experts: the process groups.
        bucket_bytes: of all shards that are gathered together, unless those of one parameter alone take more.
    """

    def __init__(
        self, chunks: Sequence[GPTModel], architecture: Architecture, groups: ParallelGroups, experts: ExpertGroups, bucket_bytes: int
    ) -> None:
        self._chunks = chunks
        self._architecture = architecture
        self._groups = groups
        self._experts = experts
        self._bucket_bytes = bucket_bytes
        self._places: dict[str, TensorPlace] = {}
        self._buckets: list[_Bucket] | None = None
        self._sliced: list[_Bucket] = []
        self._entries: list[_Entry] = []
        self._all_alone = all(part.alone for part in hf_tensors(architecture))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and full tensors (in the parameters' dtype, on this rank's device), in the order of the mapping rules.

        Collective: all ranks take as many. Tensors are contiguous, and are nobody else's; but many lie in one storage, which is there for
        as long as one of them is kept. Memory beyond the model is at most five buckets of ``bucket_bytes`` (or of the largest
        parameter); a family that stores all experts of a layer together adds those.
        """
        return self._joined(GatherStream(self._arrivals(SpareMemory(), everywhere=True)))

    def agree_on_slices(self, wanted: Sequence[Slices], beside: int) -> dict[str, Slice]:
        """Choose the weights that ``sliced`` gives as slices: those of which each rank has in its own shard what the engine's rank beside
        it reads. Collective; the weights were gone through once before.

        A weight is gathered whole as before where that is not so on one rank, where ranks with the same shards stand beside ranks of
        engines that read different slices, and where experts are divided over ranks.

        Args:
            wanted: what each rank of an engine reads.
            beside: the engine's rank that reads here; -1 for none.

        Returns:
            The slices that are read here; the same names on all ranks.
        """
        everywhere = set.intersection(*(set(slices) for slices in wanted))
        wanted = [{name: slices[name] for name in everywhere} for slices in wanted]
        if self._buckets is None:
            raise StateError("slices are chosen once the weights were gone through: take the refit info first")
        ranks = dist.get_rank(self._groups.tensor), dist.get_rank(self._experts.tensor), beside
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, ranks)
        of_tensor = engine_ranks([(tensor, engine) for tensor, _, engine in everybody], self._groups.tensor_size)
        of_expert = engine_ranks([(tensor, engine) for _, tensor, engine in everybody], self._experts.tensor_size)
        if self._experts.model_size > 1:
            of_expert = []
        pairs = []
        for entry in self._entries:
            engines = of_expert if is_expert(entry.rule.megatron_name) else of_tensor
            pairs.append((entry, self._is_cut_alike(entry, wanted, engines)))
        names = {part.name for entry, own in pairs if own and entry.rule.emits for part in entry.rule.parts}
        slices = {name: where for name, where in wanted[beside].items() if name in names}
        runs = (list(run) for _, run in itertools.groupby(pairs, key=lambda pair: (*self._ranks_of(pair[0]), pair[1])))
        buckets = itertools.chain.from_iterable(in_buckets(run, self._bytes_in_stream, self._bucket_bytes) for run in runs)
        self._sliced = [self._bucket([entry for entry, _ in bucket], slices if bucket[0][1] else None) for bucket in buckets]
        return slices

    def _is_cut_alike(self, entry: _Entry, wanted: Sequence[Slices], beside: Sequence[int]) -> bool:
        if not beside:
            return False
        layouts = _layouts(entry.rule, tuple(entry.shape), len(beside), self._architecture) if entry.rule.emits else []
        return is_cut_alike(entry.rule, layouts, [wanted[rank] for rank in beside] if layouts else [])

    def _bytes_in_stream(self, pair: tuple[_Entry, bool]) -> int:
        entry, own = pair
        return entry.shape.numel() * entry.dtype.itemsize if own else self._bytes_of_all_ranks(entry)

    def _bucket(self, entries: Sequence[_Entry], slices: Slices | None) -> _Bucket:
        """Return the bucket of neighbouring parameters, gathered from all ranks or with ``slices`` of this rank's shards alone."""
        cut = self._cut(entries[0])
        own = None if slices is None else (dist.get_rank(cut.tensor), slices)
        return _Bucket(entries, cut.tensor_size, self._architecture, own)

    def sliced(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the engine's rank beside this one reads, in the order of all weights: slices of those that were agreed on, of which nothing
        comes from tensor-parallel neighbours, and the others whole. Collective."""
        return self._joined(GatherStream(self._arrivals(SpareMemory(), everywhere=True, sliced=True)))

    def of_stage(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of all weights that this rank's pipeline stage has, in the same order. Collective among the ranks of the stage alone, but
        for the first time, when all ranks have to come."""
        return self._joined(GatherStream(self._arrivals(SpareMemory(), everywhere=False)))

    def _joined(self, gather_stream: GatherStream) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors with those that a family stores inside others put into these."""
        return gather_stream if self._all_alone else join(gather_stream, self._architecture)

    def names_by_stage(self) -> list[list[str]]:
        """The names that ``of_stage`` gives on each pipeline stage, without a look at a weight: the plan has them. Local.

        Raises:
            StateError: there is no plan before the weights were gone through once.
        """
        if self._buckets is None:
            raise StateError("the names of all stages are known once the weights were gone through: take the refit info first")
        return [[name for name, _ in join(self._without_memory(stage), self._architecture)] for stage in range(self._groups.pipeline_size)]

    def _without_memory(self, stage: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Return what a stage exports, as tensors of names and shapes alone."""
        for bucket in self._buckets or ():
            if bucket.first.stage == stage:
                yield from bucket.unshard_plan.tensors(torch.empty(bucket.ranks, bucket.length, dtype=bucket.first.dtype, device="meta"))

    def _arrivals(self, spare: SpareMemory, *, everywhere: bool, sliced: bool = False) -> Iterator[InFlightBucket]:
        """The buckets one after another, each set out when it is asked for."""
        if self._buckets is None:
            # Transformer Engine's names become those of the rules
            named = places_of(self._chunks, self._experts)
            self._places = {rule_for(name, self._architecture).megatron_name: place for name, place in named}
        held = {name: owner[key] for name, (owner, key) in self._places.items()}
        if self._buckets is None:
            self._buckets = self._plan(held)
        chosen = self._sliced if sliced else self._buckets
        buckets = (bucket for bucket in chosen if everywhere or bucket.first.stage == self._groups.pipeline_rank)
        for bucket in buckets:
            yield _set_out(bucket, held, self._groups, self._experts, spare, everywhere=everywhere)

    def _plan(self, held: Mapping[str, torch.Tensor]) -> list[_Bucket]:
        """All parameters in their order, in buckets; the same on all ranks. The one exchange of names and shapes."""
        listing = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
        stages: list[Any] = [listing]
        if self._groups.pipeline_size > 1:
            stages = [None] * self._groups.pipeline_size
            dist.all_gather_object(stages, listing, group=self._groups.pipeline)
        self._entries = [self._entry(rule, stages) for rule in all_rules(self._architecture)]
        alike = (list(neighbours) for _, neighbours in itertools.groupby(self._entries, key=self._ranks_of))
        buckets = itertools.chain.from_iterable(
            in_buckets(neighbours, self._bytes_of_all_ranks, self._bucket_bytes) for neighbours in alike
        )
        return [self._bucket(entries, None) for entries in buckets]

    def _bytes_of_all_ranks(self, entry: _Entry) -> int:
        size: int = entry.shape.numel() * entry.dtype.itemsize * self._cut(entry).tensor_size
        return size

    def _entry(self, rule: Rule, stages: Sequence[dict[str, Any]]) -> _Entry:
        """Return where a parameter stands. An expert that another rank holds has the shape of this rank's expert in its place."""
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
