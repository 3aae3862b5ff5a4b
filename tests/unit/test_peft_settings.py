"""What ``policy.peft`` says: layers by name, how factors begin, their scale, NeMo-RL's sections, and what is
refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear

from converters.mapping.layouts import Span, shard_layout
from converters.mapping.rule import HuggingFaceTensor, Kind, Rule
from megarl.config.defaults import complete_policy
from megarl.config.load import load_config
from megarl.config.validate import validate_config
from megarl.errors import ConfigError
from megarl.models.engine.adapters import AdapterSettings, FirstFactors, merged
from megarl.models.megatron.adapters import _order_of
from megarl.run.preflight import missing_adapters
from tests.unit.config_samples import changed, complete, raw_distillation, raw_grpo, raw_ppo

CONFIGS = Path(__file__).parents[2] / "configs"
LAYERS = [
    f"model.layers.{layer}.{name}"
    for layer in range(2)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
]
OTHERS = ["model.layers.0.mlp.experts.3.down_proj", "model.embed_tokens", "lm_head"]


def settings(**section: Any) -> AdapterSettings:
    found = AdapterSettings.of(
        complete_policy(
            {"model_name": "a/model", "precision": "float32", "peft": {"enabled": True, **section}}
        )
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("targets", "excluded", "expected"),
    [
        ([], [], LAYERS),
        ([], ["k_proj", "*.1.*"], [LAYERS[0], LAYERS[2]]),
        (["q_proj"], [], [LAYERS[0], LAYERS[3]]),
        (["*.layers.1.*.q_proj"], [], [LAYERS[3]]),
        (["linear_qkv"], [], [LAYERS[0], LAYERS[1], LAYERS[3], LAYERS[4]]),
        (["*.layers.0.*.linear_fc2"], ["*.experts.*"], [LAYERS[2]]),
        (["model.layers.1.mlp.down_proj"], [], [LAYERS[5]]),
    ],
)
def test_layers_are_named_as_in_peft_or_in_megatron(
    targets: list[str], excluded: list[str], expected: list[str]
) -> None:
    layers = (
        [*LAYERS, *(name.replace("k_proj", "v_proj") for name in LAYERS if "k_proj" in name)]
        if "linear_qkv" in targets
        else LAYERS
    )
    found = settings(target_modules=targets, exclude_modules=excluded).chosen(layers, OTHERS)
    assert [name for name in found if "v_proj" not in name] == expected


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"target_modules": ["gate_proj"]}, "'gate_proj' names no linear layer"),
        ({"target_modules": ["down_proj"]}, "experts.3.down_proj, which can have no adapter in this version"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head, which can have no adapter"),
        ({"exclude_modules": ["*"]}, "nothing would be trained"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        settings(**section).chosen(LAYERS, OTHERS)


def test_how_factors_begin() -> None:
    """As PEFT's Linear: A uniform up to 1 / sqrt(inputs), B zero; the same for one name and seed, and for no
    other."""
    width, rank = 50, 400
    ours = {
        name: FirstFactors(settings(dim=rank, lora_A_init_method=name), ["a"], 3).read("a", "A", width)
        for name in ("kaiming", "xavier", "normal")
    }
    theirs = Linear(torch.nn.Linear(width, 7), "default", LoraConfig(r=rank), r=rank).lora_A["default"].weight
    assert (
        float(ours["kaiming"].abs().max())
        == pytest.approx(float(theirs.abs().max()), rel=1e-3)
        == pytest.approx(width**-0.5, rel=1e-3)
    )
    assert float(ours["kaiming"].std()) == pytest.approx(float(theirs.std()), rel=0.02)
    assert float(ours["xavier"].std()) == pytest.approx((2 / (width + rank)) ** 0.5, rel=0.02)
    assert float(ours["normal"].std()) == pytest.approx(1 / rank, rel=0.02)
    first = FirstFactors(settings(dim=4), ["a", "b"], 3)
    assert not first.read("a", "B", 9).any() and first.read("a", "B", 9).shape == (9, 4)
    assert torch.equal(first.read("a", "A", 9), FirstFactors(settings(dim=4), ["a"], 3).read("a", "A", 9))
    assert not torch.equal(first.read("a", "A", 9), first.read("b", "A", 9))
    assert not torch.equal(first.read("a", "A", 9), FirstFactors(settings(dim=4), ["a"], 4).read("a", "A", 9))


def test_the_scale_is_stabilised_by_the_root_of_the_rank() -> None:
    assert settings(dim=16, alpha=32).scaling == 2.0
    assert settings(dim=16, alpha=32, use_rslora=True).scaling == 8.0
    assert settings(dim=16, use_rslora=True).as_peft(["a.q_proj"], ["a.q_proj"])["use_rslora"] is True


def test_peft_s_config_lists_ends_of_names_where_they_are_enough() -> None:
    config = settings().as_peft(LAYERS[:4], LAYERS)
    # what ends as an expert's matrix does is written out
    assert settings().as_peft([LAYERS[2], LAYERS[5]], [*LAYERS, *OTHERS])["target_modules"] == [
        LAYERS[2],
        LAYERS[5],
    ]
    assert config["target_modules"] == [
        "model.layers.0.mlp.down_proj",
        "model.layers.0.self_attn.k_proj",
        "q_proj",
    ]


def test_a_merged_weight_is_rounded_once_and_the_base_stays() -> None:
    weight, up, down = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((7, 5), (7, 3), (3, 5))
    )
    for dtype in (torch.float32, torch.bfloat16):
        base = weight.to(dtype)
        kept = base.clone()
        expected = (base.double() + 2.5 * up.to(dtype).double() @ down.to(dtype).double()).to(dtype)
        found = merged(base, up.to(dtype), down.to(dtype), 2.5)
        torch.testing.assert_close(found, expected, atol=1e-6 if dtype is torch.float32 else 0.0, rtol=0)
        assert found.dtype == dtype and torch.equal(base, kept)
        assert torch.equal(merged(base, torch.zeros_like(up), down, 2.5), base)


def test_rows_of_fused_layers_are_those_of_their_parts() -> None:
    """Query, key and value rows of two key-value groups; without an adapter of the key, its rows are those of
    zeros."""
    rule = Rule(
        "qkv",
        Kind.QKV,
        tuple(
            HuggingFaceTensor(f"{name}.weight", (rows, 4)) for name, rows in (("q", 12), ("k", 4), ("v", 4))
        ),
    )
    layout = shard_layout(rule, 2, 1, 2, 0)
    assert layout.spans[0] == Span(0, 6, 12)
    # The second rank's shard of the query begins at row 6 and has 6 rows; that of the value at 2, with 2.
    half = {0: 6, 2: 2}
    assert _order_of(layout, half, half).tolist() == [0, 1, 2, 3, 4, 5, 8, 8, 6, 7]


NEMO = {"enabled": True, "dim": 4, "alpha": 8}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"policy.megatron_cfg.peft": {**NEMO, "lora_A_init_method": "xavier"}},
            {"dim": 4, "lora_A_init_method": "xavier"},
        ),
        ({"policy.dtensor_cfg": {"enabled": False, "lora_cfg": NEMO}}, None),
        (
            {
                "policy.megatron_cfg": {"enabled": False},
                "policy.dtensor_cfg": {
                    "enabled": True,
                    "lora_cfg": {**NEMO, "match_all_linear": True, "lora_A_init": "xavier"},
                },
                "policy.optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-4}},
                "policy.train_global_batch_size": 60,
                "policy.generation.backend": "hf",
            },
            {"dim": 4, "target_modules": [], "lora_A_init_method": "xavier"},
        ),
    ],
)
def test_nemo_rl_s_sections_are_read_as_one(changes: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = validate_config(changed(raw_grpo(), changes))["policy"]["peft"]
    assert found is None if expected is None else expected.items() <= found.items()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"policy.peft": NEMO, "policy.megatron_cfg.peft": NEMO}, "policy.megatron_cfg.peft"),
        ({"policy.peft": {**NEMO, "use_dora": True}}, "policy.peft.use_dora"),
        ({"policy.peft": {**NEMO, "lora_A_init_method": "pissa"}}, "policy.peft.lora_A_init_method"),
        ({"policy.peft": {**NEMO, "quantization": "nf4"}}, "policy.peft.quantization"),
        ({"policy.peft": {**NEMO, "lora_dtype": "float16"}}, "policy.peft.lora_dtype"),
        ({"policy.megatron_cfg.peft": {**NEMO, "dmi": 3}}, "policy.peft.dmi"),
    ],
)
def test_what_goes_together_with_adapters(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config(changed(raw_grpo(), changes))
    assert [violation.key for violation in caught.value.violations] == [key]
    assert all(violation.fix for violation in caught.value.violations)


def test_models_beside_the_policy_have_adapters_of_their_own_where_they_are_trained() -> None:
    config = complete(raw_ppo(), {"policy.peft": NEMO})
    assert config["policy"]["peft"]["enabled"] and config["critic"]["peft"] is None
    config = validate_config(changed(raw_ppo(), {"critic.peft": NEMO}))
    assert config["policy"]["peft"] is None and config["critic"]["peft"]["dim"] == 4
    with pytest.raises(ConfigError, match=r"critic\.peft\.lora_dtype"):
        validate_config(changed(raw_ppo(), {"critic.peft": {**NEMO, "lora_dtype": "float16"}}))
    with pytest.raises(ConfigError, match=r"teacher\.peft\.enabled = True: this model is not trained"):
        validate_config(changed(raw_distillation(), {"teacher.peft": NEMO}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 5}, "has rank 4 in the adapter"),
        ({"alpha": 9.0}, "has scale 2 in the adapter"),
        ({"targets": ("k_proj",)}, "its layers differ"),
    ],
)
def test_another_adapter_to_go_on_from_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    from megarl.models.engine.adapters import factor_name, write_peft

    stored = settings(dim=4, alpha=8, target_modules=["q_proj"], adapter_path=str(tmp_path / "adapter"))
    names = [LAYERS[0], LAYERS[3]]
    factors = {
        factor_name(name, letter): torch.ones((4, 6) if letter == "A" else (6, 4))
        for name in names
        for letter in "AB"
    }
    write_peft(tmp_path / "adapter", stored.as_peft(names, LAYERS), factors)
    assert torch.equal(FirstFactors(stored, names, 0).read(names[0], "B", 6), torch.ones(6, 4))
    other = dataclasses.replace(stored, **change)
    with pytest.raises(ConfigError, match=message):
        FirstFactors(other, other.chosen(LAYERS, OTHERS), 0)


@pytest.mark.parametrize("labels", [1, 2])
def test_a_classifier_is_no_model_that_scores(tmp_path: Path, labels: int) -> None:
    """Of whose rows the first is not the score."""
    from megarl.models.engine.adapters import SAVED_SCORE, factor_name, write_peft

    stored = settings(dim=4, alpha=8, target_modules=["q_proj"], adapter_path=str(tmp_path / "adapter"))
    stored = dataclasses.replace(stored, scores=True)
    factors = {
        factor_name(LAYERS[0], "A"): torch.ones(4, 6),
        factor_name(LAYERS[0], "B"): torch.ones(6, 4),
        SAVED_SCORE: torch.ones(labels, 6),
    }
    write_peft(tmp_path / "adapter", stored.as_peft(LAYERS[:1], LAYERS), factors)
    with contextlib.ExitStack() as stack:
        if labels > 1:
            stack.enter_context(pytest.raises(ConfigError, match=r"its score layer is \[2, 6\]"))
        score = FirstFactors(stored, LAYERS[:1], 0).score()
        assert score is not None and score.shape == (1, 6)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"target_modules": ["all-linear"]}, "'all-linear' names no layer of the model. Fix: write an empty"),
        ({"target_modules": ["q_proj", "nope_proj"]}, "'nope_proj' names no layer of the model"),
        ({"exclude_modules": ["down_prj"]}, "'down_prj' names no layer of the model"),
        ({"target_modules": ["linear_qkv"], "exclude_modules": ["lm_head", "*.layers.1.*"]}, ""),
    ],
)
def test_a_configuration_names_layers_of_its_model(section: dict[str, Any], message: str) -> None:
    """Where the model's sizes are known, before workers are there."""
    recipe = CONFIGS / "grpo-qwen2.5-1.5b-1gpu-megatron.yaml"
    written = json.dumps({"enabled": True, **section})
    with contextlib.ExitStack() as stack:
        if message:
            stack.enter_context(pytest.raises(ConfigError, match=re.escape(message)))
        validate_config(load_config(recipe, [f"policy.peft={written}"]))


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        # The names of its weights are not known here: phi3 has qkv_proj and gate_up_proj.
        (
            "grpo-qwen2.5-1.5b-dtensor",
            ["policy.model_name=microsoft/phi-4", "policy.peft={enabled: true, target_modules: [qkv_proj]}"],
        ),
        ("rm-qwen2.5-1.5b-8gpu-megatron", ["policy.peft={enabled: true, exclude_modules: [score]}"]),
        (
            "ppo-gsm8k-qwen2.5-1.5b-1gpu-megatron",
            ["critic.peft={enabled: true, exclude_modules: [score, '*norm*']}"],
        ),
        ("grpo-qwen2.5-1.5b-megatron", ["policy.peft={enabled: true, exclude_modules: [linear_fc1]}"]),
    ],
)
def test_names_that_a_model_may_have_are_accepted(recipe: str, changes: list[str]) -> None:
    words = [*changes, "++cluster.memory_check=warn"]
    validate_config(load_config(CONFIGS / f"{recipe}.yaml", words))


def test_an_adapter_that_cannot_be_read_is_found_before_a_run(tmp_path: Path) -> None:
    from megarl.models.engine.adapters import write_peft

    recipe = CONFIGS / "grpo-qwen2.5-1.5b-1gpu-megatron.yaml"
    start = tmp_path / "adapter"
    written = json.dumps({"enabled": True, "adapter_path": str(start)})
    config = validate_config(load_config(recipe, [f"policy.peft={written}"]))
    [found] = missing_adapters(config)
    assert found.key == "policy.peft.adapter_path" and "is not a directory" in found.bound
    plain = settings().as_peft(LAYERS[:1], LAYERS)
    write_peft(start, plain, {})
    assert list(missing_adapters(config)) == []
    (start / "adapter_config.json").write_text(json.dumps({**plain, "use_dora": True, "bias": "all"}))
    [found] = missing_adapters(config)
    assert "use_dora = true" in found.bound and "bias = 'all'" in found.bound
