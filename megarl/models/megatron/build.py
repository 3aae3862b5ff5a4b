"""Builds this worker's model chunks: one Megatron GPTModel or HybridModel per chunk of its pipeline stage,
wrapped for data parallelism."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, distributed_data_parallel
from megatron.core.distributed.param_and_grad_buffer import partition_buckets
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from converters.mapping.rule import is_expert
from converters.model_config.architecture import Architecture
from converters.model_config.megatron_settings import megatron_settings
from megarl.config.arithmetic import padded_vocabulary
from megarl.config.backend import absent_hybrid_model, scores
from megarl.config.policy import PolicyConfig
from megarl.env import installed_version
from megarl.errors import ConfigError, Violation
from megarl.models.engine.groups import ParallelGroups, summed_gradients
from megarl.models.engine.microbatches import round_up
from megarl.models.megatron.latent_attention import set_latent_norm_epsilon, share_rotary_tables
from megarl.models.megatron.moe_router import routers, teach_routing
from megarl.models.megatron.residual_norm import join_norms, joins_norms
from megarl.models.megatron.settings import ddp_config, transformer_config
from megarl.models.megatron.specs import decoder_spec
from megarl.models.megatron.transformer_engine import uses_transformer_engine
from megarl.patched import patched


def build_chunks(
    policy: PolicyConfig, architecture: Architecture, groups: ParallelGroups
) -> list[LanguageModule]:
    """Return the model chunks of this pipeline stage (one, unless the pipeline is interleaved) on the current
    device. Collective over the world.

    Weights are uninitialised and must be loaded first. A reward or value model has a ``ScoreLayer`` in place
    of its output layer.
    """
    # Gated delta nets exist only as portable layers.
    fused = architecture.gated_delta is None and uses_transformer_engine(
        policy, has_experts=architecture.mixture is not None
    )
    head = architecture.head if scores(policy) else None
    if head is not None:
        # Megatron-Core has no score layer: let it build an output layer, which a ScoreLayer replaces below.
        architecture = replace(architecture, head=None)
    config = transformer_config(policy, architecture, fused=fused)
    settings = megatron_settings(architecture)
    options = settings.model
    # Megatron-Core requires the same number of rows on all ranks; VocabularyShard keeps the padding rows out
    # of every softmax.
    options["vocab_size"] = padded_vocabulary(architecture.vocab_size, groups.tensor_size)
    make = _maker(policy["megatron_cfg"]["model_class"])
    count = config.virtual_pipeline_model_parallel_size or 1
    with _tables_in_equal_parts(groups.context_size), _output_layers_that_add_apart():
        chunks = [
            make(
                config,
                chunk if count > 1 else None,
                decoder_spec(config, chunk if count > 1 else None, fused=fused),
                options,
                pre_process=groups.is_first_stage and chunk == 0,
                post_process=groups.is_last_stage and chunk == count - 1,
            )
            for chunk in range(count)
        ]
    for chunk in chunks:
        if chunk.post_process and not layers._grad_accum_fusion_available:
            # Set this after construction: see _output_layers_that_add_apart.
            chunk.output_layer.gradient_accumulation_fusion = False
        scale_rotary_like_llama3(chunk, settings.llama3)
        set_latent_norm_epsilon(chunk, settings.latent_norm_epsilon)
        share_rotary_tables(chunk)
        if head is not None and chunk.post_process:
            chunk.output_layer = ScoreLayer(config, head.labels, groups.tensor)
        if policy["megatron_cfg"]["float32_logits"] and chunk.post_process:
            keep_products_in_float32(chunk.output_layer)
    if joins_norms(config, fused=fused):
        join_norms(chunks)
    teach_routing(chunks, architecture)
    # The data-parallel wrapper sorts parameters into buffers by these marks.
    _mark_experts(chunks)
    _mend_expert_biases(chunks)
    if policy["megatron_cfg"]["freeze_moe_router"]:
        for router in routers(chunks):
            for parameter in router.parameters():
                # Freeze before the data-parallel wrapper, which creates gradient buffers for trained
                # parameters.
                parameter.requires_grad_(False)
    return chunks


_MODEL_CLASS = "policy.megatron_cfg.model_class"


def _maker(chosen: str | None) -> Callable[..., LanguageModule]:
    """Return the function that builds a model chunk: ``_gpt_model`` or
    ``megarl.models.megatron.hybrid.hybrid_model``.

    Raises:
        ConfigError: the installed Megatron-Core lacks the configured class.
    """
    # null selects GPTModel if Megatron-Core still has it, else HybridModel.
    if chosen != "hybrid" and _has_gpt_model():
        return _gpt_model
    if chosen == "gpt":
        raise ConfigError(
            [
                Violation(
                    _MODEL_CLASS,
                    chosen,
                    f"Megatron-Core {installed_version('megatron-core')} has no GPTModel",
                    "write hybrid or null",
                )
            ]
        )
    absent = absent_hybrid_model(_MODEL_CLASS, installed_version("megatron-core") or "0")
    if absent is not None:
        raise ConfigError([absent])
    # Import here, because the module needs parts of Megatron-Core that 0.16 lacks.
    from megarl.models.megatron.hybrid import hybrid_model

    return hybrid_model


def _has_gpt_model() -> bool:
    try:
        return importlib.util.find_spec("megatron.core.models.gpt.gpt_model") is not None
    except ModuleNotFoundError:  # its package is absent too
        return False


def _gpt_model(
    config: TransformerConfig,
    chunk: int | None,
    layers: TransformerBlockSubmodules,
    options: Mapping[str, object],
    **ends: Any,
) -> LanguageModule:
    """Build a GPTModel chunk; see ``hybrid_model``."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    # Keep logits sharded over the vocabulary: gathered, they would be the largest tensor of the step.
    return GPTModel(
        config=config, transformer_layer_spec=layers, parallel_output=True, vp_stage=chunk, **ends, **options
    )


@contextlib.contextmanager
def _tables_in_equal_parts(context_size: int) -> Iterator[None]:
    """Within the context, round the length of YaRN's rotary tables up to a multiple of twice the
    context-parallel size.

    YaRN's embedding builds a table for the model's original length at construction, and each of c
    context-parallel ranks keeps two of 2c equal chunks. The added rows are never read.
    """
    make = YarnRotaryEmbedding._set_cos_sin_cache
    parts = 2 * context_size if context_size > 1 else 1

    def make_even(rotary: YarnRotaryEmbedding, length: int, *arguments: Any, **options: Any) -> None:
        make(rotary, round_up(length, parts), *arguments, **options)

    # Patch the class, because the constructor already builds the table.
    with patched((YarnRotaryEmbedding, "_set_cos_sin_cache", make_even)):
        yield


def _output_layers_that_add_apart() -> contextlib.AbstractContextManager[None]:
    """Return a context in which Megatron-Core can build an output layer without Apex.

    Megatron-Core's output layer has fused gradient accumulation only with an extension of Apex. Without Apex
    it refuses to build the layer if the config enables this fusion, even if all other layers are Transformer
    Engine's.
    """
    return patched((layers, "_grad_accum_fusion_available", True))


class ScoreLayer(torch.nn.Module):
    """Score layer of the last pipeline stage, replicated on every tensor-parallel rank.

    Under sequence parallelism each rank scores its own part of the sequence and computes a part of the
    weight's gradient, which Megatron-Core sums as it does for norms.

    Args:
        config: configuration of the model.
        labels: number of scores per position.
        group: the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, labels: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel, self.tp_group = config.sequence_parallel, group
        # Left uninitialised: load_from_hf, or the seeded new score layer, fills it equally on all ranks.
        weight = torch.empty(
            labels, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel
        # An attribute, as in ColumnParallelLinear, so that keep_products_in_float32 can replace it in both
        # classes.
        self._forward_impl: Any = _plain_linear

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, **unused: Any
    ) -> tuple[torch.Tensor, None]:
        """Return the scores [S, B, labels] of hidden states [s, B, H]; s is S / ranks under sequence
        parallelism, else S. The arguments are those of an output layer."""
        own = self._forward_impl(
            hidden, self.weight, None, allreduce_dgrad=False, sequence_parallel=False, tp_group=self.tp_group
        )
        return gather_from_sequence_parallel_region(
            own, False, self.tp_group
        ) if self.sequence_parallel else own, None


def _plain_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **unused: Any
) -> torch.Tensor:
    return F.linear(input, weight, bias)


def keep_products_in_float32(layer: ColumnParallelLinear | ScoreLayer) -> None:
    """Make a layer with 16-bit weights return its float32 accumulator without rounding it to 16 bits.

    Gradients are not affected: they arrive in float32, are rounded to the layer's dtype, and are multiplied
    in that dtype.
    """
    layer._forward_impl = _float32_linear


def _float32_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup,
    **unused: Any,
) -> torch.Tensor:
    """Return the float32 product [S, B, V / ranks] of ``input`` [s, B, H] and the weight; s is S / ranks
    under sequence parallelism, else S.

    The signature is Megatron-Core's. Options for fused gradient accumulation are ignored, because autograd
    accumulates the gradient.
    """
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = summed_gradients(input, tp_group)
    output: torch.Tensor = Float32Product.apply(input, weight)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias


class Float32Product(torch.autograd.Function):
    """Matmul of tokens [..., H] and the transpose of a weight [V, H] with a float32 result.

    On CUDA, 16-bit operands are multiplied in their own dtype (untested on GPUs); on a CPU they are converted
    to float32 first. Float32 operands give the usual matmul.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        rows = tokens.flatten(0, -2)
        if rows.is_cuda and rows.dtype is not torch.float32:
            # mm accepts out_dtype on CUDA only.
            product = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        else:
            # Products of two 16-bit numbers are exact in float32, so only the sums are rounded, as on a GPU.
            product = rows.float() @ weight.float().t()
        return product.view(*tokens.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        tokens, weight = ctx.saved_tensors
        # Round the gradient like the backward pass of a 16-bit layer, so that only the forward result
        # differs.
        gradient = gradient.to(tokens.dtype)
        of_tokens = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = gradient.flatten(0, -2).t() @ tokens.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return of_tokens, of_weight


def scale_rotary_like_llama3(model: LanguageModule, scaling: Mapping[str, float] | None) -> None:
    """Apply Llama 3's scaling to the rotary frequencies of a model that was built without scaling; None
    leaves them unchanged.

    Args:
        model: a model that has not run yet, because it caches rotary angles by length.
        scaling: arguments of Megatron's own llama3 scaling; Megatron's model constructor passes on only the
            factor.
    """
    if scaling is not None:
        rotary = model.rotary_pos_emb
        # Replace the frequencies, from which the angles of each length are computed and cached on first use.
        rotary.inv_freq = rotary._apply_scaling(rotary.inv_freq, **scaling)


def _mark_experts(chunks: Sequence[torch.nn.Module]) -> None:
    """Mark experts in every layout as reduced over the expert-data-parallel ranks, with their own
    optimizer.

    Megatron-Core marks them only if the expert-parallel size exceeds 1. Two cases need more. Up to 0.16 it
    uses wrong data-parallel ranks for experts that are all on one rank but sharded differently from the other
    layers. And a layout with expert parallelism has two parts of optimizer state, which a layout without it
    could not load.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if is_expert(name):
                # Despite its name, this attribute is how Megatron-Core marks a parameter of an expert.
                parameter.allreduce = False


def _mend_expert_biases(chunks: Sequence[torch.nn.Module]) -> None:
    """Correct the handling of biases of the experts' second layer, which Megatron-Core gets right only if
    experts are not divided over ranks.

    Megatron-Core treats such a bias as a replica of the first tensor-parallel rank's bias, although the other
    ranks have other experts. It omits the bias from the gradient norm on these ranks, and under sequence
    parallelism sums the gradients of different experts. If all experts are on one rank, it adds the bias in
    place to the result of a no-op reduction, which breaks the result's gradient.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, RowParallelLinear) and module.is_expert and module.bias is not None:
                module.bias.tensor_model_parallel = True
                module.bias.sequence_parallel = False
                # Skip the reduction, as in every other layout, where the token dispatcher does it.
                module.explicit_expert_comm = True


def _groups_of_one_type(buffers: Sequence[Any], *arguments: Any, **options: Any) -> list[Any]:
    """Return groups of buckets that are reduced together, formed separately for each buffer and thus each
    dtype.

    A gated delta net has float32 weights next to 16-bit ones. gloo reduces tensors of one dtype at a time,
    but for chunks after the first Megatron-Core puts all buffers into one group. Newer Megatron-Core releases
    pass more options.
    """
    groups: list[Any] = []
    for buffer in buffers:
        # One buffer per call, so that no group spans several dtypes.
        groups += partition_buckets([buffer], *arguments, **options)
    return groups


def wrap_for_data_parallel(
    chunks: Sequence[LanguageModule], policy: PolicyConfig, groups: ParallelGroups
) -> list[DistributedDataParallel]:
    """Wrap ``chunks`` with Megatron's gradient and parameter buffers, and configure how the schedules
    synchronise gradients."""
    config: TransformerConfig = chunks[0].config
    distribution = ddp_config(policy, groups.data_size * groups.context_size)
    # Only the first chunk needs buckets: gradients of the others are reduced while other chunks run.
    with patched((distributed_data_parallel, "partition_buckets", _groups_of_one_type)):
        wrapped = [
            DistributedDataParallel(config, distribution, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
    if distribution.overlap_grad_reduce:
        # Without no_sync_func every micro-batch would reduce its gradients, instead of only the last one.
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped
