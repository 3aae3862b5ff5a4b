"""Models that score: the config and the weights that a language model gets, and what cannot score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from converters.check import check_source
from converters.checkpoint.artifacts import write_config
from converters.checkpoint.source import open_source
from converters.families.read import read_architecture
from converters.model_config.heads import ScoreHead
from converters.model_config.prediction_layers import as_stored
from megarl.config.defaults import complete_policy
from megarl.config.layout import consecutive_layers
from megarl.config.model_facts import facts_of_policy
from megarl.config.parameters import stage_parameters
from megarl.errors import ModelError
from megarl.models.engine.scoring import SCORE, said_of_scoring, scoring_config, scoring_source
from megarl.run.model_check import check_model
from megarl.throughput.flops import ModelFlops
from tests.models import make_tiny, policy_config, tiny_config
from tests.prediction_layers import add_prediction_layers
from tests.tiers import sampled


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("scoring") / "qwen2", "qwen2", tied=True)


def test_a_language_model_s_config_becomes_one_that_scores(model: Path) -> None:
    given = AutoConfig.from_pretrained(model)
    config = scoring_config(given)
    assert config.architectures == ["Qwen2ForSequenceClassification"] and config.num_labels == 1
    assert given.architectures == ["Qwen2ForCausalLM"], "the given one stays as it is"
    architecture = read_architecture(config)
    assert architecture.head == ScoreHead(1, bias=False) and not architecture.tied_embeddings
    assert scoring_config(config).architectures == config.architectures


def test_a_new_layer_is_read_as_if_it_had_been_stored(model: Path) -> None:
    config = scoring_config(AutoConfig.from_pretrained(model))
    stored = open_source(model)
    source, other = (scoring_source(stored, config, seed) for seed in (3, 4))
    assert set(source.names()) == {SCORE, *(name for name in stored.names() if name != "lm_head.weight")}
    assert SCORE in source and "lm_head.weight" not in source and SCORE not in stored
    drawn = torch.randn(1, 36, generator=torch.Generator().manual_seed(3)) * 0.2
    assert torch.equal(source.read(SCORE), drawn) and not torch.equal(other.read(SCORE), drawn)
    assert torch.equal(source.read(SCORE, (slice(0, 1), slice(5, 9))), drawn[:, 5:9])
    assert source.shape(SCORE) == (1, 36) and source.dtype(SCORE) == torch.float32
    source.read(SCORE).zero_()
    assert torch.equal(source.read(SCORE), drawn), "what was read is the reader's own"
    assert torch.equal(
        source.read("model.norm.weight"), load_file(model / "model.safetensors")["model.norm.weight"]
    )
    check_source(source, read_architecture(config))


def save_scoring(directory: Path, labels: int, kind: Any = AutoModelForSequenceClassification) -> Path:
    config = tiny_config("qwen2", tied=False)
    config.num_labels = labels
    kind.from_config(config).save_pretrained(directory)
    return directory


def test_a_model_that_scores_keeps_its_own_layer(tmp_path: Path) -> None:
    directory = save_scoring(tmp_path / "one", 1)
    source = scoring_source(
        open_source(directory), scoring_config(AutoConfig.from_pretrained(directory)), seed=3
    )
    assert torch.equal(source.read(SCORE), load_file(directory / "model.safetensors")[SCORE])


@pytest.mark.parametrize("backend", ["megatron", "fsdp1"])
def test_what_cannot_score_is_refused_before_anything_starts(tmp_path: Path, backend: str) -> None:
    def check(directory: Path) -> None:
        policy = {**policy_config(directory), "generation": None, "reward_model_cfg": {"enabled": True}}
        check_model(
            complete_policy(
                policy if backend == "megatron" else {**policy, "megatron_cfg": {"enabled": False}}
            )
        )

    check(save_scoring(tmp_path / "one", 1))
    with pytest.raises(ModelError, match=r"it scores with 3 labels, but policy\.reward_model_cfg needs 1"):
        check(save_scoring(tmp_path / "three", 3))
    with pytest.raises(
        ModelError,
        match=r"it is a Qwen2ForTokenClassification, but policy\.reward_model_cfg needs a language model or "
        r"a",
    ):
        check(save_scoring(tmp_path / "token", 1, AutoModelForTokenClassification))


def test_a_family_without_such_a_class_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"transformers has no class with a score layer .* for model_type 'glm4_moe'"
    ):
        scoring_config(tiny_config("glm4_moe", tied=False))


@sampled(1)
@pytest.mark.parametrize("tied", [False, True])
def test_layers_that_predict_further_tokens_are_no_obstacle(tmp_path: Path, tied: bool) -> None:
    """Their copies of the output layer go with it."""
    directory = make_tiny(tmp_path / "deepseek", "deepseek_v3_dense", tied=tied)
    add_prediction_layers(directory)
    config = scoring_config(AutoConfig.from_pretrained(directory))
    source = scoring_source(open_source(directory), config, seed=0)
    architecture = as_stored(read_architecture(config), source.names())
    assert architecture.prediction_layers == 1
    check_source(source, architecture)


def test_a_checkpoint_s_config_says_what_the_model_is(model: Path, tmp_path: Path) -> None:
    config = scoring_config(AutoConfig.from_pretrained(model))
    config.pad_token_id = 7
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    write_config(tmp_path, torch.bfloat16, said_of_scoring(config))
    said = json.loads((tmp_path / "config.json").read_text())
    assert (
        said["architectures"] == ["Qwen2ForSequenceClassification"]
        and said["pad_token_id"] == 7
        and said["dtype"] == "bfloat16"
    )
    assert AutoConfig.from_pretrained(tmp_path).num_labels == 1
    assert read_architecture(said).head == ScoreHead(1, bias=False)
    before = (tmp_path / "config.json").read_bytes()
    write_config(tmp_path, torch.bfloat16, said_of_scoring(config))
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_text_model_s_section_says_the_dtype_too(tmp_path: Path) -> None:
    sections = {"text_config": {"dtype": "bfloat16"}, "vision_config": {"dtype": "bfloat16"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", **sections}))
    write_config(tmp_path, torch.float32)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["dtype"] == said["text_config"]["dtype"] == "float32"
    assert said["vision_config"] == sections["vision_config"]


def test_estimates_know_that_there_is_no_output_layer(model: Path) -> None:
    policy = complete_policy(
        {**policy_config(model), "generation": None, "reward_model_cfg": {"enabled": True}}
    )
    facts, plain = facts_of_policy(policy), facts_of_policy({**policy, "reward_model_cfg": None})
    assert facts is not None and plain is not None
    # tied, the first of two stages has no part of the output layer and the last one a copy
    difference = [
        stage_parameters(plain, 1, stage, consecutive_layers([2, 1]))
        - stage_parameters(facts, 1, stage, consecutive_layers([2, 1]))
        for stage in (0, 1)
    ]
    assert difference == [0, (101 - 1) * 36]
    assert ModelFlops.of(plain).logits / ModelFlops.of(facts).logits == 101
