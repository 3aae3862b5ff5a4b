"""Models that also see: Qwen3.5 is converted whole and its text is trained; what else there is, is refused
with what there is instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from converters.command import main as convert
from converters.errors import ConversionError
from converters.families.read import read_architecture
from megarl.cli import main
from megarl.config.model_facts import read_model_facts
from megarl.data.tokenization import get_tokenizer
from megarl.errors import DataError, ModelError
from megarl.run.model_check import check_model, check_tokens, tokens_of_pictures
from tests.models import VOCABULARY
from tests.seeing import FILES, TOKENS, make_seeing, save_text_part
from tests.unit.config_samples import raw_grpo
from tests.unit.test_sources import load, write
from tests.unit.test_tokenization import save_tokenizer


def there_and_back(model: Path, directory: Path, *more: str) -> dict[str, torch.Tensor]:
    """The tensors of an export of the import of a model, which a comparison finds equal."""
    mcore, back = str(directory / "mcore"), str(directory / "back")
    for command in (
        ["import", str(model), mcore],
        ["verify", str(model), mcore],
        ["export", mcore, back],
        ["verify", str(model), back],
    ):
        assert convert([*command, *(more if command[0] == "verify" else ())]) == 0
    return load_file(directory / "back" / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("family", "stacked"), [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)]
)
def test_all_of_a_model_comes_back(tmp_path: Path, family: str, stacked: bool, tied: bool) -> None:
    """With tower, prediction layer, nested config and the files of its processor; transformers opens it and
    computes the same."""
    model = make_seeing(tmp_path / "model", family, tied=tied, stacked_experts=stacked)
    before, after = load_file(model / "model.safetensors"), there_and_back(model, tmp_path, "--logits")
    assert before.keys() == after.keys() and all(
        torch.equal(after[name], tensor) for name, tensor in before.items()
    )
    for name in (*FILES, "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (model / name).read_bytes()
    options = {"dtype": torch.float32, "experts_implementation": "eager", "output_loading_info": True}
    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "back", **options)
    assert not report["missing_keys"] and not report["unexpected_keys"]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_text_that_transformers_took_out_of_such_a_model_is_converted(tmp_path: Path, family: str) -> None:
    """It saves the config of a text, and names as inside the model."""
    text = save_text_part(make_seeing(tmp_path / "model", family, tied=False), tmp_path / "text")
    before, after = load_file(text / "model.safetensors"), there_and_back(text, tmp_path)
    assert "model.language_model.norm.weight" in before and before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_model_and_not_its_text_says_whether_embeddings_are_tied(tmp_path: Path) -> None:
    """As transformers has it: it saves a tied model with a text that says that it is not."""
    model = make_seeing(tmp_path / "model", "qwen3_5", tied=True)
    content = json.loads((model / "config.json").read_text())
    content["text_config"]["tie_word_embeddings"] = False
    (model / "config.json").write_text(json.dumps(content))
    facts = read_model_facts(str(model))
    assert facts is not None and facts.tied_embeddings and read_architecture(content).tied_embeddings
    there_and_back(model, tmp_path)


def changed(key: str, value: Any) -> dict[str, Any]:
    content = {
        "model_type": "qwen3_5",
        "text_config": {"hidden_size": 48},
        "vision_config": {"out_hidden_size": 48},
    }
    section, _, inner = key.partition(".")
    return {**content, section: {**content[section], inner: value} if inner else value}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("text_config", None, "text_config = None: an object is needed"),
        ("vision_config", [1], r"vision_config = \[1\]: an object is needed"),
        ("vision_config.out_hidden_size", 40, "out_hidden_size = 40: the text needs its hidden_size = 48"),
        ("vision_config.depth", 0, "vision_config.depth = 0: a positive whole number is needed"),
        ("text_config.to_dict", 1, "to_dict: no setting, but a part of transformers' Qwen3_5TextConfig"),
    ],
)
def test_a_section_that_cannot_be_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        read_architecture(changed(key, value))


def test_a_tower_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    model = make_seeing(tmp_path / "model", "qwen3_5", tied=False)
    tensors = load_file(model / "model.safetensors")
    del tensors["model.visual.blocks.1.attn.qkv.bias"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"missing: model\.visual\.blocks\.1\.attn\.qkv\.bias \[72\]"):
        check_model(
            {
                "model_name": str(model),
                "trust_remote_code": False,
                "merged_adapter": None,
                "megatron_cfg": {"enabled": True},
            }
        )


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3", "llama4", "qwen3_omni_moe"])
def test_other_models_that_also_see_are_refused_with_those_that_are_not(model_type: str) -> None:
    content = {
        "model_type": model_type,
        "architectures": ["SomeForConditionalGeneration"],
        "text_config": {},
        "vision_config": {},
    }
    with pytest.raises(
        ConversionError,
        match=rf"'{model_type}' has no mapping rules: it also reads pictures.*qwen3_5 or qwen3_5_moe",
    ):
        read_architecture(content)


@pytest.mark.parametrize("tensor_parallel", [0, 2])
def test_torch_backends_refuse_models_that_also_see(tmp_path: Path, tensor_parallel: int) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    tower = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    }
    config = AutoConfig.for_model("qwen2_5_vl", text_config={**sizes, "vocab_size": 100}, vision_config=tower)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    settings = {
        "enabled": True,
        "tensor_parallel_size": 2,
        "sequence_parallel": False,
        "custom_parallel_plan": None,
    }
    backend = {"dtensor_cfg": settings} if tensor_parallel else {}
    with pytest.raises(
        ModelError, match=r"a qwen2_5_vl model also sees or hears.*megatron_cfg.enabled to true.*qwen3_5"
    ):
        check_model(
            {"model_name": str(tmp_path), "trust_remote_code": False, "merged_adapter": None, **backend}
        )


def test_a_dry_run_takes_such_a_model_and_names_the_backends_that_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_seeing(tmp_path / "model", "qwen3_5", tied=True)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw_grpo()))
    lengths = [
        "policy.max_total_sequence_length=64",
        "data.max_input_seq_length=32",
        "policy.generation.max_new_tokens=32",
    ]
    changes = [
        "policy.generation.stop_token_ids=null",
        "policy.megatron_cfg.pipeline_model_parallel_size=1",
        *lengths,
    ]
    arguments = ["train", str(tmp_path / "run.yaml"), f"policy.model_name={model}", *changes, "--dry-run"]
    assert main(arguments) == 0, capsys.readouterr().err
    assert "peak" in capsys.readouterr().out
    assert (
        main(
            [
                *arguments,
                "policy.megatron_cfg.enabled=false",
                "policy.optimizer={name: torch.optim.AdamW, kwargs: {lr: 1e-4}}",
            ]
        )
        == 2
    )
    assert "the model has gated delta nets, which on the fsdp1 backend are" in capsys.readouterr().err


def test_words_for_pictures_in_data_are_refused(tmp_path: Path) -> None:
    model = make_seeing(tmp_path / "model", "qwen3_5", tied=False)
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "tokenizer")})
    pictures = tokens_of_pictures({"model_name": str(model)})
    assert pictures == set(TOKENS.values())
    word = tokenizer.convert_ids_to_tokens(tokenizer("five")["input_ids"][-1])
    one, other = (
        write(tmp_path / name, [{"prompt": text, "answer": "two"} for text in texts], repeat=2)
        for name, texts in (("a.jsonl", ["two two", "two"]), ("b.jsonl", ["two", "two five"]))
    )
    data, seen = load([one, other], tokenizer), {tokenizer.convert_tokens_to_ids(word)}
    check_tokens(data, tokenizer, VOCABULARY, False, pictures=pictures)
    example, token = data.examples.first_with(seen, False)  # type: ignore[misc]
    assert (
        token in seen
        and token in example.prompt_ids
        and token not in data.examples[example.index - 1].prompt_ids
    )
    with pytest.raises(
        DataError,
        match=rf"record {example.index} .*token id {token} .*stands for an image.*leave out records",
    ):
        check_tokens(data, tokenizer, VOCABULARY, False, pictures=seen)
    assert load([one], tokenizer).examples.first_with(seen, True) is None
