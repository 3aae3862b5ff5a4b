"""How much memory a rank will need: exact counts of parameters, and estimates of what training adds to them. All sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config.arithmetic import BatchPlan, padded_vocabulary
from megarl.config.layout import Layout, layers_per_stage
from megarl.config.model_facts import ModelFacts

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
    query = facts.num_attention_heads * facts.head_dim
    key_value = 2 * facts.num_key_value_heads * facts.head_dim
    divided = facts.hidden_size * (query + key_value) + query * facts.hidden_size
    divided += 3 * facts.hidden_size * facts.ffn_hidden_size
    divided += (query + key_value) * facts.qkv_bias + 2 * facts.ffn_hidden_size * facts.mlp_bias
    whole = 2 * facts.hidden_size + 2 * facts.head_dim * facts.qk_norm
    whole += facts.hidden_size * (facts.attention_output_bias + facts.mlp_bias)
    return divided // tensor + whole


def stage_parameters(facts: ModelFacts, tensor: int, stage: int, layers: list[int]) -> int:
    """Parameters on one tensor-parallel rank of one pipeline stage.

    The first stage holds the embedding, the last one the final norm and the output layer; when both are tied and there are several stages,
    the last one holds a copy of the embedding. The vocabulary is padded to a multiple of ``tensor``.
    """
    vocabulary = padded_vocabulary(facts.vocab_size, tensor) // tensor * facts.hidden_size
    count = layers[stage] * layer_parameters(facts, tensor)
    first, last = stage == 0, stage == len(layers) - 1
    if first:
        count += vocabulary
    if last:
        count += facts.hidden_size
        if not (facts.tied and first):
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


def layer_activation_bytes(facts: ModelFacts, tokens: int, tensor: int, sequence_parallel: bool, element: int) -> int:
    """Bytes one layer keeps of one micro-batch for the backward pass, without recomputation.

    Inputs and outputs of the two norms (four times the width, divided over tensor ranks only with sequence parallelism); queries,
    keys, values, attention output; gate, up, activated gate and their product; one float32 normaliser a head and token (attention
    without a stored score matrix). Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", section 4, without dropout, for grouped queries and a gated MLP.
    """
    query = facts.num_attention_heads * facts.head_dim
    key_value = 2 * facts.num_key_value_heads * facts.head_dim
    outside = 4 * facts.hidden_size * element
    inside = (2 * query + key_value + 4 * facts.ffn_hidden_size) * element + 4 * facts.num_attention_heads
    return tokens * (outside // (tensor if sequence_parallel else 1) + inside // tensor)


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
    megatron = policy["megatron_cfg"]
    layers = layers_per_stage(
        facts.num_layers,
        layout.pipeline,
        megatron["num_layers_in_first_pipeline_stage"],
        megatron["num_layers_in_last_pipeline_stage"],
    )
    return [_stage_memory(stage, layers, policy, facts, layout, plan, reference) for stage in range(layout.pipeline)]


def _stage_memory(
    stage: int, layers: list[int], policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, plan: BatchPlan, reference: bool
) -> RankMemory:
    megatron = policy["megatron_cfg"]
    element = BYTES[policy["precision"]]
    gradient = 4 if megatron["distributed_data_parallel_config"]["grad_reduce_in_fp32"] else element
    parameters = stage_parameters(facts, layout.tensor, stage, layers)
    state = parameters * optimizer_bytes(megatron["optimizer"], element, gradient)
    if megatron["optimizer"]["use_distributed_optimizer"]:
        state = -(-state // (layout.data * layout.context))
    last = stage == layout.pipeline - 1
    return RankMemory(
        stage=stage,
        layers=layers[stage],
        parameters=parameters,
        weights=parameters * element,
        gradients=parameters * gradient,
        optimizer=state,
        activations=_activations(stage, layers[stage], policy, facts, layout, plan),
        logits=_logits(policy, facts, layout, plan, element) if last else 0,
        generation_cache=_generation_cache(layers[stage], policy, facts, layout, element),
        reference_weights=parameters * element if reference else 0,
    )


def _activations(stage: int, layers: int, policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, plan: BatchPlan) -> int:
    """With recomputation a layer keeps only its input, and one layer at a time is there in full."""
    megatron, element = policy["megatron_cfg"], BYTES[policy["precision"]]
    tokens = -(-plan.tokens_per_micro_batch // layout.context)
    shared = layout.tensor if megatron["sequence_parallel"] else 1
    whole = layer_activation_bytes(facts, tokens, layout.tensor, megatron["sequence_parallel"], element)
    copies = in_flight(stage, layout.pipeline, plan.micro_batches)
    if megatron["activation_checkpointing"]:
        return copies * layers * (tokens * facts.hidden_size * element // shared) + whole
    return copies * layers * whole


def _logits(policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, plan: BatchPlan, element: int) -> int:
    """Training keeps the logits, a float32 copy of them and its gradient; the log-probability pass the first two."""
    columns = padded_vocabulary(facts.vocab_size, layout.tensor) // layout.tensor
    training = plan.tokens_per_micro_batch * columns * (element + 8)
    scoring = policy["logprob_batch_size"] * plan.sequence_length * columns * (element + 4)
    return int(-(-max(training, scoring) // layout.context))


def _generation_cache(layers: int, policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, element: int) -> int:
    if policy["generation"] is None:
        return 0
    tokens = policy["generation_batch_size"] * policy["max_total_sequence_length"]
    return int(2 * layers * facts.num_key_value_heads * facts.head_dim // layout.tensor * element * tokens)
