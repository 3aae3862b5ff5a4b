"""Megatron-Core's HybridModel, the successor of GPTModel, with GPTModel's parameter names and checkpoints.

A HybridModel's decoder is a sequence of half layers, given by a pattern of symbols: token mixers, MLPs or
expert layers. Here each layer of a model becomes two half layers, split from GPTModel's layer spec, and both
have that layer's number. So everything that depends on layer numbers and names (mapping rules, windows,
caches, routing records, checkpoints) is the same for both classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import sharded_state_dict_default

from converters.model_config.layer_kind import LayerKind
from megarl.models.megatron.specs import kinds_of_chunk
from megarl.patched import patched

# Symbol and spec name of the mixer's half layer, by ``LayerKind.mixer``.
_MIXERS = {
    "attention": (Symbols.ATTENTION, "attention_layer"),
    "latent": (Symbols.MLA, "mla_layer"),
    "gated_delta": (Symbols.GDN, "gdn_layer"),
}
_MLP, _EXPERTS = (Symbols.MLP, "mlp_layer"), (Symbols.MOE, "moe_layer")


class HalfLayer(TransformerLayer):
    """A layer's token mixer, or its MLP, with the number of the layer."""

    def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int, **options: Any) -> None:
        # HybridStack counts half layers from 1; two of them share a layer number.
        super().__init__(config, submodules, (layer_number + 1) // 2, **options)
        if isinstance(self.mlp, IdentityOp):
            # Without an MLP there is nothing to recompute; Megatron-Core would checkpoint an identity.
            self.recompute_mlp = False


class Decoder(HybridStack):
    """A ``HybridStack`` of half layers with the checkpoints of GPTModel's decoder."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = None, metadata: Mapping[str, object] | None = None
    ) -> ShardedStateDict:
        """Return the sharded state dict, keyed by local names. Tensors have GPTModel's checkpoint names;
        layers of one form share one tensor, as in GPTModel."""
        config = self.config
        # GPTModel's decoder also decides by these settings whether each layer has its own tensors.
        apart = bool((metadata or {}).get("non_homogeneous_layers"))
        apart = (
            apart or isinstance(config.moe_layer_freq, list) or isinstance(config.linear_attention_freq, list)
        )
        sharded: ShardedStateDict = {}
        for index, layer in enumerate(self.layers):
            local, number = f"{prefix}layers.{index}.", layer.layer_number - 1
            half = layer.sharded_state_dict(
                local, () if apart else ((0, number, config.num_layers),), metadata
            )
            replace_prefix_for_sharding(
                half, local, f"{prefix}layers.{number}." if apart else f"{prefix}layers."
            )
            sharded |= half
        if self.post_process:
            norm = sharded_state_dict_default(
                self.final_norm, f"{prefix}final_norm.", (), metadata, tp_group=self.tp_group
            )
            replace_prefix_for_sharding(norm, f"{prefix}final_norm.", f"{prefix}final_layernorm.")
            sharded |= norm
        return sharded


class LayeredModel(HybridModel):
    """A HybridModel with the features that only GPTModel has."""

    def forward(self, *arguments: Any, padding_mask: torch.Tensor | None = None, **options: Any) -> Any:
        """Run the forward pass of ``HybridModel``; scatter ``padding_mask`` over the sequence in the first
        chunk, as GPTModel does."""
        if padding_mask is not None and self.pre_process and self.config.sequence_parallel:
            padding_mask = (
                scatter_to_sequence_parallel_region(
                    padding_mask.t().contiguous(), group=self.pg_collection.tp
                )
                .t()
                .contiguous()
            )
        return super().forward(*arguments, padding_mask=padding_mask, **options)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Mapping[str, object] | None = None
    ) -> ShardedStateDict:
        """Return the sharded state dict without the output layer's empty extra state, which GPTModel's
        checkpoints lack."""
        sharded: ShardedStateDict = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        sharded.pop(f"{prefix}output_layer._extra_state", None)
        return sharded


def hybrid_model(
    config: TransformerConfig,
    chunk: int | None,
    layers: TransformerBlockSubmodules,
    options: Mapping[str, object],
    **ends: Any,
) -> HybridModel:
    """Build one model chunk of this pipeline stage.

    Args:
        config: Megatron's model configuration.
        chunk: index of the chunk; None if the stage has a single chunk.
        layers: GPTModel's layer specs of the chunk.
        options: keyword arguments of GPTModel.
        ends: ``pre_process`` and ``post_process``, as in GPTModel.
    """
    # Copy the options, because the other chunks are built from them too.
    options = dict(options)
    # HybridModel has no arguments for rotary scaling; it is applied below.
    scaled, factor = options.pop("rope_scaling", False), options.pop("rope_scaling_factor", None)
    # Clear these counts: the bars in the pattern also divide the layers, and HybridModel accepts only one of
    # the two.
    uneven = [(config, f"num_layers_in_{end}_pipeline_stage", None) for end in ("first", "last")]
    pattern = _pattern(config)
    if config.recompute_num_layers is not None:
        config.recompute_num_layers = 2  # the halves of one layer
    stack = ModuleSpec(
        module=Decoder, submodules=_submodules(kinds_of_chunk(config, chunk), layers.layer_specs)
    )
    # HybridStack always uses Transformer Engine's norm as its last norm, so patch that name.
    with patched(*uneven, (hybrid_block, "TENorm", layers.layer_norm)):
        model = LayeredModel(
            config=config,
            hybrid_stack_spec=stack,
            hybrid_layer_pattern=pattern,
            parallel_output=True,
            vp_stage=chunk,
            **ends,
            **options,
        )
    if scaled:
        model.rotary_pos_emb.inv_freq = model.rotary_pos_emb._apply_scaling(
            model.rotary_pos_emb.inv_freq, factor=factor
        )
    return model


def _pattern(config: TransformerConfig) -> str:
    """Return the symbols of all half layers, with a bar between chunks. The first chunks of all stages come
    before all second chunks."""
    chunks = config.virtual_pipeline_model_parallel_size
    patterns = []
    for chunk in [None] if chunks is None else range(chunks):
        for stage in range(config.pipeline_model_parallel_size):
            halves = itertools.chain.from_iterable(map(_halves, kinds_of_chunk(config, chunk, stage)))
            patterns.append("".join(symbol for symbol, _ in halves))
    return Symbols.PIPE.join(patterns)


def _halves(kind: LayerKind) -> tuple[tuple[str, str], tuple[str, str]]:
    return _MIXERS[kind.mixer], _EXPERTS if kind.sparse else _MLP


def _submodules(kinds: Sequence[LayerKind], layers: Sequence[ModuleSpec]) -> HybridStackSubmodules:
    """Return the specs of the half layers of some layers."""
    specs: dict[str, ModuleSpec] = {}
    for kind, layer in zip(kinds, layers, strict=True):
        (_, mixer), (_, mlp) = _halves(kind)
        parts = layer.submodules
        first = replace(parts, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
        second = replace(
            parts, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
        )
        # One spec per symbol suffices, because layers of one kind do not differ.
        specs[mixer] = ModuleSpec(module=HalfLayer, submodules=first)
        specs[mlp] = ModuleSpec(module=HalfLayer, submodules=second)
    return HybridStackSubmodules(**specs)
