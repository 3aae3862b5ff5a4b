"""Rules of decoders with a mixture of experts in some or all layers.

transformers stacks all experts of a layer in two tensors in memory, but saves each expert's tensors, as in
the first releases of these models. Both formats are read, and both names of the MLP block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from converters.families import dense
from converters.mapping.rule import HuggingFaceTensor, Kind, Rule, TensorLocation, module_rules
from converters.model_config.mixture import MixtureOfExperts, read_mixture
from converters.model_config.sizes import Config, read_size

if TYPE_CHECKING:
    from converters.model_config.architecture import ModelFacts


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """Names of a family's mixture-of-experts tensors.

    Attributes:
        blocks: possible names of the block in a layer; the first is used for writing.
        gate, up, down: matrices of an expert.
        shared: shared expert in the block; its gate has the suffix ``_gate``.
        router: router in the block.
    """

    blocks: tuple[str, ...] = ("mlp",)
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    router: str = "gate"


def read_qwen_mixture(
    config: Config, num_layers: int, problems: list[str], *, shared_width_key: str | None = None
) -> MixtureOfExperts | None:
    """Read the mixture of experts of Qwen2-MoE or Qwen3-MoE; arguments as in ``read_mixture``."""
    return read_mixture(
        config,
        problems,
        width_key="moe_intermediate_size",
        normalized=bool(config.get("norm_topk_prob")),
        sparse_layers=_read_sparse_layers(config, num_layers, problems),
        shared_width_key=shared_width_key,
    )


def _read_sparse_layers(config: Config, num_layers: int, problems: list[str]) -> tuple[bool, ...]:
    """Return for each layer of a Qwen model whether it has experts; append problems to ``problems``.

    Every ``decoder_sparse_step``-th layer, counted from 1, has experts, unless its index (from 0) is in
    ``mlp_only_layers``.
    """
    step, dense = read_size(config, "decoder_sparse_step", problems), config.get("mlp_only_layers") or []
    if not isinstance(dense, (list, tuple)) or not all(isinstance(layer, int) for layer in dense):
        problems.append(f"mlp_only_layers = {dense!r}: a list of layer indices is needed")
        dense = []
    # transformers counts layers from 1 for this step, and from 0 in mlp_only_layers.
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def layer_rules(facts: ModelFacts, layer: int, names: MixtureNames = MixtureNames()) -> tuple[Rule, ...]:
    """Return the rules of all parameters of a layer, in forward order. Layers without experts have a dense
    MLP."""
    mixture = facts.mixture
    if mixture is None or not facts.is_sparse(layer):
        return dense.layer_rules(facts, layer)
    return (
        *dense.attention_rules(facts, layer),
        *router_rules(facts, mixture, layer, names),
        *_expert_rules(facts, mixture, layer, names),
        *(_shared_expert_rules(facts, mixture, layer, names) if mixture.shared_ffn_hidden_size else ()),
    )


def router_rules(
    facts: ModelFacts, mixture: MixtureOfExperts, layer: int, names: MixtureNames
) -> Iterator[Rule]:
    """Yield the rules of a router's weight and biases."""
    experts = mixture.num_experts
    tensors: list[tuple[str, str, tuple[int, ...]]] = [("weight", "weight", (experts, facts.hidden_size))]
    if mixture.routing.has_bias:
        tensors.append(("bias", "bias", (experts,)))
    if mixture.routing.has_correction_bias:
        tensors.append(("expert_bias", "e_score_correction_bias", (experts,)))
    for megatron, name, shape in tensors:
        first, *others = [f"model.layers.{layer}.{block}.{names.router}.{name}" for block in names.blocks]
        places = tuple(TensorLocation(other, shape) for other in others)
        # Megatron-Core keeps the correction bias in float32 for any model dtype (TopKRouter).
        tensor = HuggingFaceTensor(first, shape, places, stays_float32=megatron == "expert_bias")
        yield Rule(f"decoder.layers.{layer}.mlp.router.{megatron}", Kind.REPLICATED, (tensor,))


def _expert_rules(
    facts: ModelFacts, mixture: MixtureOfExperts, layer: int, names: MixtureNames
) -> Iterator[Rule]:
    hidden, width, experts = facts.hidden_size, mixture.ffn_hidden_size, mixture.num_experts
    blocks = tuple(f"model.layers.{layer}.{block}.experts" for block in names.blocks)
    gate_up, down = (experts, 2 * width, hidden), (experts, hidden, width)
    # transformers stacks the gate above the up projection, which begins at row ``width``.
    for expert in range(experts):
        megatron = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}."
        parts = (
            _expert_tensor(
                blocks, names.gate, (width, hidden), TensorLocation("gate_up_proj", gate_up, expert)
            ),
            _expert_tensor(
                blocks, names.up, (width, hidden), TensorLocation("gate_up_proj", gate_up, expert, width)
            ),
        )
        yield Rule(f"{megatron}linear_fc1.weight", Kind.GATED, parts)
        part = _expert_tensor(blocks, names.down, (hidden, width), TensorLocation("down_proj", down, expert))
        yield Rule(f"{megatron}linear_fc2.weight", Kind.ROW, (part,))


def _shared_expert_rules(
    facts: ModelFacts, mixture: MixtureOfExperts, layer: int, names: MixtureNames
) -> Iterator[Rule]:
    """Yield the rules of the shared expert. Megatron-Core shards it like a dense MLP, not like routed
    experts."""
    hidden, width = facts.hidden_size, mixture.shared_ffn_hidden_size
    megatron, prefix = (
        f"decoder.layers.{layer}.mlp.shared_experts.",
        f"model.layers.{layer}.{names.blocks[0]}.{names.shared}",
    )
    gated = {f"{prefix}.{name}": (width, hidden) for name in (names.gate, names.up)}
    yield from module_rules(f"{megatron}linear_fc1", Kind.GATED, gated)
    yield from module_rules(f"{megatron}linear_fc2", Kind.ROW, {f"{prefix}.{names.down}": (hidden, width)})
    if mixture.shared_gate:
        yield Rule(
            f"{megatron}gate_weight",
            Kind.REPLICATED,
            (HuggingFaceTensor(f"{prefix}_gate.weight", (1, hidden)),),
        )


def _expert_tensor(
    blocks: tuple[str, ...], name: str, shape: tuple[int, int], stacked: TensorLocation
) -> HuggingFaceTensor:
    """Return an expert's matrix, which may be stored alone or in a stack.

    Args:
        blocks: possible names of the block with the experts.
        name: name of the matrix.
        shape: its shape.
        stacked: location in the stack, whose name lacks the block.
    """
    # The first location is the one to write; all others are alternatives for reading.
    first, *others = [f"{block}.{stacked.index}.{name}.weight" for block in blocks]
    alone = [TensorLocation(other, shape) for other in others]
    together = [replace(stacked, name=f"{block}.{stacked.name}") for block in blocks]
    return HuggingFaceTensor(first, shape, (*alone, *together))
