"""What stands beside the weights, what a manifest says of both, and what an import or export refuses to take
or leaves behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.command import main
from converters.torch_dist.index import read_index, write_index
from tests.unit.converters_tiny import save_tiny

Run = Callable[..., tuple[int, Any]]
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def with_facts(*argv: str | Path) -> tuple[int, Any]:
        capsys.readouterr()
        code = main([*map(str, argv), "--json"])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out else said.err

    return with_facts


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def model(directory: Path, name: str = "llama", **options: Any) -> Path:
    save_tiny(directory, name, **options)
    change_json(directory / "tokenizer_config.json", chat_template="{{ messages }}")
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "README.md").write_text("a model")
    return directory


@pytest.fixture
def converted(tmp_path: Path, run: Run) -> Path:
    """A directory with a model, the checkpoint that was made of it, and the model that was made of that."""
    model(tmp_path / "hf")
    assert run("import", tmp_path / "hf", tmp_path / "mcore")[0] == 0
    assert run("export", tmp_path / "mcore", tmp_path / "back")[0] == 0
    return tmp_path


def found(facts: dict[str, Any]) -> set[tuple[str, str]]:
    return {(each["kind"], each["name"]) for each in facts["differences"]}


SETTINGS = [
    ("eos_token_id", 7),
    ("bos_token_id", None),
    ("pad_token_id", 3),
    ("dtype", "float16"),
    ("temperature", 0.5),
]


@pytest.mark.parametrize(("key", "value"), SETTINGS)
def test_configs_that_differ_in_what_no_architecture_has(
    converted: Path, run: Run, key: str, value: Any
) -> None:
    for other in ("mcore", "back"):
        assert run("verify", converted / "hf", converted / other)[0] == 0
    change_json(converted / "hf" / "config.json", **{key: value})
    for action in ("verify", "diff"):
        for other in ("mcore", "back"):
            code, facts = run(action, converted / "hf", converted / other)
            assert code == 1 and found(facts) == {("config", key)}, (action, facts)


def test_a_default_of_the_class_and_another_spelling_are_no_difference(converted: Path, run: Run) -> None:
    path = converted / "hf" / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("bos_token_id") == 1, "the default of Llama's class"
    path.write_text(json.dumps({"torch_dtype": config.pop("dtype"), **config, "_name_or_path": "elsewhere"}))
    assert run("verify", converted / "hf", converted / "back")[0] == 0


CHANGED = {
    "tokenizer.json": lambda path: path.write_text("{}"),
    "generation_config.json": lambda path: change_json(path, temperature=0.1),
    "tokenizer_config.json": lambda path: change_json(path, chat_template="{{ other }}"),
    "config.json": lambda path: change_json(path, eos_token_id=5),
    "README.md": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", CHANGED)
def test_files_that_were_changed_after_the_conversion(converted: Path, run: Run, name: str) -> None:
    places = {"mcore": converted / "mcore" / "huggingface" / name, "back": converted / "back" / name}
    for side, path in places.items():
        assert run("verify", converted / side)[0] == 0
        CHANGED[name](path)
        code, facts = run("verify", converted / side)
        assert code == 1 and found(facts) == {("file", name)}, facts
    for action, side in (("export", "mcore"), ("import", "back")):
        code, said = run(action, converted / side, converted / "new")
        assert code == 2 and name in said and "conversion.json" in said and not list(converted.glob("*new*"))
    code, facts = run("verify", converted / "hf", converted / "mcore")
    assert (code, name in str(facts)) == (1, True)


def test_what_says_nothing_of_the_model_is_named_and_no_difference(converted: Path, run: Run) -> None:
    (converted / "hf" / "README.md").write_text("another text")
    (converted / "hf" / "generation_config.json").write_text(
        json.dumps(
            {
                "transformers_version": "1.0",
                **json.loads((converted / "hf" / "generation_config.json").read_text()),
            },
            indent=7,
        )
    )
    code, facts = run("verify", converted / "hf", converted / "back")
    assert code == 0 and any("README.md" in each for each in facts["not_checked"]), facts
    (converted / "back" / "NOTES").write_text("later")
    assert any("NOTES" in each for each in run("verify", converted / "back")[1]["not_checked"])


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_import_holds_a_model_against_its_manifest(converted: Path, run: Run, dtype: str | None) -> None:
    asked = () if dtype is None else ("--dtype", dtype)
    assert run("import", converted / "back", converted / "again", *asked)[0] == 0
    path = converted / "back" / "model.safetensors"
    tensors = load_file(path)
    # by less than bfloat16 can tell
    tensors[NORM][3] *= 1 + 2**-20
    save_file(tensors, path, metadata={"format": "pt"})
    code, said = run("import", converted / "back", converted / "new", *asked)
    assert code == 2 and NORM in said and "does not match its conversion.json" in said
    assert not list(converted.glob("*new*")) and not list(converted.glob(".new*")), (
        "a refused conversion leaves nothing"
    )


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_export_leaves_nothing_of_a_checkpoint_that_was_changed(
    converted: Path, run: Run, dtype: str | None
) -> None:
    asked = () if dtype is None else ("--dtype", dtype)
    path = converted / "mcore" / "conversion.json"
    manifest = json.loads(path.read_text())
    manifest["tensors"][NORM]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    code, said = run("export", converted / "mcore", converted / "new", *asked)
    assert (
        code == 2 and NORM in said and not list(converted.glob(".new*")) and not (converted / "new").exists()
    )


def test_an_export_takes_no_tensor_that_the_manifest_does_not_know(converted: Path, run: Run) -> None:
    path = converted / "mcore" / "conversion.json"
    manifest = json.loads(path.read_text())
    manifest["tensors"].pop(NORM)
    path.write_text(json.dumps(manifest))
    code, said = run("export", converted / "mcore", converted / "new")
    assert code == 2 and f"{NORM!r} is in the checkpoint, but not in conversion.json" in said
    path.unlink()
    assert run("export", converted / "mcore", converted / "new")[0] == 0


def test_an_import_takes_no_tensor_that_the_manifest_does_not_know(converted: Path, run: Run) -> None:
    path = converted / "back" / "conversion.json"
    manifest = json.loads(path.read_text())
    manifest["tensors"].pop(NORM)
    path.write_text(json.dumps(manifest))
    code, said = run("import", converted / "back", converted / "new")
    assert (
        code == 2
        and f"{NORM}, which conversion.json does not list" in said
        and not list(converted.glob(".new*"))
    )


def test_a_json_file_that_is_no_object_is_compared_all_the_same(converted: Path, run: Run) -> None:
    (converted / "hf" / "tokenizer.json").write_text("[1]")
    code, facts = run("verify", converted / "hf", converted / "back")
    assert code == 1 and found(facts) == {("file", "tokenizer.json")}


def test_objects_are_looked_at_or_named(converted: Path, run: Run) -> None:
    checkpoint = converted / "mcore"
    assert not any("not tensors" in each for each in run("verify", checkpoint)[1]["not_checked"])
    index = read_index(checkpoint)
    key = next(
        name
        for name in index.state_dict_metadata
        if name.endswith("_extra_state/shard_0_1") or "_extra_state" in name
    )
    torch.save([torch.ones(3)], checkpoint / "__other.distcp")
    place = next(place for place in index.storage_data if place.fqn == key)
    stored = index.storage_data[place]
    stored.relative_path, stored.offset, stored.length = (
        "__other.distcp",
        0,
        (checkpoint / "__other.distcp").stat().st_size,
    )
    with (checkpoint / ".metadata").open("wb") as file:
        write_index(index, file)
    code, facts = run("verify", checkpoint)
    assert code == 1 and found(facts) == {("object", key)}
    (checkpoint / "conversion.json").unlink()
    assert any("not tensors" in each for each in run("verify", checkpoint)[1]["not_checked"])


def test_work_that_can_be_taken_up_is_said_and_other_is_not_left(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from converters import importing
    from converters.torch_dist.writer import ItemFile

    monkeypatch.setattr("converters.importing._SMALLEST_FILE", 2**12)
    model(tmp_path / "hf")
    add, calls = ItemFile.add, []

    def full(self: ItemFile, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) > most:
            raise OSError(28, "No space left on device")
        add(self, *arguments)

    monkeypatch.setattr(importing.ItemFile, "add", full)
    most = 0
    code, said = run("import", tmp_path / "hf", tmp_path / "mcore", "--workers", "1")
    assert code == 2 and "No space left" in said and not list(tmp_path.glob(".mcore*"))
    most = len(calls) + 8
    code, said = run("import", tmp_path / "hf", tmp_path / "mcore", "--workers", "1")
    assert code == 2 and f"{tmp_path / '.mcore.partial'} keeps 0.00 GB of finished work" in said
    most = len(calls) + 1000
    code, facts = run("import", tmp_path / "hf", tmp_path / "mcore", "--workers", "1")
    assert code == 0 and facts["resumed_bytes"] > 0
    assert run("verify", tmp_path / "hf", tmp_path / "mcore")[0] == 0


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"]
)
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_opened(tmp_path: Path, run: Run, name: str) -> None:
    path = model(tmp_path / "hf") / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    code, said = run("import", tmp_path / "hf", tmp_path / "mcore")
    assert code == 2 and f"{name} is a named pipe" in said
    assert not list(tmp_path.glob("*mcore*"))


@pytest.mark.parametrize(
    "name", [".metadata", "common.pt", "conversion.json", "huggingface/config.json", "__0_0.distcp"]
)
def test_a_pipe_in_a_checkpoint(converted: Path, run: Run, name: str) -> None:
    path = converted / "mcore" / name
    path.unlink()
    os.mkfifo(path)
    for action in (("verify", converted / "mcore"), ("export", converted / "mcore", converted / "new")):
        code, said = run(*action)
        assert code == 2 and Path(name).name in said, said


def test_targets(converted: Path, run: Run) -> None:
    (converted / "empty").mkdir()
    assert run("import", converted / "hf", converted / "empty")[0] == 0
    (converted / "full").mkdir()
    (converted / "full" / "file").touch()
    code, said = run("import", converted / "hf", converted / "full")
    assert code == 2 and "full exists" in said
    (converted / "link").symlink_to(converted / "nothing")
    assert run("import", converted / "hf", converted / "link")[0] == 2


def test_sources_that_are_something_else(converted: Path, run: Run) -> None:
    code, said = run("import", converted / "mcore", converted / "new")
    assert code == 2 and "is a checkpoint of Megatron-Core" in said and "python -m converters export" in said
    change_json(
        converted / "hf" / "config.json", model_type="kimi_k9", architectures=["DeepseekV3ForCausalLM"]
    )
    code, said = run("import", converted / "hf", converted / "new")
    assert code == 2 and "'kimi_k9'" in said and "deepseek_v3" in said and "\n" not in said.strip()


UNSUPPORTED = {
    "attention_bias": {"attention_bias": True, "mlp_bias": False},
    "attention_factor": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 1.3,
        }
    },
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_a_model_that_megatron_does_not_compute_is_taken_on_request_alone(
    tmp_path: Path, run: Run, what: str
) -> None:
    model(tmp_path / "hf", **UNSUPPORTED[what])
    for action in (("plan", tmp_path / "hf"), ("import", tmp_path / "hf", tmp_path / "mcore")):
        code, said = run(*action)
        assert code == 2 and what in said and "--allow-unsupported" in said
    assert run("plan", tmp_path / "hf", "--allow-unsupported")[0] == 0
    assert run("import", tmp_path / "hf", tmp_path / "mcore", "--allow-unsupported")[0] == 0
    assert run("export", tmp_path / "mcore", tmp_path / "back")[0] == 0
    assert run("verify", tmp_path / "hf", tmp_path / "back")[0] == 0


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_a_plan_counts_what_is_written(tmp_path: Path, run: Run, name: str) -> None:
    model(tmp_path / "hf", name)
    planned = run("plan", tmp_path / "hf")[1]
    done = run("import", tmp_path / "hf", tmp_path / "mcore")[1]
    assert (done["tensors"], done["bytes"]) == (len(planned["tensors"]), planned["bytes"])
    planned = run("plan", tmp_path / "mcore")[1]
    done = run("export", tmp_path / "mcore", tmp_path / "back")[1]
    assert (done["tensors"], done["bytes"]) == (len(planned["tensors"]), planned["bytes"])
