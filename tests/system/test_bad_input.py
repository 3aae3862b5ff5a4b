"""Bad input to the program itself: exit code 2, one message that names the thing, its value and the remedy,
and nothing left behind."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli import main
from megarl.run import run as algorithms_run
from tests.system.whole_runs import Launches, Material, make_material, write_config
from tests.tables import read_table
from tests.tiers import sampled, slow


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("material"), teach=False)


def long_prompt(directory: Path) -> list[str]:
    path = directory / "long.jsonl"
    path.write_text(json.dumps({"prompt": "7 " * 200, "answer": "7"}))
    return [f"data.train.path={path}"]


def one_record(directory: Path, text: str) -> list[str]:
    """A data file that holds this."""
    path = directory / "odd.jsonl"
    path.write_text(text)
    return [f"data.train.path={path}"]


def pipe(directory: Path) -> list[str]:
    path = directory / "pipe.jsonl"
    os.mkfifo(path)
    return [f"data.train.path={path}"]


def broken_parquet(directory: Path) -> list[str]:
    path = directory / "torn.parquet"
    path.write_bytes(b"PAR1 and no more")
    return [f"data.train.path={path}"]


def few_records(directory: Path, weight: float | None = None) -> list[str]:
    """Three records; with a weight, as two sources of as many."""
    path = directory / "few.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"{each}+1=", "answer": str(each + 1)}) for each in range(3))
    )
    if weight is None:
        return [f"data.train.path={path}"]
    source = f"{{path: {path}, prompt_key: prompt, answer_key: answer, weight: {weight}}}"
    return [f"data.train=[{source}, {source}]"]


def conversation(directory: Path, *roles: str) -> list[str]:
    """A source of a good conversation and of one with these roles."""
    path = directory / "turns.jsonl"
    rows = [
        {"turns": [{"role": role, "content": "1+1="} for role in each]}
        for each in (("user", "assistant"), roles)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return [
        f"data.train={{path: {path}, messages_key: turns}}",
        "~data.train.prompt_key",
        "~data.train.answer_key",
    ]


def without_tokenizer(model: Path, directory: Path) -> list[str]:
    copy = directory / "bare"
    shutil.copytree(model, copy)
    for path in (*copy.glob("tokenizer*"), *copy.glob("special_tokens_map.json")):
        path.unlink()
    return [f"policy.model_name={copy}"]


def changed_model(model: Path, directory: Path, **changes: object) -> list[str]:
    """The model with other entries in its config.json."""
    copy = directory / "changed"
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return [f"policy.model_name={copy}"]


def lost_tensor(model: Path, directory: Path) -> list[str]:
    copy = directory / "lost"
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors")
    return [f"policy.model_name={copy}"]


def torn_weights(model: Path, directory: Path) -> list[str]:
    copy = directory / "torn"
    shutil.copytree(model, copy)
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    return [f"policy.model_name={copy}"]


def small_vocabulary(model: Path, directory: Path) -> list[str]:
    """Weights and config agree with each other, but the tokenizer knows more tokens."""
    overrides = changed_model(model, directory, vocab_size=211)
    path = directory / "changed" / "model.safetensors"
    tensors = load_file(path)
    rows = {"model.embed_tokens.weight", "lm_head.weight"}
    save_file(
        {name: tensor[:211].clone() if name in rows else tensor for name, tensor in tensors.items()}, path
    )
    return overrides


def loose_head(model: Path, directory: Path) -> list[str]:
    """A tied model with a second, different output layer: only who reads the weights can see that."""
    overrides = changed_model(model, directory, tie_word_embeddings=True)
    path = directory / "changed" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = torch.ones_like(tensors["lm_head.weight"])
    save_file(tensors, path)
    return overrides


def nested_record(directory: Path) -> list[str]:
    return one_record(directory, '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + ', "answer": "2"}')


def line_of_ten_megabytes(directory: Path) -> list[str]:
    return one_record(directory, json.dumps({"prompt": "12+7=" * 2**21, "answer": "2"}))


def nested_override(directory: Path) -> list[str]:
    return ["seed=" + "[" * 100_000]


FAULTS: dict[str, dict[str, Any]] = read_table("bad_input.yaml")["faults"]


def overrides_of(fault: dict[str, Any], model: Path, directory: Path) -> list[str]:
    """The overrides of a fault, whose files are made in a directory from the model."""
    made: list[str] = []
    if "record" in fault:
        made = one_record(directory, fault["record"])
    elif "roles" in fault:
        made = conversation(directory, *fault["roles"])
    elif "model" in fault:
        made = changed_model(model, directory, **fault["model"])
    elif "from" in fault:
        make = globals()[fault["from"]]
        needs = {"model": model, "directory": directory}
        wanted = {name: value for name, value in needs.items() if name in inspect.signature(make).parameters}
        made = make(**wanted, **fault.get("options", {}))
    return [*made, *fault.get("overrides", [])]


def check_message(output: str, says: list[str]) -> None:
    """One message that says everything, and no traceback."""
    message = output[output.index("megarl: ") :]
    for part in says:
        assert re.search(part, message), f"{part!r} is not in:\n{message}"
    assert "Traceback" not in output, output


def check_nothing_left(run_dir: Path) -> None:
    """At most the resolved configuration, and empty lock files of the run and of its checkpoints."""
    left = (
        {path.relative_to(run_dir).as_posix(): path for path in run_dir.rglob("*")}
        if run_dir.exists()
        else {}
    )
    locks = {"run.lock", "checkpoints/run.lock"} & set(left)
    assert set(left) <= {"config.yaml", "checkpoints", *locks}
    assert ("run.lock" in left or not left) and all(left[lock].read_bytes() == b"" for lock in locks)


@sampled(15)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found_before_workers_start(
    name: str,
    material: Material,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(algorithms_run, "start_ray", lambda *arguments: None)
    monkeypatch.setattr(
        algorithms_run, "start_policy", lambda *arguments: pytest.fail("the workers are about to start")
    )
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    assert (
        main(
            [
                "train",
                str(config),
                f"run_dir={tmp_path / 'run'}",
                *overrides_of(FAULTS[name], material.model, tmp_path),
            ]
        )
        == 2
    )
    check_message(capsys.readouterr().err, FAULTS[name]["says"])
    check_nothing_left(tmp_path / "run")


@pytest.mark.parametrize(
    "place",
    ["file/run", "file", "/proc/none/run", "x" * 300],
    ids=["below a file", "a file", "read-only", "too long"],
)
def test_directories_that_no_run_can_have(
    place: str,
    material: Material,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(algorithms_run, "start_ray", lambda *arguments: None)
    monkeypatch.setattr(
        algorithms_run, "start_policy", lambda *arguments: pytest.fail("the workers are about to start")
    )
    (tmp_path / "file").write_text("x")
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    assert main(["train", str(config), f"run_dir={tmp_path / place}"]) == 2
    check_message(capsys.readouterr().err, [re.escape(f"run_dir = {str(tmp_path / place)!r}"), "Fix"])


@slow
@pytest.mark.parametrize("name", ["misspelt key", "broken line", "other vocabulary"])
def test_faults_end_the_program_with_2(
    name: str, material: Material, launches: Launches, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    launch = launches.start(config, tmp_path / "run", overrides_of(FAULTS[name], material.model, tmp_path))
    assert launch.finish() == 2, launch.output()[-3000:]
    check_message(launch.output(), FAULTS[name]["says"])
    check_nothing_left(tmp_path / "run")


@slow
def test_fault_found_by_a_worker(material: Material, launches: Launches, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    launch = launches.start(config, tmp_path / "run", loose_head(material.model, tmp_path))
    assert launch.finish() == 2, launch.output()[-3000:]
    output = launch.output()
    message = output[output.index("megarl: ") :]
    assert re.search(
        r"\[pp0 dp0 cp0 tp0 .*lm_head\.weight differs from model\.embed_tokens\.weight", message, re.DOTALL
    ), message
    assert "Traceback" not in message, message
    assert (
        not list((tmp_path / "run" / "checkpoints").glob("*step_*"))
        and not (tmp_path / "run" / "hf").exists()
    )
