"""Memory that a rank will need: exact counts of parameters, and estimates of what training adds to them. All
sizes are bytes.

The torch backends shard parameters, gradients and optimizer state over all ranks that hold the same
tensor-parallel part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from converters.model_config.architecture import ModelFacts
from converters.model_config.layer_kind import LayerKind
from megarl.config.activations import (
    Operations,
    head_activation_bytes,
    in_flight,
    layer_activation_bytes,
    operations,
    sparse_layer_activation_bytes,
)
from megarl.config.adapters import adapter_parameters, adapters_of, vocabulary_adapter_parameters
from megarl.config.arithmetic import BatchPlan, padded_vocabulary
from megarl.config.backend import enabled_backend
from megarl.config.engines import is_engine
from megarl.config.layout import Layout, layers_of_stages, pipeline_chunks
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
        stage: the pipeline stage.
        layers: its layers.
        parameters: parameters on the rank.
        weights: the weights.
        gradients: the gradient buffer.
        optimizer: optimizer state, with float32 copies of weights and gradients.
        activations: kept of the layers for the backward pass, of all micro-batches in flight.
        recomputed: what one layer has again in the backward pass, of what is not kept.
        logits: of the last stage what its norm and its output layer keep, logits, in whose memory their
            gradient is written, and the gradient of the output layer. The backward pass is through with it
            when it comes to the first layer.
        scoring: what a log-probability pass takes, which lies beside no activations of training.
        generation_cache: keys and values of the sequences being generated.
        reference_weights: the reference policy's weights, in host memory.
        host_optimizer: optimizer state that stays in host memory.
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

    @property
    def peak(self) -> int:
        """Most memory at once: passes and generation take turns, weights and optimizer state stay. Host
        memory is not counted."""
        return self.state + max(
            self.activations + max(self.logits, self.recomputed), self.scoring, self.generation_cache
        )

    @property
    def state(self) -> int:
        """Return the bytes that training needs whatever the batches: weights, gradients and optimizer
        state."""
        return self.weights + self.gradients + self.optimizer


MOMENTS = 2
"""Numbers a parameter of optimizer state: Adam's, which most optimizers do not exceed."""
STORED: Mapping[str, float] = {"float32": 4, "bfloat16": 2, "8bit": 1 + 4 / 256}
"""Bytes of a number of an optimizer's state; blocks of 256 have a float32 scale."""


def optimizer_bytes(optimizer: MegatronOptimizerConfig, weight_bytes: int, gradient_bytes: int) -> float:
    """Return bytes a parameter of optimizer state, before it is divided over data-parallel ranks.

    Float32 moments (two for Adam, one for SGD with momentum), and float32 copies of weights and gradients
    unless they are float32 already. Source: the table "theoretical memory footprint" in Megatron-Core's guide
    to the distributed optimizer. With states below float32, or in host memory, gradients are read as they
    were reduced.
    """
    if has_own_states(optimizer):
        copy = 4 * (weight_bytes < 4 and optimizer["master_dtype"] == "float32")
        return copy + STORED[optimizer["exp_avg_dtype"]] + STORED[optimizer["exp_avg_sq_dtype"]]
    moments = MOMENTS if optimizer["optimizer"] == "adam" else int(optimizer["sgd_momentum"] > 0)
    copies = (weight_bytes < 4) + (gradient_bytes < 4)
    return 4 * (moments + copies)


def has_own_states(optimizer: MegatronOptimizerConfig) -> bool:
    """Return whether states are below float32 or in host memory, so that megarl keeps them and not
    Megatron-Core."""
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
    """Return the memory of a rank of each pipeline stage.

    Args:
        policy: a checked ``policy`` section with its defaults, on the Megatron backend.
        facts: sizes of the model.
        layout: the ranks.
        plan: the batches.
        reference: whether there is a reference policy.
        device: what the ranks run on.
    """
    layers = layers_of_stages(policy["megatron_cfg"], facts.num_layers)
    kept = operations("megatron", device, BYTES[policy["precision"]])
    return [
        _stage_memory(stage, layers, policy, facts, layout, plan, reference, kept)
        for stage in range(layout.pipeline)
    ]


def _stage_memory(
    stage: int,
    layers: list[list[int]],
    policy: PolicyConfig,
    facts: ModelFacts,
    layout: Layout,
    plan: BatchPlan,
    reference: bool,
    kept: Operations,
) -> RankMemory:
    megatron, element = policy["megatron_cfg"], kept.element
    # Megatron-Core's gradient buffer is in float32, or in the type of the weights.
    gradient = 4 if megatron["distributed_data_parallel_config"]["grad_reduce_in_fp32"] else element
    shared = stage_parameters(facts, layout.tensor, stage, layers)
    expert, expert_tensor = _expert_sizes(megatron)
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
        # The model without its adapters is the reference, and needs no copy.
        parameters, experts, reference = parameters + trained_parameters, trained_parameters - shared, False
    state = trained_parameters * each
    if megatron["optimizer"]["use_distributed_optimizer"]:
        copies = layout.data * layout.context
        # An expert's copies are on all ranks of a stage that hold no other part of the experts.
        expert_copies = max(1, copies * layout.tensor // (expert * expert_tensor))
        # Rounded up: the buffers are padded to parts of one size.
        state = -(-shared * each // copies) - (-experts * each // expert_copies)
    share = megatron["optimizer"]["optimizer_offload_fraction"]
    # there are copies of float32 weights too, and of the gradients that come while the backward pass goes on
    overlaps = megatron["distributed_data_parallel_config"]["overlap_grad_reduce"] is not False
    early = gradient * (overlaps and policy["precision"] != "float16")
    in_host = share * state * (each + 4 * (element == 4) + early) / each if share else 0
    tokens, scored = (
        -(-count // layout.context) for count in (plan.tokens_per_micro_batch, _logprob_tokens(policy, plan))
    )
    sizes = (facts, layout.tensor, megatron["sequence_parallel"], expert_tensor, kept)
    trained = _Layers(kinds, tokens, *sizes)
    logits, last = _Logits(), stage == layout.pipeline - 1
    if last:
        logits = logit_bytes(
            policy, facts, layout, plan, BYTES["float32"] if megatron["float32_logits"] else element
        )
    activations, recomputed = _activations(trained, _recomputed(megatron))
    return RankMemory(
        stage=stage,
        layers=len(layers[stage]),
        parameters=parameters,
        weights=parameters * element,
        gradients=trained_parameters * gradient,
        optimizer=int((1 - share) * state),
        activations=math.ceil(
            in_flight(stage, layout.pipeline, plan.micro_batches, pipeline_chunks(megatron)) * activations
        ),
        recomputed=recomputed,
        logits=logits.training + trained.head * last,
        scoring=_scoring(_Layers(kinds, scored, *sizes), logits),
        generation_cache=generation_cache_bytes(kinds, policy, facts, layout, element),
        reference_weights=parameters * element if reference else 0,
        host_optimizer=int(in_host),
    )


def _expert_sizes(megatron: MegatronConfig) -> tuple[int, int]:
    """Return ranks that the experts are divided over, and ranks that each of them is cut over."""
    return megatron["expert_model_parallel_size"], megatron["expert_tensor_parallel_size"]


@dataclass(frozen=True, slots=True)
class _Layers:
    """Bytes that the layers of a stage keep of one micro-batch.

    Attributes:
        kinds: how many there are of each kind.
        tokens: of the micro-batch on a rank.
        facts: sizes of the model.
        tensor: tensor-parallel ranks.
        sequence_parallel: these divide what lies between their parts of a layer.
        expert_tensor: ranks that an expert is cut over.
        kept: what the operations keep.
    """

    kinds: Mapping[LayerKind, int]
    tokens: int
    facts: ModelFacts
    tensor: int
    sequence_parallel: bool
    expert_tensor: int
    kept: Operations

    def each(self, recomputed: Collection[str] = ()) -> list[int]:
        """Return the bytes of a layer of each kind."""
        sizes = (self.facts, self.tokens, self.tensor, self.sequence_parallel)
        return [
            sparse_layer_activation_bytes(*sizes, self.expert_tensor, self.kept, recomputed, kind.mixer)
            if kind.sparse
            else layer_activation_bytes(*sizes, self.kept, recomputed, kind.mixer)
            for kind in self.kinds
        ]

    def whole(self, recomputed: Collection[str] = ()) -> int:
        """Return the bytes of all layers."""
        return sum(
            count * kept for count, kept in zip(self.kinds.values(), self.each(recomputed), strict=True)
        )

    @property
    def inputs(self) -> int:
        """Bytes of the inputs of all layers, which is all that stays where whole layers are recomputed."""
        divided = self.tensor if self.sequence_parallel else 1
        return sum(self.kinds.values()) * (
            self.tokens * self.facts.hidden_size * self.kept.element // divided
        )

    @property
    def head(self) -> int:
        """Bytes that the last norm and the output layer keep."""
        return head_activation_bytes(self.facts, self.tokens, self.tensor, self.sequence_parallel, self.kept)


def _recomputed(megatron: MegatronConfig) -> Collection[str] | None:
    """Return the parts of layers that are recomputed; None for whole layers."""
    if not megatron["activation_checkpointing"]:
        return ()
    return megatron["recompute_modules"] if megatron["recompute_granularity"] == "selective" else None


def _activations(layers: _Layers, recomputed: Collection[str] | None) -> tuple[int, int]:
    """Return what the layers keep of one micro-batch, and what the largest of them makes again of what is
    recomputed."""
    if recomputed is None:
        return layers.inputs, max(layers.each())
    anew = max(whole - kept for whole, kept in zip(layers.each(), layers.each(recomputed), strict=True))
    return layers.whole(recomputed), anew


@dataclass(frozen=True, slots=True)
class _Logits:
    """Memory of the output layer of a last stage.

    Attributes:
        training: the logits, in whose memory their gradient is written, and the gradient of the layer's
            weight.
        scoring: the logits of a log-probability pass.
    """

    training: int = 0
    scoring: int = 0


def logit_bytes(
    policy: PolicyConfig, facts: ModelFacts, layout: Layout, plan: BatchPlan, element: int
) -> _Logits:
    """Return what the output layer takes for logits of ``element`` bytes.

    The kernel of the log-probabilities, and the PyTorch code that works on few rows at a time, make no copy
    of the logits. Only where these are wider than the layers is their gradient copied for the products. In
    chunks there are the logits of one chunk, and the weight's gradient is summed up in float32, beside the
    part of a chunk. What a model that scores gives of a token is not worth counting.
    """
    if facts.head is not None:
        return _Logits()
    columns, own = (
        padded_vocabulary(facts.vocab_size, layout.tensor) // layout.tensor,
        BYTES[policy["precision"]],
    )
    training, scoring = (
        -(-tokens // layout.context)
        for tokens in (plan.tokens_per_micro_batch, _logprob_tokens(policy, plan))
    )
    # beside adapters the layer is not trained
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


def _logprob_tokens(policy: PolicyConfig, plan: BatchPlan) -> int:
    """Return most tokens of a micro-batch of a log-probability pass."""
    return int(plan.logprob_token_budget or policy["logprob_batch_size"] * plan.sequence_length)


def _scoring(layers: _Layers, logits: _Logits) -> int:
    """Return what a log-probability pass takes, which keeps nothing: at most what a whole layer works with,
    or the logits."""
    return max(*layers.each(), logits.scoring)


def generation_cache_bytes(
    kinds: Mapping[LayerKind, int], policy: PolicyConfig, facts: ModelFacts, layout: Layout, element: int
) -> int:
    """Keys and values of the sequences that are generated at a time, and states of gated delta nets in
    float32; none where an engine has
    them."""
    if policy["generation"] is None or is_engine(policy["generation"]):
        return 0
    tokens = policy["generation_batch_size"] * policy["max_total_sequence_length"]
    # of latent attention keys and values of all heads, not what they are projected up from
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
"""Layers whose whole parameters are there at once: the one that computes and the next one, which is being
gathered."""


def estimate_sharded(
    policy: PolicyConfig, facts: ModelFacts, layout: Layout, plan: BatchPlan, *, reference: bool
) -> RankMemory:
    """Return the memory of a rank.

    Weights and optimizer state are shards in the types that they are kept in, gradients in float32; beside
    them stand, in the type they compute in, the whole parameters of the layers that compute, and of what is
    no layer (embedding, last norm, output layer), which stay gathered while a pass lasts.

    Args:
        policy: a checked ``policy`` section with its defaults, on DTensor or FSDP1.
        facts: sizes of the model.
        layout: the ranks.
        plan: the batches.
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
        # weights that are not trained are kept in the type they compute in
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
    tokens, scored = (
        -(-count // layout.context) for count in (plan.tokens_per_micro_batch, _logprob_tokens(policy, plan))
    )
    sizes = (facts, layout.tensor, divided, 1, operations(backend, "", element))
    # The torch backends run neither mixtures of experts nor gated delta nets (rules/not_yet.py).
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
    )


def weight_bytes(policy: PolicyConfig) -> int:
    """Return bytes of a weight that a torch backend keeps and steps."""
    optimizer = policy["optimizer"]
    return BYTES[optimizer["master_dtype"] if optimizer else "float32"]


def moment_bytes(policy: PolicyConfig) -> float:
    """Return bytes a parameter of the moments on a torch backend."""
    optimizer = policy["optimizer"]
    if not optimizer:
        return MOMENTS * STORED["float32"]
    return STORED[optimizer["exp_avg_dtype"]] + STORED[optimizer["exp_avg_sq_dtype"]]


def _offloads(policy: PolicyConfig) -> bool:
    """Return whether the shards live in host memory."""
    if enabled_backend(policy) == "dtensor":
        return bool(policy["dtensor_cfg"]["cpu_offload"])
    return bool(policy["fsdp_offload_enabled"])
