"""Streams the weights of a sharded model as full Hugging Face tensors, in one order for all layouts; used by
exports and refits.

The location of each parameter is computed once; after that no names or shapes are sent. Parameters that are
adjacent in the order and stored on the same ranks are gathered in buckets, and the next bucket is in flight
while one is unpacked. Mixture-of-experts models have tens of thousands of tensors, for each of which Python
work would take longer than the copy, so there is at most one call per tensor.
"""

from __future__ import annotations

import collections
import enum
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule

from converters.errors import ConversionError
from converters.mapping.layouts import ShardLayout, shard_layout
from converters.mapping.rule import Kind, Rule, expert_index, is_expert, shift_expert
from converters.mapping.rules import all_rules, hf_tensors, rule_for
from converters.mapping.shards import join
from converters.model_config.architecture import Architecture
from megarl.checkpoint.collective import gather_objects
from megarl.errors import StateError
from megarl.models.engine.gather_stream import (
    FullTensor,
    GatherStream,
    InFlightBucket,
    SpareMemory,
    UnshardPlan,
    in_buckets,
)
from megarl.models.engine.groups import ParallelGroups
from megarl.models.megatron.hf_state import TensorPlace, places_of
from megarl.models.megatron.parallel import ExpertGroups
from megarl.weight_sync.plan import Copy, WeightIterator
from megarl.weight_sync.slices import Slice, Slices


def assembly_of(
    rules: Sequence[Rule],
    shapes: Sequence[Sequence[int]],
    ranks: int,
    architecture: Architecture,
    *,
    slices: Slices = MappingProxyType({}),
    begins: Sequence[Mapping[int, int]] | None = None,
) -> UnshardPlan:
    """Return a plan that builds the Hugging Face tensors of some parameters, or slices of them, from shards
    in one flat tensor.

    Args:
        rules: mapping rules of the parameters.
        shapes: shape of one shard of each parameter, equal on all ranks.
        ranks: number of ranks that have shards.
        architecture: the model.
        slices: slices to build, by tensor name; tensors without a slice are built in full.
        begins: for each parameter, the index of the first element of each rank's shard in the flat tensor, by
            rank; ranks whose shard is missing are absent. By default the flat tensor has the shards of all
            parameters of rank 0, then those of rank 1, and so on.

    Raises:
        ConversionError: the shards do not have the shapes that the architecture requires.
    """
    if begins is None:
        *firsts, length = itertools.accumulate(map(math.prod, shapes), initial=0)
        begins = []
        for first in firsts:
            begins.append({rank: rank * length + first for rank in range(ranks)})
    return UnshardPlan(_tensors(rules, shapes, ranks, architecture, slices, begins))


def _tensors(
    rules: Sequence[Rule],
    shapes: Sequence[Sequence[int]],
    ranks: int,
    architecture: Architecture,
    slices: Slices,
    begins: Sequence[Mapping[int, int]],
) -> Iterator[FullTensor]:
    for rule, shape, there in zip(rules, shapes, begins, strict=True):
        # Skip a tied output layer: its weight was already emitted as the embedding.
        if not rule.emits:
            continue
        layouts = _layouts(rule, tuple(shape), ranks, architecture)
        # Read a replicated parameter from the lowest rank that has it. The copies are equal, and every rank
        # must make the same choice.
        shards = sorted(there.items())[: 1 if rule.kind is Kind.REPLICATED else None]
        for number, part in enumerate(rule.parts):
            where = slices.get(part.name)
            copies: list[Copy] = []
            for rank, begin in shards:
                copies += _copies(layouts[rank], number, part.shape, begin, where)
            yield FullTensor(
                part.name, part.shape if where is None else where.shape_of(part.shape), tuple(copies)
            )


def is_cut_alike(rule: Rule, layouts: Sequence[ShardLayout], wanted: Sequence[Slices]) -> bool:
    """Return whether each rank's own shard of a parameter contains everything that the engine rank on the
    same device reads of it.

    Args:
        rule: mapping rule of the parameter.
        layouts: shard layouts, one per rank.
        wanted: for the same ranks, the slices that the engine rank on that rank's device reads.
    """
    for number, part in enumerate(rule.parts) if rule.emits else ():
        for layout, slices in zip(layouts, wanted, strict=True):
            if not (part.alone and _has(layout, number, part.shape, slices.get(part.name))):
                return False
    return True


def _is_read(rule: Rule, slices: Slices) -> bool:
    """Return whether an engine rank with these slices reads any part of a parameter."""
    return any(part.name not in slices or slices[part.name].length > 0 for part in rule.parts)


class Reach(enum.IntEnum):
    """The ranks of a pipeline stage to which the shards of a parameter are sent."""

    OWN = 0
    """Not sent: each rank already has what is read on its device."""
    TENSOR = 1
    """Sent to the ranks over which the parameter is sharded."""
    ALL = 2
    """Sent to those ranks and, for an expert, to all ranks over which experts are divided."""


class Beside(NamedTuple):
    """A rank's position in the groups over which parameters are sharded, and the engine rank on its
    device.

    Attributes:
        tensor, expert_tensor: rank in the tensor-parallel and in the expert-tensor-parallel group.
        owner: rank in the expert-parallel group.
        engine: engine rank that reads on this device; -1 for none.
    """

    tensor: int
    expert_tensor: int
    owner: int
    engine: int


def reach_of(
    rule: Rule,
    owner: int,
    layouts: Sequence[ShardLayout],
    wanted: Sequence[Slices],
    everybody: Collection[Beside],
) -> Reach:
    """Return the smallest ``Reach`` with which each rank gets the data that is read on its device.

    Args:
        rule: mapping rule of the parameter.
        owner: expert-parallel rank that has the expert; ignored for other parameters.
        layouts: shard layouts, by rank in the group over which the parameter is sharded.
        wanted: slices that each engine rank reads.
        everybody: positions of all ranks.
    """
    of_expert = is_expert(rule.megatron_name)
    own_layouts, own_slices = [], []
    for one in everybody:
        slices = wanted[one.engine]
        if not of_expert or one.owner == owner:
            own_layouts.append(layouts[one.expert_tensor if of_expert else one.tensor])
            own_slices.append(slices)
        # A rank that lacks the expert needs it, however the expert itself is sharded.
        elif _is_read(rule, slices):
            return Reach.ALL
    return Reach.OWN if is_cut_alike(rule, own_layouts, own_slices) else Reach.TENSOR


def _has(layout: ShardLayout, number: int, whole: Sequence[int], where: Slice | None) -> bool:
    """Return whether a shard contains slice ``where`` of part ``number``, or the whole part if ``where`` is
    None. The shard's spans must not overlap."""
    # An engine with expert parallelism has empty slices for the experts of its other ranks.
    if where is not None and not where.length:
        return True
    start, stop = (
        (where.start, where.stop)
        if where is not None and where.dim == layout.axis
        else (0, whole[layout.axis])
    )
    found = 0
    for span in layout.spans:
        if span.part == number:
            found += len(range(max(span.start, start), min(span.stop, stop)))
    return found == stop - start


def layouts_of(rule: Rule, ranks: int, padded_vocab: int, architecture: Architecture) -> list[ShardLayout]:
    """Return the layouts of a parameter's shards, by rank; ``padded_vocab`` is the number of rows of the
    padded embedding over all ranks."""
    return [shard_layout(rule, architecture.head_dim, rank, ranks, padded_vocab) for rank in range(ranks)]


def _layouts(rule: Rule, shape: tuple[int, ...], ranks: int, architecture: Architecture) -> list[ShardLayout]:
    """Return the layouts of a parameter's shards, by rank.

    Raises:
        ConversionError: a shard should have another shape than ``shape``.
    """
    layouts = layouts_of(rule, ranks, shape[0] * ranks if rule.kind is Kind.VOCAB else 0, architecture)
    for rank, layout in enumerate(layouts):
        if layout.shape != shape:
            raise ConversionError(
                f"{rule.megatron_name}: the shard of rank {rank} is {list(shape)}, expected "
                f"{list(layout.shape)}",
                "build the model from the architecture that its weights are exported for",
            )
    return layouts


def _copies(
    layout: ShardLayout, number: int, whole: Sequence[int], begin: int, where: Slice | None = None
) -> Iterator[Copy]:
    """Yield the copies from one shard into part ``number`` of shape ``whole``, or into slice ``where`` of
    it.

    ``begin`` is the index of the shard's first element. Shard and slice are treated as matrices: all
    dimensions but the first are flattened into columns.
    """
    wanted = [range(whole[0]), range(math.prod(whole[1:]))]
    if where is not None:
        if where.dim and len(whole) > 2:
            raise ConversionError(
                f"a slice of dimension {where.dim} of a weight of shape {list(whole)}", "report the model"
            )
        wanted[where.dim] = range(where.start, where.stop)
    width, position = math.prod(layout.shape[1:]), 0
    for span in layout.spans:
        if span.part == number:
            here = [range(whole[0]), range(width)]
            here[layout.axis] = range(span.start, span.stop)
            both, first = [], []
            for own, asked in zip(here, wanted, strict=True):
                common = range(max(own.start, asked.start), min(own.stop, asked.stop))
                both.append(common)
                first.append(common.start - own.start)
            # The preceding spans are stored in front of this one.
            first[layout.axis] += position
            source = begin + first[0] * width + first[1]
            target = (both[0].start - wanted[0].start) * len(wanted[1]) + both[1].start - wanted[1].start
            rows, columns = map(len, both)
            # Full rows on both sides are contiguous: one plain copy is faster than a strided one.
            if rows * columns and columns == width == len(wanted[1]):
                yield Copy.run_of(rows * columns, source, target)
            elif rows * columns:
                yield Copy(source, target, (rows, columns), (width, 1), (len(wanted[1]), 1))
        position += span.length


@dataclass(frozen=True, slots=True)
class _Entry:
    """Location of one parameter.

    Attributes:
        rule: mapping rule of the parameter.
        stage: pipeline stage.
        owner: expert-parallel rank; 0 for parameters that all ranks have.
        shape, dtype: shape and dtype of one rank's shard.
    """

    rule: Rule
    stage: int
    owner: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.rule.megatron_name

    @property
    def nbytes(self) -> int:
        """Bytes of one shard."""
        return self.shape.numel() * self.dtype.itemsize


# Parameters that are always gathered together: a single one, or the same number of experts from each
# expert-parallel rank.
_Unit = tuple[_Entry, ...]


class _Bucket:
    """Adjacent parameters of one pipeline stage and dtype whose shards are sent to the same ranks.

    The shards form rows of equal length, one row per contributing rank. These are all ranks that have shards,
    the one expert-parallel rank that has them, or this rank alone.

    Args:
        entries: the parameters.
        reach: how far the shards are sent.
        experts: the expert groups if the parameters belong to experts, else None.
        cut: the groups over which the parameters are sharded.
        architecture: the model.
        slices: slices that are read on this device, by tensor name.

    Attributes:
        first: the first parameter.
        rows, length: number of rows, and of elements per row.
        row, names: index of this rank's row, and names of the parameters in it.
        source: expert-parallel rank that broadcasts its row; None for no broadcast.
        group: group over which rows are all-gathered; None for no all-gather.
        unshard_plan: plan that builds the tensors from the rows.
    """

    def __init__(
        self,
        entries: Sequence[_Entry],
        reach: Reach,
        experts: ExpertGroups | None,
        cut: ParallelGroups | ExpertGroups,
        architecture: Architecture,
        slices: Slices,
    ) -> None:
        self.first = entries[0]
        own = experts.model_rank if experts is not None else 0
        shard_ranks = [cut.tensor_rank] if reach is Reach.OWN else list(range(cut.tensor_size))
        owners, self.source, self.group = [own], None, cut.tensor if len(shard_ranks) > 1 else None
        if reach is Reach.ALL and experts is not None and experts.model_size > 1:
            owners = sorted({entry.owner for entry in entries})
            # If one rank owns all experts of the bucket, it broadcasts them. Otherwise each rank owns the
            # same number, and a single all-gather is enough.
            if len(owners) == 1:
                self.source = owners[0]
            else:
                self.group = experts.tensor_and_model
        self.rows = len(owners) * len(shard_ranks)
        # A rank without these experts receives the row of its expert-tensor-parallel counterpart that has
        # them.
        self.row = (owners.index(own) if own in owners else 0) * len(shard_ranks) + shard_ranks.index(
            cut.tensor_rank
        )
        self.names = [entry.name for entry in entries if entry.owner == own]
        # The unpacking checks that all rows have one length, on which the all-gather relies.
        lengths = dict.fromkeys(owners, 0)
        for entry in entries:
            if entry.owner in lengths:
                lengths[entry.owner] += entry.shape.numel()
        [self.length] = set(lengths.values())
        # Owner -> offset in elements, from the start of the buffer, of its next shard in the first of its
        # rows. It has a row for each shard rank.
        coming = {owner: index * len(shard_ranks) * self.length for index, owner in enumerate(owners)}
        begins: list[dict[int, int]] = []
        for entry in entries:
            begins.append({})
            if entry.owner in coming:
                for row, rank in enumerate(shard_ranks):
                    begins[-1][rank] = coming[entry.owner] + row * self.length
                coming[entry.owner] += entry.shape.numel()
        rules, shapes = [entry.rule for entry in entries], [entry.shape for entry in entries]
        self.unshard_plan = assembly_of(
            rules, shapes, cut.tensor_size, architecture, slices=slices, begins=begins
        )


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
    """Start sending a bucket to the ranks that read it, and return the bucket in flight.

    Args:
        bucket: the bucket.
        held: this rank's shards by name.
        groups, experts: the process groups.
        spare: provides memory for the bucket.
        everywhere: send to all pipeline stages instead of the bucket's own stage only.
    """
    device = held[next(iter(held))].device
    # Reuse an earlier bucket's memory if possible, because the kernel has to clear newly allocated pages.
    shards = spare.empty(bucket.rows * bucket.length, bucket.first.dtype, device).view(
        bucket.rows, bucket.length
    )
    pending: dist.Work | None = None
    # Without an exchange, a rank that has none of the bucket's experts has an empty row.
    if bucket.length and groups.pipeline_rank == bucket.first.stage:
        own = shards[bucket.row]
        if bucket.names:
            torch.cat([held[name].flatten() for name in bucket.names], out=own)
            # Check the size, because torch.cat resizes an output of the wrong size instead of failing.
            if len(own) != bucket.length:
                raise StateError(
                    f"{bucket.names[0]} or one of the {len(bucket.names) - 1} parameters after it "
                    "has changed its shape: make a new policy"
                )
        if bucket.source is not None:
            pending = dist.broadcast(
                own,
                src=dist.get_global_rank(experts.model, bucket.source),
                group=experts.model,
                async_op=True,
            )
        if bucket.group is not None:
            if pending is not None:
                pending.wait()
            pending = dist.all_gather_into_tensor(shards.view(-1), own, group=bucket.group, async_op=True)
    # Broadcast between stages after the gather, so that the other stages need no gather of their own.
    if everywhere and groups.pipeline_size > 1 and bucket.length:
        if pending is not None:
            pending.wait()
        source = dist.get_global_rank(groups.pipeline, bucket.first.stage)
        pending = dist.broadcast(shards, src=source, group=groups.pipeline, async_op=True)
    return InFlightBucket(bucket.unshard_plan, shards, pending, spare)


class WeightStream:
    """Stream of a model's weights as full Hugging Face tensors, which can be read any number of times.

    Args:
        chunks: the unwrapped model chunks of this rank.
        architecture: sizes and layers of the model, from which names and shapes of its tensors follow.
        groups, experts: the process groups.
        bucket_bytes: maximum bytes of the shards gathered together, unless a single parameter is larger.
        exported: maps this rank's shards, by name, to the shards to send. Its result may compute a shard on
            access, as for merged adapters.
    """

    def __init__(
        self,
        chunks: Sequence[LanguageModule],
        architecture: Architecture,
        groups: ParallelGroups,
        experts: ExpertGroups,
        bucket_bytes: int,
        exported: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = lambda held: held,
    ) -> None:
        self._chunks = chunks
        self._architecture = architecture
        self._groups = groups
        self._experts = experts
        self._bucket_bytes = bucket_bytes
        self._exported = exported
        self._places: dict[str, TensorPlace] = {}
        self._buckets: list[_Bucket] | None = None
        self._sliced: list[_Bucket] = []
        self._slices: Slices = {}
        self._units: list[_Unit] = []
        self._all_alone = all(part.alone for part in hf_tensors(architecture))

    def __iter__(self) -> WeightIterator:
        """Yield Hugging Face names and full tensors (in the parameters' dtype, on this rank's device), in the
        order of the mapping rules.

        If the experts of a layer are divided over ranks and exceed one bucket, each bucket has the same
        number of experts from each rank.

        Collective: all ranks must read the same number of tensors. Tensors are contiguous and never
        overwritten later, but many share one storage, which is freed only when none of them is referenced.
        The stream needs up to five buckets of ``bucket_bytes`` (or of the largest parameter) in addition to
        the model. A family that stores all experts of a layer in one tensor needs memory for that tensor too.
        """
        return self._joined(GatherStream(self._arrivals(SpareMemory(), everywhere=True)))

    def agree_on_slices(self, wanted: Sequence[Slices], beside: int) -> dict[str, Slice]:
        """Agree on the slices that ``sliced`` yields from now on: those that the engine rank on each device
        reads. Collective, after one pass through the weights.

        A weight is not gathered if each rank's own shard contains everything that is read on its device. An
        expert is not sent to devices that read nothing of it. Other weights are gathered and then sliced.

        Args:
            wanted: the slices that each engine rank reads.
            beside: the engine rank that reads on this device; -1 for none.

        Returns:
            The slice read on this device, for each weight that some engine rank does not read in full; the
            names are equal on all ranks. Empty if a device has no engine rank.

        Raises:
            StateError: there was no pass through the weights yet.
        """
        if self._buckets is None:
            raise StateError(
                "slices are chosen after a first pass over the weights: take the refit info first"
            )
        here = Beside(self._groups.tensor_rank, self._experts.tensor_rank, self._experts.model_rank, beside)
        # Gather the positions of all ranks, so that each derives the same reach for every parameter.
        everybody = gather_objects(here)
        # Either all ranks or none take slices, because all must run the same collectives.
        if any(one.engine < 0 for one in everybody):
            return {}
        places = (part.places[0] for part in hf_tensors(self._architecture))
        shapes = {place.name: place.shape for place in places}
        # Exclude these slices, because the copies from shards treat a weight as a matrix.
        names: set[str] = set()
        excluded: set[str] = set()
        for slices in wanted:
            for name, where in slices.items():
                (excluded if where.dim and len(shapes[name]) > 2 else names).add(name)
        names -= excluded
        chosen: list[Slices] = []
        for slices in wanted:
            chosen.append({name: where for name, where in slices.items() if name in names})
        self._slices = {name: chosen[beside].get(name, Slice.all_of(shapes[name])) for name in names}
        self._sliced = self._in_buckets(
            [(unit, self._reach(unit, chosen, set(everybody))) for unit in self._units], self._slices
        )
        return dict(self._slices)

    def _reach(self, unit: _Unit, wanted: Sequence[Slices], everybody: Collection[Beside]) -> Reach:
        """Return the reach of a unit, whose parameters are sent together; see ``reach_of``."""
        ranks = self._cut(unit[0]).tensor_size
        reach = Reach.OWN
        for entry in unit:
            layouts = _layouts(entry.rule, tuple(entry.shape), ranks, self._architecture)
            reach = max(reach, reach_of(entry.rule, entry.owner, layouts, wanted, everybody))
        return reach

    def sliced(self) -> WeightIterator:
        """Yield what the engine rank on this device reads: the agreed slices, and the other weights in full,
        in the order of ``__iter__``. Collective."""
        return self._joined(
            GatherStream(self._arrivals(SpareMemory(), everywhere=True, sliced=True)), self._slices
        )

    def of_stage(self) -> WeightIterator:
        """Yield the weights of this rank's pipeline stage, in the order of ``__iter__``.

        Collective over the ranks of the stage; the first pass over the weights is collective over all ranks.
        """
        return self._joined(GatherStream(self._arrivals(SpareMemory(), everywhere=False)))

    def _joined(self, gather_stream: GatherStream, slices: Slices = MappingProxyType({})) -> WeightIterator:
        """Join the weights that the model family stores in one tensor, and cut joined tensors to their
        slices."""
        if self._all_alone:
            return gather_stream
        alone = {part.name for part in hf_tensors(self._architecture) if part.alone}
        stored = {name: where for name, where in slices.items() if name not in alone}
        joined = join(gather_stream, self._architecture)
        return (
            (name, stored[name].of(tensor).contiguous() if name in stored else tensor)
            for name, tensor in joined
        )

    def names_by_stage(self) -> list[list[str]]:
        """Return the tensor names that ``of_stage`` yields on each pipeline stage. Local: the names come from
        the plan.

        Raises:
            StateError: there was no pass through the weights yet, so there is no plan.
        """
        if self._buckets is None:
            raise StateError(
                "the names of all stages are known after a first pass over the weights: take the "
                "refit info first"
            )
        names = []
        for stage in range(self._groups.pipeline_size):
            names.append(list(dict(join(self._without_memory(stage), self._architecture))))
        return names

    def _without_memory(self, stage: int) -> WeightIterator:
        """Yield the names that a stage exports, with meta tensors of the right shapes."""
        for bucket in self._buckets or ():
            if bucket.first.stage == stage:
                yield from bucket.unshard_plan.tensors(
                    torch.empty(bucket.rows, bucket.length, dtype=bucket.first.dtype, device="meta")
                )

    def _arrivals(
        self, spare: SpareMemory, *, everywhere: bool, sliced: bool = False
    ) -> Iterator[InFlightBucket]:
        """Yield the buckets in order; a bucket is sent when it is requested."""
        if self._buckets is None:
            # Store tensors under the names of the mapping rules, because Transformer Engine's layers have
            # other names.
            named = places_of(self._chunks, self._experts)
            self._places = {rule_for(name, self._architecture).megatron_name: place for name, place in named}
        held: Mapping[str, torch.Tensor] = {name: owner[key] for name, (owner, key) in self._places.items()}
        if self._buckets is None:
            self._buckets = self._plan(held)
        # Wrap the shards after planning, which needs only names and shapes: adapters are then merged one
        # bucket at a time.
        held = self._exported(held)
        for bucket in self._sliced if sliced else self._buckets:
            if everywhere or bucket.first.stage == self._groups.pipeline_rank:
                yield _set_out(bucket, held, self._groups, self._experts, spare, everywhere=everywhere)

    def _plan(self, held: Mapping[str, torch.Tensor]) -> list[_Bucket]:
        """Divide all parameters, in order, into buckets that are equal on all ranks. Names and shapes are
        exchanged only here."""
        listing = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
        stages = gather_objects(listing, self._groups.pipeline)
        entries = (self._entry(rule, stages) for rule in all_rules(self._architecture))
        # Group neighbours only: sorting would change the order of export, on which all ranks and receivers
        # rely.
        alike = itertools.groupby(
            entries, key=lambda entry: (entry.stage, is_expert(entry.name), entry.dtype)
        )
        self._units = []
        for _, neighbours in alike:
            self._units += self._units_of(list(neighbours))
        return self._in_buckets([(unit, Reach.ALL) for unit in self._units], {})

    def _units_of(self, entries: Sequence[_Entry]) -> Iterator[_Unit]:
        """Split adjacent parameters into units that are gathered together.

        If experts are divided over ranks, a unit has the same number of experts from each rank and takes one
        all-gather. If one expert from each rank exceeds a bucket, each parameter is its own unit.
        """
        rounds: dict[str, list[tuple[int, _Entry]]] = {}
        if is_expert(entries[0].name) and self._experts.model_size > 1:
            for place, entry in enumerate(entries):
                # A round is the same local expert on all ranks. Subtracting each rank's offset gives all of
                # them one name.
                rounds.setdefault(shift_expert(entry.name, -entry.owner * self._share), []).append(
                    (place, entry)
                )
        sizes = []
        for alike in rounds.values():
            nbytes = sum(entry.nbytes for _, entry in alike)
            sizes.append(nbytes * self._experts.tensor_size)
        if not rounds or max(sizes) > self._bucket_bytes:
            for entry in entries:
                yield (entry,)
            return
        for several in in_buckets(
            zip(rounds.values(), sizes, strict=True), operator.itemgetter(1), self._bucket_bytes
        ):
            places: list[tuple[int, _Entry]] = []
            for alike, _ in several:
                places += alike
            places.sort(key=operator.itemgetter(0))
            yield tuple(entry for _, entry in places)

    def _in_buckets(self, units: Sequence[tuple[_Unit, Reach]], slices: Slices) -> list[_Bucket]:
        """Group adjacent units whose shards are sent to the same ranks into buckets."""
        found = []
        for (_, of_experts, _, reach, _), run in itertools.groupby(units, key=lambda one: self._way(*one)):
            experts = self._experts if of_experts else None
            for several in in_buckets(run, lambda one: self._bytes_in_stream(*one), self._bucket_bytes):
                entries: list[_Entry] = []
                for unit, _ in several:
                    entries += unit
                found.append(
                    _Bucket(entries, reach, experts, self._cut(entries[0]), self._architecture, slices)
                )
        return found

    def _way(self, unit: _Unit, reach: Reach) -> tuple[Any, ...]:
        """Return the key that adjacent units must share to be in one bucket. It includes the owners of the
        experts if shards are sent to all ranks."""
        owners = sorted({entry.owner for entry in unit}) if reach is Reach.ALL else ()
        return unit[0].stage, is_expert(unit[0].name), unit[0].dtype, reach, owners

    def _bytes_in_stream(self, unit: _Unit, reach: Reach) -> int:
        """Return the bytes of shards that each rank receives."""
        owners: collections.Counter[int] = collections.Counter()
        for entry in unit:
            owners[entry.owner] += entry.nbytes
        ranks = 1 if reach is Reach.OWN else self._cut(unit[0]).tensor_size
        return ranks * (owners.total() if reach is Reach.ALL else max(owners.values()))

    @property
    def _share(self) -> int:
        """Number of experts per rank."""
        return (self._chunks[0].config.num_moe_experts or 0) // self._experts.model_size

    def _entry(self, rule: Rule, stages: Sequence[Mapping[str, tuple[Sequence[int], torch.dtype]]]) -> _Entry:
        """Return the location of a parameter.

        For an expert of another rank, look up this rank's expert at the same local index, which has the same
        shape.
        """
        name, owner = rule.megatron_name, 0
        if is_expert(name):
            owner = expert_index(name) // self._share
            name = shift_expert(name, (self._experts.model_rank - owner) * self._share)
        stage = next(index for index, listing in enumerate(stages) if name in listing)
        shape, dtype = stages[stage][name]
        return _Entry(rule, stage, owner, torch.Size(shape), dtype)

    def _cut(self, entry: _Entry) -> ParallelGroups | ExpertGroups:
        return self._experts if is_expert(entry.name) else self._groups
