"""The tiny model loads with plain transformers, and the checkpoint check counts exactly what a slow loop
counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from converters.families.read import read_architecture
from megarl.errors import ConfigError, DataError, ModelError
from megarl.quickstart import material
from megarl.quickstart.__main__ import FAMILIES, _Changes, run_once
from megarl.quickstart.__main__ import main as quickstart
from megarl.quickstart.material import evaluate_checkpoint, main, make_model, read_problems, write_problems
from tests.tiers import sampled


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("quickstart") / "model", seed=3)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as source:
        return {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118


def one_by_one(model_dir: Path, prompt: str, max_new_tokens: int) -> str:
    """Greedy decoding of a single prompt by whole forward passes: no padding, no cache."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(model_dir),
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
    )
    tokens: list[int] = tokenizer(prompt)["input_ids"]
    start = len(tokens)
    for _ in range(max_new_tokens):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
        if token == tokenizer.eos_token_id:
            break
        tokens.append(token)
    return tokenizer.decode(tokens[start:], skip_special_tokens=True).strip()


def test_weights_are_float32_and_divide_by_two(model_dir: Path) -> None:
    config, tokenizer = AutoConfig.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    assert config.model_type == "qwen2"
    assert config.vocab_size == len(tokenizer)
    assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert all(tensor.dtype == torch.float32 for tensor in weights(model_dir).values())
    for size in (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    ):
        assert size % 2 == 0
    assert "lm_head.weight" in weights(model_dir)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_each_family_has_the_same_tokens_and_about_as_many_weights(
    model_dir: Path, tmp_path: Path, family: str
) -> None:
    directory = make_model(tmp_path / family, 3, family)
    config, one, other = (
        AutoConfig.from_pretrained(directory),
        *map(AutoTokenizer.from_pretrained, (directory, model_dir)),
    )
    assert config.model_type == material.FAMILIES[family][0] and one.get_vocab() == other.get_vocab()
    prompt = "Tom has 12 apples and buys 3 more. How many apples? Answer: 15"
    assert (
        one(prompt)["input_ids"] == other(prompt)["input_ids"]
        and one.decode(one(prompt)["input_ids"]) == prompt
    )
    assert 150_000 < sum(tensor.numel() for tensor in weights(directory).values()) < 165_000
    assert read_architecture(config).gated_delta is None or family == "qwen3_5"


def test_flags_that_are_not_built_for_gated_delta_nets_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(FAMILIES) == list(material.FAMILIES)
    for flags in (
        ["--backend", "fsdp1"],
        ["--adapter", "lora"],
        ["--generation", "vllm"],
        ["--generation", "vllm", "--asynchronous"],
    ):
        with pytest.raises(SystemExit) as ended:
            quickstart(["--family", "qwen3_5", *flags, "--out", str(tmp_path / "runs")])
        assert ended.value.code == 2 and not (tmp_path / "runs").exists()
        assert f"{flags[0]} {flags[1]}" in capsys.readouterr().err.replace("vllm-apart", "vllm")


def test_adapters_on_fsdp1_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        quickstart(["--backend", "fsdp1", "--adapter", "lora", "--out", str(tmp_path / "runs")])
    assert ended.value.code == 2 and not (tmp_path / "runs").exists()
    assert "FSDP1 has no adapters; use --backend megatron or dtensor" in capsys.readouterr().err


def test_a_wrong_override_of_the_second_part_is_refused_before_the_first(tmp_path: Path) -> None:
    changes = _Changes(
        "arithmetic", "qwen2", "megatron", "policy", "none", False, [], ["grpo.max_num_step=2"]
    )
    with pytest.raises(ConfigError, match=r"did you mean 'grpo\.max_num_steps'"):
        run_once(1, tmp_path, changes, Console(quiet=True))
    assert not (tmp_path / "sft").exists()


def test_seed_decides_the_weights_and_leaves_the_callers_random_state(
    model_dir: Path, tmp_path: Path
) -> None:
    before = torch.random.get_rng_state()
    again, other = (
        weights(make_model(tmp_path / "again", seed=3)),
        weights(make_model(tmp_path / "other", seed=4)),
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    first = weights(model_dir)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@sampled(1)
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_accuracy_is_that_of_a_slow_loop(model_dir: Path, tmp_path: Path, batch_size: int) -> None:
    """Every third record gets the model's own continuation as its answer; prompts of many lengths share a
    batch."""
    problems = read_problems(write_problems(tmp_path / "source.jsonl", 13, 21))
    answers = [one_by_one(model_dir, problem.prompt, 3) for problem in problems]
    records = [
        {"prompt": problem.prompt, "answer": f" {answer} " if index % 3 == 0 else problem.answer}
        for index, (problem, answer) in enumerate(zip(problems, answers, strict=True))
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    expected = (
        sum(record["answer"].strip() == answer for record, answer in zip(records, answers, strict=True)) / 13
    )
    assert expected > 0
    assert evaluate_checkpoint(model_dir, path, batch_size, max_new_tokens=3) == pytest.approx(expected)


def test_command_line(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_problems(tmp_path / "problems.jsonl", 5, 2)
    assert main([str(model_dir), str(path), "--batch-size", "2"]) == 0
    assert capsys.readouterr().out == f"accuracy {evaluate_checkpoint(model_dir, path):.4f}\n"
    assert main([str(tmp_path), str(path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_bad_input_is_refused(model_dir: Path, tmp_path: Path) -> None:
    path = write_problems(tmp_path / "problems.jsonl", 5, 2)
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        evaluate_checkpoint(tmp_path / "absent", path)
    with pytest.raises(DataError, match="does not exist"):
        evaluate_checkpoint(model_dir, tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="batch_size = 0"):
        evaluate_checkpoint(model_dir, path, batch_size=0)
    with pytest.raises(DataError, match="max_new_tokens = -1"):
        evaluate_checkpoint(model_dir, path, max_new_tokens=-1)
