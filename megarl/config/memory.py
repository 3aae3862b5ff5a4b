"""Memory that a rank will need: exact counts of parameters, and estimates of what training adds to them. All sizes are bytes.

The torch backends shard parameters, gradients and optimizer state over all ranks that hold the same tensor-parallel part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from converters.model_config.latent_attention import LatentAttention
from converters.model_config.mixture import MixtureOfExperts
from megarl.config.arithmetic import BatchPlan, padded_vocabulary
from megarl.config.backend import enabled_backend
from megarl.config.layout import Layout, stage_layer_counts
from megarl.config.model_facts import ModelFacts
from megarl.models.generation.engines import is_engine

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
        activations: kept for the backward pass, of all micro-batches in flight.
        logits: logits and what the log-probabilities and their gradient need beside them; last stage only.
        generation_cache: keys and values of the sequences being generated.
        reference_weights: the reference policy's weights, in host memory.
    """

    stage: int
    layers: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    generation_cache: int
    reference_weights: int

    @property
    def peak(self) -> int:
        """Most memory at once: training and generation take turns, weights and optimizer state stay. Host memory is not counted."""
        return self.weights + self.gradients + self.optimizer + max(self.activations + self.logits, self.generation_cache)


def layer_parameters(facts: ModelFacts, tensor: int) -> int:
    """Parameters of one dense layer on one tensor-parallel rank: attention, gated MLP, norms.

    Source: the shapes of Megatron-Core's ``SelfAttention`` and ``MLP``; output biases and norms are on every rank, all else is divided.
    """
    divided = 3 * facts.hidden_size * facts.ffn_hidden_size + 2 * facts.ffn_hidden_size * facts.features.mlp_bias
    return attention_parameters(facts, tensor) + divided // tensor + facts.hidden_size * facts.features.mlp_bias


def attention_parameters(facts: ModelFacts, tensor: int) -> int:
    """Parameters of one layer on one tensor-parallel rank without its MLP: attention and norms."""
    features = facts.features
    if facts.latent is not None:
        return _latent_attention_parameters(facts, facts.latent, tensor) + 2 * facts.hidden_size
    query = facts.num_attention_heads * facts.head_dim
    key_value = 2 * facts.num_key_value_heads * facts.head_dim
    divided = facts.hidden_size * (query + key_value) + query * facts.hidden_size + (query + key_value) * features.qkv_bias
    divided += facts.num_attention_heads * features.sinks
    whole = 2 * facts.hidden_size + 2 * facts.head_dim * features.qk_norm + facts.hidden_size * features.attention_output_bias
    return divided // tensor + whole


def _latent_attention_parameters(facts: ModelFacts, latent: LatentAttention, tensor: int) -> int:
    """Parameters of one layer's latent attention on one tensor-parallel rank, its norms included, without the norm before it.

    Source: the shapes of Megatron-Core's ``MLASelfAttention``; norms are on every rank, all else is divided.
    """
    hidden, heads, queries = facts.hidden_size, facts.num_attention_heads, latent.q_lora_rank or 0
    query = queries * (hidden + heads * latent.qk_head_dim) if queries else hidden * heads * latent.qk_head_dim
    down = hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    up = latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    return (query + down + up + heads * latent.v_head_dim * hidden) // tensor + queries + latent.kv_lora_rank


def sparse_layer_parameters(facts: ModelFacts, tensor: int) -> int:
    """Parameters of one layer with experts on one tensor-parallel rank: attention, norms, router, shared expert, but no routed ones.

    Source: the shapes of Megatron-Core's ``TopKRouter``, which every rank has, and of its ``SharedExpertMLP``, whose gate, where it has
    one, every rank has.
    """
    mixture = _mixture_of(facts)
    whole = facts.hidden_size * (mixture.num_experts + mixture.has_shared_gate) + mixture.num_experts * mixture.routing.has_bias
    return attention_parameters(facts, tensor) + 3 * facts.hidden_size * mixture.shared_ffn_hidden_size // tensor + whole


def expert_layer_parameters(facts: ModelFacts, expert: int, expert_tensor: int) -> int:
    """Parameters of the routed experts of one layer on one rank; 0 for a dense model.

    Args:
        facts: sizes of the model.
        expert: ranks that the experts are divided over.
        expert_tensor: ranks that each of them is cut over.
    """
    mixture = facts.mixture
    if mixture is None:
        return 0
    width = mixture.ffn_hidden_size // expert_tensor
    biases = (2 * width + facts.hidden_size) * facts.features.mlp_bias
    return mixture.num_experts // expert * (3 * facts.hidden_size * width + biases)


def _mixture_of(facts: ModelFacts) -> MixtureOfExperts:
    assert facts.mixture is not None, facts.model_type
    return facts.mixture


def stage_layers(facts: ModelFacts, stage: int, layers: list[int]) -> tuple[int, int]:
    """Dense layers of one pipeline stage, and those with experts."""
    first = sum(layers[:stage])
    sparse = sum(facts.is_sparse(layer) for layer in range(first, first + layers[stage]))
    return layers[stage] - sparse, sparse


def stage_parameters(facts: ModelFacts, tensor: int, stage: int, layers: list[int]) -> int:
    """Parameters on one tensor-parallel rank of one pipeline stage, without routed experts.

    The first stage holds the embedding, the last one the final norm and the output layer; when both are tied and there are several stages,
    the last one holds a copy of the embedding. A model that scores has one row in the place of the output layer. The vocabulary is padded
    to a multiple of ``tensor``.
    """
    vocabulary = padded_vocabulary(facts.vocab_size, tensor) // tensor * facts.hidden_size
    dense, sparse = stage_layers(facts, stage, layers)
    count = dense * layer_parameters(facts, tensor)
    if sparse:
        count += sparse * sparse_layer_parameters(facts, tensor)
    first, last = stage == 0, stage == len(layers) - 1
    if first:
        count += vocabulary
    if last:
        count += facts.hidden_size
        if facts.scores:
            count += facts.hidden_size
        elif not (facts.tied and first):
            count += vocabulary
    return count


def optimizer_bytes(optimizer: Mapping[str, Any], weight_bytes: int, gradient_bytes: int) -> int:
    """Bytes a parameter of optimizer state, before it is divided over data-parallel ranks.

    Float32 moments (two for Adam, one for SGD with momentum), and float32 copies of weights and gradients unless they are float32 already.
    Source: the table "theoretical memory footprint" in Megatron-Core's guide to the distributed optimizer.
    """
    moments = 2 if optimizer["optimizer"] == "adam" else int(optimizer["sgd_momentum"] > 0)
    copies = (weight_bytes < 4) + (gradient_bytes < 4)
    return 4 * (moments + copies)


def layer_activation_bytes(
    facts: ModelFacts, tokens: int, tensor: int, sequence_parallel: bool, element: int, recomputed: Collection[str] = ()
) -> int:
    """Bytes one layer keeps of one micro-batch for the backward pass, but for its parts that are ``recomputed``.

    Inputs and outputs of the two norms (four times the width, divided over tensor ranks only with sequence parallelism); queries,
    keys, values, attention output; gate, up, activated gate and their product; one float32 normaliser a head and token (attention
    without a stored score matrix). Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", section 4, without dropout, for grouped queries and a gated MLP.
    """
    attention, whole = 2 * (facts.num_attention_heads + facts.num_key_value_heads) * facts.head_dim, 0
    if facts.latent is not None:
        latent = facts.latent
        # queries, keys, values and output of the heads; the latent vectors before and after their norms, and the shared part of keys
        attention = 2 * facts.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
        whole = 2 * ((latent.q_lora_rank or 0) + latent.kv_lora_rank) + latent.qk_rope_head_dim
    outside = (4 * facts.hidden_size + whole) * element
    mlp = 0 if "mlp" in recomputed else 4 * facts.ffn_hidden_size * element
    # queries, keys, values and output of attention go into what is kept anyway
    inside = attention * element + mlp + (0 if "core_attn" in recomputed else 4 * facts.num_attention_heads)
    return tokens * (outside // (tensor if sequence_parallel else 1) + inside // tensor)


def sparse_layer_activation_bytes(
    facts: ModelFacts, tokens: int, tensor: int, sequence_parallel: bool, expert_tensor: int, element: int, recomputed: Collection[str] = ()
) -> int:
    """Bytes one layer with experts keeps of one micro-batch for the backward pass, but for its parts that are ``recomputed``, when the
    router spreads the tokens evenly.

    All of a dense layer, the shared expert in place of its MLP, and for each token of this rank (divided over tensor ranks with sequence
    parallelism) float32 scores of all experts before and after softmax, the output of a gated shared expert and its weight, and for each of
    its chosen experts: input and output (whole on each of the expert's tensor ranks), gate, up, activated gate and their product.
    """
    mixture = _mixture_of(facts)
    if "moe" in recomputed:
        return layer_activation_bytes(replace(facts, ffn_hidden_size=0), tokens, tensor, sequence_parallel, element, recomputed)
    dense = replace(facts, ffn_hidden_size=mixture.shared_ffn_hidden_size)
    own = tokens // tensor if sequence_parallel else tokens
    chosen = 2 * facts.hidden_size * expert_tensor + 4 * mixture.ffn_hidden_size
    weighed = facts.hidden_size + 1 if mixture.has_shared_gate else 0
    experts = own * ((mixture.experts_per_token * chosen + weighed) * element + 8 * mixture.num_experts)
    attention = [part for part in recomputed if part == "core_attn"]
    return layer_activation_bytes(dense, tokens, tensor, sequence_parallel, element, attention) + experts


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage holds at once in the 1F1B schedule (Narayanan et al. 2021, section 2.2.1)."""
    return min(stages - stage, micro_batches)


def estimate(policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, plan: BatchPlan, reference: bool) -> list[RankMemory]:
    """Memory of a rank of each pipeline stage.

    Args:
        policy: a checked ``policy`` section with its defaults, on the Megatron backend.
        facts: sizes of the model.
        layout: the ranks.
        plan: the batches.
        reference: whether there is a reference policy.
    """
    layers = stage_layer_counts(policy["megatron_cfg"], facts.num_layers)
    return [_stage_memory(stage, layers, policy, facts, layout, plan, reference) for stage in range(layout.pipeline)]


def _stage_memory(
    stage: int, layers: list[int], policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, plan: BatchPlan, reference: bool
) -> RankMemory:
    megatron = policy["megatron_cfg"]
    element = BYTES[policy["precision"]]
    gradient = 4 if megatron["distributed_data_parallel_config"]["grad_reduce_in_fp32"] else element
    shared = stage_parameters(facts, layout.tensor, stage, layers)
    expert, expert_tensor = _expert_sizes(megatron)
    experts = stage_layers(facts, stage, layers)[1] * expert_layer_parameters(facts, expert, expert_tensor)
    parameters = shared + experts
    each = optimizer_bytes(megatron["optimizer"], element, gradient)
    state = parameters * each
    if megatron["optimizer"]["use_distributed_optimizer"]:
        copies = layout.data * layout.context
        # An expert's copies lie on all ranks of a stage that hold no other part of the experts.
        expert_copies = max(1, copies * layout.tensor // (expert * expert_tensor))
        state = -(-shared * each // copies) - (-experts * each // expert_copies)
    last = stage == layout.pipeline - 1
    return RankMemory(
        stage=stage,
        layers=layers[stage],
        parameters=parameters,
        weights=parameters * element,
        gradients=parameters * gradient,
        optimizer=state,
        activations=_activations(stage, layers, policy, facts, layout, plan),
        logits=logit_bytes(policy, facts, layout, plan, BYTES["float32"] if megatron["float32_logits"] else element) if last else 0,
        generation_cache=generation_cache_bytes(layers[stage], policy, facts, layout, element),
        reference_weights=parameters * element if reference else 0,
    )


def _expert_sizes(megatron: Mapping[str, Any]) -> tuple[int, int]:
    """Ranks that the experts are divided over, and ranks that each of them is cut over."""
    return megatron.get("expert_model_parallel_size", 1), megatron.get("expert_tensor_parallel_size", 1)


def _activations(stage: int, layers: list[int], policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, plan: BatchPlan) -> int:
    """With recomputation a layer keeps only its input, or what is outside its recomputed parts, and one layer at a time is whole."""
    megatron, element = policy["megatron_cfg"], BYTES[policy["precision"]]
    tokens = -(-plan.tokens_per_micro_batch // layout.context)
    divided = megatron["sequence_parallel"]
    dense, sparse = stage_layers(facts, stage, layers)
    copies = in_flight(stage, layout.pipeline, plan.micro_batches)

    def kept(recomputed: Collection[str] = ()) -> tuple[int, int]:
        """Of a dense layer and of one with experts."""
        sizes = (facts, tokens, layout.tensor, divided)
        with_experts = sparse_layer_activation_bytes(*sizes, _expert_sizes(megatron)[1], element, recomputed) if sparse else 0
        return layer_activation_bytes(*sizes, element, recomputed) if dense else 0, with_experts

    whole = kept()
    if not megatron["activation_checkpointing"]:
        return copies * (dense * whole[0] + sparse * whole[1])
    if megatron["recompute_granularity"] == "selective":
        parts = kept(megatron["recompute_modules"])
        return copies * (dense * parts[0] + sparse * parts[1]) + max(whole)
    inputs = tokens * facts.hidden_size * element // (layout.tensor if divided else 1)
    return copies * layers[stage] * inputs + max(whole)


def logit_bytes(policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, plan: BatchPlan, element: int) -> int:
    """Training keeps the logits of ``element`` bytes, a float32 copy of them and its gradient; the log-probability pass the first two. In
    chunks there are those of one chunk, and in 16 bit the sum of the output layer's gradient in float32. What a model that scores gives of
    a token is not worth counting."""
    if facts.scores:
        return 0
    columns = padded_vocabulary(facts.vocab_size, layout.tensor) // layout.tensor
    chunk, sums = policy["logprob_chunk_size"], 0
    training = -(-plan.tokens_per_micro_batch // layout.context)
    scoring = -(-(plan.logprob_token_budget or policy["logprob_batch_size"] * plan.sequence_length) // layout.context)
    if chunk is not None:
        training, scoring = min(training, chunk), min(scoring, chunk)
        sums = columns * facts.hidden_size * 4 if element < 4 else 0
    return int(max(training * columns * (element + 8) + sums, scoring * columns * (element + 4)))


def generation_cache_bytes(layers: int, policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, element: int) -> int:
    """Keys and values of the sequences that are generated at a time; none where an engine has them."""
    if policy["generation"] is None or is_engine(policy["generation"]["backend"]):
        return 0
    tokens = policy["generation_batch_size"] * policy["max_total_sequence_length"]
    width = cached_width(facts)
    return int(layers * facts.num_key_value_heads * width // layout.tensor * element * tokens)


def cached_width(facts: ModelFacts) -> int:
    """Numbers that generation keeps of a token for each of a layer's key-value heads: with latent attention keys and values of all heads,
    not what they are projected up from."""
    return 2 * facts.head_dim if facts.latent is None else facts.latent.qk_head_dim + facts.latent.v_head_dim


MOMENTS = 2
"""float32 numbers a parameter of optimizer state: Adam's, which most optimizers do not exceed."""
GATHERED_LAYERS = 2
"""Layers whose whole parameters are there at once: the one that computes and the next one, which is being gathered."""


def estimate_sharded(policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, plan: BatchPlan, reference: bool) -> RankMemory:
    """Memory of a rank.

    Weights, gradients and optimizer state are float32 shards; beside them stand the whole parameters of the layers that compute, in the
    type they compute in, and their reduced gradients before they are sharded.

    Args:
        policy: a checked ``policy`` section with its defaults, on DTensor or FSDP1.
        facts: sizes of the model.
        layout: the ranks.
        plan: the batches.
        reference: whether there is a reference policy.
    """
    element, shards = BYTES[policy["precision"]], layout.data * layout.context
    whole = stage_parameters(facts, layout.tensor, 0, [facts.num_layers])
    parameters = -(-whole // shards)
    in_host = _offloads(policy)
    gathered = GATHERED_LAYERS * layer_parameters(facts, layout.tensor) * element
    device_share = 0 if in_host else 4 * parameters
    return RankMemory(
        stage=0,
        layers=facts.num_layers,
        parameters=parameters,
        weights=device_share + gathered,
        gradients=device_share,
        optimizer=MOMENTS * device_share,
        activations=_sharded_activations(policy, facts, layout, plan, element),
        logits=logit_bytes(policy, facts, layout, plan, element),
        generation_cache=generation_cache_bytes(facts.num_layers, policy, facts, layout, element),
        reference_weights=4 * parameters if reference else 0,
    )


def _offloads(policy: Mapping[str, Any]) -> bool:
    """Whether the shards live in host memory."""
    if enabled_backend(policy) == "dtensor":
        return bool(policy["dtensor_cfg"]["cpu_offload"])
    return bool(policy["fsdp_offload_enabled"])


def _sharded_activations(policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, plan: BatchPlan, element: int) -> int:
    dtensor = enabled_backend(policy) == "dtensor"
    divided = dtensor and policy["dtensor_cfg"]["sequence_parallel"]
    recompute = policy["dtensor_cfg"]["activation_checkpointing"] if dtensor else policy["activation_checkpointing_enabled"]
    tokens = -(-plan.tokens_per_micro_batch // layout.context)
    layer = layer_activation_bytes(facts, tokens, layout.tensor, divided, element)
    if recompute:
        return facts.num_layers * (tokens * facts.hidden_size * element // (layout.tensor if divided else 1)) + layer
    return facts.num_layers * layer
