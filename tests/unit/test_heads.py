"""Value and reward models: a score layer in place of the output layer, both ways."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from converters.checkpoint.source import open_source
from converters.command import main
from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.model_config.heads import ScoreHead
from converters.model_config.megatron_settings import megatron_settings
from converters.torch_dist.reader import TorchDistCheckpoint
from tests.tiers import sampled
from tests.unit.converters_tiny import stored_tensors, tiny_config

SEQUENCE, TOKEN = AutoModelForSequenceClassification, AutoModelForTokenClassification
# tied: the config of a language model that the head was put on says so, and it means nothing for the head
CASES = [
    ("llama", SEQUENCE, 1, torch.float32, {"tie_word_embeddings": True}),
    ("llama_tied", TOKEN, 3, torch.bfloat16, {}),
    ("mistral_window", TOKEN, 1, torch.float32, {}),
    ("qwen2", SEQUENCE, 2, torch.bfloat16, {}),
    ("qwen3_tied", SEQUENCE, 4, torch.float32, {}),
    ("qwen3_moe", TOKEN, 2, torch.float32, {}),
    ("mixtral", SEQUENCE, 1, torch.bfloat16, {"tie_word_embeddings": True}),
]


def save_scoring(
    directory: Path, name: str, kind: Any, labels: int, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A model that scores, saved by transformers, its weights random."""
    torch.manual_seed(4)
    config = tiny_config(name, num_labels=labels, **changes)
    model = kind.from_config(config, dtype=dtype, experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(directory)
    return model


def run(*argv: str | Path) -> None:
    assert main([*map(str, argv)]) == 0, argv


@sampled(3)
@pytest.mark.parametrize(("name", "kind", "labels", "dtype", "changes"), CASES)
def test_there_and_back(
    name: str,
    kind: Any,
    labels: int,
    dtype: torch.dtype,
    changes: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hf, mcore, back = tmp_path / "hf", tmp_path / "mcore", tmp_path / "back"
    model = save_scoring(hf, name, kind, labels, dtype, **changes)
    run("import", hf, mcore, "--vocab-multiple", "8")
    run("export", mcore, back)
    before, after = stored_tensors(hf), stored_tensors(back)
    assert set(before) == set(after) and "lm_head.weight" not in before
    for tensor in before:
        assert before[tensor].dtype == after[tensor].dtype and torch.equal(before[tensor], after[tensor]), (
            tensor
        )
    checkpoint = TorchDistCheckpoint(mcore)
    # what a trainer's plain linear layer asks for: all rows on every rank, none of them padding
    assert checkpoint.shape("output_layer.weight") == (labels, 42)
    assert torch.equal(checkpoint.read("output_layer.weight", ((0, labels), (0, 42))), model.score.weight)
    assert ("output_layer.bias" in checkpoint) == (kind is TOKEN) == ("score.bias" in before)
    assert (back / "config.json").read_bytes() == (hf / "config.json").read_bytes()
    capsys.readouterr()
    run("verify", hf, mcore, "--logits", "--json")
    assert json.loads(capsys.readouterr().out)["logits_difference"] == 0.0
    loaded = kind.from_pretrained(back, dtype=dtype, experts_implementation="eager").eval()
    tokens = torch.arange(1, 12)[None]
    with torch.no_grad():
        # loaded ones lie where the file has them; dot products of some processors round by where a vector
        # begins
        assert torch.equal(copy.deepcopy(loaded)(tokens).logits, model(tokens).logits)


def test_a_worker_is_not_built_of_it(tmp_path: Path) -> None:
    architecture = read_architecture(save_scoring(tmp_path, "llama", SEQUENCE, 3).config)
    assert architecture.head == ScoreHead(3, bias=False) and not architecture.tied_embeddings
    with pytest.raises(ConversionError, match=r"scores \(3 labels\) is no language model"):
        megatron_settings(architecture)
    read_json = open_source(tmp_path).read_json("config.json")
    assert read_architecture(read_json) == architecture


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "said"),
    [
        (
            SEQUENCE,
            {"architectures": ["LlamaForRewardModel"]},
            {},
            "only LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClass",
        ),
        (
            SEQUENCE,
            {"architectures": "LlamaForSequenceClassification"},
            {},
            "architectures = 'LlamaForSequenceClassification'",
        ),
        (SEQUENCE, {"architectures": ["LlamaForCausalLM"]}, {}, "missing: lm_head.weight [101, 42]"),
        (SEQUENCE, {"architectures": ["LlamaForTokenClassification"]}, {}, "missing: score.bias [3]"),
        (TOKEN, {"architectures": ["LlamaForSequenceClassification"]}, {}, "unknown: score.bias [3]"),
        (
            SEQUENCE,
            {"id2label": {"0": "a", "1": "b"}},
            {},
            "shape: score.weight is [3, 42], config.json asks for [2, 42]",
        ),
        (SEQUENCE, {"id2label": {}}, {}, "num_labels"),
        (SEQUENCE, {}, {"lm_head.weight": torch.ones(101, 42)}, "unknown: lm_head.weight"),
        (SEQUENCE, {}, {"score.weight": torch.ones(42, 3)}, "shape: score.weight is [42, 3]"),
        (TOKEN, {"classifier_dropout": 0.5}, {}, "classifier_dropout = 0.5"),
    ],
)
def test_what_does_not_fit(
    kind: Any,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hf = tmp_path / "hf"
    save_scoring(hf, "llama", kind, 3)
    described = {
        key: value
        for key, value in json.loads((hf / "config.json").read_text()).items()
        if key != "label2id" or not config
    }
    (hf / "config.json").write_text(json.dumps({**described, **config}))
    save_file({**stored_tensors(hf), **tensors}, hf / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", str(hf), str(tmp_path / "mcore")]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error and not (tmp_path / "mcore").exists(), error
