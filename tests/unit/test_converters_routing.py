"""Routers that take sigmoids, groups of experts, and biases that correct the choice: facts, settings, and
dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from converters.checkpoint.source import open_source
from converters.errors import ConversionError
from converters.exporting import export_model, plan_export
from converters.families.read import read_architecture
from converters.importing import import_model, plan_import
from converters.model_config.megatron_settings import megatron_settings
from converters.model_config.mixture import MixtureOfExperts, Routing
from converters.opening import open_megatron
from converters.torch_dist.reader import TorchDistCheckpoint
from megarl.models.megatron.moe_router import choose
from tests.tiers import newest_megatron
from tests.unit.converters_tiny import save_tiny, stored_tensors, tiny_config
from tests.unit.published_models import published

pytestmark = newest_megatron
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def spread(weights: Tensor, experts: Tensor, count: int) -> Tensor:
    """[t, E] of the weights [t, k] of some experts."""
    return torch.zeros(len(weights), count).scatter(1, experts, weights)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    ("groups", "kept", "chosen"), [(1, 1, 3), (4, 2, 4), (4, 2, 3), (6, 5, 7), (3, 1, 1), (3, 3, 5)]
)
def test_sigmoids_in_groups_are_those_of_transformers(
    groups: int, kept: int, chosen: int, normalized: bool
) -> None:
    config = tiny_config(
        "glm4_moe",
        num_experts_per_tok=chosen,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=normalized,
        routed_scaling_factor=2.5,
    )
    router = Glm4MoeTopkRouter(config)
    torch.manual_seed(groups + kept + chosen)
    router.weight.data.normal_()
    router.e_score_correction_bias.copy_(torch.rand(12) - 0.5)
    hidden = torch.randn(50, 42)
    logits, weights, experts = router(hidden)
    mixture = read_architecture(config).mixture
    assert mixture is not None
    mine, went_to = choose(
        logits, chosen, mixture.routing, normalized=normalized, correction_bias=router.e_score_correction_bias
    )
    torch.testing.assert_close(mine, spread(weights, experts, 12))
    assert torch.equal(went_to, mine > 0) and (went_to.sum(1) == chosen).all()
    # the bias decides on experts, and groups keep tokens from some
    without, _ = choose(logits, chosen, mixture.routing, normalized=normalized)
    assert not torch.equal(without, mine)
    (coefficients,) = torch.autograd.grad(
        (weights * torch.arange(chosen)).sum(), router.weight, retain_graph=True
    )
    positions = spread(torch.arange(chosen).float().expand(50, -1), experts, 12)
    (own,) = torch.autograd.grad((mine * positions).sum(), router.weight)
    torch.testing.assert_close(own, coefficients)


@pytest.mark.parametrize("chosen", [1, 2, 4, 6])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (3, 2)])
def test_softmax_in_groups_is_that_of_transformers(groups: int, kept: int, chosen: int) -> None:
    from transformers import DeepseekV2Config

    method = "greedy" if groups == 1 else "group_limited_greedy"
    config = DeepseekV2Config(
        n_routed_experts=12,
        num_experts_per_tok=chosen,
        n_group=groups,
        topk_group=kept,
        topk_method=method,
        hidden_size=32,
        routed_scaling_factor=3.0,
    )
    router = DeepseekV2TopkRouter(config)
    torch.manual_seed(groups)
    router.weight.data.normal_()
    logits, weights, experts = router(torch.randn(60, 32))
    routing = Routing("softmax", False, groups, kept, 1, config.routed_scaling_factor)
    mine, _ = choose(logits, chosen, routing, normalized=False)
    torch.testing.assert_close(mine, spread(weights, experts, 12))


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("chosen", range(1, 7))
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 1), (4, 2), (3, 2), (4, 4)])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_megatron_chooses_where_its_choice_is_the_same(
    score: Any, groups: int, kept: int, chosen: int, normalized: bool
) -> None:
    """And only there: what the settings leave to our own choice, Megatron-Core does otherwise."""
    if chosen > kept * 12 // groups:
        pytest.skip("too few experts in the groups")
    best = 2 if score == "sigmoid" else 1
    routing = Routing(score, score == "sigmoid", groups, kept, best, 1.5)
    mixture = MixtureOfExperts(12, chosen, 22, normalized, (False, True, True), 0.0, routing=routing)
    architecture = read_architecture(tiny_config("glm4_moe"))
    settings = megatron_settings(type(architecture)(**{**vars(architecture), "mixture": mixture}))
    transformer = settings.transformer
    torch.manual_seed(chosen)
    logits, bias = torch.randn(400, 12) * 2, torch.rand(12) - 0.5 if score == "sigmoid" else None
    grouped = (
        {"num_groups": routing.groups, "group_topk": routing.groups_per_token} if routing.is_grouped else {}
    )
    weights, went_to = topk_routing_with_score_function(
        logits,
        chosen,
        use_pre_softmax=settings.attributes.get(
            "moe_router_pre_softmax", transformer["moe_router_pre_softmax"]
        ),
        scaling_factor=transformer["moe_router_topk_scaling_factor"],
        score_function=transformer["moe_router_score_function"],
        expert_bias=bias,
        **grouped,
    )
    mine, mine_went_to = choose(logits, chosen, routing, normalized=normalized, correction_bias=bias)
    same = torch.equal(went_to, mine_went_to) and torch.allclose(weights, mine, atol=1e-6, rtol=0)
    assert same == (settings.routing is None)
    assert transformer["moe_router_bias_update_rate"] == 0


def test_yarn_on_a_part_of_the_head_is_refused_by_megatron_alone() -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.4,
    }
    architecture = read_architecture(tiny_config("glm4_moe", rope_parameters=yarn))
    with pytest.raises(ConversionError, match=r"yarn and partial_rotary_factor = 0\.4"):
        megatron_settings(architecture)


def test_facts_of_the_published_models() -> None:
    architecture = read_architecture(published("GLM-4.5"))
    routing = Routing("sigmoid", True, 1, 1, 2, 2.5, in_float32=True)
    sparse = (False,) * 3 + (True,) * 89
    assert architecture.mixture == MixtureOfExperts(160, 8, 1536, True, sparse, 0.0, 1536, False, routing)
    assert (architecture.qkv_bias, architecture.attention_output_bias, architecture.qk_norm) == (
        True,
        False,
        True,
    )
    assert architecture.rotary_fraction == 0.5 and megatron_settings(architecture).routing is None


def test_the_correction_stays_float32(tmp_path: Path) -> None:
    """Asking for bfloat16 rounds the model, not the bias; a bias that was stored in bfloat16 is widened."""
    save_tiny(tmp_path / "hf", "glm4_moe")
    expected = stored_tensors(tmp_path / "hf")
    import_model(plan_import(open_source(tmp_path / "hf"), dtype=torch.bfloat16), tmp_path / "mcore")
    checkpoint = TorchDistCheckpoint(tmp_path / "mcore")
    assert checkpoint.dtype("decoder.layers.1.mlp.router.expert_bias") == torch.float32
    assert checkpoint.dtype("decoder.layers.1.mlp.router.weight") == torch.bfloat16
    for dtype in (None, torch.bfloat16, torch.float16):
        target = tmp_path / f"back-{dtype}"
        export_model(plan_export(open_megatron(tmp_path / "mcore"), dtype=dtype), target)
        back = stored_tensors(target)
        assert back[BIAS].dtype == torch.float32 and torch.equal(back[BIAS], expected[BIAS])
        assert not torch.equal(expected[BIAS].bfloat16().float(), expected[BIAS])
        assert back["model.norm.weight"].dtype == (dtype or torch.bfloat16)
