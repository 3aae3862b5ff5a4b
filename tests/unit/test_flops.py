"""Floating-point operations of a model against those that torch counts in transformers' own passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from converters.families.read import read_architecture
from megarl.config.adapters import adapter_parameters
from megarl.config.model_facts import facts_of
from megarl.models.engine.gated_delta import causal_convolution, gated_delta_step
from megarl.throughput.flops import ModelFlops, attended_pairs
from tests.tiers import sampled
from tests.unit.converters_tiny import CONFIGS, SIZES

ROWS, LENGTH = 2, 13


def model_and_flops(name: str, **changes: Any) -> tuple[PreTrainedModel, ModelFlops]:
    config_class, options = CONFIGS[name]
    config = config_class(**{**SIZES, **options, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return model, ModelFlops.of(facts_of(config.to_dict()))


def squares(flops: ModelFlops, lengths: list[int]) -> float:
    """Operations of attention that computes masked pairs as well, as transformers' eager attention does."""
    return sum(rate * float(length) ** 2 for _, rate in flops.pairs for length in lengths)


def counted(run: Any) -> float:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def tokens(rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["llama_one_group", "qwen3_moe"])
def test_parts_that_are_recomputed_are_what_torch_counts(name: str) -> None:
    model, flops = model_and_flops(name)
    hidden, lengths = torch.randn(ROWS, LENGTH, SIZES["hidden_size"]), [LENGTH] * ROWS
    with torch.no_grad():
        found = {
            kind: sum(counted(lambda layer=layer: layer.mlp(hidden)) for layer in layers)
            for kind, layers in by_kind(model).items()
        }
    for part in ("mlp", "moe"):
        assert flops.recomputation(lengths, [part]) == pytest.approx(found[part], rel=0.01)
    assert flops.recomputation(lengths, ["core_attn"]) == flops.attention(lengths)
    assert flops.recomputation(lengths, ["mlp", "moe", "core_attn"]) < flops.recomputation(lengths)


def test_beside_adapters_no_weight_has_a_gradient() -> None:
    model, flops = model_and_flops("qwen3")
    changed = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    # as behind an embedding that is trained
    changed.enable_input_require_grads()
    count = sum(parameter.numel() for parameter in changed.parameters() if parameter.requires_grad)
    section = {"dim": 4, "target_modules": [], "exclude_modules": []}
    facts = facts_of(model.config.to_dict())
    assert adapter_parameters(section, facts, range(facts.num_layers)) == count
    found = counted(lambda: changed(input_ids=tokens()).logits.sum().backward())
    lengths = [LENGTH] * ROWS
    expected = flops.training(lengths, adapters=count) + 3 * (
        squares(flops, lengths) - flops.attention(lengths)
    )
    assert expected == pytest.approx(found, rel=0.01)


def by_kind(model: PreTrainedModel) -> dict[str, list[Any]]:
    """The layers with a dense MLP and those with experts."""
    kinds: dict[str, list[Any]] = {"mlp": [], "moe": []}
    for layer in model.model.layers:
        kinds["moe" if hasattr(layer.mlp, "experts") else "mlp"].append(layer)
    return kinds


# what else CONFIGS has are other sizes of these
NAMES = (
    "qwen3_next",
    "qwen3_next_mixed_tied",
    "qwen3_5_text",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "llama_one_group",
    "mistral_window",
    "qwen2_moe_mixed_tied",
    "qwen3_moe",
)


@sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_training_are_what_torch_counts(name: str) -> None:
    model, flops = model_and_flops(name)
    lengths = [LENGTH] * ROWS
    masked = squares(flops, lengths) - flops.attention(lengths)

    def train() -> None:
        model(input_ids=tokens(), use_cache=False).logits.sum().backward()

    with pytest.MonkeyPatch.context() as patch:
        # of a convolution channel by channel torch counts a backward pass of all channels with all: sums of
        # products are not counted
        for modeling in (modeling_qwen3_next, modeling_qwen3_5):
            patch.setattr(modeling, "causal_conv1d_fn", convolution)
            patch.setattr(modeling, "torch_chunk_gated_delta_rule", recurrence)
        with torch.no_grad():
            found = counted(lambda: model(input_ids=tokens(), use_cache=False))
        trained = counted(train)
    convolved = (
        2 * sum(lengths) * sum(weight.numel() for key, weight in model.named_parameters() if "conv1d" in key)
    )
    assert flops.forward(lengths) + masked - convolved == pytest.approx(found, rel=0.01)
    assert flops.training(lengths) + 3 * (masked - convolved) == pytest.approx(trained, rel=0.01)


def convolution(inputs: Tensor, weight: Tensor, bias: None, activation: str, **options: Any) -> Tensor:
    rows, length = inputs.shape[0], inputs.shape[2]
    convolved = causal_convolution(
        inputs.transpose(1, 2).flatten(0, 1), weight, tuple(range(0, rows * length + 1, length))
    )
    return torch.nn.functional.silu(convolved).unflatten(0, (rows, length)).transpose(1, 2)


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """The gated delta rule token by token: what chunks add to it is no work of the model."""
    state = value.new_zeros(*value.shape[:1], value.shape[2], key.shape[3], value.shape[3])
    outputs = []
    for token in range(key.shape[1]):
        output, state = gated_delta_step(
            query[:, token], key[:, token], value[:, token], g[:, token], beta[:, token], state
        )
        outputs.append(output)
    return torch.stack(outputs, dim=1), None


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3", "mixtral"])
def test_recomputed_layers_are_a_further_forward_pass_of_them(name: str) -> None:
    model, flops = model_and_flops(name)
    lengths = [LENGTH] * ROWS
    masked = squares(flops, lengths) - flops.attention(lengths)

    def train() -> None:
        model(input_ids=tokens(), use_cache=False).logits.sum().backward()

    model.train()
    plain = counted(train)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with set_checkpoint_early_stop(False):  # which leaves out the last product of a layer
        again = counted(train) - plain
    assert flops.recomputation(lengths) + masked == pytest.approx(again, rel=0.01)


def test_frozen_routers_have_no_gradient_of_their_weights() -> None:
    model, flops = model_and_flops("qwen3_moe", num_experts=9)

    def train() -> None:
        model(input_ids=tokens(), use_cache=False).logits.sum().backward()

    whole = counted(train)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not parameter_name.endswith("mlp.gate.weight"))
    lengths = [LENGTH] * ROWS
    saved = flops.training(lengths) - flops.training(lengths, frozen_routers=True)
    assert saved == whole - counted(train) > 0


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss_full_tied"])
def test_generation_reads_a_prompt_once_and_all_responses_but_their_last_tokens(name: str) -> None:
    model, flops = model_and_flops(name)
    prompt, new, alike = 11, 6, 3

    @torch.no_grad()
    def generate() -> None:
        cache = model(input_ids=tokens(1, prompt), use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(alike)
        for _ in range(new - 1):
            model(input_ids=tokens(alike, 1), past_key_values=cache, use_cache=True)

    # what is masked in the pass over the prompt; a decoding pass masks nothing
    masked = squares(flops, [prompt]) - flops.attention([prompt])
    needed = flops.generation([prompt], [prompt] * alike, [prompt + new] * alike)
    assert needed + masked == pytest.approx(counted(generate), rel=0.01)


def test_a_response_without_tokens_costs_the_prompt_alone() -> None:
    _, flops = model_and_flops("llama")
    assert (
        flops.generation([7], [7, 7], [7, 7])
        == flops.forward([7], logits=1)
        == flops.generation([7], [7], [8])
    )
    assert flops.forward([]) == flops.generation([], [], []) == flops.training(np.zeros(0)) == 0


@pytest.mark.parametrize("window", [None, 1, 2, 9, 30])
def test_pairs_are_those_of_the_mask(window: int | None) -> None:
    lengths = [0, 1, 2, 8, 9, 10, 29]
    expected = [
        sum(
            key <= query and (window is None or query - key < window)
            for query in range(n)
            for key in range(n)
        )
        for n in lengths
    ]
    assert attended_pairs(lengths, window).tolist() == expected


@pytest.mark.parametrize("name", ["gpt_oss", "mistral_window", "qwen2_tied", "qwen3", "deepseek_v3"])
def test_attention_is_counted_within_the_window_of_each_layer(name: str) -> None:
    config_class, options = CONFIGS[name]
    facts = facts_of(config_class(**{**SIZES, **options}).to_dict())
    flops, lengths = ModelFlops.of(facts), [0, 7, 31]
    widths = (
        2 * facts.head_dim
        if facts.latent_attention is None
        else facts.latent_attention.qk_head_dim + facts.latent_attention.v_head_dim
    )
    pairs = 0
    for window in facts.windows:
        pairs += sum(
            query - key < (window or query + 1)
            for length in lengths
            for query in range(length)
            for key in range(query + 1)
        )
    assert flops.attention(lengths) == 2 * facts.num_attention_heads * widths * pairs


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_windows_of_a_file_are_those_of_the_converted_model(name: str) -> None:
    config_class, options = CONFIGS[name]
    content = config_class(**{**SIZES, **options}).to_dict()
    assert facts_of(content).windows == read_architecture(content).windows
    # a file that leaves out what its class fills in
    short = {key: value for key, value in content.items() if key != "layer_types"}
    if "layer_types" not in options:
        assert facts_of(short).windows == facts_of(content).windows
