"""Whatever stands in a config.json: an architecture or a ConversionError, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converters.command import main
from converters.errors import ConversionError
from converters.families import FAMILIES
from converters.families.read import read_architecture
from tests.tiers import sampled
from tests.unit.converters_tiny import CONFIGS, save_tiny, tiny_config

NESTED: list[Any] = []
for _ in range(10_000):
    NESTED = [NESTED]
NUMBERS = [-1, 0, 0.5, 1e-320, float("inf"), float("nan"), 10**8, 10**30]
ODD = [*NUMBERS, None, True, "", "x", [], [None], ["x"], {}, {"a": 1}, {"to_dict": 1}, NESTED]
ALSO = [
    "to_dict",
    "__class__",
    "attribute_map",
    "quantization_config",
    "rope_scaling",
    "torch_dtype",
    "dtype",
    "architectures",
    "model_type",
]
FULL = {config.model_type: json.loads(json.dumps(config.to_dict())) for config in map(tiny_config, CONFIGS)}


@sampled(1)
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("family", sorted(FULL))
def test_odd_values_never_end_in_anything_else(family: str, data: st.DataObject) -> None:
    """One or two keys of a full config, or keys that configs may have besides."""
    keys = st.sampled_from(sorted({*FULL[family], *ALSO}))
    odd = data.draw(st.dictionaries(keys, st.sampled_from(ODD), min_size=1, max_size=2))
    try:
        architecture = read_architecture({**FULL[family], **odd})
    except ConversionError as error:
        assert error.exit_code == 2 and str(error)
    else:
        assert 0 < architecture.num_layers <= 2**16


def test_every_built_in_family_is_there() -> None:
    # the text of a model that also sees has a family of its own
    plain = {
        name
        for name, family in FAMILIES.items()
        if not (name.startswith("user") or family.config_like or family.may_be_nested)
    }
    assert set(FULL) >= plain


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "hf"
    save_tiny(directory, "qwen3_moe")
    return directory


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "garbage"}, "dtype = 'garbage'"),
        ({"architectures": 5}, "architectures"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"quantization_config": 5}, "quantization_config"),
        ({"rope_parameters": {"rope_type": ["x"], "rope_theta": 1e4}}, "rope"),
        ({"to_dict": 1}, "to_dict"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers = 100000000: at most 65536"),
        ({"num_hidden_layers": 60_000}, "asks for 60000 layers of 7 experts, which the 93 tensors of"),
        ({"num_local_experts": 10**9}, "asks for 3 layers of 1000000000 experts"),
    ],
)
def test_the_command_says_what_is_wrong(
    changes: dict[str, Any], said: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (hf / "config.json").read_text()
    try:
        (hf / "config.json").write_text(json.dumps({**json.loads(before), **changes}))
        for argv in (["import", str(hf), str(tmp_path / "out")], ["inspect", str(hf)]):
            assert main(argv) == 2
            assert said in capsys.readouterr().err
    finally:
        (hf / "config.json").write_text(before)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a": ' + "[" * 200 + "]" * 200 + "}", "[]", "{", "\ud800", '{"a": ' + "1" * 5000 + "}"],
)
def test_files_that_are_no_config(
    text: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").symlink_to(hf / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "out")]) == 2
    assert "config.json" in capsys.readouterr().err


def test_layers_without_a_tensor_of_their_own_are_refused_before_rules_are_made(
    hf: Path, tmp_path: Path, capsys: Any
) -> None:
    """In the other format too, where layers are stacked."""
    assert main(["import", str(hf), str(tmp_path / "mcore")]) == 0
    config = tmp_path / "mcore" / "huggingface" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 60_000}))
    assert main(["export", str(tmp_path / "mcore"), str(tmp_path / "back")]) == 2
    assert "60000 layers" in capsys.readouterr().err
