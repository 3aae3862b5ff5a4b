"""Layer specs: selects and logs the modules that make up Megatron's GPT layers.

The fused spec uses Transformer Engine's layers on a CUDA device. The *portable spec* uses Megatron's own
parallel linear layers with megarl's attention (``megarl.models.engine.attention``) and norms that support
sequence parallelism, which Megatron-Core offers only with Transformer Engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from converters.mapping.rule import fused_norms
from converters.model_config.layer_kind import LayerKind, Mixer
from megarl.distributed.device import runtime
from megarl.errors import ModelError
from megarl.models.engine.attention import ROWS, SequenceLayout, attention, cached_attention
from megarl.models.engine.context import ContextShare
from megarl.models.engine.decoded_rows import DecodedRows
from megarl.models.megatron.cached_attention import RowSelfAttention
from megarl.models.megatron.gated_delta import gated_delta_spec
from megarl.models.megatron.grouped_experts import GroupedExperts
from megarl.models.megatron.latent_attention import LatentSelfAttention
from megarl.models.megatron.moe_router import BalancedRouter
from megarl.models.megatron.transformer_engine import KEY, find

logger = logging.getLogger(__name__)


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, extended by the engine's.

    Attributes:
        layout: layout of the sequences.
        positions: [t] int64, position in its own sequence of each token on this context-parallel rank.
    """

    layout: SequenceLayout = ROWS
    positions: torch.Tensor | None = None


class PortableAttention(MegatronModule):
    """Megatron's ``core_attention`` computed by the engine's portable attention: causal, with packed
    sequences, context parallelism, sliding windows in all or some layers, and attention sinks.

    Attributes:
        softmax_offset: [H of this rank] sink logits, under the name of Megatron's own attention; None without
            sinks.
        rows: the rows being decoded, set by ``megarl.models.megatron.cached_attention.decoding``; None in
            training.

    Raises:
        ModelError: the model has sinks, and context parallelism is configured to send keys and values in a
            ring.
    """

    rows: DecodedRows | None = None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        window = getattr(config, "window_size", None)
        windowed = is_layer_window_attention(
            window, getattr(config, "window_attn_skip_freq", None), layer_number
        )
        # Megatron-Core's window counts the positions before a query; ours includes the query, so add 1.
        self.window = None if window is None or window[0] < 0 or not windowed else window[0] + 1
        group = pg_collection.cp if pg_collection is not None else None
        size = 1 if group is None else dist.get_world_size(group)
        self.context = (
            ContextShare(dist.get_rank(group), size, group, config.cp_comm_type == "p2p")
            if size > 1
            else ContextShare()
        )
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            if self.context.ring:
                raise ModelError(
                    "context_parallel_comm_type = p2p: attention with sinks does not send keys "
                    "and values around; choose all_gather"
                )
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = torch.cuda.current_device()
            self.softmax_offset = torch.nn.Parameter(
                torch.empty(heads, dtype=config.params_dtype, device=device)
            )
            # Mark the sinks as sharded over the tensor-parallel ranks like the heads. In the gradient norm
            # Megatron-Core counts unmarked parameters only on the first rank.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *unused: Any,
        packed_seq_params: PackedSequences | None = None,
        **ignored: Any,
    ) -> torch.Tensor:
        """Return the attention output [S, B, H * D] for query [S, B, H, D] and key and value [K, B, G, D].
        Packed tensors have no B: [T, H, D], ... -> [T, H * D].

        No mask is needed: padding is on the right, where the causal mask already hides it from every real
        token.
        """
        if packed_seq_params is not None:
            # Megatron-Core's packed tensors have no batch dimension; the engine's are [B, H, S, D].
            query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
            mixed = self._mixed(query, key, value, packed_seq_params.layout)
            return mixed[0].transpose(0, 1).flatten(1)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = self._mixed(query, key, value, SequenceLayout(None, self.context))
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def _mixed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SequenceLayout
    ) -> torch.Tensor:
        # A decoding step has a mask for its cache, a pass over prompts has row lengths, and training has
        # neither.
        mask = None if self.rows is None else self.rows.mask(self.window, query.dtype)
        if mask is not None:
            return cached_attention(
                query, key, value, mask, scale=self.softmax_scale, sinks=self.softmax_offset
            )
        lengths = None if self.rows is None else self.rows.row_lengths
        return attention(
            query,
            key,
            value,
            layout,
            scale=self.softmax_scale,
            window=self.window,
            sinks=self.softmax_offset,
            row_lengths=lengths,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the sharded state dict of the sinks; empty without sinks."""
        # By default Megatron-Core would save the sinks as if they were replicated on all tensor-parallel
        # ranks.
        own = {} if self.softmax_offset is None else {"softmax_offset": self.softmax_offset}
        return make_sharded_tensors_for_checkpoint(own, prefix, {"softmax_offset": 0}, sharded_offsets)


def portable_core(attention: Any) -> PortableAttention:
    """Return a ``PortableAttention`` for an attention layer with another core, sharing that core's sinks if
    it has any."""
    core = attention.core_attention
    config = attention.config
    portable = PortableAttention(config, attention.layer_number, getattr(core, "softmax_scale", None))
    if portable.softmax_offset is not None:
        # Share the parameter, because the optimizer keeps updating it.
        portable.softmax_offset = core.softmax_offset
    return portable


class PortableRMSNorm(torch.nn.RMSNorm):
    """RMSNorm with support for sequence-parallel gradients and for precomputed results.

    The weight takes part in the sequence-parallel gradient reduction. A preceding residual addition may
    already have computed the norm of its sum (``megarl.models.megatron.residual_norm``) and left it with
    ``leave``. A zero-centred norm multiplies by 1 + weight.
    """

    _ready: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=runtime().device)
        # Megatron-Core sums the gradients of marked parameters over the tensor-parallel ranks, each of which
        # saw a part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel
        self.zero_centered = config.layernorm_zero_centered_gamma

    def leave(self, total: torch.Tensor, norm: torch.Tensor) -> None:
        """Store the norm of ``total`` for the next forward pass."""
        self._ready = total, norm

    def forward(self, x: torch.Tensor | Callable[[torch.Tensor, float | None], Any]) -> Any:
        """Return the norm of ``x``, or, if ``x`` is a function, its result for weight and epsilon.

        A function is called through the module so that forward hooks run first, such as that of
        Megatron-Core's ``overlap_param_gather``, which waits for the weight.
        """
        if not isinstance(x, torch.Tensor):
            return x(self.weight, self.eps)
        # Drop the stored norm after one use, because it holds the memory of two activations per layer.
        ready, self._ready = self._ready, None
        # Compare the autograd nodes too: recomputation returns the same tensor with another node, of which
        # the stored norm is not part.
        if (
            ready is not None
            and ready[0] is x
            and ready[1].grad_fn is x.grad_fn
            and torch.is_grad_enabled() == ready[1].requires_grad
        ):
            return ready[1]
        if self.zero_centered:
            # Compute 1 + weight in float32: near 1, 16 bits would lose most of a small weight.
            wide = torch.promote_types(x.dtype, torch.float32)
            return torch.nn.functional.rms_norm(
                x.to(wide), self.normalized_shape, 1 + self.weight.to(wide), self.eps
            ).to(x.dtype)
        return super().forward(x)


def with_our_router(experts: Any) -> Any:
    """Put ``BalancedRouter`` into Megatron's spec of an expert layer and return the spec. The spec is a
    ``ModuleSpec`` up to 0.16, a partial constructor later."""
    submodules = experts.submodules if isinstance(experts, ModuleSpec) else experts.keywords["submodules"]
    submodules.router = BalancedRouter
    return experts


def _grouped(experts: Any) -> Any:
    """Put ``GroupedExperts`` into Megatron's spec of an expert layer, in either form, and return the spec."""
    submodules = experts.submodules if isinstance(experts, ModuleSpec) else experts.keywords["submodules"]
    inner = submodules.experts
    if isinstance(inner, ModuleSpec):
        inner.module = GroupedExperts
    else:
        # Later releases have a partial constructor, whose arguments must be kept.
        submodules.experts = functools.partial(GroupedExperts, *inner.args, **inner.keywords)
    return experts


def _portable_experts(config: TransformerConfig) -> Any:
    experts = with_our_router(get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts))
    return _grouped(experts) if config.grouped_experts else experts


def _attention(config: TransformerConfig) -> ModuleSpec:
    head_norm = PortableRMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=RowSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PortableAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _latent_attention(config: TransformerConfig) -> ModuleSpec:
    return ModuleSpec(
        module=LatentSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=PortableAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=PortableRMSNorm,
            kv_layernorm=PortableRMSNorm,
        ),
    )


# Builders of the portable spec of a layer's token mixer, by ``LayerKind.mixer``.
_MIXERS: Mapping[str, Callable[[TransformerConfig], ModuleSpec]] = {
    "attention": _attention,
    "latent": _latent_attention,
    "gated_delta": lambda config: gated_delta_spec(),
}


def _portable_layer(config: TransformerConfig, kind: LayerKind) -> ModuleSpec:
    """Return the portable spec of one layer."""
    dense = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    # Store these norms under the names in Transformer Engine's fused layers, so that each spec can load the
    # other's checkpoints.
    names = {
        norm.removesuffix("weight"): inside.removesuffix("weight")
        for norm, inside in fused_norms(kind).items()
    }
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=PortableRMSNorm,
            self_attention=_MIXERS[kind.mixer](config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=PortableRMSNorm,
            mlp=_portable_experts(config) if kind.sparse else dense,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=names,
        ),
    )


def _layers_of_chunk(config: TransformerConfig, chunk: int | None, stage: int | None) -> list[int]:
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return list(layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=chunk, pp_rank=stage))
    # Without a layout Megatron-Core divides the layers over the stages itself; ask its own functions, which
    # know about uneven first and last stages.
    first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)))


def kinds_of_chunk(config: TransformerConfig, chunk: int | None, stage: int | None = None) -> list[LayerKind]:
    """Return the layer kinds of one model chunk of a pipeline stage.

    Args:
        config: Megatron's model configuration.
        chunk: index of the chunk; None if stages have a single chunk.
        stage: pipeline stage; None for this rank's.
    """
    return [_kind_of(config, layer) for layer in _layers_of_chunk(config, chunk, stage)]


def _kind_of(config: TransformerConfig, layer: int) -> LayerKind:
    mixer: Mixer = "latent" if config.multi_latent_attention else "attention"
    linear = config.linear_attention_freq
    if linear is not None and linear[layer]:
        mixer = "gated_delta"
    frequency = config.moe_layer_freq
    sparse = bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0
    return LayerKind(mixer, config.num_moe_experts is not None and sparse)


def decoder_spec(config: TransformerConfig, chunk: int | None, *, fused: bool) -> TransformerBlockSubmodules:
    """Return the layer specs of one model chunk of this pipeline stage.

    Args:
        config: Megatron's model configuration.
        chunk: index of the chunk; None if stages have a single chunk.
        fused: use Transformer Engine's layers.
    """
    kinds = kinds_of_chunk(config, chunk)
    if fused:
        logger.info("layer spec: Transformer Engine")
        # Replace only router and attention in Megatron-Core's spec, so that fusions added by new releases are
        # used.
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk)
        for layer, kind in zip(block.layer_specs, kinds, strict=True):
            layer.submodules.self_attention.module = (
                LatentSelfAttention if kind.mixer == "latent" else RowSelfAttention
            )
            if kind.sparse:
                with_our_router(layer.submodules.mlp)
        return block
    logger.info("layer spec: portable (Transformer Engine: %s)", find().reason or f"not taken, see {KEY}")
    # Build a spec per layer, because dense and sparse layers, and attention and gated delta nets, may
    # alternate.
    layers = [_portable_layer(config, kind) for kind in kinds]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=PortableRMSNorm)
