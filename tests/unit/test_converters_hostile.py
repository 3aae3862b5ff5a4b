"""Checkpoints that were made to do harm, or that chance has damaged: one typed error, nothing run, leaked or
lost."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
from torch.distributed.checkpoint import metadata

from converters.checkpoint import source
from converters.command import main
from converters.errors import ConversionError
from converters.files.restricted import index_name, unpickle
from converters.torch_dist import items
from converters.torch_dist.index import read_index
from converters.torch_dist.reader import TorchDistCheckpoint
from tests.unit.converters_tiny import save_tiny


def telling(module: str, name: str, attribute: str) -> bytes:
    """A pickle that tells the class or function itself, not an object of it, what one attribute is."""
    # PROTO 2, GLOBAL, (None, {attribute: 5}), BUILD, STOP
    text = attribute.encode()
    return b"\x80\x02c%s\n%s\nN}X%s%sK\x05s\x86b." % (
        module.encode(),
        name.encode(),
        len(text).to_bytes(4, "little"),
        text,
    )


@pytest.mark.parametrize("name", ["Metadata", "TensorStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"])
def test_a_pickle_cannot_change_the_classes_it_names(name: str) -> None:
    with pytest.raises(TypeError, match="is set"):
        unpickle(io.BytesIO(telling(metadata.__name__, name, "poisoned")), index_name, "an index")
    assert not hasattr(getattr(metadata, name), "poisoned")


@pytest.mark.parametrize(
    "state",
    [
        b"N}X\x05\x00\x00\x00valueK\x05s\x86",
        b"}X\x08\x00\x00\x00poisonedK\x05s",
        b"}X\x07\x00\x00\x00_memberK\x05s",
    ],
    ids=["slots", "attributes", "the stand-in itself"],
)
@pytest.mark.parametrize("make", [b"%s\x85R", b"%s\x85\x81"], ids=["called", "made"])
def test_a_pickle_cannot_change_a_member_that_it_finds(make: bytes, state: bytes) -> None:
    """``_MEM_FORMAT_ENCODING(0)`` is one object for the whole process."""
    before = dict(metadata._MEM_FORMAT_ENCODING(0).__dict__)
    found = b"\x80\x02c%s\n_MEM_FORMAT_ENCODING\n" % metadata.__name__.encode() + make % b"K\x00"
    assert unpickle(io.BytesIO(found + b"."), index_name, "an index") == metadata._MEM_FORMAT_ENCODING(0)
    with pytest.raises(
        TypeError, match=r"an attribute of _MEM_FORMAT_ENCODING\.TORCH_CONTIGUOUS_FORMAT is set"
    ):
        unpickle(io.BytesIO(found + state + b"b."), index_name, "an index")
    assert metadata._MEM_FORMAT_ENCODING(0).__dict__ == before


def test_a_pickle_cannot_change_our_functions() -> None:
    for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        with pytest.raises(TypeError, match="is set"):
            unpickle(io.BytesIO(telling("torch._utils", name, "__kwdefaults__")), items._known, "a tensor")
    assert items._describe.__kwdefaults__ is None


def test_what_a_pickle_makes_is_real() -> None:
    """Stand-ins of the classes make objects of the classes."""
    chunk = metadata.ChunkStorageMetadata(offsets=(0, 1), sizes=(2, 3))  # type: ignore[arg-type]
    index = metadata.Metadata(
        {"a": metadata.BytesStorageMetadata()}, storage_data={metadata.MetadataIndex("a"): chunk}
    )
    assert unpickle(io.BytesIO(pickle.dumps(index)), index_name, "an index") == index


@pytest.fixture(scope="module")
def mcore(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_tiny(directory / "hf", "llama", num_hidden_layers=1, intermediate_size=8, hidden_size=12, head_dim=2)
    assert main(["import", str(directory / "hf"), str(directory / "mcore")]) == 0
    return directory / "mcore"


def test_indices_with_some_bytes_changed(mcore: Path, tmp_path: Path) -> None:
    """Read, and every tensor of them too, or refused."""
    for file in mcore.glob("*.distcp"):
        (tmp_path / file.name).symlink_to(file)
    original, chance, refused = (mcore / ".metadata").read_bytes(), random.Random(5), 0
    for _ in range(150):
        data = bytearray(original)
        for _ in range(chance.choice((1, 1, 4))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        (tmp_path / ".metadata").write_bytes(data)
        try:
            checkpoint = TorchDistCheckpoint(tmp_path)
            for key in checkpoint:
                if sum(checkpoint.shape(key)) < 10**6:
                    checkpoint.read(key, tuple((0, size) for size in checkpoint.shape(key)))
        except ConversionError:
            refused += 1
    assert refused > 15


def test_archives_with_some_bytes_changed(mcore: Path, tmp_path: Path) -> None:
    place = next(
        where
        for key, where in read_index(mcore).storage_data.items()
        if key.fqn == "decoder.final_layernorm.weight"
    )
    original = (mcore / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
    chance, refused = random.Random(6), 0
    for _ in range(150):
        data = bytearray(original)
        data[chance.randrange(len(data))] = chance.randrange(256)
        (tmp_path / "file").write_bytes(data)
        try:
            items.read_item(tmp_path / "file", 0, len(data), "a tensor")
        except ConversionError:
            refused += 1
    assert refused > 15


def run(*argv: str | Path) -> int:
    return main([str(each) for each in argv])


def test_links_that_lead_out_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "hf", "llama")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "hf" / "README.md").symlink_to(tmp_path / "secret")
    (tmp_path / "hf" / "LICENSE").symlink_to("gone")
    assert run("import", tmp_path / "hf", tmp_path / "mcore") == 2
    error = capsys.readouterr().err
    assert "README.md leads to" in error and "LICENSE leads to" in error and not (tmp_path / "mcore").exists()
    (tmp_path / "hf" / "LICENSE").unlink()
    (tmp_path / "hf" / "README.md").unlink()
    (tmp_path / "hf" / "also.md").write_text("x")
    (tmp_path / "hf" / "README.md").symlink_to("also.md")
    assert run("import", tmp_path / "hf", tmp_path / "mcore") == 0
    (tmp_path / "mcore" / "huggingface" / "notes.txt").symlink_to(tmp_path / "secret")
    assert run("export", tmp_path / "mcore", tmp_path / "back") == 2 and not (tmp_path / "back").exists()


def test_the_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "llama")
    (tmp_path / "hf" / "tokenizer.json").write_text('{"a": 1}')
    snapshot = tmp_path / "hub" / "models--who--what" / "snapshots" / ("a" * 40)
    blobs = tmp_path / "hub" / "models--who--what" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (tmp_path / "hf").iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert run("import", snapshot, tmp_path / "mcore") == 0
    copied = tmp_path / "mcore" / "huggingface" / "tokenizer.json"
    assert copied.read_text() == '{"a": 1}' and not copied.is_symlink()
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to("../../../models--another/blobs/x")
    assert run("import", snapshot, tmp_path / "again") == 2


def test_further_chat_templates_come_along(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "llama")
    (tmp_path / "hf" / "additional_chat_templates").mkdir()
    (tmp_path / "hf" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (tmp_path / "hf" / "additional_chat_templates" / "weights.bin").write_text("x")
    assert (
        run("import", tmp_path / "hf", tmp_path / "mcore")
        == run("export", tmp_path / "mcore", tmp_path / "back")
        == 0
    )
    templates = tmp_path / "back" / "additional_chat_templates"
    assert [(file.name, file.read_text()) for file in templates.iterdir()] == [
        ("tool_use.jinja", "{{ tools }}")
    ]
    assert run("export", tmp_path / "mcore", tmp_path / "back", "--overwrite") == 0 and templates.is_dir()


def test_an_export_replaces_only_an_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "hf", "llama")
    assert run("import", tmp_path / "hf", tmp_path / "mcore") == 0
    assert run("export", tmp_path / "mcore", tmp_path / "back") == 0
    # A model of others, also one in the directory of a user's data, and an import.
    (tmp_path / "back" / "train.jsonl").write_text("{}")
    shutil.copytree(tmp_path / "hf", tmp_path / "base")
    shutil.copytree(tmp_path / "mcore", tmp_path / "imported")
    for name, others in (
        ("back", "train.jsonl"),
        ("base", "it has no conversion.json, but config.json"),
        ("imported", ".metadata"),
    ):
        before = sorted(os.listdir(tmp_path / name))
        capsys.readouterr()
        assert run("export", tmp_path / "mcore", tmp_path / name, "--overwrite") == 2
        assert others in capsys.readouterr().err and sorted(os.listdir(tmp_path / name)) == before
    (tmp_path / "back" / "train.jsonl").unlink()
    assert run("export", tmp_path / "mcore", tmp_path / "back", "--overwrite") == 0


def test_the_hub_is_asked_for_further_chat_templates_and_for_no_other_directory() -> None:
    from huggingface_hub.utils import filter_repo_objects

    there = ["config.json", "model.safetensors", "additional_chat_templates/tool_use.jinja"]
    # the config of a tokenizer may name code beside it, and a model's card and licence go with it
    there += ["tokenization_kimi.py", "README.md", "LICENSE.txt"]
    others = [
        "original/config.json",
        "onnx/tokenizer.json",
        "adapter/config.json",
        "assets/a.json",
        "consolidated.safetensors",
        "inference/run.py",
    ]
    wanted = filter_repo_objects(
        [*there, *others], allow_patterns=source._HUB_PATTERNS, ignore_patterns=source._HUB_IGNORED
    )
    assert list(wanted) == there


def test_what_is_read_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / ".out.partial", "llama")
    before = sorted(os.listdir(tmp_path / ".out.partial"))
    assert (
        run("import", tmp_path / ".out.partial", tmp_path / "out") == 2
        and "overlap" in capsys.readouterr().err
    )
    assert sorted(os.listdir(tmp_path / ".out.partial")) == before
    assert run("import", tmp_path / ".out.partial", tmp_path / "mcore") == 0
    (tmp_path / ".out.partial").rename(tmp_path / "hf")
    capsys.readouterr()
    for target in (tmp_path / "hf", tmp_path / "hf" / ".."):
        assert run("export", tmp_path / "mcore", target, "--hf-config", tmp_path / "hf", "--overwrite") == 2
        assert "overlap" in capsys.readouterr().err
    assert run("export", tmp_path / "mcore", tmp_path / "hf" / "inside", "--hf-config", tmp_path / "hf") == 0


@pytest.mark.parametrize(
    "also_stored",
    [
        {"__metadata__": "model.norm.weight"},
        {"lm_head.weight": "model.norm.weight"},
        {"../x": "lm_head.weight"},
    ],
)
def test_a_manifest_cannot_add_tensors(
    also_stored: dict[str, str], mcore: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in mcore.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "conversion.json").unlink()
    manifest = json.loads((mcore / "conversion.json").read_text())
    (tmp_path / "conversion.json").write_text(json.dumps({**manifest, "also_stored": also_stored}))
    assert run("export", tmp_path, tmp_path.parent / f"{tmp_path.name}-back") == 2
    assert "which no llama model does" in capsys.readouterr().err
