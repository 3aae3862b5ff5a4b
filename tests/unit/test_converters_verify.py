"""What verify takes for equal, what it takes for wrong, and what it says that it did not look at."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.command import main
from converters.compare import config_differences
from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.torch_dist.index import read_index, write_index
from converters.verify import known_config
from tests.unit.converters_tiny import save_tiny
from tests.unit.published_models import save_published


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    def with_facts(*argv: str | Path) -> tuple[int, Any]:
        capsys.readouterr()
        code = main([*map(str, argv), "--json"])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out else said.err

    return with_facts


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def nan_of(payload: int) -> Tensor:
    """A NaN of bfloat16, negative."""
    return torch.tensor(-(2**15) + (0xFF << 7) + payload, dtype=torch.int16).view(torch.bfloat16)


def mixed(directory: Path) -> None:
    """Norms of one layer in float32 and of the others in bfloat16, one of these with NaNs."""
    save_tiny(directory, "qwen3", torch.bfloat16)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.input_layernorm.weight"] = (
            tensors["model.layers.1.input_layernorm.weight"].float() * 1.001
        )
        for place, payload in enumerate((1, 0x41, 0x7F)):
            tensors["model.layers.0.input_layernorm.weight"][place] = nan_of(payload)

    rewrite(directory, change)


def test_a_widened_tensor_is_no_difference_and_keeps_its_nans(run: Any, tmp_path: Path) -> None:
    mixed(tmp_path / "hf")
    run("import", tmp_path / "hf", tmp_path / "mcore")
    code, found = run("verify", tmp_path / "hf", tmp_path / "mcore")
    assert code == 1 and found["values_checked"] and found["equal"], found
    assert [(each["kind"], each["text"]) for each in found["differences"]] == [
        ("not finite", "equal, and 3 elements are NaN or infinity")
    ]
    assert run("diff", tmp_path / "mcore", tmp_path / "hf") == (0, {"equal": True, "differences": []})
    code, found = run("verify", tmp_path / "mcore")
    assert code == 1 and {each["text"] for each in found["differences"]} == {
        "3 of 42 elements are not finite, the first at [0]"
    }
    run("export", tmp_path / "mcore", tmp_path / "back")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert all(
        torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)) for name, tensor in one.items()
    )
    # by less than bfloat16 can tell, in what was widened
    rewrite(
        tmp_path / "hf",
        lambda tensors: tensors["model.layers.0.input_layernorm.weight"].view(torch.int16)[7].add_(1),
    )
    code, found = run("verify", tmp_path / "hf", tmp_path / "mcore")
    assert code == 1 and [(each["kind"], each["name"]) for each in found["differences"]] == [
        ("values", "model.layers.0.input_layernorm.weight")
    ]


def test_a_dtype_that_was_asked_for_is_a_difference(run: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "qwen2", torch.bfloat16)
    run("import", tmp_path / "hf", tmp_path / "mcore", "--dtype", "float32")
    code, found = run("verify", tmp_path / "hf", tmp_path / "mcore")
    assert code == 1 and {each["kind"] for each in found["differences"]} == {"dtype"}


LOST, OTHER, EXTRA = (
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.2.mlp.down_proj.weight",
    "extra.weight",
)


def test_what_was_excused_is_written_down_and_honoured(run: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "llama")
    complete = load_file(tmp_path / "hf" / "model.safetensors")
    rewrite(tmp_path / "hf", lambda tensors: (tensors.pop(LOST), tensors.update({EXTRA: torch.zeros(2)})))
    assert run("verify", tmp_path / "hf")[0] == 1
    excuses = ("--allow-missing", LOST, "--allow-missing", "extra.*")
    code, found = run("verify", tmp_path / "hf", *excuses)
    assert code == 0 and f"excused: {LOST}, extra.*" in found["not_checked"]
    code, done = run("import", tmp_path / "hf", tmp_path / "mcore", *excuses)
    assert code == 0 and done["missing"] == [LOST] and done["left_out"] == [EXTRA]
    manifest = json.loads((tmp_path / "mcore" / "conversion.json").read_text())
    assert manifest["excused"] == {"missing": [LOST], "left_out": [EXTRA]}
    assert run("inspect", tmp_path / "mcore")[1]["missing"] == [LOST]
    for paths in (("mcore",), ("hf", "mcore"), ("mcore", "hf")):
        code, found = run("verify", *(tmp_path / path for path in paths))
        assert code == 0 and found["tensors"] == len(complete) - 1, found
    assert run("diff", tmp_path / "hf", tmp_path / "mcore")[0] == 0
    assert run("export", tmp_path / "mcore", tmp_path / "back")[0] == 2
    assert run("export", tmp_path / "mcore", tmp_path / "back", "--allow-missing", LOST)[0] == 0
    assert run("verify", tmp_path / "back")[0] == 0
    # two conversions away: of what the first left out, the second knows nothing
    assert run("verify", tmp_path / "hf", tmp_path / "back")[0] == 1
    assert run("verify", tmp_path / "hf", tmp_path / "back", "--allow-missing", EXTRA)[0] == 0


def test_what_was_not_excused_still_fails(run: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "llama")
    complete = load_file(tmp_path / "hf" / "model.safetensors")
    rewrite(tmp_path / "hf", lambda tensors: tensors.pop(LOST))
    run("import", tmp_path / "hf", tmp_path / "mcore", "--allow-missing", LOST)
    rewrite(tmp_path / "hf", lambda tensors: tensors.update({LOST: complete[LOST]}))
    code, found = run("verify", tmp_path / "hf", tmp_path / "mcore")
    assert code == 1 and [(each["kind"], each["name"]) for each in found["differences"]] == [
        ("missing", LOST)
    ]
    assert run("diff", tmp_path / "hf", tmp_path / "mcore")[0] == 1
    assert run("diff", tmp_path / "hf", tmp_path / "mcore", "--allow-missing", "*.1.mlp.down*")[0] == 0
    rewrite(tmp_path / "hf", lambda tensors: tensors.pop(OTHER))
    code, found = run("verify", tmp_path / "hf", tmp_path / "mcore")
    assert code == 1 and not found["values_checked"] and OTHER in found["differences"][0]["text"]


def test_one_checkpoint_without_a_manifest_is_read_to_the_last_byte(run: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "llama_tied")
    code, found = run("verify", tmp_path / "hf")
    assert code == 0 and not found["values_checked"]
    assert "every value was read and is finite" in found["checked"]
    assert any("whether the values are correct" in each for each in found["not_checked"])
    run("import", tmp_path / "hf", tmp_path / "mcore")
    (tmp_path / "mcore" / "conversion.json").unlink()
    assert run("verify", tmp_path / "mcore")[0] == 0
    rewrite(
        tmp_path / "hf", lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"][3].fill_(float("nan"))
    )
    code, found = run("verify", tmp_path / "hf")
    assert code == 1 and found["differences"] == [
        {
            "kind": "values",
            "name": "model.layers.2.mlp.up_proj.weight",
            "text": "42 of 2184 elements are not finite, the first at [3, 0]",
        }
    ]


def test_one_checkpoint_whose_tensors_cannot_be_read(run: Any, tmp_path: Path) -> None:
    """Its index is whole and the archive behind one entry is not: only who reads it sees that."""
    save_tiny(tmp_path / "hf", "llama")
    run("import", tmp_path / "hf", tmp_path / "mcore")
    (tmp_path / "mcore" / "conversion.json").unlink()
    index = read_index(tmp_path / "mcore")
    place = next(
        place for key, place in index.storage_data.items() if key.fqn == "decoder.final_layernorm.weight"
    )
    place.offset += 64
    with (tmp_path / "mcore" / ".metadata").open("wb") as file:
        write_index(index, file)
    code, said = run("verify", tmp_path / "mcore")
    assert code == 2 and "decoder.final_layernorm.weight" in said


def test_logits_of_one_checkpoint_are_refused(run: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "llama")
    code, said = run("verify", tmp_path / "hf", "--logits")
    assert code == 2 and "compares two checkpoints" in said


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_said(
    tmp_path: Path, run: Callable[..., tuple[int, Any]], value: float
) -> None:
    save_tiny(tmp_path / "hf", "qwen3")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(tmp_path / "hf", lambda tensors: tensors[name][-1].fill_(value))
    code, facts = run("import", tmp_path / "hf", tmp_path / "mcore")
    assert code == 1 and facts["not_finite"] == f"NaN or infinity in {name}"
    code, facts = run("export", tmp_path / "mcore", tmp_path / "back")
    assert code == 1 and facts["not_finite"] == f"NaN or infinity in {name}"
    for pair in (("hf", "mcore"), ("mcore", "back"), ("hf", "back")):
        code, facts = run("verify", *(tmp_path / each for each in pair))
        assert (
            code == 1
            and facts["equal"]
            and [(each["kind"], each["name"]) for each in facts["differences"]] == [("not finite", name)]
        )
        assert run("diff", *(tmp_path / each for each in pair))[0] == 0
    for path in ("hf", "mcore"):
        code, facts = run("verify", tmp_path / path)
        assert code == 1 and [(each["kind"], each["name"]) for each in facts["differences"]] == [
            ("values", name)
        ]


def test_a_model_that_transformers_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of_ones_own"}')
    with pytest.raises(
        ConversionError,
        match=r"--logits: transformers does not compute this model: .*of_ones_own.*leave --logits out",
    ):
        known_config(tmp_path)


def test_logits_of_a_family_that_transformers_knows_by_another_name(
    tmp_path: Path, run: Callable[..., tuple[int, Any]]
) -> None:
    """Kimi-K2, without the code that its config names."""
    save_published(tmp_path / "hf", "Kimi-K2", quantization_config=None, num_nextn_predict_layers=0)
    assert run("import", tmp_path / "hf", tmp_path / "mcore")[0] == 0
    code, facts = run("verify", tmp_path / "hf", tmp_path / "mcore", "--logits")
    assert code == 0 and facts["logits_difference"] == 0


def test_verify_ends_with_what_was_compared_and_with_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "hf", "llama")
    shutil.copytree(tmp_path / "hf", tmp_path / "other")
    named = "compared: every value, config, special tokens, defaults of text generation, files of"
    assert main(["verify", str(tmp_path / "hf"), str(tmp_path / "other")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"  {named} tokenizer and chat template: equal"
    rewrite(tmp_path / "other", lambda tensors: tensors[OTHER].add_(1))
    assert main(["verify", str(tmp_path / "hf"), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("chat template: not equal")


def test_a_difference_in_one_entry_of_a_setting_is_named_by_its_path(run: Any, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    save_tiny(tmp_path / "hf", "qwen3", rope_parameters=yarn)
    shutil.copytree(tmp_path / "hf", tmp_path / "other")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["rope_parameters"]["beta_fast"] = 16.0
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    _, found = run("diff", tmp_path / "hf", tmp_path / "other")
    assert [each["name"] + ": " + each["text"] for each in found["differences"]] == [
        "rope_scaling.beta_fast: 32.0 and 16.0"
    ]


def test_an_absent_entry_of_a_setting_differs_from_null(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    plain = read_architecture(json.loads((tmp_path / "config.json").read_text()))
    one, other = (dataclasses.replace(plain, rope_scaling=scaling) for scaling in ({"factor": None}, {}))
    assert list(map(str, config_differences(one, other))) == ["config: rope_scaling.factor: None and absent"]
    assert list(config_differences(one, one)) == []


def test_verify_cuts_a_long_list_that_diff_prints_in_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("llama", "qwen3"):
        save_tiny(tmp_path / name, name)
    paths = [str(tmp_path / "llama"), str(tmp_path / "qwen3")]
    assert main(["diff", *paths]) == 1
    every = len(capsys.readouterr().out.splitlines())
    assert every > 25 and main(["verify", *paths]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == f"{every} differences"
        and lines[21] == f"  and {every - 20} more; diff and --json list all"
    )
