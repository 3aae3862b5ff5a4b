"""The files next to a model's weights: as the model has them, with the tokenizer of the run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoTokenizer

from converters.checkpoint.artifacts import copy_artifacts
from megarl.data.tokenization import get_tokenizer
from megarl.models.engine.saving import SavingWorker, write_model_files
from tests.tiers import newest_megatron
from tests.unit.test_tokenization import save_tokenizer

pytestmark = newest_megatron

OTHER = "Q {{ messages[0]['content'] }} A"
# As transformers 4 wrote it, in which Llama 3.1 is published.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": 1,
    "model_type": "llama",
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "vocab_size": 14,
}


def published(directory: Path, *, pad: bool = True, key: bool = True) -> Path:
    """A model's directory with a tokenizer in transformers 4's form, and files that say it a second time."""
    save_tokenizer(directory, pad=pad, chat=True)
    template = (directory / "chat_template.jinja").read_text()
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    if key:
        (directory / "chat_template.jinja").unlink()
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "temperature": 0.6}))
    (directory / "tokenizer.model").write_text("sentencepiece")
    (directory / "tekken.json").write_text("{}")
    (directory / "tokenization_own.py").write_text("# code")
    (directory / "modeling_own.py").write_text("# code")
    (directory / "LICENSE").write_text("terms")
    return directory


def written(
    model: Path, target: Path, tokenizer: Any, *, scores: bool = False, dtype: torch.dtype = torch.bfloat16
) -> dict[str, str]:
    config = SimpleNamespace(
        to_dict=lambda: {
            "architectures": ["LlamaForSequenceClassification"],
            "id2label": {0: "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "pad_token_id": 1,
        }
    )
    # Workers get the tokenizer from the driver.
    tokenizer = pickle.loads(pickle.dumps(tokenizer))
    write_model_files(model, target, dtype, config, tokenizer, scores=scores)
    return {path.name: path.read_text() for path in target.iterdir()}


def test_files_are_those_of_the_model(tmp_path: Path) -> None:
    """To the byte, without the padding and the joining template of the training."""
    model = published(tmp_path / "model", pad=False)
    own = {path.name: path.read_text() for path in model.iterdir()}
    settings = json.loads(own.pop("generation_config.json"))
    for number, template in enumerate((None, "default")):
        tokenizer = get_tokenizer({"name": str(model), "chat_template": template})
        files = written(model, tmp_path / str(number), tokenizer)
        assert json.loads(files.pop("generation_config.json")) == settings
        assert files == own


def test_a_config_keeps_the_form_of_its_model(tmp_path: Path) -> None:
    model = published(tmp_path / "model")
    files = written(model, tmp_path / "out", None, dtype=torch.float32)
    assert json.loads(files["config.json"]) == CONFIG | {"torch_dtype": "float32"}
    del (unnamed := dict(CONFIG))["architectures"]
    (model / "config.json").write_text(json.dumps(unnamed))
    assert json.loads(written(model, tmp_path / "again", None)["config.json"]) == CONFIG


def test_weights_in_other_forms_are_not_copied(tmp_path: Path) -> None:
    """Not beside the weights of every step: only a large vocabulary is."""
    model = published(tmp_path / "model")
    for name in ("rust_model.ot", "model.onnx_data", "model.tar.gz", "tokenizer.model"):
        with (model / name).open("wb") as file:
            file.write(b"form")
            file.truncate(2**26 + 1)
    (model / "original").mkdir()
    (model / "original" / "consolidated.00.pth").write_bytes(b"weights")
    (model / "model.onnx").write_bytes(b"weights")
    copy_artifacts(model, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in published(tmp_path / "plain").iterdir()
    }


@pytest.mark.parametrize("key", [True, False])
def test_a_chat_template_of_the_run_is_written_where_the_model_has_one(tmp_path: Path, key: bool) -> None:
    model = published(tmp_path / "model", key=key)
    files = written(model, tmp_path / "out", get_tokenizer({"name": str(model), "chat_template": OTHER}))
    config = json.loads(files["tokenizer_config.json"])
    assert "tokenizer.model" in files and "tekken.json" not in files
    assert config.get("chat_template") == (OTHER if key else None)
    assert files.get("chat_template.jinja") == (None if key else OTHER)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == OTHER


@pytest.mark.parametrize("readable", [True, False])
def test_another_tokenizer_replaces_all_files_of_the_model_s(tmp_path: Path, readable: bool) -> None:
    model, name = published(tmp_path / "model"), save_tokenizer(tmp_path / "other", bos=True)
    tokenizer = get_tokenizer({"name": name, "chat_template": OTHER})
    if not readable:
        # The directory is on the driver's disk alone.
        (tmp_path / "other").rename(tmp_path / "moved")
    files = written(model, tmp_path / "out", tokenizer)
    assert not {"tokenizer.model", "tekken.json"} & set(files) and "tokenization_own.py" not in files
    assert {"modeling_own.py", "LICENSE", "config.json"} <= set(files)
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found.chat_template == OTHER and found("two")["input_ids"] == [2, 6]


@pytest.mark.parametrize("readable", [True, False])
def test_only_a_model_that_scores_gets_the_padding_of_the_run(tmp_path: Path, readable: bool) -> None:
    model = published(tmp_path / "model")
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "other", pad=False)})
    if not readable:
        (tmp_path / "other").rename(tmp_path / "moved")
    written(model, tmp_path / "language", tokenizer)
    files = written(model, tmp_path / "reward", tokenizer, scores=True)
    assert AutoTokenizer.from_pretrained(tmp_path / "language").pad_token is None
    assert AutoTokenizer.from_pretrained(tmp_path / "reward").pad_token == "</s>"
    assert tokenizer.pad_token == "</s>"
    config = json.loads(files["config.json"])
    assert config["pad_token_id"] == 1 and config["rope_theta"] == CONFIG["rope_theta"]
    assert "generation_config.json" not in files


def test_files_that_cannot_be_read_at_the_start_are_read_at_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run may need none of them."""
    model, worker = tmp_path / "model", SavingWorker()
    worker.cfg = cast(Any, {"model_name": str(model), "precision": "bfloat16"})
    worker.backend = cast(Any, SimpleNamespace(untouched=SimpleNamespace(directory=model), hf_config=None))
    worker.tokenizer, worker.scores = None, False
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    worker._keep_model_files()
    assert "no checkpoint or export can be written: FileNotFoundError" in caplog.text
    published(model)
    worker.write_model_files(tmp_path / "saved", torch.float32)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["torch_dtype"] == "float32"
    assert (tmp_path / "saved" / "LICENSE").read_text() == "terms"
