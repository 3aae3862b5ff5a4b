"""Layout of ranks: their order over the parallel axes and nodes, and the layers of each pipeline stage."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from megarl.config.policy import MegatronConfig


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's index along each parallel axis, its node, and its place on the node."""

    rank: int
    pipeline: int
    data: int
    context: int
    tensor: int
    node: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel axes, in ranks. Tensor ranks are neighbours, then context, data and, farthest
    apart, pipeline ranks."""

    pipeline: int
    data: int
    context: int
    tensor: int
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pipeline * self.data * self.context * self.tensor

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of ``rank``.

        Raises:
            IndexError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not one of the {self.world_size} ranks of the layout")
        # The order in which Megatron-Core makes its groups by default, tp-cp-ep-dp-pp.
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        node, local_rank = divmod(rank, self.ranks_per_node)
        return Coordinates(rank, pipeline, data, context, tensor, node, local_rank)


def layers_per_stage(
    num_layers: int, stages: int, first: int | None = None, last: int | None = None
) -> list[int]:
    """Return layers of each pipeline stage: ``first`` and ``last`` as given, the others share the rest
    evenly.

    Source: Megatron-Core's ``TransformerConfig`` (``num_layers_in_first_pipeline_stage``,
    ``num_layers_in_last_pipeline_stage``).

    Raises:
        ValueError: the layers cannot be divided like that; the message says why.
    """
    if stages == 1:
        if first is not None or last is not None:
            raise ValueError("with one pipeline stage there is no first or last stage to give layers to")
        return [num_layers]
    fixed = [count for count in (first, last) if count is not None]
    if any(count < 1 for count in fixed):
        raise ValueError("a pipeline stage needs at least one layer")
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
    """Return the model chunks of a written pipeline layout, in the order in which a token goes through them.

    The notation is Megatron-Core's: ``E`` embedding, ``t`` transformer layer, ``L`` output layer and loss,
    ``|`` between chunks, ``x*3`` and ``(tt|)*3`` for repetitions, commas for the eye: ``"Et*2|(tt|)*2tL"`` is
    ``["Ett", "tt", "tt", "tL"]``.

    Raises:
        ValueError: a sign that is none of these, or an embedding or output layer elsewhere than at the two
            ends.
    """
    unrolled = text.replace(",", "").replace(" ", "")
    # Groups first: the second pattern would take a closing bracket for a layer.
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
    """Return the model chunks of one pipeline stage (1 unless the pipeline is interleaved) of a valid
    ``megatron_cfg``."""
    layout = megatron["pipeline_model_parallel_layout"]
    if layout is not None:
        return len(read_pipeline_layout(layout)) // int(megatron["pipeline_model_parallel_size"])
    return megatron["virtual_pipeline_model_parallel_size"] or 1


def consecutive_layers(counts: Iterable[int]) -> list[range]:
    """Return the numbers of the layers of parts that follow one another, by the number of layers of each."""
    parts = list(counts)
    return [range(end - count, end) for count, end in zip(parts, itertools.accumulate(parts), strict=True)]


def layers_of_stages(megatron: MegatronConfig, num_layers: int) -> list[list[int]]:
    """Return the numbers of the layers of each pipeline stage of a ``megatron_cfg``, over all of its chunks.

    Source: Megatron-Core's ``get_transformer_layer_offset``, and ``PipelineParallelLayerLayout`` where the
    layout is written.

    Raises:
        ValueError: the layers cannot be divided as it says; the message says why.
    """
    stages, layout = int(megatron["pipeline_model_parallel_size"]), megatron["pipeline_model_parallel_layout"]
    if layout is None:
        first, last = (
            megatron["num_layers_in_first_pipeline_stage"],
            megatron["num_layers_in_last_pipeline_stage"],
        )
        number = pipeline_chunks(megatron)
        counts = layers_per_stage(num_layers, stages, first, last)
        chunks = [count // number for _ in range(number) for count in counts]
    else:
        chunks = [chunk.count("t") for chunk in read_pipeline_layout(layout)]
        if len(chunks) % stages:
            raise ValueError(f"its {len(chunks)} chunks do not divide over {stages} pipeline stages")
        if sum(chunks) != num_layers:
            raise ValueError(f"it places {sum(chunks)} layers, the model has {num_layers}")
    numbers = consecutive_layers(chunks)
    # Megatron-Core gives chunk c to stage c modulo stages, so that a stage's layers are not neighbours.
    return [list(itertools.chain.from_iterable(numbers[stage::stages])) for stage in range(stages)]
