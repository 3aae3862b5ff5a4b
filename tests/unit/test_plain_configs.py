"""A config that is read without transformers says what transformers makes of it, or nothing; and a model is
judged alike either way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig

from converters.errors import ConversionError
from converters.families import FAMILIES
from converters.families.plain import PLAIN_FAMILIES
from converters.families.read import read_architecture, read_plain
from converters.model_config.architecture import Architecture
from converters.model_config.inert_keys import INERT_KEYS
from megarl.config.tables import KNOWN_MODELS
from megarl.errors import MegarlError
from megarl.run import model_check
from tests.tables import read_table
from tests.tiers import sampled
from tests.unit.converters_tiny import CONFIGS, save_tiny, tiny_config

TABLES = read_table("plain_configs.yaml")

ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    3,
    -1,
    0.5,
    float("nan"),
    "x",
    [],
    [0],
    ["full_attention"] * 3,
    {"a": 1},
]
ROPES: list[Any] = TABLES["ropes"]
BACKENDS: dict[str, dict[str, Any]] = {
    "megatron": {"megatron_cfg": {"enabled": True}},
    "fsdp1": {},
    "dtensor": {
        "dtensor_cfg": {
            "enabled": True,
            "tensor_parallel_size": 2,
            "sequence_parallel": False,
            "custom_parallel_plan": None,
        },
    },
}


def saved(name: str, directory: Path) -> dict[str, Any]:
    """The ``config.json`` that transformers writes of a tiny config."""
    tiny_config(name).save_pretrained(directory)
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


def by_transformers(content: dict[str, Any]) -> Architecture:
    return read_architecture(CONFIG_MAPPING[content["model_type"]].from_dict(json.loads(json.dumps(content))))


PLAIN = [name for name, (config_class, _) in CONFIGS.items() if config_class.model_type in PLAIN_FAMILIES]


def test_every_plain_family_is_built_in() -> None:
    """Those without an entry are read with transformers, which takes seconds longer."""
    assert (
        PLAIN_FAMILIES.keys() < FAMILIES.keys()
        and {CONFIGS[name][0].model_type for name in PLAIN} == PLAIN_FAMILIES.keys()
    )


@pytest.mark.parametrize("name", PLAIN)
def test_what_transformers_writes_is_plain(name: str, tmp_path: Path) -> None:
    content = saved(name, tmp_path)
    assert read_plain(content) == by_transformers(content)


@pytest.mark.parametrize(
    "name", [name for name, content in KNOWN_MODELS.items() if content["model_type"] in PLAIN_FAMILIES]
)
def test_published_models_are_plain(name: str) -> None:
    assert read_plain(KNOWN_MODELS[name]) == read_architecture(AutoConfig.for_model(**KNOWN_MODELS[name]))


@sampled(1)
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_config_is_never_read_otherwise_than_by_transformers(name: str, tmp_path: Path) -> None:
    """Whatever key is taken away, added or given another value."""
    content = saved(name, tmp_path)
    added = {
        "num_experts",
        "num_local_experts",
        "num_mtp_layers",
        "use_mrope",
        "auto_map",
        "torch_dtype",
        "partial_rotary_factor",
    }
    read = 0
    for key in sorted(
        {*content, *added, *INERT_KEYS, *FAMILIES[content["model_type"]].config_keys} - {"model_type"}
    ):
        changes: list[dict[str, Any]] = [{key: value} for value in (*ODD, "float32", "auto")]
        variants = [{**content, **change} for change in changes] + [
            {k: v for k, v in content.items() if k != key}
        ]
        for variant in variants:
            read += same_or_nothing(variant)
    without = {key: value for key, value in content.items() if key not in ("rope_parameters", "rope_scaling")}
    for rope in ROPES:
        for variant in (
            {"rope_parameters": rope},
            {"rope_scaling": rope},
            {"rope_scaling": rope, "rope_theta": 77.0},
        ):
            read += same_or_nothing({**without, **variant})
    assert read > 50


def same_or_nothing(content: dict[str, Any]) -> bool:
    """Whether the config is plain; then transformers says the same of it."""
    plain = read_plain(content)
    if plain is not None:
        assert plain == by_transformers(content), content
    return plain is not None


def verdict(monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], *, plain: bool) -> object:
    with monkeypatch.context() as patch:
        if not plain:
            patch.setattr(model_check, "read_plain", lambda content: None)
        try:
            return model_check.check_model(policy)
        except (ConversionError, MegarlError) as error:
            return type(error), str(error)


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DENSE = ("llama", "qwen2_tied")
JUDGED = (*DENSE, "qwen3_moe", "gpt_oss", "deepseek_v3")
FAULTS: dict[str, Callable[[Path], object]] = {
    "none": lambda directory: None,
    "missing": lambda directory: change_tensors(directory, lambda tensors: tensors.pop("model.norm.weight")),
    "unknown": lambda directory: change_tensors(
        directory, lambda tensors: tensors.update({"model.more": torch.ones(2)})
    ),
    "shape": lambda directory: change_tensors(
        directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})
    ),
    "dtype": lambda directory: change_tensors(
        directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(42, dtype=torch.int8)})
    ),
    "activation": lambda directory: change_config(directory, hidden_act="gelu"),
    "dropout": lambda directory: change_config(directory, attention_dropout=0.1),
    "stranger": lambda directory: change_config(directory, new_key=3),
    "size": lambda directory: change_config(directory, vocab_size="many"),
    "layers": lambda directory: change_config(directory, num_hidden_layers=4),
    "bias": lambda directory: change_config(directory, attention_bias=True, mlp_bias=False),
    "torn": lambda directory: (directory / "model.safetensors").write_bytes(b"\x08"),
    "config": lambda directory: (directory / "config.json").write_text("{"),
}


@sampled(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_is_judged_alike_with_and_without_transformers(
    fault: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in JUDGED if backend == "megatron" else DENSE:
        save_tiny(tmp_path / name, name)
        FAULTS[fault](tmp_path / name)
        policy = {
            "model_name": str(tmp_path / name),
            "trust_remote_code": False,
            "merged_adapter": None,
            **BACKENDS[backend],
        }
        assert verdict(monkeypatch, policy, plain=True) == verdict(monkeypatch, policy, plain=False), name
