"""``megarl convert`` and ``python -m converters`` as a user runs them: exit codes, JSON, and what verify
finds."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

import megarl
from converters.checkpoint.manifest import tool_version
from converters.command import main, read_size
from converters.torch_dist.index import read_index
from megarl.cli import main as megarl_main
from tests.tiers import sampled, slow
from tests.unit.converters_tiny import save_tiny


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "hf", "qwen3_moe")
    return tmp_path / "hf"


def facts(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_whole_way(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mcore, back = str(tmp_path / "mcore"), str(tmp_path / "back")
    code, done = facts(capsys, "import", str(hf), mcore, "--workers", "3", "--max-memory", "64GiB")
    assert (
        code == 0
        and done["family"] == "qwen3_moe"
        and done["resumed_bytes"] == 0
        and done["peak_memory"] > 2**20
    )
    code, done = facts(capsys, "export", mcore, back, "--max-shard-size", "100KB")
    assert code == 0
    assert len(list(Path(back).glob("*.safetensors"))) > 1
    assert facts(capsys, "verify", mcore, back)[1]["equal"] and facts(capsys, "verify", mcore)[0] == 0
    code, compared = facts(capsys, "verify", str(hf), mcore, "--logits")
    assert code == 0 and compared["logits_difference"] == 0.0
    assert facts(capsys, "diff", back, str(hf)) == (0, {"equal": True, "differences": []})
    inspected = facts(capsys, "inspect", mcore)[1]
    assert (
        inspected["format"] == "megatron"
        and inspected["layers"] == "stacked"
        and inspected["converted_from"] == "hf"
    )
    assert inspected["parameters"] == sum(
        tensor.numel() for tensor in load_file(hf / "model.safetensors").values()
    )
    planned = facts(capsys, "plan", str(hf))[1]
    assert (
        planned["direction"] == "import"
        and planned["bytes"] == facts(capsys, "plan", mcore)[1]["bytes"] == inspected["bytes"]
    )
    assert {family["model_type"] for family in facts(capsys, "families")[1]["families"]} >= {
        "llama",
        "mixtral",
        "qwen3_moe",
    }


def rewritten(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def swap(one: str, other: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def next_float(tensors: dict[str, Tensor]) -> None:
    rows = tensors["model.layers.2.self_attn.o_proj.weight"]
    rows[3, 5] = torch.nextafter(rows[3, 5], torch.tensor(float("inf")))


def rotate_head(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].roll(10, dims=0)


MUTATIONS: dict[str, tuple[Callable[[dict[str, Tensor]], None], tuple[str, ...]]] = {
    "gate and up": (
        swap("model.layers.0.mlp.experts.2.gate_proj.weight", "model.layers.0.mlp.experts.2.up_proj.weight"),
        ("model.layers.0.mlp.experts.2.gate_proj.weight", "model.layers.0.mlp.experts.2.up_proj.weight"),
    ),
    "key and value": (
        swap("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"),
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"),
    ),
    "two experts": (
        swap(
            "model.layers.2.mlp.experts.0.down_proj.weight", "model.layers.2.mlp.experts.6.down_proj.weight"
        ),
        ("model.layers.2.mlp.experts.0.down_proj.weight", "model.layers.2.mlp.experts.6.down_proj.weight"),
    ),
    "two layers": (
        swap("model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
        ("model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
    ),
    "a head": (rotate_head, ("model.layers.1.self_attn.q_proj.weight",)),
    "one ulp": (next_float, ("model.layers.2.self_attn.o_proj.weight",)),
}


@sampled(2)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_verify_names_what_is_wrong(
    mutation: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, names = MUTATIONS[mutation]
    main(["import", str(hf), str(tmp_path / "mcore")])
    main(["export", str(tmp_path / "mcore"), str(tmp_path / "back")])
    rewritten(hf, change)
    rewritten(tmp_path / "back", change)
    capsys.readouterr()
    code, found = facts(capsys, "verify", str(hf), str(tmp_path / "mcore"))
    assert code == 1
    assert tuple(each["name"] for each in found["differences"] if each["kind"] == "values") == names
    code, found = facts(capsys, "verify", str(tmp_path / "back"))
    assert code == 1 and {each["name"] for each in found["differences"] if each["kind"] == "hash"} == set(
        names
    )


def test_verify_sees_padding_and_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "hf", "llama")
    main(["import", str(tmp_path / "hf"), str(tmp_path / "mcore"), "--vocab-multiple", "8"])
    index = read_index(tmp_path / "mcore")
    (place,) = (place for key, place in index.storage_data.items() if key.fqn == "output_layer.weight")
    with (tmp_path / "mcore" / place.relative_path).open("r+b") as file:
        file.seek(place.offset)
        archive = bytearray(file.read(place.length))
        last = bytes(4 * 42)
        at = archive.rindex(last) + len(last) - 4
        archive[at : at + 4] = b"\0\0\x80\x3f"
        file.seek(place.offset)
        file.write(archive)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    capsys.readouterr()
    code, found = facts(capsys, "verify", str(tmp_path / "mcore"), str(tmp_path / "hf"))
    assert code == 1
    assert [(each["kind"], each["name"]) for each in found["differences"]] == [
        ("padding", "output_layer.weight"),
        ("config", "norm_epsilon"),
    ]


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


def damage(kind: str, mcore: Path) -> str:
    """Damage a checkpoint in some way; what the error has to say."""
    files = sorted(mcore.glob("*_0.distcp"))
    if kind == "truncated":
        files[-1].write_bytes(files[-1].read_bytes()[:-30_000])
        return "the file is truncated: it has"
    if kind == "missing file":
        files[-1].unlink()
        return "does not exist"
    if kind == "index damaged":
        (mcore / ".metadata").write_bytes((mcore / ".metadata").read_bytes()[:-10])
        return "cannot be read"
    if kind == "malicious index":
        (mcore / ".metadata").write_bytes(pickle.dumps(Metadata({"a": Bomb()})))  # type: ignore[dict-item]
        return "could run code"
    index = read_index(mcore)
    if kind == "path outside":
        for place in index.storage_data.values():
            place.relative_path = f"../{mcore.name}/{place.relative_path}"
        said = "not the plain name"
    elif kind == "malicious tensor":
        place = next(
            place for key, place in index.storage_data.items() if key.fqn == "decoder.final_layernorm.weight"
        )
        with files[-1].open("ab") as file:
            place.relative_path, place.offset = files[-1].name, file.tell()
            torch.save(Bomb(), file)
            place.length = file.tell() - place.offset
        said = "could run code"
    else:
        assert kind == "key missing"
        index.state_dict_metadata.pop("decoder.layers.mlp.router.weight")
        said = "missing: decoder.layers.mlp.router.weight"
    (mcore / ".metadata").write_bytes(pickle.dumps(index))
    return said


@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "missing file",
        "index damaged",
        "malicious index",
        "path outside",
        "malicious tensor",
        "key missing",
    ],
)
def test_damaged_checkpoints(
    kind: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mcore = tmp_path / "mcore"
    main(["import", str(hf), str(mcore)])
    said = damage(kind, mcore)
    capsys.readouterr()
    code = main(["export", str(mcore), str(tmp_path / "back")])
    error = capsys.readouterr().err
    assert code == 2 and said in error and "Traceback" not in error, error
    assert not (tmp_path / "back").exists() and not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["import", "nowhere/at/all", "x"], "does not exist"),
        (["export", "nowhere", "x"], "holds no torch_dist checkpoint"),
        (["export", "hf", "x"], "it looks like a Hugging Face model, which import converts"),
        (
            ["inspect", "legacy"],
            "older format (mp_rank_00), which is not read (no .metadata). Fix: let Megatron-LM load it with",
        ),
        (["import", "hf/model", "x"], "no such directory: 'hf/model'; and as a hub id"),
        (["verify", "nowhere"], "is not a directory"),
        (["verify", ".", ".", "."], "one or two checkpoints"),
        (["inspect", "."], "holds no torch_dist checkpoint"),
    ],
)
def test_wrong_arguments(
    argv: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "legacy" / "mp_rank_00").mkdir(parents=True)
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_messages_name_the_action_and_the_program_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["import", "a", "b", "--tp", "2"])
    assert "import: error: unrecognized arguments: --tp 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        megarl_main(["convert", "import", "a", "b", "--tp", "2"])
    assert "megarl convert import: error: unrecognized argument: --tp" in capsys.readouterr().err
    save_tiny(tmp_path / "hf", "llama")
    main(["import", str(tmp_path / "hf"), str(tmp_path / "mcore")])
    assert main(["import", str(tmp_path / "mcore"), str(tmp_path / "out")]) == 2
    assert "Fix: python -m converters export reads it" in capsys.readouterr().err


def test_what_a_conversion_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "hf", "llama")
    for part in ("1/2", "2/2"):
        main(["import", str(tmp_path / "hf"), str(tmp_path / "mcore"), "--part", part])
    said = capsys.readouterr().out.splitlines()[1]
    assert "mcore: llama, 30 tensors, stored as 9, 0.00 MB by part 2/2 in" in said and "GB/s" not in said
    main(["plan", str(tmp_path / "hf")])
    assert capsys.readouterr().out.split()[:4] == ["tensor", "dtype", "bytes", "shape"]
    for multiple in ("1", "8"):
        main(["import", str(tmp_path / "hf"), str(tmp_path / multiple), "--vocab-multiple", multiple])
        capsys.readouterr()
        main(["inspect", str(tmp_path / multiple)])
        said = capsys.readouterr().out
        assert ("padded vocabulary: 104" in said) == (multiple == "8") and "values: not read" in said


def test_the_version_of_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    assert tool_version() == megarl.__version__


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("2GiB", 2**31), ("2G", 2**31), ("5GB", 5 * 10**9), ("1.5 kB", 1500), ("512M", 2**29)],
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


def test_the_support_table_names_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "converters" / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| family, with its `model_type`")[2].partition("\n\n")[0]
    assert main(["families"]) == 0
    families = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(families) and len(families) == 21


@slow
def test_both_names_of_the_command(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "llama")
    for command in (["-m", "converters"], ["-m", "megarl.cli", "convert"]):
        done = subprocess.run(
            [sys.executable, *command, "inspect", str(tmp_path / "hf")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 and "family: llama" in done.stdout, done.stderr
