"""Loads Hugging Face weights into Megatron models, and gives parameters names that do not depend on the
layout.

Each slice of the files is read once, by the first of the ranks that hold it, which broadcasts it to the
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from megarl.weight_sync.plan import WeightIterator

# A module's dictionary of parameters or buffers, and a key in it.
TensorPlace = tuple[dict[str, torch.Tensor], str]

ADAPTER = "adapter"
"""Name of the submodule that holds a layer's adapters."""
_LAYERS = "decoder.layers."
_CORRECTION_BIAS = "mlp.router.expert_bias"


def global_names(model: LanguageModule, experts: ExpertGroups) -> dict[str, str]:
    """Map the names of a model chunk's parameters to their names in a GPTModel without pipeline stages and
    expert parallelism.

    The routers' correction biases, which Megatron stores as buffers, are included.
    """
    first_expert = experts.model_rank * ((model.config.num_moe_experts or 0) // experts.model_size)
    names = {}
    for local, _ in _tensors_of(model):
        # HybridModel calls the last norm final_norm.
        name = local.replace("decoder.final_norm.", "decoder.final_layernorm.")
        if local.startswith(_LAYERS):
            index, rest = local[len(_LAYERS) :].split(".", 1)
            layer = model.decoder.layers[int(index)]
            # Use the layer's global number: its index in the chunk starts at 0 on every stage and chunk.
            name = f"{_LAYERS}{layer.layer_number - 1}.{rest}"
        names[local] = shift_expert(name, first_expert) if is_expert(name) else name
    return names


def _tensors_of(model: LanguageModule) -> WeightIterator:
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(_CORRECTION_BIAS):
            yield name, buffer


def places_of(chunks: Sequence[LanguageModule], experts: ExpertGroups) -> Iterator[tuple[str, TensorPlace]]:
    """Yield the name of each base-model tensor (no adapters) with the dictionary and key that hold it."""
    for chunk in chunks:
        for local, name in global_names(chunk, experts).items():
            if f".{ADAPTER}." in local:
                continue
            path, _, key = local.rpartition(".")
            module = chunk.get_submodule(path)
            # Yield dictionary and key instead of the tensor, which offloading and loading may replace.
            yield name, (module._parameters if key in module._parameters else module._buffers, key)


def parameters_of(chunks: Sequence[LanguageModule], experts: ExpertGroups) -> WeightIterator:
    """Yield this rank's parameters and checkpointed buffers, under their names in a model without pipeline
    stages and expert parallelism."""
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
    """Load every parameter of this stage from ``source``. Collective over the world.

    Each slice is read by one rank, the first of its data- and context-parallel replicas, which broadcasts the
    bytes. A rank that fails to read still takes part in the broadcasts, so that no rank hangs; all ranks
    raise at the end.

    Raises:
        ModelError: another rank could not read its slices.
    """
    failure: Exception | None = None
    for name, parameter in parameters_of(chunks, experts):
        of_experts = is_expert(name)
        copies = holders(of_experts=of_experts)
        # After a failure, continue without reading, because the other ranks wait in the broadcasts below.
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
            # Broadcast as bytes, which preserves every bit, NaN payloads included.
            whole = parameter.detach().view(-1).view(torch.uint8)
            dist.broadcast(whole, src=dist.get_global_rank(copies, 0), group=copies)
    # Reduce over the world: a stage whose own weights loaded must not continue alone.
    failed = torch.tensor([int(failure is not None)], device=runtime().device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if failure is not None:
        raise failure
    if int(failed):
        raise ModelError(f"another rank could not read the weights in {source.directory}: see its own error")
