"""Layout of a model over ranks: coordinates on the parallel axes and nodes, and layers of each pipeline
stage."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from megarl.config.policy import MegatronConfig


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Index of a rank on each parallel axis, its node, and its index on the node."""

    rank: int
    pipeline: int
    data: int
    context: int
    tensor: int
    node: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Size of each parallel axis in ranks. Adjacent ranks differ first in their tensor index, then in
    context, data and pipeline index."""

    pipeline: int
    data: int
    context: int
    tensor: int
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.pipeline * self.data * self.context * self.tensor

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank.

        Raises:
            IndexError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not one of the {self.world_size} ranks of the layout")
        # Megatron-Core's default order of process groups is tp-cp-ep-dp-pp, the first varying fastest.
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        node, local_rank = divmod(rank, self.ranks_per_node)
        return Coordinates(rank, pipeline, data, context, tensor, node, local_rank)


def layers_per_stage(
    num_layers: int, stages: int, first: int | None = None, last: int | None = None
) -> list[int]:
    """Return the number of layers of each pipeline stage: ``first`` and ``last`` if given, and equal shares
    of the remaining layers for the other stages.

    Source: Megatron-Core's ``TransformerConfig`` (``num_layers_in_first_pipeline_stage``,
    ``num_layers_in_last_pipeline_stage``).

    Raises:
        ValueError: the layers cannot be divided this way; the message gives the reason.
    """
    if stages == 1:
        if first is not None or last is not None:
            raise ValueError("with one pipeline stage there is no first or last stage to give layers to")
        return [num_layers]
    fixed = [count for count in (first, last) if count is not None]
    if min(fixed, default=1) < 1:
        raise ValueError("a pipeline stage needs at least one layer")
    # The stages without a given number must have equal shares.
    rest, others = num_layers - sum(fixed), stages - len(fixed)
    if others == 0:
        if rest != 0:
            raise ValueError(f"the two stages hold {sum(fixed)} layers, the model has {num_layers}")
        return fixed
    if rest < others or rest % others != 0:
        raise ValueError(f"{rest} layers do not divide evenly over {others} pipeline stages")
    middle = [rest // others] * others
    return ([first] if first is not None else []) + middle + ([last] if last is not None else [])


def read_pipeline_layout(text: str) -> list[str]:
    """Return the model chunks of ``pipeline_model_parallel_layout``, in the order in which a token passes
    through them.

    Megarl reads Megatron-Core's notation: ``E`` embedding, ``t`` transformer layer, ``L`` output layer and
    loss, ``|`` between chunks, ``x*3`` and ``(tt|)*3`` for repetitions; commas and spaces are ignored.
    ``"Et*2|(tt|)*2tL"`` gives ``["Ett", "tt", "tt", "tL"]``.

    Raises:
        ValueError: the text has another character, or does not begin with its only ``E`` and end with its
            only ``L``.
    """
    unrolled = text.replace(",", "").replace(" ", "")
    # Expand (...)*n first, because the second pattern would take the closing bracket for a layer.
    for repeated in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        unrolled = re.sub(repeated, lambda found: found.group(1) * int(found.group(2)), unrolled)
    unknown = sorted(set(unrolled) - set("EtL|"))
    if unknown:
        raise ValueError(
            f"{''.join(unknown)!r} is not understood; write E, t, L, |, and *n or (...)*n for repetitions"
        )
    if (
        unrolled.replace("|", "").replace("t", "") != "EL"
        or not unrolled.startswith("E")
        or not unrolled.endswith("L")
    ):
        raise ValueError("the embedding E comes first and the output layer L last, each once")
    return unrolled.split("|")


def pipeline_chunks(megatron: MegatronConfig) -> int:
    """Return the number of model chunks per pipeline stage of a valid ``megatron_cfg``; 1 unless the
    schedule is interleaved."""
    layout = megatron["pipeline_model_parallel_layout"]
    if layout is not None:
        return len(read_pipeline_layout(layout)) // int(megatron["pipeline_model_parallel_size"])
    return megatron["virtual_pipeline_model_parallel_size"] or 1


def consecutive_layers(counts: Iterable[int]) -> list[range]:
    """Return the layer numbers of consecutive parts of a model, from the number of layers of each part."""
    parts = list(counts)
    return [range(end - count, end) for count, end in zip(parts, itertools.accumulate(parts), strict=True)]


def chunks_of_stages(megatron: MegatronConfig, num_layers: int) -> list[list[range]]:
    """Return the layer numbers of each model chunk, as ``[stage][chunk]``.

    Source: Megatron-Core's ``get_transformer_layer_offset``, and ``PipelineParallelLayerLayout`` for a
    written layout.

    Raises:
        ValueError: the layers cannot be divided as configured; the message gives the reason.
    """
    stages, layout = int(megatron["pipeline_model_parallel_size"]), megatron["pipeline_model_parallel_layout"]
    if layout is None:
        first, last = (
            megatron["num_layers_in_first_pipeline_stage"],
            megatron["num_layers_in_last_pipeline_stage"],
        )
        number = pipeline_chunks(megatron)
        counts = layers_per_stage(num_layers, stages, first, last)
        chunks = [count // number for count in counts] * number
    else:
        chunks = [chunk.count("t") for chunk in read_pipeline_layout(layout)]
        if len(chunks) % stages:
            raise ValueError(f"its {len(chunks)} chunks do not divide over {stages} pipeline stages")
        if sum(chunks) != num_layers:
            raise ValueError(f"it places {sum(chunks)} layers, the model has {num_layers}")
    numbers = consecutive_layers(chunks)
    # Megatron-Core assigns chunk c to stage c modulo the number of stages, so a stage's layers are not
    # consecutive.
    return [numbers[stage::stages] for stage in range(stages)]
