"""Weights in and out in Hugging Face form: each rank reads only the slices it holds, and the reverse stream gives full tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel

from converters.architecture import Architecture
from converters.rules import rule_for
from converters.shards import load_shard, to_hf
from converters.source import HuggingFaceSource
from megarl.models.engine.groups import ParallelGroups

_LAYERS = "decoder.layers."


def global_names(model: GPTModel) -> dict[str, str]:
    """This stage's parameter names, mapped to the names they have in a model without pipeline stages."""
    names = {}
    for local, _ in model.named_parameters():
        if local.startswith(_LAYERS):
            index, rest = local[len(_LAYERS) :].split(".", 1)
            layer = model.decoder.layers[int(index)]
            names[local] = f"{_LAYERS}{layer.layer_number - 1}.{rest}"
        else:
            names[local] = local
    return names


@torch.no_grad()
def load_from_hf(model: GPTModel, source: HuggingFaceSource, architecture: Architecture, groups: ParallelGroups) -> None:
    """Fill every parameter of this stage from ``source``; only this rank's slices are read."""
    names = global_names(model)
    for local, parameter in model.named_parameters():
        shard = load_shard(
            rule_for(names[local], architecture),
            source,
            architecture,
            tp_rank=groups.tensor_rank,
            tp_size=groups.tensor_size,
            padded_vocab=model.vocab_size,
            dtype=parameter.dtype,
        )
        parameter.copy_(shard)


@torch.no_grad()
def stream_to_hf(model: GPTModel, architecture: Architecture, groups: ParallelGroups) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face names and full tensors (in the parameters' dtype, on this rank's device), in one order on all ranks.

    One Megatron parameter at a time is gathered over the tensor-parallel group and handed to the other pipeline stages, so that memory
    stays bounded by the largest of them.
    """
    names = global_names(model)
    for stage in range(groups.pipeline_size):
        source_rank = dist.get_global_rank(groups.pipeline, stage)
        mine = groups.pipeline_rank == stage
        listing: list[Any] = [[(names[local], tuple(p.shape), p.dtype) for local, p in model.named_parameters()] if mine else None]
        if groups.pipeline_size > 1:
            dist.broadcast_object_list(listing, src=source_rank, group=groups.pipeline)
        parameters = {names[local]: parameter for local, parameter in model.named_parameters()} if mine else {}
        device = next(model.parameters()).device
        for name, shape, dtype in listing[0]:
            rule = rule_for(name, architecture)
            full = torch.empty(groups.tensor_size, *shape, dtype=dtype, device=device)
            if mine:
                local = parameters[name].detach().contiguous()
                if groups.tensor_size > 1:
                    dist.all_gather_into_tensor(full.view(groups.tensor_size * shape[0], *shape[1:]), local, group=groups.tensor)
                else:
                    full[0] = local
            if groups.pipeline_size > 1:
                dist.broadcast(full, src=source_rank, group=groups.pipeline)
            yield from to_hf(rule, list(full.unbind(0)), architecture)
