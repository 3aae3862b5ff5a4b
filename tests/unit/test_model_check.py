"""What a driver and a dry run find out about a model before any worker starts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from converters.errors import ConversionError
from megarl.cli import main
from megarl.config.defaults import complete_run
from megarl.errors import ConfigError, ModelError
from megarl.run.model_check import check_model, check_model_on_disk
from tests.models import VOCABULARY, make_tiny
from tests.unit.config_samples import raw_grpo

MEGATRON = {"megatron_cfg": {"enabled": True}}
FSDP1: dict[str, Any] = {}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 9000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.5,
}


def dtensor(tensor: int = 1, sequence_parallel: bool = False) -> dict[str, Any]:
    return {
        "dtensor_cfg": {
            "enabled": True,
            "tensor_parallel_size": tensor,
            "sequence_parallel": sequence_parallel,
            "custom_parallel_plan": None,
        }
    }


def policy(model: Path, backend: dict[str, Any]) -> dict[str, Any]:
    return {"model_name": str(model), "trust_remote_code": False, "merged_adapter": None, **backend}


def without_a_tensor(model: Path, name: str = "model.norm.weight") -> None:
    weights = load_file(model / "model.safetensors")
    del weights[name]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def granite(directory: Path) -> Path:
    """A family that transformers divides and the converters do not know."""
    from transformers import AutoModelForCausalLM, GraniteConfig

    sizes: dict[str, Any] = {
        "hidden_size": 36,
        "intermediate_size": 52,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
    }
    AutoModelForCausalLM.from_config(GraniteConfig(**sizes, vocab_size=VOCABULARY)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("backend", [MEGATRON, FSDP1, dtensor(), dtensor(2, True)], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_whole_model_passes(tmp_path: Path, family: str, backend: dict[str, Any]) -> None:
    model = make_tiny(tmp_path / "model", family, tied=True)
    assert check_model(policy(model, backend)) == VOCABULARY
    check_model_on_disk(policy(model, backend))


@pytest.mark.parametrize("check", [check_model, check_model_on_disk])
@pytest.mark.parametrize(
    ("backend", "kind"), [(MEGATRON, ConversionError), (FSDP1, ModelError), (dtensor(2), ModelError)], ids=str
)
def test_missing_weights_are_named(
    tmp_path: Path, backend: dict[str, Any], kind: type[Exception], check: Any
) -> None:
    model = make_tiny(tmp_path / "model", "qwen2", tied=False)
    without_a_tensor(model)
    with pytest.raises(kind, match=r"missing: model\.norm\.weight"):
        check(policy(model, backend))


def test_files_that_no_export_could_copy_are_found_before_training(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", "qwen2", tied=False)
    (model / "README.md").symlink_to(tmp_path / "nowhere.md")
    for backend in (MEGATRON, FSDP1):
        with pytest.raises(ConversionError, match=r"README\.md leads to"):
            check_model(policy(model, backend))


def test_what_megarl_fills_in_knows_the_users_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of-me")
    given = raw_grpo() | {"run_dir": "~/run"}
    given["policy"] |= {"model_name": "~/model", "tokenizer": {"name": "~/model"}}
    given["data"] |= {"train": [{"path": "~/a.jsonl"}, {"path": "b~.jsonl"}]}
    found = complete_run(given)
    assert found["run_dir"] == "/home/of-me/run"
    assert found["checkpointing"]["checkpoint_dir"] == "/home/of-me/run/checkpoints"
    assert found["policy"]["model_name"] == found["policy"]["tokenizer"]["name"] == "/home/of-me/model"
    assert [source["path"] for source in found["data"]["train"]] == ["/home/of-me/a.jsonl", "b~.jsonl"]


def test_what_megatron_has_no_setting_for_is_found_by_the_driver(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", "qwen3", tied=False, rope_parameters=YARN)
    with pytest.raises(ConversionError, match=r"attention_factor = 1\.5"):
        check_model(policy(model, MEGATRON))
    assert check_model(policy(model, FSDP1)) == VOCABULARY


def test_torch_backends_take_families_that_the_converters_do_not_know(tmp_path: Path) -> None:
    model = granite(tmp_path / "granite")
    assert check_model(policy(model, FSDP1)) == check_model(policy(model, dtensor(2))) == VOCABULARY
    with pytest.raises(ConversionError, match="granite"):
        check_model(policy(model, MEGATRON))
    with pytest.raises(ConfigError, match="no plan with it for 'granite'"):
        check_model(policy(model, dtensor(2, True)))


def test_a_directory_without_weights_is_checked_by_its_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny(tmp_path / "model", "qwen2", tied=False)
    (model / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        check_model_on_disk(policy(model, MEGATRON))
    assert "holds no weights" in caplog.text
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, "hidden_act": "gelu"}))
    with pytest.raises(ConversionError, match="hidden_act = 'gelu'"):
        check_model_on_disk(policy(model, MEGATRON))


def test_an_id_that_is_not_here_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    check_model_on_disk(policy(Path("owner/name-that-nobody-has"), MEGATRON))


def test_a_dry_run_refuses_a_wrong_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny(tmp_path / "model", "qwen2", tied=False, max_position_embeddings=4096)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw_grpo()))
    changes = ["policy.generation.stop_token_ids=null", "policy.megatron_cfg.pipeline_model_parallel_size=1"]
    names = [f"policy.model_name={model}", f"policy.tokenizer.name={model}"]
    arguments = ["train", str(tmp_path / "run.yaml"), *names, *changes, "--dry-run"]
    assert main(arguments) == 0
    # lines are broken wherever they get too long
    shown = " ".join(capsys.readouterr().out.split())
    assert "peak" in shown and "there is no tokenizer in that directory" in shown
    (model / "tokenizer.json").write_text("{}")
    assert main(arguments) == 0
    assert "of a tokenizer" not in " ".join(capsys.readouterr().out.split())
    without_a_tensor(model)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert "missing: model.norm.weight" in shown.err and "Traceback" not in shown.err and shown.out == ""
