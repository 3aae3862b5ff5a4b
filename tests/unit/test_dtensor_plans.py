"""Which style each module gets, and what is said when a plan cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from megarl.config.rules.backends import HAND_WRITTEN_PLANS
from megarl.errors import ConfigError
from megarl.models.dtensor.plans import (
    choose_plan,
    custom_plan,
    decoder_plan,
    model_plan,
    translate_parallel_style,
)
from megarl.models.dtensor.styles import ColumnLinear, NormOfParts, RowLinear, VocabularyEmbedding, WholeInput
from megarl.models.engine.scoring import scoring_config
from megarl.models.huggingface.loading import build_on_meta
from tests.models import tiny_config

A_PLAN = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": RowwiseParallel()}


def make_plan() -> dict[str, Any]:
    return A_PLAN


def not_a_plan() -> list[str]:
    return ["colwise"]


def model_of(family: str, tied: bool = False) -> Any:
    return build_on_meta(tiny_config(family, tied=tied))


def granite() -> Any:
    """A family with a plan of transformers' own and none of ours."""
    from transformers import GraniteConfig

    sizes = {
        "vocab_size": 101,
        "hidden_size": 36,
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
    }
    return build_on_meta(
        GraniteConfig(**sizes, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    )


@pytest.mark.parametrize(
    ("name", "kind", "attributes"),
    [
        ("colwise", ColwiseParallel, {"output_layouts": (Shard(-1),)}),
        ("rowwise", RowwiseParallel, {"output_layouts": (Replicate(),)}),
        ("colwise_rep", ColwiseParallel, {"output_layouts": (Replicate(),)}),
        ("rowwise_rep", RowwiseParallel, {"input_layouts": (Replicate(),)}),
        ("sequence_parallel", SequenceParallel, {}),
    ],
)
def test_styles_go_by_their_names(name: str, kind: type, attributes: dict[str, Any]) -> None:
    style = translate_parallel_style(name)
    assert isinstance(style, kind)
    assert {key: getattr(style, key) for key in attributes} == attributes


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'diagonal'.*colwise, rowwise"):
        translate_parallel_style("diagonal")
    with pytest.raises(AssertionError, match="int"):
        translate_parallel_style(3)


@pytest.mark.parametrize("family", sorted(HAND_WRITTEN_PLANS))
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_our_plans_know_every_matrix_of_a_layer(family: str, sequence_parallel: bool) -> None:
    model = model_of(family)
    plan = choose_plan(model, sequence_parallel=sequence_parallel)
    layer = "model.layers.*."
    linear = {
        name for name, module in model.model.layers[0].named_modules() if isinstance(module, torch.nn.Linear)
    }
    assert linear <= {key.removeprefix(layer) for key in plan}
    norms = {
        name
        for name, module in model.model.layers[0].named_modules()
        if type(module).__name__.endswith("RMSNorm")
    }
    heads = {name for name in norms if name.startswith("self_attn")}
    assert (heads != set()) == (family == "qwen3")
    assert all(isinstance(plan[layer + name], NormOfParts) for name in heads)
    assert {name for name in norms - heads if layer + name in plan} == (
        norms - heads if sequence_parallel else set()
    )
    stream = Shard(1) if sequence_parallel else Replicate()
    assert plan["model.embed_tokens"].output_layouts == stream
    assert plan["lm_head"].input_layouts == (stream,) and plan["lm_head"].output_layouts == (Shard(-1),)
    assert (
        isinstance(plan["model.layers.*.self_attn"], WholeInput)
        and plan["model.layers.*.self_attn"].layout == stream
    )


def test_head_norms_are_left_out_where_there_are_none() -> None:
    assert "model.layers.*.self_attn.q_norm" in decoder_plan(sequence_parallel=False)
    assert "model.layers.*.self_attn.q_norm" not in choose_plan(model_of("llama"), sequence_parallel=False)


def test_other_families_get_the_plan_of_transformers() -> None:
    plan = choose_plan(granite(), sequence_parallel=False)
    assert isinstance(plan["model.layers.*.self_attn.q_proj"], ColumnLinear)
    assert isinstance(plan["model.layers.*.mlp.down_proj"], RowLinear)
    assert isinstance(plan["model.embed_tokens"], VocabularyEmbedding)
    assert plan["lm_head"].output_layouts == (Shard(-1),) and plan["lm_head"].use_local_output
    with pytest.raises(ConfigError, match="no plan with it for 'granite'"):
        choose_plan(granite(), sequence_parallel=True)


def test_a_style_of_transformers_own_is_named() -> None:
    model = model_of("mixtral")
    with pytest.raises(ConfigError, match="MixtralForCausalLM in transformers has an unknown parallel style"):
        model_plan(model)


@pytest.mark.parametrize(
    "given", [A_PLAN, "tests.unit.test_dtensor_plans.A_PLAN", "tests.unit.test_dtensor_plans.make_plan"]
)
def test_custom_plans_come_in_three_forms(given: object) -> None:
    plan = custom_plan(given)
    assert isinstance(plan["model.layers.*.mlp.up_proj"], ColwiseParallel)
    assert plan["model.layers.*.mlp.down_proj"] is A_PLAN["model.layers.*.mlp.down_proj"]


@pytest.mark.parametrize(
    "given",
    [
        "nowhere.to_be.found",
        "tests.unit.test_dtensor_plans.no_such_name",
        "word",
        "tests.unit.test_dtensor_plans.not_a_plan",
        7,
    ],
)
def test_anything_else_is_refused_with_the_three_forms(given: object) -> None:
    with pytest.raises(
        ConfigError,
        match=r"a dictionary from module names to styles, the import path of such a dictionary, or .* "
        r"function",
    ):
        custom_plan(given)


def test_a_custom_plan_may_not_name_what_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"has no module model\.layers\.\*\.mlp\.gate"):
        choose_plan(model_of("llama"), sequence_parallel=False, custom={"model.layers.*.mlp.gate": "colwise"})
    with pytest.raises(ConfigError, match=r"'model\.norm' has a int"):
        custom_plan({"model.norm": 3})


@pytest.mark.parametrize("plan", [{}, {"model.layers.*.mlp.act_fn": "colwise"}], ids=["empty", "activations"])
def test_a_custom_plan_names_a_parameter(plan: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"custom_parallel_plan = \{.*names no module with a parameter.*or write null"
    ):
        choose_plan(model_of("llama"), sequence_parallel=False, custom=plan)


def test_a_custom_plan_keeps_how_activations_lie_next_to_the_vocabulary() -> None:
    given = {
        "model.embed_tokens": RowwiseParallel(output_layouts=Shard(1)),
        "lm_head": ColwiseParallel(input_layouts=Shard(1)),
    }
    plan = choose_plan(model_of("qwen2", tied=True), sequence_parallel=False, custom=given)
    assert plan["model.embed_tokens"].output_layouts == Shard(1)
    assert plan["lm_head"].input_layouts == (Shard(1),)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_policys_plan_fits_a_model_that_scores(sequence_parallel: bool) -> None:
    critic = build_on_meta(scoring_config(tiny_config("qwen3", tied=False)), scores=True)
    whole = decoder_plan(sequence_parallel=sequence_parallel)
    plan = choose_plan(critic, sequence_parallel=sequence_parallel, custom=whole)
    ours = choose_plan(critic, sequence_parallel=sequence_parallel)
    assert "lm_head" in whole and "lm_head" not in plan and plan.keys() == ours.keys()
    assert plan["score"].input_layouts == ours["score"].input_layouts
    with pytest.raises(ConfigError, match="has no module lm_tail"):
        choose_plan(critic, sequence_parallel=sequence_parallel, custom={**whole, "lm_tail": "colwise"})


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("model.layers.*.mlp.up_proj", ColwiseParallel()),
        ("model.layers.*.mlp.up_proj", "colwise"),
        (
            "model.layers.*.self_attn",
            PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
        ),
        ("lm_head", ColumnLinear(shared_input=True)),
    ],
    ids=["torch", "name", "outside", "alone"],
)
def test_an_input_gradient_is_added_up_once(name: str, style: Any) -> None:
    plan = dict(decoder_plan(sequence_parallel=False))
    del plan["model.layers.*.self_attn.q_norm"], plan["model.layers.*.self_attn.k_norm"]
    choose_plan(model_of("llama"), sequence_parallel=False, custom=plan)
    with pytest.raises(
        ConfigError, match=r"custom_parallel_plan.*do not agree on who adds up the gradient.*WholeInput"
    ):
        choose_plan(model_of("llama"), sequence_parallel=False, custom={**plan, name: style})
