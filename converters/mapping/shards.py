"""Copy parameters between a Hugging Face checkpoint and tensor-parallel shards, bit by bit unless a dtype is
requested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from converters.checkpoint.source import HuggingFaceSource
from converters.errors import ConversionError
from converters.mapping.layouts import ShardLayout, Span, padded_vocab_size, shard_layout
from converters.mapping.places import locate, read_part, rows_in
from converters.mapping.rule import Kind, Rule, TensorLocation
from converters.mapping.rules import hf_tensors
from converters.model_config.architecture import Architecture


def load_shard(
    rule: Rule,
    source: HuggingFaceSource,
    architecture: Architecture,
    tp_rank: int = 0,
    tp_size: int = 1,
    padded_vocab: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Load a rank's shard of a parameter, reading only the rows and columns that it needs.

    Args:
        rule: rule of the parameter.
        source: checkpoint with the tensors.
        architecture: architecture of the model.
        tp_rank: tensor-parallel rank; for an expert's parameter (``is_expert``) the expert-tensor-parallel
            rank.
        tp_size: size of that group.
        padded_vocab: rows of the padded embedding over all ranks; None for the smallest multiple of
            ``tp_size``. Padding rows are zero.
        dtype: dtype of the result; None for that of the checkpoint.

    Returns:
        A new contiguous CPU tensor.

    Raises:
        ConversionError: a tensor is missing or has a wrong shape, the parameter cannot be divided, or the
            parts have different dtypes and no ``dtype`` is given.
    """
    places = [locate(part, source) for part in rule.parts]
    padded = padded_vocab if padded_vocab is not None else padded_vocab_size(architecture.vocab_size, tp_size)
    layout = shard_layout(rule, architecture.head_dim, tp_rank, tp_size, padded)
    dtype = dtype or _common_dtype(rule, places, source)
    # A single span needs no assembly.
    if len(layout.spans) == 1 and not layout.padding:
        return _read_span(rule, places, source, layout.axis, layout.spans[0]).to(dtype)
    # ``copy_`` casts span by span, so no second full-size tensor is needed.
    shard = torch.empty(layout.shape, dtype=dtype)
    for span in layout.spans:
        shard.narrow(layout.axis, span.position, span.length).copy_(
            _read_span(rule, places, source, layout.axis, span)
        )
    shard.narrow(layout.axis, layout.shape[layout.axis] - layout.padding, layout.padding).zero_()
    return shard


def to_hf(rule: Rule, shards: Sequence[Tensor], architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of a parameter from the shards of all ranks; the inverse of
    ``load_shard``.

    Args:
        rule: rule of the parameter.
        shards: the shard of each tensor-parallel rank (expert-tensor-parallel rank for an expert's
            parameter), in rank order, on the same device. Of a replicated parameter only the first is used.
        architecture: architecture of the model.

    Yields:
        (name, new contiguous full tensor), without padding rows. Nothing for a parameter that another rule
            writes.

    Raises:
        ConversionError: the shards have wrong shapes.
    """
    if not rule.emits:
        return
    if not shards:
        raise ConversionError(
            f"{rule.megatron_name}: no shards given", "pass the shard of every tensor-parallel rank"
        )
    # The trainer may have padded to any size.
    padded = sum(shard.shape[0] for shard in shards if shard.dim()) if rule.kind is Kind.VOCAB else 0
    layouts = []
    for rank, shard in enumerate(shards):
        layout = shard_layout(rule, architecture.head_dim, rank, len(shards), padded)
        layouts.append(layout)
        if tuple(shard.shape) != layout.shape or shard.dtype != shards[0].dtype:
            raise ConversionError(
                f"{rule.megatron_name}: the shard of rank {rank} is {shard.dtype} {list(shard.shape)}, "
                f"expected {shards[0].dtype} {list(layout.shape)}",
                (
                    "pass the shards of all tensor-parallel ranks in rank order, and the architecture that "
                    "the "
                    "model was built from"
                ),
            )
    # All ranks have the same values.
    if rule.kind is Kind.REPLICATED:
        shards, layouts = shards[:1], layouts[:1]
    tensors = [torch.empty(part.shape, dtype=shards[0].dtype, device=shards[0].device) for part in rule.parts]
    # Shards may be parameters, whose copies need no gradients.
    for shard, layout in zip(shards, layouts, strict=True):
        _copy_out(shard.detach(), layout, tensors)
    for part, tensor in zip(rule.parts, tensors, strict=True):
        yield part.name, tensor


def _copy_out(shard: Tensor, layout: ShardLayout, tensors: Sequence[Tensor]) -> None:
    """Copy the spans of a shard to the full tensors."""
    for span in layout.spans:
        rows = shard.narrow(layout.axis, span.position, span.length)
        tensors[span.part].narrow(layout.axis, span.start, span.length).copy_(rows)


def _read_span(
    rule: Rule, places: Sequence[TensorLocation], source: HuggingFaceSource, axis: int, span: Span
) -> Tensor:
    part, place = rule.parts[span.part], places[span.part]
    if span.length == part.shape[axis]:
        return read_part(part, place, source)
    before = tuple(slice(0, size) for size in part.shape[:axis])
    return read_part(part, place, source, (*before, slice(span.start, span.stop)))


def _common_dtype(rule: Rule, places: Sequence[TensorLocation], source: HuggingFaceSource) -> torch.dtype:
    dtypes = {place.name: source.dtype(place.name) for place in places}
    if len(set(dtypes.values())) > 1:
        raise ConversionError(
            f"{rule.megatron_name} is made of tensors stored in different dtypes",
            "pass dtype to choose one",
            [f"{name}: {dtype}" for name, dtype in dtypes.items()],
        )
    return next(iter(dtypes.values()))


def join(stream: Iterable[tuple[str, Tensor]], architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Assemble the tensors of a stream that are stored together, such as a stack of experts.

    Args:
        stream: (name, tensor) for each tensor of the model, once. Tensors that are stored together must have
            the same dtype and device.
        architecture: architecture of the model.

    Yields:
        (stored name, tensor). A tensor that may be stored alone is passed on at once. A stack is yielded when
            its last part has arrived; until then it is in memory.
    """
    parts = {part.name: part for part in hf_tensors(architecture) if not part.alone}
    # Number of parts of each stack that have not arrived yet.
    missing = Counter(part.places[0].name for part in parts.values())
    begun: dict[str, Tensor] = {}
    for name, tensor in stream:
        part = parts.get(name)
        if part is None:
            yield name, tensor
            continue
        place = part.places[0]
        if place.name not in begun:
            begun[place.name] = torch.zeros(place.shape, dtype=tensor.dtype, device=tensor.device)
        whole = begun[place.name]
        rows_in(whole if place.index is None else whole[place.index], place).copy_(tensor)
        missing[place.name] -= 1
        if not missing[place.name]:
            yield place.name, begun.pop(place.name)
