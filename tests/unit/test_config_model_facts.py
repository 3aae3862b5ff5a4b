"""Which model names are paths, and what is said about paths without a usable model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from megarl.config import read_model_facts
from megarl.config.model_facts import facts_of, looks_like_path
from megarl.config.tables import KNOWN_MODELS
from megarl.errors import ConfigError


@pytest.mark.parametrize("name", ["/a/b", "./a", "../a", "~/a", "a/", "a/b/c"])
def test_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert looks_like_path(name)
    with pytest.raises(ConfigError, match=r"policy\.model_name = .*this directory does not exist"):
        read_model_facts(name)


def test_the_model_in_or_next_to_a_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Path("run/hf/step_2")
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    for path in ("run", "run/hf", "run/hf/step_2/model.safetensors"):
        with pytest.raises(ConfigError, match=r"Fix: write run/hf/step_2$"):
            read_model_facts(path)
    with pytest.raises(ConfigError, match=r"Fix: write owner/name$"):
        read_model_facts("https://huggingface.co/owner/name/tree/main")


@pytest.mark.parametrize("name", ["gpt2", "owner/name-that-nobody-has"])
def test_ids_are_not_looked_for_on_the_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert not looks_like_path(name)
    assert read_model_facts(name) is None


def test_an_id_in_the_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 20, "num_attention_heads": 5, '
        '"intermediate_size": 44, "vocab_size": 77}'
    )
    facts = read_model_facts("owner/tiny")
    assert facts is not None
    assert (
        facts.num_layers,
        facts.num_key_value_heads,
        facts.head_dim,
        facts.tied_embeddings,
        facts.max_position,
    ) == (
        3,
        5,
        4,
        False,
        None,
    )


@pytest.mark.parametrize("name", ["-dash", "a--b", "white space", ""])
def test_names_that_are_neither(name: str) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name"):
        read_model_facts(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no config.json"),
        ("{", "cannot be used"),
        ("[]", "cannot be used"),
        ("{}", "lacks the key 'num_attention_heads'"),
        ('{"num_attention_heads": "many"}', "cannot be used"),
    ],
)
def test_broken_model_directories(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_model_facts(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kinds: ["mamba", *kinds[1:]], r"layer_types\[0\] = 'mamba': linear_attention or"),
        (lambda kinds: kinds[:-1], "layer_types has 31 entries: .* each of the 32 layers"),
    ],
)
def test_layers_of_unknown_kinds_are_named(change: Any, message: str) -> None:
    """Counted as attention they would make up another plan, without a word."""
    content = copy.deepcopy(KNOWN_MODELS["Qwen/Qwen3.5-9B"])
    kinds = [*["linear_attention"] * 3, "full_attention"] * 8
    content["text_config"]["layer_types"] = change(kinds)
    with pytest.raises(ValueError, match=message):
        facts_of(content)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        read_model_facts(str(tmp_path / "weights"))
