"""Estimates of the activation bytes that a forward pass stores for the backward pass, from tensor shapes.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4, list the
stored tensors. The counts here are for grouped-query attention and a gated MLP without dropout, as each
backend's operations store them. A test compares the sums with the bytes that saved-tensor hooks count on a
CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from converters.model_config.architecture import ModelFacts
from converters.model_config.layer_kind import Mixer

# Bytes per token of a norm's float32 inverse deviation, and per token and head of attention's float32
# log-sum-exp.
_SCALE = 4
# Bytes of an index tensor's element: torch uses int64.
_INDEX = 8
# An unfused norm stores two float32 tensors: 8 bytes per element.
_UNFUSED_NORM = 8
GATED_DELTA_CHUNK = 64
"""Tokens per chunk of a gated delta net (``megarl.models.engine.gated_delta``)."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Sizes of the activations that a backend's operations store for the backward pass.

    Attributes:
        element: bytes per element in the layers' dtype.
        norm: bytes stored by a norm per element of its input.
        gated: elements stored by a gated MLP per intermediate channel.
        weighed: elements stored by an expert per intermediate channel; the router's weight is multiplied in
            there.
        joined: queries, keys and values are views of one tensor, which is freed only with the values.
    """

    element: int
    norm: int
    gated: int
    weighed: int
    joined: bool


def operations(backend: str, device: str, element: int) -> Operations:
    """Return the sizes of the activations that a backend's operations store on a device.

    transformers' norms store a float32 copy of their input, and the normalised tensor before the weight. On a
    CPU, Megatron-Core's norms store two float32 tensors, and its MLPs the gate, the activated gate, and the
    up projection twice, because an offset of 0 is added to it. On a GPU, where torch.compile or Transformer
    Engine fuses operations, only inputs are stored: of a norm, of the gated activation (gate and up), and of
    the MLP's second matmul.

    Args:
        backend: name of the backend.
        device: device type, ``cpu`` or other.
        element: bytes per element in the layers' dtype.
    """
    if backend != "megatron":
        return Operations(element, norm=4 + element, gated=4, weighed=4, joined=False)
    if device == "cpu":
        return Operations(element, norm=8, gated=5, weighed=6, joined=True)
    return Operations(element, norm=element, gated=3, weighed=3, joined=True)


def layer_activation_bytes(
    facts: ModelFacts,
    tokens: int,
    tensor: int,
    sequence_parallel: bool,
    kept: Operations,
    recomputed: Collection[str] = (),
    mixer: Mixer = "attention",
) -> int:
    """Return the activation bytes that one dense layer stores for one micro-batch on one rank.

    Without sequence parallelism, every tensor-parallel rank stores the two norms' activations, and the inputs
    of the matmuls behind them, in full.

    Args:
        facts: sizes of the model.
        tokens: tokens of the micro-batch on the rank.
        tensor: tensor-parallel size.
        sequence_parallel: activations between the tensor-parallel parts are sharded too.
        kept: activation sizes of the backend's operations.
        recomputed: parts of the layer that are recomputed instead (``core_attn``, ``mlp``).
        mixer: kind of the layer's token mixer.
    """
    outside, inside = 0, 0
    if mixer == "gated_delta":
        inside = _gated_delta_bytes(facts, kept)
    else:
        outside, inside = _attention_bytes(facts, kept, "core_attn" in recomputed)
    # Zero-centred norms (weight + 1) are not fused.
    norm = _UNFUSED_NORM if facts.zero_centered_norms else kept.norm
    outside += 2 * (facts.hidden_size * (norm + kept.element) + _SCALE)
    if "mlp" not in recomputed:
        inside += kept.gated * facts.ffn_hidden_size * kept.element
    return tokens * (outside // (tensor if sequence_parallel else 1) + inside // tensor)


def _attention_bytes(facts: ModelFacts, kept: Operations, recomputed: bool) -> tuple[int, int]:
    """Return the activation bytes that attention stores per token, without its input.

    The inputs and the output of core attention are stored even if core attention is recomputed.

    Returns:
        (bytes that every tensor-parallel rank stores in full, bytes that are divided by the tensor-parallel
            size).
    """
    heads, normaliser = facts.num_attention_heads, 0 if recomputed else _SCALE * facts.num_attention_heads
    if facts.latent_attention is not None:
        latent, vectors = (
            facts.latent_attention,
            (facts.latent_attention.q_lora_rank or 0) + facts.latent_attention.kv_lora_rank,
        )
        # Attention kernels need keys and values of equal width, so the narrower ones are padded, and the
        # output is sliced.
        wide = max(latent.qk_head_dim, latent.v_head_dim)
        numbers = heads * (4 * wide + latent.v_head_dim * (latent.qk_head_dim != latent.v_head_dim))
        norms = 1 + (latent.q_lora_rank is not None)
        return vectors * (kept.norm + kept.element) + norms * _SCALE, numbers * kept.element + normaliser
    query, key = heads * facts.head_dim, facts.num_key_value_heads * facts.head_dim
    # Stored are rotated queries and keys, values, and the output. If queries, keys and values are views of
    # one tensor, the values also keep the unrotated queries and keys alive.
    numbers = 3 * (query + key) if kept.joined else 2 * (query + key)
    norm = _UNFUSED_NORM if facts.zero_centered_norms else kept.norm
    norms = norm * (query + key) + _SCALE * (heads + facts.num_key_value_heads) if facts.qk_norm else 0
    # The output gate stores its float32 sigmoid, the gated product, and the gate itself, which is a view of
    # the joined tensor.
    gate = query * (4 + 2 * kept.element) if facts.output_gate else 0
    return 0, numbers * kept.element + norms + gate + normaliser


def _gated_delta_bytes(facts: ModelFacts, kept: Operations) -> int:
    """Return the activation bytes that a gated delta net stores per token, before division by the
    tensor-parallel size.

    For queries, keys and values these are the tensors of projection, convolution and norms, in the layers'
    dtype and in float32. For each value head they are, all in float32, five times its keys, six rows of chunk
    length, and two states per chunk. The element-wise part was counted once and rounded up.
    """
    net = facts.gated_delta
    assert net is not None, facts.family
    key_heads, keys = net.key_heads * net.key_width, net.value_heads * net.key_width
    chunk = (6 * 4 + 1) * GATED_DELTA_CHUNK * net.value_heads
    states = 2 * 4 * keys * net.value_width // GATED_DELTA_CHUNK
    return (
        (8 * kept.element + 9) * key_heads
        + (6 * kept.element + 22) * net.values
        + 5 * 4 * keys
        + chunk
        + states
    )


def sparse_layer_activation_bytes(
    facts: ModelFacts,
    tokens: int,
    tensor: int,
    sequence_parallel: bool,
    expert_tensor: int,
    kept: Operations,
    recomputed: Collection[str] = (),
    mixer: Mixer = "attention",
) -> int:
    """Return the activation bytes that one mixture-of-experts layer stores for one micro-batch, if the
    router spreads tokens evenly over the experts.

    They are those of a dense layer with the shared expert as its MLP, plus, for each token on this rank
    (sharded by sequence parallelism): the router's float32 scores, the mask of chosen experts, and the chosen
    weights and indices; for a gated shared expert its output and gate; and for each chosen expert its input
    (in full on each rank of its tensor-parallel group), its weight, and the activations of its MLP.

    Args:
        facts: sizes of the model.
        tokens, tensor, sequence_parallel, kept, mixer: as in ``layer_activation_bytes``.
        expert_tensor: tensor-parallel size of an expert.
        recomputed: parts of the layer that are recomputed instead (``core_attn``, ``moe``).
    """
    mixture = facts.mixture
    assert mixture is not None, facts.family
    sizes, attention = (
        (tokens, tensor, sequence_parallel, kept),
        {"core_attn"}.intersection(recomputed),
    )
    # A recomputed mixture stores nothing, like a dense layer without an MLP.
    if "moe" in recomputed:
        return layer_activation_bytes(replace(facts, ffn_hidden_size=0), *sizes, attention, mixer)
    # Without a shared expert this size is 0, and the MLP adds nothing.
    dense = replace(facts, ffn_hidden_size=mixture.shared_ffn_hidden_size)
    own = tokens // tensor if sequence_parallel else tokens
    chosen = (
        (facts.hidden_size * expert_tensor + kept.weighed * mixture.ffn_hidden_size + 1) * kept.element
        + 2 * _INDEX
        + _SCALE
    )
    shared = (facts.hidden_size + 1) * kept.element if mixture.has_shared_gate else 0
    router = mixture.num_experts * (_SCALE + 1 + kept.element)
    return layer_activation_bytes(dense, *sizes, attention, mixer) + own * (
        mixture.experts_per_token * chosen + router + shared
    )


def head_activation_bytes(
    facts: ModelFacts, tokens: int, tensor: int, sequence_parallel: bool, kept: Operations
) -> int:
    """Return the activation bytes of the final norm, and of the output layer's input, for one micro-batch on
    one rank."""
    norm = facts.hidden_size * kept.norm + _SCALE
    return tokens * (norm // (tensor if sequence_parallel else 1) + facts.hidden_size * kept.element)


def most_held(stage: int, stages: int, micro_batches: int, kept: Sequence[int]) -> int:
    """Return the maximum activation bytes that a pipeline stage stores at once, over all micro-batches in
    flight.

    With one chunk per stage the schedule is 1F1B (Narayanan et al. 2021, section 2.2.1); with several it is
    the interleaved one (section 2.2.2), with the padding and group size of
    ``megarl.models.megatron.schedule``.

    Args:
        stage: index of the stage.
        stages: number of pipeline stages.
        micro_batches: number of micro-batches of a global batch.
        kept: bytes that one micro-batch stores in each chunk of the stage.
    """
    chunks, before = len(kept), stages - stage - 1
    if chunks == 1:
        return min(before + 1, micro_batches) * kept[0]
    filled = max(micro_batches, stages)
    group = stages if filled % stages == 0 else filled
    # Groups of micro-batches pass one after another, each through all chunks.
    order = [chunk for chunk in range(chunks) for _ in range(group)] * (filled // group)
    warm_up = min(2 * before + (chunks - 1) * group, len(order))
    peak = held = sum(kept[chunk] for chunk in order[:warm_up])
    # After the warm-up, one backward pass follows each forward pass (1F1B), with the chunks in reverse order.
    for forward, backward in zip(order[warm_up:], order, strict=False):
        held += kept[forward]
        peak = max(peak, held)
        held -= kept[chunks - 1 - backward]
    return peak
