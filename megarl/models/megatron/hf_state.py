"""Weights in and out in Hugging Face form: each rank reads only the slices it holds, and the reverse stream gives full tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel

from converters.architecture import Architecture
from converters.experts import is_expert, shift_expert
from converters.rules import rule_for
from converters.shards import load_shard, to_hf
from converters.source import HuggingFaceSource
from megarl.models.engine.groups import ParallelGroups
from megarl.models.megatron.parallel import ExpertGroups

_LAYERS = "decoder.layers."


def global_names(model: GPTModel, experts: ExpertGroups) -> dict[str, str]:
    """A model chunk's parameter names, mapped to the names they have in a model without pipeline stages and expert parallelism."""
    first_expert = experts.model_rank * ((model.config.num_moe_experts or 0) // experts.model_size)
    names = {}
    for local, _ in model.named_parameters():
        name = local
        if local.startswith(_LAYERS):
            index, rest = local[len(_LAYERS) :].split(".", 1)
            layer = model.decoder.layers[int(index)]
            name = f"{_LAYERS}{layer.layer_number - 1}.{rest}"
        names[local] = shift_expert(name, first_expert) if is_expert(name) else name
    return names


def parameters_of(chunks: Sequence[GPTModel], experts: ExpertGroups) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters by the names they have in a model without pipeline stages and expert parallelism."""
    for chunk in chunks:
        names = global_names(chunk, experts)
        for local, parameter in chunk.named_parameters():
            yield names[local], parameter


@torch.no_grad()
def load_from_hf(
    chunks: Sequence[GPTModel], source: HuggingFaceSource, architecture: Architecture, groups: ParallelGroups, experts: ExpertGroups
) -> None:
    """Fill every parameter of this stage from ``source``; only this rank's slices are read."""
    for name, parameter in parameters_of(chunks, experts):
        cut = experts if is_expert(name) else groups
        shard = load_shard(
            rule_for(name, architecture),
            source,
            architecture,
            tp_rank=cut.tensor_rank,
            tp_size=cut.tensor_size,
            padded_vocab=chunks[0].vocab_size,
            dtype=parameter.dtype,
        )
        parameter.copy_(shard)


@torch.no_grad()
def stream_to_hf(
    chunks: Sequence[GPTModel], architecture: Architecture, groups: ParallelGroups, experts: ExpertGroups
) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face names and full tensors (in the parameters' dtype, on this rank's device), in one order on all ranks.

    One Megatron parameter at a time is gathered over the ranks that hold its parts and handed to the other pipeline stages, so that memory
    stays bounded by the largest of them.
    """
    held = dict(parameters_of(chunks, experts))
    device = next(iter(held.values())).device
    for stage in range(groups.pipeline_size):
        source_rank = dist.get_global_rank(groups.pipeline, stage)
        mine = groups.pipeline_rank == stage
        listing: list[Any] = [_listing(held, chunks[0].config.num_moe_experts, experts) if mine else None]
        if groups.pipeline_size > 1:
            dist.broadcast_object_list(listing, src=source_rank, group=groups.pipeline)
        for name, owner, shape, dtype in listing[0]:
            rule = rule_for(name, architecture)
            cut = experts if is_expert(name) else groups
            full = torch.empty(cut.tensor_size, *shape, dtype=dtype, device=device)
            if mine:
                local = held[name].detach().contiguous() if name in held else torch.empty(shape, dtype=dtype, device=device)
                if is_expert(name) and experts.model_size > 1:
                    dist.broadcast(local, src=dist.get_global_rank(experts.model, owner), group=experts.model)
                if cut.tensor_size > 1:
                    dist.all_gather_into_tensor(full.view(cut.tensor_size * shape[0], *shape[1:]), local, group=cut.tensor)
                else:
                    full[0] = local
            if groups.pipeline_size > 1:
                dist.broadcast(full, src=source_rank, group=groups.pipeline)
            yield from to_hf(rule, list(full.unbind(0)), architecture)


def _listing(
    held: dict[str, torch.nn.Parameter], num_experts: int | None, experts: ExpertGroups
) -> list[tuple[str, int, tuple[int, ...], torch.dtype]]:
    """Name, expert-parallel rank that holds it, shape and dtype of every parameter of this stage, the same on all of its ranks."""
    share = (num_experts or 0) // experts.model_size
    listing = []
    for name, parameter in held.items():
        owners = range(experts.model_size) if is_expert(name) else range(1)
        names = [shift_expert(name, (owner - experts.model_rank) * share) for owner in owners] if is_expert(name) else [name]
        listing += [(global_name, owner, tuple(parameter.shape), parameter.dtype) for owner, global_name in zip(owners, names, strict=True)]
    return listing
