"""Memory of a rank in bytes: exact parameter counts, and estimates of what training needs in addition.

The DTensor and FSDP1 backends shard parameters, gradients and optimizer state over all data- and
context-parallel ranks.
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
    """Memory of one rank of a pipeline stage, in bytes unless stated otherwise.

    Attributes:
        stage: index of the pipeline stage.
        layers: number of layers in the stage.
        parameters: number of parameters on the rank.
        weights: weights, base weights of adapters included.
        gradients: gradient buffer.
        optimizer: optimizer state on the device, with float32 copies of weights and gradients.
        activations: activations of the layers that are stored for the backward pass, over all micro-batches
            in flight.
        recomputed: activations of the one layer that the backward pass is recomputing.
        logits: in the last stage, activations of the final norm and the output layer, the logits (their
            gradient reuses this memory), and the gradient of the output layer's weight. The backward pass
            frees them before it reaches the layers.
        scoring: memory of a log-probability pass, in which no activations of training exist.
        generation_cache: KV cache of the sequences that the policy itself generates at a time.
        reference_weights: the reference policy's weights, in host memory.
        host_optimizer: optimizer state in host memory.
        frozen: base weights of adapters, a part of ``weights``.
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
        """Peak device memory in bytes. Training, log-probability passes and generation alternate, so only
        the largest of the three counts, on top of ``state``."""
        return self.state + max(
            self.activations + max(self.logits, self.recomputed), self.scoring, self.generation_cache
        )

    @property
    def state(self) -> int:
        """Device memory in bytes that training needs at any batch size: weights, gradients and optimizer
        state."""
        return self.weights + self.gradients + self.optimizer


MOMENTS = 2
"""Moments per parameter: two for Adam. Few optimizers have more."""
STORED: Mapping[str, float] = {"float32": 4, "bfloat16": 2, "8bit": 1 + 4 / 256}
"""Bytes per element of optimizer state, by dtype. With ``8bit``, 256 elements share a float32 scale."""


def optimizer_bytes(optimizer: MegatronOptimizerConfig, weight_bytes: int, gradient_bytes: int) -> float:
    """Return the bytes of optimizer state per parameter, before sharding over data-parallel ranks.

    They are float32 moments (two for Adam, one for SGD with momentum), plus float32 copies of weights and of
    gradients that are not float32 themselves. Source: the table "theoretical memory footprint" in
    Megatron-Core's guide to the distributed optimizer. If states are below float32 or in host memory,
    gradients are not copied.

    Args:
        optimizer: the optimizer's section with its defaults.
        weight_bytes: bytes per weight.
        gradient_bytes: bytes per gradient element.
    """
    if has_own_states(optimizer):
        copy = 4 * (weight_bytes < 4 and optimizer["master_dtype"] == "float32")
        return copy + STORED[optimizer["exp_avg_dtype"]] + STORED[optimizer["exp_avg_sq_dtype"]]
    moments = MOMENTS if optimizer["optimizer"] == "adam" else int(optimizer["sgd_momentum"] > 0)
    copies = (weight_bytes < 4) + (gradient_bytes < 4)
    return 4 * (moments + copies)


def has_own_states(optimizer: MegatronOptimizerConfig) -> bool:
    """Return whether megarl instead of Megatron-Core holds the optimizer state: if it is below float32 or in
    host memory."""
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
        policy: a checked ``policy`` section with its defaults.
        facts: sizes of the model.
        layout: sizes of the parallel axes.
        plan: batch sizes.
        reference: the run has a reference policy.
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
    # Megatron-Core's gradient buffer has float32 elements, or those of the weights' dtype.
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
        # The base weights serve as the reference policy, so there is no copy of them.
        parameters, experts, reference = parameters + trained_parameters, trained_parameters - shared, False
    state = trained_parameters * each
    if megatron["optimizer"]["use_distributed_optimizer"]:
        # Megatron-Core's distributed optimizer shards its state over data- and context-parallel ranks
        # together.
        copies = layout.data * layout.context
        # Number of ranks of a stage that hold the same expert shard, over which its state is sharded.
        expert_copies = max(1, copies * layout.tensor // (expert * expert_tensor))
        # Round up, because buffers are padded to shards of equal size.
        state = -(-shared * each // copies) - (-experts * each // expert_copies)
    share = megatron["optimizer"]["optimizer_offload_fraction"]
    # Host memory also holds copies of float32 weights, and of the gradients that the backward pass sends.
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
    """Layers of a pipeline stage, with the sizes that determine their activation bytes for one micro-batch.

    Attributes:
        kinds: number of layers of each kind.
        tokens: tokens of the micro-batch on the rank.
        facts: sizes of the model.
        tensor: tensor-parallel size.
        sequence_parallel: activations between the tensor-parallel parts of a layer are sharded too.
        expert_tensor: tensor-parallel size of an expert.
        kept: activation sizes of the backend's operations.
    """

    kinds: Mapping[LayerKind, int]
    tokens: int
    facts: ModelFacts
    tensor: int
    sequence_parallel: bool
    expert_tensor: int
    kept: Operations

    def each(self, recomputed: Collection[str] = ()) -> list[int]:
        """Return the activation bytes that one layer stores, for each kind of layer."""
        sizes = (self.facts, self.tokens, self.tensor, self.sequence_parallel)
        return [
            sparse_layer_activation_bytes(*sizes, self.expert_tensor, self.kept, recomputed, kind.mixer)
            if kind.sparse
            else layer_activation_bytes(*sizes, self.kept, recomputed, kind.mixer)
            for kind in self.kinds
        ]

    def whole(self, recomputed: Collection[str] = ()) -> int:
        """Return the activation bytes that all layers of the stage store."""
        return sum(
            count * kept for count, kept in zip(self.kinds.values(), self.each(recomputed), strict=True)
        )

    @property
    def inputs(self) -> int:
        """Bytes of the inputs of all layers, which is all that full recomputation stores."""
        divided = self.tensor if self.sequence_parallel else 1
        return sum(self.kinds.values()) * (
            self.tokens * self.facts.hidden_size * self.kept.element // divided
        )

    @property
    def head(self) -> int:
        """Activation bytes of the final norm and the output layer."""
        return head_activation_bytes(self.facts, self.tokens, self.tensor, self.sequence_parallel, self.kept)


def _recomputed(megatron: MegatronConfig) -> Collection[str] | None:
    """Return the parts of layers that are recomputed, empty for none; None if whole layers are recomputed."""
    if not megatron["activation_checkpointing"]:
        return ()
    return megatron["recompute_modules"] if megatron["recompute_granularity"] == "selective" else None


def _activations(layers: _Layers, recomputed: Collection[str] | None) -> tuple[int, int]:
    """Return (activation bytes that the layers store for one micro-batch, maximum bytes that one layer
    recomputes)."""
    # A chunk may have only the embedding or the output layer, and no layers; hence default=0.
    if recomputed is None:
        return layers.inputs, max(layers.each(), default=0)
    again = (whole - kept for whole, kept in zip(layers.each(), layers.each(recomputed), strict=True))
    return layers.whole(recomputed), max(again, default=0)


@dataclass(frozen=True, slots=True)
class _Logits:
    """Memory of the last stage's output layer, in bytes.

    Attributes:
        training: the logits, whose memory their gradient reuses, and the gradient of the layer's weight.
        scoring: the logits in a log-probability pass.
    """

    training: int = 0
    scoring: int = 0


def logit_bytes(
    policy: PolicyConfig, facts: ModelFacts, layout: Layout, plan: BatchPlan, element: int
) -> _Logits:
    """Return the memory of the output layer, for logits of ``element`` bytes.

    Log-probability kernels do not copy the logits. The logits' gradient is copied for the matmuls only if it
    is wider than the layers' dtype. With ``logprob_chunk_size``, the logits of one chunk exist at a time; the
    weight's gradient is then accumulated in float32, in addition to one chunk's contribution. A score head is
    too small to be counted.
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
    """Return the bytes of a log-probability pass. It stores nothing for a backward pass, so this is the
    larger of one layer's activations and the logits."""
    return max(*layers.each(), logits.scoring)


def generation_cache_bytes(
    kinds: Mapping[LayerKind, int], policy: PolicyConfig, facts: ModelFacts, layout: Layout, element: int
) -> int:
    """Return the bytes of the KV cache, and of the recurrent states of gated delta nets, for the sequences
    that a rank generates at a time; 0 if the policy itself does not generate."""
    if policy["generation"] is None or is_engine(policy["generation"]):
        return 0
    tokens = policy["generation_batch_size"] * policy["max_total_sequence_length"]
    # With latent attention, the cache holds the keys and values of all heads, not the latents.
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
"""Layers whose full parameters exist at a time on the DTensor and FSDP1 backends: the one that computes, and
the prefetched next one."""


def estimate_sharded(
    policy: PolicyConfig, facts: ModelFacts, layout: Layout, plan: BatchPlan, *, reference: bool
) -> RankMemory:
    """Return the memory of one rank on the DTensor or FSDP1 backend.

    Weights and optimizer state are shards in their storage dtypes, gradients float32 shards. The layers being
    computed are also held in full, in the compute dtype; so are the parameters outside the layers (embedding,
    final norm, output layer), which stay gathered for the whole pass.

    Args:
        policy: a checked ``policy`` section with its defaults.
        facts: sizes of the model.
        layout: sizes of the parallel axes.
        plan: batch sizes.
        reference: the run has a reference policy.
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
        # Frozen base weights are stored in the compute dtype.
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
    # DTensor and FSDP1 support neither mixture-of-experts layers nor gated delta nets (rules/not_yet.py).
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
    """Return the bytes per weight in which the DTensor and FSDP1 backends store and update weights."""
    optimizer = policy["optimizer"]
    return BYTES[optimizer["master_dtype"] if optimizer else "float32"]


def moment_bytes(policy: PolicyConfig) -> float:
    """Return the bytes per parameter of the optimizer's moments on the DTensor and FSDP1 backends."""
    optimizer = policy["optimizer"]
    if not optimizer:
        return MOMENTS * STORED["float32"]
    return STORED[optimizer["exp_avg_dtype"]] + STORED[optimizer["exp_avg_sq_dtype"]]


def _offloads(policy: PolicyConfig) -> bool:
    """Return whether a policy on DTensor or FSDP1 keeps its shards in host memory."""
    if enabled_backend(policy) == "dtensor":
        return bool(policy["dtensor_cfg"]["cpu_offload"])
    return bool(policy["fsdp_offload_enabled"])
