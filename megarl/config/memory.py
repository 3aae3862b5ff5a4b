"""Memory that a rank needs: exact parameter counts, and estimates of the additional memory of training. All
sizes are in bytes.

The torch backends shard parameters, gradients and optimizer state over all ranks that share a tensor-parallel
part.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from converters.model_config.architecture import ModelFacts
from converters.model_config.layer_kind import LayerKind
from megarl.config.activations import (
    Operations,
    head_activation_bytes,
    layer_activation_bytes,
    most_held,
    operations,
    sparse_layer_activation_bytes,
)
from megarl.config.adapters import adapter_parameters, adapters_of, vocabulary_adapter_parameters
from megarl.config.arithmetic import BatchPlan, padded_vocabulary
from megarl.config.backend import enabled_backend
from megarl.config.engines import is_engine
from megarl.config.layout import Layout, chunks_of_stages
from megarl.config.parameters import (
    expert_layer_parameters,
    layer_parameters,
    layers_by_kind,
    sparse_layers,
    stage_parameters,
)
from megarl.config.policy import (
    STATE_KEYS,
    MegatronConfig,
    MegatronOptimizerConfig,
    PolicyConfig,
)

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of a rank of one pipeline stage.

    Attributes:
        stage: index of the pipeline stage.
        layers: number of layers in the stage.
        parameters: number of parameters on the rank.
        weights: bytes of the weights.
        gradients: bytes of the gradient buffer.
        optimizer: optimizer state, with float32 copies of weights and gradients.
        activations: activations of the layers that all micro-batches in flight keep for the backward pass.
        recomputed: activations of one layer that the backward pass recomputes.
        logits: the last stage's activations of the last norm and the output layer, its logits, whose memory
            their gradient reuses, and the output layer's gradient. The backward pass frees all of these
            before it reaches the layers.
        scoring: memory of a log-probability pass, which never coexists with training activations.
        generation_cache: keys and values of the sequences being generated.
        reference_weights: the reference policy's weights, in host memory.
        host_optimizer: optimizer state that stays in host memory.
        frozen: bytes of the weights that adapters leave untouched, which are among ``weights``.
    """

    stage: int
    layers: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int
    logits: int
    scoring: int
    generation_cache: int
    reference_weights: int
    host_optimizer: int = 0
    frozen: int = 0

    @property
    def peak(self) -> int:
        """Peak memory: weights and optimizer state stay, while passes and generation alternate. Host memory
        is not counted."""
        return self.state + max(
            self.activations + max(self.logits, self.recomputed), self.scoring, self.generation_cache
        )

    @property
    def state(self) -> int:
        """Bytes that training needs for any batch size: weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer


MOMENTS = 2
"""Optimizer-state values per parameter: two as in Adam, which most optimizers do not exceed."""
STORED: Mapping[str, float] = {"float32": 4, "bfloat16": 2, "8bit": 1 + 4 / 256}
"""Bytes per value of optimizer state, by dtype; blocks of 256 values have a float32 scale."""


def optimizer_bytes(optimizer: MegatronOptimizerConfig, weight_bytes: int, gradient_bytes: int) -> float:
    """Return the bytes of optimizer state per parameter, before division over data-parallel ranks.

    These are float32 moments (two for Adam, one for SGD with momentum), and float32 copies of weights and
    gradients unless they are float32 already. Source: the table "theoretical memory footprint" in
    Megatron-Core's guide to the distributed optimizer. If states are below float32 or in host memory,
    gradients are read as they were reduced, without a copy.
    """
    if has_own_states(optimizer):
        copy = 4 * (weight_bytes < 4 and optimizer["master_dtype"] == "float32")
        return copy + STORED[optimizer["exp_avg_dtype"]] + STORED[optimizer["exp_avg_sq_dtype"]]
    moments = MOMENTS if optimizer["optimizer"] == "adam" else int(optimizer["sgd_momentum"] > 0)
    copies = (weight_bytes < 4) + (gradient_bytes < 4)
    return 4 * (moments + copies)


def has_own_states(optimizer: MegatronOptimizerConfig) -> bool:
    """Return whether any states are below float32 or in host memory, in which case megarl keeps them instead
    of Megatron-Core."""
    below = any(optimizer.get(key, "float32") != "float32" for key in STATE_KEYS)
    return below or optimizer.get("optimizer_offload_fraction", 0.0) > 0


def estimate(
    policy: PolicyConfig,
    facts: ModelFacts,
    layout: Layout,
    plan: BatchPlan,
    *,
    reference: bool,
    device: str = "cuda",
) -> list[RankMemory]:
    """Return the memory of one rank of each pipeline stage on the Megatron backend.

    Args:
        policy: a checked ``policy`` section with its defaults, on the Megatron backend.
        facts: sizes of the model.
        layout: layout of the ranks.
        plan: batch sizes.
        reference: whether there is a reference policy.
        device: device type of the ranks.
    """
    chunks = chunks_of_stages(policy["megatron_cfg"], facts.num_layers)
    kept = operations("megatron", device, BYTES[policy["precision"]])
    return [
        _stage_memory(stage, chunks, policy, facts, layout, plan, reference, kept)
        for stage in range(layout.pipeline)
    ]


def _stage_memory(
    stage: int,
    chunks: list[list[range]],
    policy: PolicyConfig,
    facts: ModelFacts,
    layout: Layout,
    plan: BatchPlan,
    reference: bool,
    kept: Operations,
) -> RankMemory:
    megatron, element = policy["megatron_cfg"], kept.element
    # Megatron-Core's gradient buffer is in float32 or in the dtype of the weights.
    gradient = 4 if megatron["distributed_data_parallel_config"]["grad_reduce_in_fp32"] else element
    layers = [list(itertools.chain.from_iterable(of_stage)) for of_stage in chunks]
    shared = stage_parameters(facts, layout.tensor, stage, layers)
    expert = megatron["expert_model_parallel_size"]
    expert_tensor = megatron["expert_tensor_parallel_size"]
    kinds = layers_by_kind(facts, layers[stage])
    experts = sparse_layers(kinds) * expert_layer_parameters(facts, expert, expert_tensor)
    parameters = shared + experts
    each = optimizer_bytes(megatron["optimizer"], element, gradient)
    trained_parameters, adapters = parameters, adapters_of(policy)
    if adapters is not None:
        numbers, held = layers[stage], (facts.num_experts // expert, expert_tensor)
        embedding, output = vocabulary_adapter_parameters(adapters, facts, layout.tensor)
        outside = embedding * (stage == 0) + output * (stage == layout.pipeline - 1)
        shared = outside + adapter_parameters(adapters, facts, numbers, layout.tensor, (0, 1))
        trained_parameters = outside + adapter_parameters(adapters, facts, numbers, layout.tensor, held)
        # The model without its adapters serves as the reference, so that no copy is needed.
        parameters, experts, reference = parameters + trained_parameters, trained_parameters - shared, False
    state = trained_parameters * each
    if megatron["optimizer"]["use_distributed_optimizer"]:
        # Megatron-Core's distributed optimizer divides its state over the data and context ranks together.
        copies = layout.data * layout.context
        # Copies of an expert are on all ranks of a stage that hold no other part of the experts.
        expert_copies = max(1, copies * layout.tensor // (expert * expert_tensor))
        # Round up, because the buffers are padded to equal parts.
        state = -(-shared * each // copies) - (-experts * each // expert_copies)
    share = megatron["optimizer"]["optimizer_offload_fraction"]
    # Include copies of float32 weights, and of the gradients that arrive during the backward pass.
    overlaps = megatron["distributed_data_parallel_config"]["overlap_grad_reduce"] is not False
    early = gradient * (overlaps and policy["precision"] != "float16")
    in_host = share * state * (each + 4 * (element == 4) + early) / each if share else 0
    tokens, scored = _tokens_on_a_rank(policy, layout, plan)
    sizes = (facts, layout.tensor, megatron["sequence_parallel"], expert_tensor, kept)
    trained = _Layers(kinds, tokens, *sizes)
    logits, last = _Logits(), stage == layout.pipeline - 1
    if last:
        logits = logit_bytes(
            policy, facts, layout, plan, BYTES["float32"] if megatron["float32_logits"] else element
        )
    of_chunks = [
        _activations(replace(trained, kinds=layers_by_kind(facts, chunk)), _recomputed(megatron))
        for chunk in chunks[stage]
    ]
    return RankMemory(
        stage=stage,
        layers=len(layers[stage]),
        parameters=parameters,
        weights=parameters * element,
        gradients=trained_parameters * gradient,
        optimizer=int((1 - share) * state),
        activations=most_held(stage, layout.pipeline, plan.micro_batches, [kept for kept, _ in of_chunks]),
        recomputed=max(recomputed for _, recomputed in of_chunks),
        logits=logits.training + trained.head * last,
        scoring=_scoring(_Layers(kinds, scored, *sizes), logits),
        generation_cache=generation_cache_bytes(kinds, policy, facts, layout, element),
        reference_weights=parameters * element if reference else 0,
        host_optimizer=int(in_host),
        frozen=(parameters - trained_parameters) * element if adapters is not None else 0,
    )


@dataclass(frozen=True, slots=True)
class _Layers:
    """Bytes that the layers of a stage keep of one micro-batch.

    Attributes:
        kinds: number of layers of each kind.
        tokens: tokens of the micro-batch on a rank.
        facts: sizes of the model.
        tensor: number of tensor-parallel ranks.
        sequence_parallel: the tensor ranks also divide the activations between the tensor-parallel parts of a
            layer.
        expert_tensor: number of ranks that share an expert.
        kept: sizes of the activations that the operations keep.
    """

    kinds: Mapping[LayerKind, int]
    tokens: int
    facts: ModelFacts
    tensor: int
    sequence_parallel: bool
    expert_tensor: int
    kept: Operations

    def each(self, recomputed: Collection[str] = ()) -> list[int]:
        """Return the bytes that one layer of each kind keeps."""
        sizes = (self.facts, self.tokens, self.tensor, self.sequence_parallel)
        return [
            sparse_layer_activation_bytes(*sizes, self.expert_tensor, self.kept, recomputed, kind.mixer)
            if kind.sparse
            else layer_activation_bytes(*sizes, self.kept, recomputed, kind.mixer)
            for kind in self.kinds
        ]

    def whole(self, recomputed: Collection[str] = ()) -> int:
        """Return the bytes that all layers keep."""
        return sum(
            count * kept for count, kept in zip(self.kinds.values(), self.each(recomputed), strict=True)
        )

    @property
    def inputs(self) -> int:
        """Bytes of the inputs of all layers, which alone are kept if whole layers are recomputed."""
        divided = self.tensor if self.sequence_parallel else 1
        return sum(self.kinds.values()) * (
            self.tokens * self.facts.hidden_size * self.kept.element // divided
        )

    @property
    def head(self) -> int:
        """Bytes that the last norm and the output layer keep."""
        return head_activation_bytes(self.facts, self.tokens, self.tensor, self.sequence_parallel, self.kept)


def _recomputed(megatron: MegatronConfig) -> Collection[str] | None:
    """Return the parts of layers that are recomputed; None if whole layers are."""
    if not megatron["activation_checkpointing"]:
        return ()
    return megatron["recompute_modules"] if megatron["recompute_granularity"] == "selective" else None


def _activations(layers: _Layers, recomputed: Collection[str] | None) -> tuple[int, int]:
    """Return the bytes that the layers keep of one micro-batch, and the most that a single layer
    recomputes."""
    # A chunk that only holds the embedding or the output layer has no layers.
    if recomputed is None:
        return layers.inputs, max(layers.each(), default=0)
    again = (whole - kept for whole, kept in zip(layers.each(), layers.each(recomputed), strict=True))
    return layers.whole(recomputed), max(again, default=0)


@dataclass(frozen=True, slots=True)
class _Logits:
    """Memory of the last stage's output layer.

    Attributes:
        training: the logits, whose memory their gradient reuses, and the gradient of the layer's weight.
        scoring: the logits of a log-probability pass.
    """

    training: int = 0
    scoring: int = 0


def logit_bytes(
    policy: PolicyConfig, facts: ModelFacts, layout: Layout, plan: BatchPlan, element: int
) -> _Logits:
    """Return the memory of the output layer for logits of ``element`` bytes.

    The log-probability kernel, and the PyTorch code that handles few rows at a time, do not copy the logits.
    Their gradient is copied for the matrix products only if the logits are wider than the layers' dtype. With
    chunks, only one chunk's logits exist at a time, and the weight's gradient is accumulated in float32, next
    to one chunk's part. The few outputs of a scoring model are not counted.
    """
    if facts.head is not None:
        return _Logits()
    columns, own = (
        padded_vocabulary(facts.vocab_size, layout.tensor) // layout.tensor,
        BYTES[policy["precision"]],
    )
    training, scoring = _tokens_on_a_rank(policy, layout, plan)
    # With adapters the output layer is not trained, so that its weight has no gradient.
    chunk, weight = (
        policy["logprob_chunk_size"],
        columns * facts.hidden_size if adapters_of(policy) is None else 0,
    )
    gradient = own * weight
    if chunk is not None:
        training, scoring = min(training, chunk), min(scoring, chunk)
        gradient = (4 if own == 4 else 4 + own) * weight
    return _Logits(
        training * columns * (element + own * (element > own)) + gradient, scoring * columns * element
    )


def _tokens_on_a_rank(policy: PolicyConfig, layout: Layout, plan: BatchPlan) -> tuple[int, int]:
    """Return the maximum number of tokens that a rank has of a micro-batch of training, and of one of a
    log-probability pass."""
    scored = plan.logprob_token_budget or policy["logprob_batch_size"] * plan.sequence_length
    return -(-plan.tokens_per_micro_batch // layout.context), -(-scored // layout.context)


def _scoring(layers: _Layers, logits: _Logits) -> int:
    """Return the bytes of a log-probability pass, which keeps no activations: those of one whole layer or of
    the logits, whichever is larger."""
    return max(*layers.each(), logits.scoring)


def generation_cache_bytes(
    kinds: Mapping[LayerKind, int], policy: PolicyConfig, facts: ModelFacts, layout: Layout, element: int
) -> int:
    """Return the bytes of the keys and values of the sequences that are generated at a time, and of the
    states of gated delta nets; 0 if an engine or nothing generates."""
    if policy["generation"] is None or is_engine(policy["generation"]):
        return 0
    tokens = policy["generation_batch_size"] * policy["max_total_sequence_length"]
    # With latent attention, count the keys and values of all heads, and not the latents from which they are
    # projected.
    width = (
        2 * facts.head_dim
        if facts.latent_attention is None
        else facts.latent_attention.qk_head_dim + facts.latent_attention.v_head_dim
    )
    layers = sum(count for kind, count in kinds.items() if kind.mixer != "gated_delta")
    cached = int(layers * facts.num_key_value_heads * width // layout.tensor * element * tokens)
    if facts.gated_delta is not None:
        states = (sum(kinds.values()) - layers) * policy["generation_batch_size"]
        cached += states * facts.gated_delta.state_bytes(element) // layout.tensor
    return cached


GATHERED_LAYERS = 2
"""Number of layers whose parameters are gathered at once: the layer that computes, and the next one."""


def estimate_sharded(
    policy: PolicyConfig, facts: ModelFacts, layout: Layout, plan: BatchPlan, *, reference: bool
) -> RankMemory:
    """Return the memory of a rank on a torch backend.

    Weights and optimizer state are shards in their storage dtypes, and gradients are float32 shards. In
    addition, the full parameters of the layers being computed are held in the compute dtype. So are the
    parameters outside the layers (embedding, last norm, output layer), which stay gathered during a pass.

    Args:
        policy: a checked ``policy`` section with its defaults, on DTensor or FSDP1.
        facts: sizes of the model.
        layout: layout of the ranks.
        plan: batch sizes.
        reference: whether there is a reference policy.
    """
    element, shards, backend = (
        BYTES[policy["precision"]],
        layout.data * layout.context,
        enabled_backend(policy),
    )
    whole, layer = (
        stage_parameters(facts, layout.tensor, 0, [range(facts.num_layers)]),
        layer_parameters(facts, 0, layout.tensor),
    )
    parameters = -(-whole // shards)
    gathered = (GATHERED_LAYERS * layer + whole - facts.num_layers * layer) * element
    stepped = kept = weight_bytes(policy)
    trained_parameters, adapters = parameters, adapters_of(policy)
    if adapters is not None:
        # Weights that are not trained are stored in the dtype of the computation.
        outside = sum(vocabulary_adapter_parameters(adapters, facts, layout.tensor))
        trained_parameters = -(
            -(outside + adapter_parameters(adapters, facts, range(facts.num_layers), layout.tensor)) // shards
        )
        kept, reference = element, False
    offloads = _offloads(policy)
    held = (
        0 if offloads else kept * parameters + (stepped * trained_parameters if adapters is not None else 0)
    )
    device_share = 0 if offloads else 4 * trained_parameters
    dtensor = backend == "dtensor"
    divided = dtensor and policy["dtensor_cfg"]["sequence_parallel"]
    recomputes = (
        policy["dtensor_cfg"]["activation_checkpointing"]
        if dtensor
        else policy["activation_checkpointing_enabled"]
    )
    tokens, scored = _tokens_on_a_rank(policy, layout, plan)
    sizes = (facts, layout.tensor, divided, 1, operations(backend, "", element))
    # The torch backends support neither mixtures of experts nor gated delta nets (rules/not_yet.py).
    kinds = {LayerKind("attention", False): facts.num_layers}
    trained = _Layers(kinds, tokens, *sizes)
    logits, (activations, recomputed) = (
        logit_bytes(policy, facts, layout, plan, element),
        _activations(trained, None if recomputes else ()),
    )
    return RankMemory(
        stage=0,
        layers=facts.num_layers,
        parameters=parameters,
        weights=held + gathered,
        gradients=device_share,
        optimizer=int(device_share * moment_bytes(policy) / 4),
        activations=activations,
        recomputed=recomputed,
        logits=logits.training + trained.head,
        scoring=_scoring(_Layers(kinds, scored, *sizes), logits),
        generation_cache=generation_cache_bytes(kinds, policy, facts, layout, element),
        reference_weights=kept * parameters if reference else 0,
        frozen=kept * parameters if adapters is not None and not offloads else 0,
    )


def weight_bytes(policy: PolicyConfig) -> int:
    """Return the bytes per weight that a torch backend stores and updates."""
    optimizer = policy["optimizer"]
    return BYTES[optimizer["master_dtype"] if optimizer else "float32"]


def moment_bytes(policy: PolicyConfig) -> float:
    """Return the bytes of optimizer moments per parameter on a torch backend."""
    optimizer = policy["optimizer"]
    if not optimizer:
        return MOMENTS * STORED["float32"]
    return STORED[optimizer["exp_avg_dtype"]] + STORED[optimizer["exp_avg_sq_dtype"]]


def _offloads(policy: PolicyConfig) -> bool:
    """Return whether the shards are offloaded to host memory."""
    if enabled_backend(policy) == "dtensor":
        return bool(policy["dtensor_cfg"]["cpu_offload"])
    return bool(policy["fsdp_offload_enabled"])
