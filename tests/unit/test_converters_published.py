"""Every published config.json that a family knows is converted there and back; every other one is refused
with its true reason."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.command import build_parser, main
from converters.command import run as convert_parsed
from converters.errors import ConversionError
from converters.families import FAMILIES
from converters.families.read import read_architecture
from converters.families.unknown import UNKNOWN
from tests.unit.converters_tiny import stored_tensors
from tests.unit.published_models import TEXTS, cut, published, save_published

REFUSED: dict[str, str] = {
    "DeepSeek-R1-0528-Qwen3-8B": r"attn_factor = 0\.878\d*: transformers does not read it, vLLM multiplies",
    "DeepSeek-V3.2": r"model_type = 'deepseek_v32'.*indexer",
    "Ling-mini___bailing_moe_v2": r"model_type = 'bailing_moe_v2'",
    "Llama-2-7b__dynamic_": r"rope type 'dynamic'",
    "Llama_compressed-tensors_FP8": r"quantization_config.*compressed-tensors",
    "Llama_longrope": r"rope type 'longrope'",
    "MiMo-7B__mimo_": r"model_type = 'mimo'",
    "Phi-4": r"model_type = 'phi3'.*fused",
    "Qwen2.5-1M": r"dual_chunk_attention_config",
    "Qwen2.5-7B-Instruct-AWQ": r"quantization_config.*awq",
    "Qwen3-8B__yarn_attention_factor": (
        r"attention_factor = 1\.0: Megatron-Core computes it from factor and "
        r"mscale"
    ),
    "Yarn-Llama-2-7b-64k": r"auto_map",
    "gemma-2-9b": r"model_type = 'gemma2'.*soft",
}
NAMES = sorted(path.stem for path in TEXTS.glob("*.json"))
KNOWN = [name for name in NAMES if name not in REFUSED]


def run(*argv: str | Path) -> None:
    assert main([*map(str, argv)]) == 0, argv


def convert(*argv: str | Path) -> int:
    return convert_parsed(build_parser().parse_args([*map(str, argv)]))


def test_what_is_described_as_unknown_is() -> None:
    assert not set(UNKNOWN) & set(FAMILIES)


def test_there_are_texts_of_both_kinds() -> None:
    assert set(REFUSED) < set(NAMES) and len(KNOWN) > 40


@pytest.mark.parametrize("name", KNOWN)
def test_a_published_model_there_and_back(name: str, tmp_path: Path) -> None:
    hf, mcore, back = tmp_path / "hf", tmp_path / "mcore", tmp_path / "back"
    expected = save_published(hf, name)
    text = (hf / "config.json").read_bytes()
    run("import", hf, mcore)
    run("verify", hf, mcore)
    run("export", mcore, back)
    run("verify", hf, back)
    found = stored_tensors(back)
    assert set(found) == set(expected)
    for tensor_name, tensor in expected.items():
        assert found[tensor_name].dtype == tensor.dtype and torch.equal(found[tensor_name], tensor), (
            tensor_name
        )
    assert (hf / "config.json").read_bytes() == text
    described = json.loads(text)
    if described.get("quantization_config"):
        del described["quantization_config"]
    exported = json.loads((back / "config.json").read_text())
    assert {key: value for key, value in exported.items() if key not in ("dtype", "torch_dtype")} == {
        key: value for key, value in described.items() if key not in ("dtype", "torch_dtype")
    }


@pytest.mark.parametrize("name", KNOWN)
def test_a_config_that_is_read_stays_as_it_is(name: str) -> None:
    """Config classes of transformers change what they are given."""
    content = cut(published(name))
    content.pop("quantization_config", None)
    before = copy.deepcopy(content)
    read_architecture(content)
    assert content == before


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_carried_over_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    """Before its weights are looked at: the reason is the config's."""
    save_published(tmp_path / "hf", "Llama-2-7b")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(cut_if_flat(published(name))))
    with pytest.raises(ConversionError, match=f"(?s){REFUSED[name]}"):
        convert("import", tmp_path / "hf", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def cut_if_flat(content: dict[str, Any]) -> dict[str, Any]:
    return cut(content) if "num_attention_heads" in content else content


@pytest.mark.parametrize("name", ["Qwen3.5-9B", "Qwen3.5-35B-A3B"])
def test_the_text_part_of_a_published_model_that_sees_is_read(name: str) -> None:
    """With positions in three sections, which are one in a text, and without a width of dense layers where
    there are none."""
    text = published(name)["text_config"]
    architecture = read_architecture(text)
    assert (
        architecture.rotary_fraction == 0.25 and architecture.output_gate and architecture.zero_centered_norms
    )
    assert (
        architecture.gated_delta is not None
        and architecture.gated_delta.layers.count(False) * 4 == architecture.num_layers
    )
    assert (architecture.prediction_layers, architecture.num_experts) == (1, text.get("num_experts", 0))
