"""What verify has to find in weights of every family, by name, and what import has to miss: generated from
the rules of the family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from converters.checkpoint.source import open_source
from converters.errors import ConversionError
from converters.exporting import export_model, plan_export
from converters.families import FAMILIES
from converters.families.read import read_architecture
from converters.importing import import_model, plan_import
from converters.mapping.places import rows_in
from converters.mapping.rule import HuggingFaceTensor, Kind, Rule
from converters.mapping.rules import all_rules
from converters.model_config.architecture import Architecture
from converters.opening import open_any, open_megatron
from converters.verify import verify
from tests.tiers import newest_megatron, sampled
from tests.unit.converters_tiny import save_tiny, stored_tensors, tiny_config
from tests.unit.foreign_checkpoints import config_of

pytestmark = newest_megatron
BIASED = (
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "llama_all_biases",
    "qwen2",
    "qwen2_moe_mixed_tied",
    "seed_oss",
)
FEW = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
# a tiny model of each family, with biases wherever it may have some, and few experts: each of them is a name
# to be tried
MODELS: dict[str, dict[str, object]] = {
    "deepseek_v2": {**FEW, "q_lora_rank": 18},
    "deepseek_v3": FEW,
    "dots1": FEW,
    "glm4_moe": {**FEW, "use_qk_norm": True},
    "glm4_moe_lite": FEW,
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "llama_all_biases": {},
    "ministral": {},
    "mistral_window": {},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe_mixed_tied": {"num_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "qwen3": {},
    "qwen3_moe_mixed": {"num_experts": 3, "num_experts_per_tok": 2},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {"num_experts": 3, "num_experts_per_tok": 2},
    "qwen3_next": {"num_experts": 3, "num_experts_per_tok": 2},
    "seed_oss": {},
}
Tensors = dict[str, Tensor]
Mutation = tuple[list[HuggingFaceTensor], Callable[[list[Tensor]], None]]
"""The tensors that are changed, and what changes them in place."""


def test_no_family_is_left_out() -> None:
    """Those that are another family by another name have its rules; so has the text of those that also see
    (``test_seeing``)."""
    own = {name for name, family in FAMILIES.items() if family.config_like is None and not family.sees}
    assert {tiny_config(name).model_type for name in MODELS} == own


def exchange(tensors: list[Tensor]) -> None:
    one, other = tensors
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def roll(tensors: list[Tensor], count: int, size: int | None = None) -> None:
    """Move rows on by ``count``, inside each block of ``size`` rows."""
    (rows,) = tensors
    blocks = rows.clone().unflatten(0, (-1, size or rows.shape[0]))
    rows.copy_(blocks.roll(count, dims=1).flatten(0, 1))


def to_next_layer(tensors: list[Tensor]) -> None:
    """Off by one: every layer has what the one before it should have."""
    for tensor, before in zip(
        tensors, [tensor.clone() for tensor in (tensors[-1], *tensors[:-1])], strict=True
    ):
        tensor.copy_(before)


def one_ulp(tensors: list[Tensor]) -> None:
    (tensor,) = tensors
    place = tuple(size // 2 for size in tensor.shape)
    tensor[place] = torch.nextafter(tensor[place], torch.tensor(torch.inf))


def mutations(architecture: Architecture) -> Iterator[tuple[str, Mutation]]:
    """Of each kind one, every one of tensors of its own."""
    rules = {rule.megatron_name: rule for rule in all_rules(architecture)}
    for name, rule in rules.items():
        if rule.kind is Kind.GATED and ".layers.0." in name:
            yield f"gate and up of {name}", ([*rule.parts], exchange)
    if architecture.latent_attention is None:
        qkv = rules["decoder.layers.1.self_attention.linear_qkv.weight"]
        yield "key and value", ([*qkv.parts[1:]], exchange)
        yield "a rotated head", ([qkv.parts[0]], partial(roll, count=1, size=architecture.head_dim))
        # a gated delta net has no heads of queries there
        if (next_layer := rules.get("decoder.layers.2.self_attention.linear_qkv.weight")) is not None:
            yield "the next head", ([next_layer.parts[0]], partial(roll, count=10))
    else:
        latent = architecture.latent_attention
        heads, keys = latent.qk_nope_head_dim + latent.v_head_dim, latent.qk_nope_head_dim
        up, query = (
            rules[f"decoder.layers.1.self_attention.linear_{name}_up_proj.weight"] for name in ("kv", "q")
        )
        yield "key and value", ([*up.parts], partial(roll, count=keys, size=heads))
        yield "a rotated head", ([*query.parts], partial(roll, count=1, size=latent.qk_head_dim))
        down = rules["decoder.layers.2.self_attention.linear_kv_down_proj.weight"]
        yield "the rotated part", ([*down.parts], partial(roll, count=latent.qk_rope_head_dim))
    if architecture.sinks:
        sinks = rules["decoder.layers.1.self_attention.core_attention.softmax_offset"]
        yield "sinks of two heads", ([*sinks.parts], partial(roll, count=1))
    if architecture.mixture is not None:
        yield from expert_mutations(architecture, rules)
    norms = [
        rules[f"decoder.layers.{layer}.input_layernorm.weight"].parts[0]
        for layer in range(architecture.num_layers)
    ]
    yield "layers off by one", (norms, to_next_layer)
    projection = (
        rules.get("decoder.layers.2.self_attention.linear_proj.weight")
        or rules["decoder.layers.1.self_attention.linear_proj.weight"]
    )
    yield "one ulp", ([*projection.parts], one_ulp)
    yield "the next token", ([*rules["embedding.word_embeddings.weight"].parts], partial(roll, count=1))
    yield "one ulp of the output layer", ([*rules["output_layer.weight"].parts], one_ulp)


def expert_mutations(architecture: Architecture, rules: Mapping[str, Rule]) -> Iterator[tuple[str, Mutation]]:
    """Two experts exchanged, in their weights, in their biases and in the router."""
    block = "decoder.layers.2.mlp."
    for name in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias"):
        experts = [rules.get(f"{block}experts.local_experts.{expert}.{name}") for expert in (0, 2)]
        for parts in zip(*(rule.parts for rule in experts if rule is not None), strict=True):
            yield f"two experts: {parts[0].name}", ([*parts], exchange)
    for name in ("weight", "bias", "expert_bias"):
        if f"{block}router.{name}" in rules:
            yield (
                f"two experts: router {name}",
                ([*rules[f"{block}router.{name}"].parts], partial(roll, count=1)),
            )


def view(tensors: Tensors, part: HuggingFaceTensor) -> Tensor:
    """A tensor where the checkpoint keeps it."""
    place = part.places[0]
    return rows_in(tensors[place.name] if place.index is None else tensors[place.name][place.index], place)


def write(directory: Path, tensors: Tensors) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_verify_names_every_mutation(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", name, **MODELS[name])
    import_model(plan_import(open_source(tmp_path / "hf")), tmp_path / "mcore")
    export_model(plan_export(open_megatron(tmp_path / "mcore")), tmp_path / "back")
    assert (
        verify(open_any(tmp_path / "hf"), open_any(tmp_path / "mcore"))
        == []
        == verify(open_any(tmp_path / "back"))
    )
    architecture = read_architecture(config_of(tmp_path / "hf"))
    tensors, changed = stored_tensors(tmp_path / "hf"), []
    for mutation, (parts, change) in mutations(architecture):
        assert not {part.name for part in parts} & set(changed), mutation
        before = [view(tensors, part).clone() for part in parts]
        change([view(tensors, part) for part in parts])
        assert not any(map(torch.equal, before, [view(tensors, part) for part in parts])), (
            f"{mutation} changes nothing"
        )
        changed += [part.name for part in parts]
    assert len(changed) >= 9
    for directory in ("hf", "back"):
        write(tmp_path / directory, tensors)
    found = verify(open_any(tmp_path / "hf"), open_any(tmp_path / "mcore"))
    assert {(each.kind, each.name) for each in found} == {("values", name) for name in changed} and len(
        found
    ) == len(changed)
    hashes = verify(open_any(tmp_path / "back"))
    assert {(each.kind, each.name) for each in hashes} == {("hash", name) for name in changed} and len(
        hashes
    ) == len(changed)


@pytest.mark.parametrize("name", BIASED)
def test_verify_names_every_dropped_bias(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", name, **MODELS[name])
    import_model(plan_import(open_source(tmp_path / "hf")), tmp_path / "mcore")
    tensors = stored_tensors(tmp_path / "hf")
    biases = [key for key in tensors if key.endswith(("bias", "sinks"))]
    assert biases
    write(tmp_path / "hf", {key: tensor for key, tensor in tensors.items() if key not in biases})
    found = verify(open_any(tmp_path / "mcore"), open_any(tmp_path / "hf"))
    assert {each.text.split()[1] for each in found if each.text.startswith("missing: ")} == set(
        biases
    ) and len(found) == len(biases)


FIRST_LAYER = {
    "ministral": "sliding_attention",
    "qwen3_next": "linear_attention",
    "qwen3_5": "linear_attention",
}


@sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_import_names_every_missing_added_or_renamed_tensor(name: str, tmp_path: Path) -> None:
    first = next((kind for beginning, kind in FIRST_LAYER.items() if name.startswith(beginning)), None)
    layers = {"num_hidden_layers": 2} | ({} if first is None else {"layer_types": [first, "full_attention"]})
    save_tiny(tmp_path / "hf", name, **MODELS[name], **layers)
    tensors = stored_tensors(tmp_path / "hf")
    for key in sorted(tensors):
        rest = {other: tensor for other, tensor in tensors.items() if other != key}
        for changed, named in (
            (rest, {f"missing: {key} "}),
            ({**tensors, f"{key}_too": tensors[key].clone()}, {f"unknown: {key}_too "}),
            ({**rest, f"{key}_too": tensors[key]}, {f"missing: {key} ", f"unknown: {key}_too "}),
        ):
            write(tmp_path / "hf", changed)
            with pytest.raises(ConversionError) as caught:
                plan_import(open_source(tmp_path / "hf"))
            assert {detail.partition("[")[0] for detail in caught.value.details} == named
