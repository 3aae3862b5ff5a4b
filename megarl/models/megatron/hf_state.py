"""Loading of weights in Hugging Face form, and the names that parameters have in all layouts.

Each slice of the files is read once, by the first of the ranks that hold it, which sends it to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule

from converters.checkpoint.source import HuggingFaceSource
from converters.mapping.rule import is_expert, shift_expert
from converters.mapping.rules import rule_for
from converters.mapping.shards import load_shard
from converters.model_config.architecture import Architecture
from megarl.distributed.device import runtime
from megarl.errors import ModelError
from megarl.models.engine.groups import ParallelGroups
from megarl.models.megatron.parallel import ExpertGroups, holders

# A module's dictionary of parameters or buffers, and a name in it.
TensorPlace = tuple[dict[str, Any], str]

ADAPTER = "adapter"
"""Name of the submodule of a layer that holds the layer's adapters."""
_LAYERS = "decoder.layers."
_CORRECTION_BIAS = "mlp.router.expert_bias"


def global_names(model: LanguageModule, experts: ExpertGroups) -> dict[str, str]:
    """Return the names of a model chunk's parameters, mapped to their names in a GPTModel without pipeline
    stages and expert parallelism. They include the biases that correct the routing to experts, which Megatron
    keeps as buffers."""
    first_expert = experts.model_rank * ((model.config.num_moe_experts or 0) // experts.model_size)
    names = {}
    for local, _ in _tensors_of(model):
        # HybridModel calls its last norm final_norm.
        name = local.replace("decoder.final_norm.", "decoder.final_layernorm.")
        if local.startswith(_LAYERS):
            index, rest = local[len(_LAYERS) :].split(".", 1)
            layer = model.decoder.layers[int(index)]
            # Use the layer's own number, because its index in a chunk does not count other stages and chunks.
            name = f"{_LAYERS}{layer.layer_number - 1}.{rest}"
        names[local] = shift_expert(name, first_expert) if is_expert(name) else name
    return names


def _tensors_of(model: LanguageModule) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(_CORRECTION_BIAS):
            yield name, buffer


def places_of(chunks: Sequence[LanguageModule], experts: ExpertGroups) -> Iterator[tuple[str, TensorPlace]]:
    """Yield the name of each tensor of ``parameters_of`` that is the model's own, with the dictionary and key
    that hold it, also after the tensor is replaced."""
    for chunk in chunks:
        for local, name in global_names(chunk, experts).items():
            if f".{ADAPTER}." in local:
                continue
            path, _, key = local.rpartition(".")
            module = chunk.get_submodule(path)
            # Yield the dictionary instead of the tensor, which offloads and later loads may replace.
            yield name, (module._parameters if key in module._parameters else module._buffers, key)


def parameters_of(
    chunks: Sequence[LanguageModule], experts: ExpertGroups
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's parameters, and the buffers that checkpoints contain, under their names in a model
    without pipeline stages and expert parallelism."""
    for chunk in chunks:
        names = global_names(chunk, experts)
        for local, tensor in _tensors_of(chunk):
            yield names[local], tensor


@torch.no_grad()
def load_from_hf(
    chunks: Sequence[LanguageModule],
    source: HuggingFaceSource,
    architecture: Architecture,
    groups: ParallelGroups,
    experts: ExpertGroups,
) -> None:
    """Fill every parameter of this stage from ``source``. A collective over the world.

    Only this rank's slices are read, and only by the first of its data-parallel and context-parallel copies,
    which sends the bytes to the others. A rank that cannot read still sends the values that it has, so that
    no rank waits for it, and all ranks fail in the end.

    Raises:
        ModelError: another rank could not read its slices.
    """
    failure: Exception | None = None
    for name, parameter in parameters_of(chunks, experts):
        of_experts = is_expert(name)
        copies = holders(of_experts=of_experts)
        # After a failure continue the loop without reading, because the other ranks wait in the broadcasts
        # below.
        if dist.get_rank(copies) == 0 and failure is None:
            cut = experts if of_experts else groups
            try:
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
            except Exception as error:
                failure = error
        if dist.get_world_size(copies) > 1:
            # Broadcast bytes, so that no value changes on the way.
            whole = parameter.detach().view(-1).view(torch.uint8)
            dist.broadcast(whole, src=dist.get_global_rank(copies, 0), group=copies)
    # Reduce over the world, not over the copies: a stage that loaded its weights must not continue alone.
    failed = torch.tensor([int(failure is not None)], device=runtime().device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if failure is not None:
        raise failure
    if int(failed):
        raise ModelError(f"another rank could not read the weights in {source.directory}: see its own error")
