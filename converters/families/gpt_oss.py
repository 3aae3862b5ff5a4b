"""GPT-OSS: biases everywhere, attention sinks, windows in some layers, and experts with a clamped gate in
every layer.

Experts of a layer are stored stacked and transposed, with gate and up rows interleaved. MXFP4 weights
(``*_blocks`` and ``*_scales``) are not transposed; the dequantising source returns them under the name of the
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from converters.families import dense
from converters.families.base import Family, features_of
from converters.families.sparse import MixtureNames, router_rules
from converters.mapping.rule import HuggingFaceTensor, Kind, Rule, TensorLocation
from converters.model_config.mixture import MixtureOfExperts, Routing, read_mixture
from converters.model_config.sizes import Config, read_number

if TYPE_CHECKING:
    from converters.model_config.architecture import ModelFacts

_NAMES = MixtureNames(router="router")
# Factor inside the sigmoid of the gate; a constant in Megatron-Core.
_ALPHA = 1.702


def _layer_rules(facts: ModelFacts, layer: int) -> tuple[Rule, ...]:
    """Return the rules of all parameters of a layer, in forward order."""
    assert facts.mixture is not None
    return (
        *dense.attention_rules(facts, layer),
        *router_rules(facts, facts.mixture, layer, _NAMES),
        *_expert_rules(facts, facts.mixture, layer),
    )


def _expert_rules(facts: ModelFacts, mixture: MixtureOfExperts, layer: int) -> Iterator[Rule]:
    hidden, width, experts = facts.hidden_size, mixture.ffn_hidden_size, mixture.num_experts
    block = f"model.layers.{layer}.mlp.experts"
    # (name, stored tensor, shape of the matrix, its first row in the stored tensor, step between its rows).
    gate, up = (
        ("gate_proj", "gate_up_proj", (width, hidden), 0, 2),
        ("up_proj", "gate_up_proj", (width, hidden), 1, 2),
    )
    down = ("down_proj", "down_proj", (hidden, width), 0, 1)

    def matrix(
        expert: int, name: str, stored: str, shape: tuple[int, int], start: int, step: int
    ) -> HuggingFaceTensor:
        """Return an expert's matrix, whose rows are every ``step``-th column of the stored matrix, from
        ``start`` on."""
        rows, columns = shape[0] * step, shape[1]
        # Published checkpoints store MXFP4 blocks as [out, in]; other checkpoints of transformers store [in,
        # out].
        places = (
            TensorLocation(
                f"{block}.{stored}", (experts, columns, rows), expert, start, step, transposed=True
            ),
            TensorLocation(
                f"{block}.{stored}_blocks", (experts, rows, columns), expert, start, step, written=False
            ),
        )
        return HuggingFaceTensor(f"{block}.{expert}.{name}.weight", shape, places, alone=False)

    def bias(
        expert: int, name: str, stored: str, shape: tuple[int, int], start: int, step: int
    ) -> HuggingFaceTensor:
        place = TensorLocation(f"{block}.{stored}_bias", (experts, shape[0] * step), expert, start, step)
        return HuggingFaceTensor(f"{block}.{expert}.{name}.bias", shape[:1], (place,), alone=False)

    for expert in range(experts):
        megatron = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}."
        yield Rule(f"{megatron}linear_fc1.weight", Kind.GATED, (matrix(expert, *gate), matrix(expert, *up)))
        yield Rule(f"{megatron}linear_fc1.bias", Kind.GATED, (bias(expert, *gate), bias(expert, *up)))
        yield Rule(f"{megatron}linear_fc2.weight", Kind.ROW, (matrix(expert, *down),))
        yield Rule(f"{megatron}linear_fc2.bias", Kind.REPLICATED, (bias(expert, *down),))


def _read_gate_limit(config: Config, problems: list[str]) -> float | None:
    alpha, limit = config.get("swiglu_alpha"), config.get("swiglu_limit")
    if alpha is not None and alpha != _ALPHA:
        problems.append(
            f"swiglu_alpha = {alpha!r}: only {_ALPHA} is supported, which is written into Megatron-Core's "
            "code"
        )
    return read_number(limit, "swiglu_limit", problems)


def _read_mixture(config: Config, num_layers: int, problems: list[str]) -> MixtureOfExperts | None:
    if config.get("attention_bias") is not True:
        problems.append(
            f"attention_bias = {config.get('attention_bias')!r}: only true is supported; Megatron-Core has "
            "all biases or none"
        )
    if config.get("num_local_experts") == 0:
        problems.append("num_local_experts = 0: a layer has no other MLP")
    chosen = config.get("experts_per_token")
    if chosen is not None and chosen != config.get("num_experts_per_tok"):
        problems.append(
            f"experts_per_token = {chosen!r}: num_experts_per_tok, which transformers reads, says otherwise"
        )
    return read_mixture(
        config,
        problems,
        width_key="intermediate_size",
        normalized=True,
        sparse_layers=(True,) * num_layers,
        routing=Routing(has_bias=True),
    )


FAMILY = Family(
    model_type="gpt_oss",
    architecture_class="GptOssForCausalLM",
    config_keys=frozenset(
        {
            "attention_bias",
            "experts_per_token",
            # Repeats original_max_position_embeddings of rope_scaling, which transformers reads instead.
            "initial_context_length",
            "layer_types",
            "num_experts_per_tok",
            "num_local_experts",
            # This key and the next concern a loss that transformers computes from labels.
            "output_router_logits",
            "router_aux_loss_coef",
            "sliding_window",
            "swiglu_alpha",
            "swiglu_limit",
        }
    ),
    read_features=partial(features_of, qkv_bias=True, attention_output_bias=True, mlp_bias=True, sinks=True),
    layer_rules=_layer_rules,
    read_mixture=_read_mixture,
    has_layer_windows=True,
    read_gate_limit=_read_gate_limit,
    defaults={"sliding_window": 128},
)
