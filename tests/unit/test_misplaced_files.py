"""Files that are not what their names say, names with the marks of wrappers, and shards that nobody reads:
said as what they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.command import main
from tests.unit.converters_tiny import save_tiny, stored_tensors

LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 976\n"
)
KINDS: dict[str, tuple[bytes, str, str]] = {
    "git-lfs": (LFS, "a pointer of git-lfs", "git lfs pull"),
    "page": (
        b"<!DOCTYPE html>\n<html><head><title>Hugging Face</title>",
        "a page of a web site",
        "/resolve/main/",
    ),
    "old page": (b"\n <html>", "a page of a web site", "hf download"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(60), "a GGUF file", "safetensors model"),
    "pickle": (b"\x80\x02}q\0.", "torch.save", "save_pretrained"),
    "zip": (b"PK\x03\x04" + bytes(60), "torch.save", "save_pretrained"),
    "empty": (b"", "empty", "fetch or write"),
    "refusal": (
        b'{"error":"Access to model is restricted. You must have access to it."}',
        "Access to model is restricted",
        "fetch the file",
    ),
    "zeros": (bytes(4096), "begins with zeros", "fetch the file again"),
    "words": (b"Entry not found", "'Entry not found'", "what the server said"),
}


def refused(capsys: pytest.CaptureFixture[str], directory: Path, *more: str) -> str:
    capsys.readouterr()
    assert main(["import", str(directory), str(directory.parent / "out"), *more]) == 2
    assert not (directory.parent / "out").exists() and not list(directory.parent.glob(".out*"))
    return capsys.readouterr().err


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "hf", "qwen3")
    return tmp_path / "hf"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_something_else(kind: str, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, said, fix = KINDS[kind]
    (hf / "model.safetensors").write_bytes(content)
    error = refused(capsys, hf)
    assert (
        f"model.safetensors is {'' if said.startswith(('a ', 'empty', 'full')) else 'a '}" in error
        and said in error
        and fix in error
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_pointer_in_the_place_of_json(name: str, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name != "config.json":
        (hf / "model.safetensors").unlink()
    (hf / name).write_bytes(LFS)
    assert f"{name} is a pointer of git-lfs" in refused(capsys, hf)


def test_one_shard_that_is_a_pointer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "hf", "qwen3", max_shard_size="40KB")
    shard = sorted((tmp_path / "hf").glob("model-*.safetensors"))[1]
    shard.write_bytes(LFS)
    assert f"{shard.name} is a pointer of git-lfs" in refused(capsys, tmp_path / "hf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (hf / "model.safetensors").chmod(0)
    assert "may not be read (mode 0000" in refused(capsys, hf)


def renamed(hf: Path, change: Callable[[str], str]) -> None:
    tensors = load_file(hf / "model.safetensors")
    save_file(
        {change(name): tensor for name, tensor in tensors.items()},
        hf / "model.safetensors",
        metadata={"format": "pt"},
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda name: f"module.{name}", "names with module. in them, as DistributedDataParallel"),
        (lambda name: f"_orig_mod.{name}", "names with _orig_mod. in them, as torch.compile"),
        (lambda name: f"base_model.model.{name}", "names with base_model.model. in them, as PEFT"),
        (
            lambda name: f"model.language_{name}" if name.startswith("model.") else name,
            "language_model. in them, as a vision-language model",
        ),
        (
            lambda name: name.replace(".mlp.", "._fsdp_wrapped_module.mlp.").replace(
                ".self_attn.", "._fsdp_wrapped_module.self_attn."
            ),
            "FSDP",
        ),
        (lambda name: name.removeprefix("model."), "names with no model. in front, as AutoModel"),
        (
            lambda name: name.replace("q_proj.weight", "q_proj.base_layer.weight"),
            "names with base_layer. in them, as PEFT with an adapter",
        ),
        (lambda name: f"policy.actor.{name}", "names with policy.actor. in them, as a wrapper"),
    ],
)
def test_names_with_the_marks_of_wrappers(
    change: Callable[[str], str], said: str, hf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed(hf, change)
    assert said in refused(capsys, hf)


def test_shards_of_an_earlier_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are left alone and named, and named as the likely cause where tensors are missing."""
    save_tiny(tmp_path / "hf", "qwen3", max_shard_size="40KB")
    hf = tmp_path / "hf"
    stale = "model-00001-of-00009.safetensors"
    save_file({"model.norm.weight": torch.zeros(42)}, hf / stale)
    assert main(["import", str(hf), str(tmp_path / "mcore"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_read"].startswith(stale)
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    shard = hf / index["weight_map"].pop("model.norm.weight")
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    error = refused(capsys, hf)
    assert "missing: model.norm.weight" in error and f"not read, since no index names them: {stale}" in error


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model-00001-of-00002.safetensors", "only 1 shards such as model-00001-of-00002.safetensors"),
        ("consolidated.safetensors", "in the format of Mistral's own code"),
        ("model-q4.gguf", "a model of llama.cpp"),
        ("pytorch_model.bin", "only pytorch_model.bin"),
    ],
)
def test_other_files_in_the_place_of_weights(
    file: str, said: str, hf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (hf / "model.safetensors").rename(hf / file)
    assert said in refused(capsys, hf)


def test_a_directory_of_links_as_the_hub_cache_has_it(tmp_path: Path) -> None:
    """Files are links to blobs beside the snapshot; a directory may be reached by a link itself."""
    save_tiny(tmp_path / "plain", "qwen3")
    snapshot, blobs = (
        tmp_path / "models--a--b" / "snapshots" / ("0" * 40),
        tmp_path / "models--a--b" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "link").symlink_to(snapshot)
    for name, source in (("one", snapshot), ("other", tmp_path / "link")):
        assert main(["import", str(source), str(tmp_path / name)]) == 0
        assert main(["export", str(tmp_path / name), str(tmp_path / f"{name}-back")]) == 0
        assert not any(path.is_symlink() for path in (tmp_path / f"{name}-back").iterdir())
        assert set(stored_tensors(tmp_path / f"{name}-back")) == set(stored_tensors(snapshot))


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer.model", "chat_template.jinja", "generation_config.json"]
)
def test_a_pointer_beside_the_weights(file: str, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (hf / file).write_bytes(LFS)
    assert f"{file} is a pointer of git-lfs" in refused(capsys, hf)


def test_files_beside_the_weights_that_may_be_anything(hf: Path) -> None:
    """Pictures that were not fetched, a template that writes a page, a tokenizer without merges."""
    for name, content in {
        "figure.png": LFS,
        "chat_template.jinja": b"<html>{{ x }}</html>",
        "merges.txt": b"",
    }.items():
        (hf / name).write_bytes(content)
    assert main(["import", str(hf), str(hf.parent / "out")]) == 0


def moved(hf: Path, place: str) -> Path:
    """Everything into a directory inside."""
    files = list(hf.iterdir())
    (hf / place).mkdir(parents=True)
    for path in files:
        path.rename(hf / place / path.name)
    return hf


def unfinished(hf: Path, suffix: str) -> Path:
    (hf / "model.safetensors").rename(hf / f"model.safetensors{suffix}")
    return hf


def trainers(hf: Path, file: str) -> Path:
    (hf / "model.safetensors").unlink()
    (hf / file).parent.mkdir(parents=True, exist_ok=True)
    (hf / file).touch()
    return hf


def dangling(hf: Path) -> Path:
    (hf / "model.safetensors").unlink()
    (hf / "model.safetensors").symlink_to("../../blobs/0")
    return hf


def beside(hf: Path, name: str) -> Path:
    (hf / name).write_bytes(b"GGUF")
    return hf


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda hf: moved(hf, f"snapshots/{'0' * 40}"),
            f"its subdirectory snapshots/{'0' * 40} holds a model",
        ),
        (lambda hf: moved(hf, "Qwen3-8B"), "hf/Qwen3-8B"),
        (lambda hf: moved(hf, "checkpoint-20"), "hf/checkpoint-20"),
        (
            lambda hf: unfinished(hf, ".incomplete"),
            "only model.safetensors.incomplete, an unfinished download",
        ),
        (
            lambda hf: beside(hf, "model.safetensors.aria2"),
            "an unfinished download (model.safetensors.aria2)",
        ),
        (lambda hf: trainers(hf, "global_step9/mp_rank_00_model_states.pt"), "zero_to_fp32.py"),
        (lambda hf: trainers(hf, "pytorch_model_fsdp_0/__0_0.distcp"), "accelerate merge-weights"),
        (lambda hf: trainers(hf, "blobs/sha256-0"), "ollama (GGUF)"),
        (lambda hf: dangling(hf), "leads to ../../blobs/0, which does not exist"),
        (lambda hf: hf / "model.safetensors", "model.safetensors is a file, not the directory of a model"),
        (
            lambda hf: beside(hf, "sha256-0") / "sha256-0",
            "is a GGUF file of llama.cpp, not the directory of a model",
        ),
    ],
)
def test_other_places_than_that_of_a_model(
    change: Callable[[Path], Path], said: str, hf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = change(hf)
    capsys.readouterr()
    assert main(["import", str(given), str(hf.parent / "out")]) == 2
    assert said in capsys.readouterr().err and not (hf.parent / "out").exists()


def test_a_directory_of_links_to_another_one(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user makes it to change one file; a link to anywhere else is still refused."""
    links = tmp_path / "links"
    links.mkdir()
    for path in hf.iterdir():
        (links / path.name).symlink_to(path)
    assert main(["import", str(links), str(tmp_path / "one")]) == 0
    (tmp_path / "secret").write_text("secret")
    (links / "tokenizer.json").symlink_to(tmp_path / "secret")
    assert "tokenizer.json leads to" in refused(capsys, links)
