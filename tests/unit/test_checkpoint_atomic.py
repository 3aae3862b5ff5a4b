"""Directories and files that appear whole or not at all, and manifests that notice any damage."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.files import atomic
from converters.files.atomic import commit_directory, fsync_tree, rename_surely, write_json_atomic
from megarl.checkpoint.atomic import remove_directory
from megarl.checkpoint.manager import metric_of, plain_json
from megarl.checkpoint.manifest import MANIFEST_NAME, verify, write_manifest
from megarl.errors import CheckpointError


def fill(root: Path) -> None:
    """Files of different sizes, an empty one, a hidden one and nested ones."""
    for name, size in (("a.bin", 1000), ("deep/er/b.bin", 17), ("deep/empty", 0), (".metadata", 3)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(random.Random(name).randbytes(size))


def test_everything_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        events.append("RENAME")
        real_rename(source, target)

    monkeypatch.setattr(atomic.os, "fsync", fsync)
    monkeypatch.setattr(atomic.os, "rename", rename)
    temporary = tmp_path / "tmp_model"
    fill(temporary)
    fsync_tree(temporary)
    commit_directory(temporary, tmp_path / "model")
    before, after = events[: events.index("RENAME")], events[events.index("RENAME") + 1 :]
    assert sorted(before) == sorted([".metadata", "a.bin", "b.bin", "deep", "empty", "er", temporary.name])
    assert before[-1] == temporary.name and before.index("er") < before.index("deep")
    assert after == [tmp_path.name]


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    write_json_atomic(path, {"step": 1})
    for broken in ({"step": float("nan")}, {"step": object()}):
        with pytest.raises((TypeError, ValueError)):
            write_json_atomic(path, broken)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    for operation in ("fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(atomic.os, operation, fail)
            with pytest.raises(OSError, match="no space"):
                write_json_atomic(path, {"step": 2})
        assert json.loads(path.read_text()) == {"step": 1}
        assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]
    write_json_atomic(path, {"step": 3})
    assert json.loads(path.read_text()) == {"step": 3}


def test_removed_directory_loses_its_name_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step_1").mkdir()
    fill(tmp_path / "step_1")

    def fail(*_: object) -> None:
        raise OSError("busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        assert remove_directory(tmp_path / "step_1")
    assert "busy" in caplog.text
    assert [path.name.startswith("tmp_deleted_step_1_") for path in tmp_path.iterdir()] == [True]
    assert not remove_directory(tmp_path / "step_1")


def test_manifest_lists_size_and_hash_of_every_file(tmp_path: Path) -> None:
    fill(tmp_path)
    write_manifest(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST_NAME).read_text())
    assert set(manifest["files"]) == {"a.bin", "deep/er/b.bin", "deep/empty", ".metadata"}
    for name, entry in manifest["files"].items():
        content = (tmp_path / name).read_bytes()
        assert entry == {"size": len(content), "hash": hashlib.sha256(content).hexdigest()}
    assert verify(tmp_path) == [] == verify(tmp_path, hashes=False)
    write_manifest(tmp_path)
    assert verify(tmp_path) == []
    (tmp_path / "added_later").touch()
    assert verify(tmp_path) == []


@given(st.data())
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("flip")
    fill(root)
    write_manifest(root)
    name = data.draw(st.sampled_from(["a.bin", "deep/er/b.bin", ".metadata"]))
    content = bytearray((root / name).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    (root / name).write_bytes(content)
    [problem] = verify(root)
    assert name in problem and "damaged" in problem
    assert verify(root, hashes=False) == []


@pytest.mark.parametrize("change", ["truncate", "extend", "delete", "directory", "link"])
def test_changed_shape_is_found_without_hashing(tmp_path: Path, change: str) -> None:
    fill(tmp_path)
    write_manifest(tmp_path)
    victim = tmp_path / "deep" / "er" / "b.bin"
    content = victim.read_bytes()
    victim.unlink()
    if change == "truncate":
        victim.write_bytes(content[:-1])
    elif change == "extend":
        victim.write_bytes(content + b"\0")
    elif change == "directory":
        victim.mkdir()
    elif change == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        victim.symlink_to(tmp_path / "elsewhere")
    [problem] = verify(tmp_path, hashes=False)
    assert "deep/er/b.bin" in problem


def test_damaged_manifest_is_never_accepted(tmp_path: Path) -> None:
    fill(tmp_path)
    assert "missing" in verify(tmp_path)[0]
    write_manifest(tmp_path)
    whole = (tmp_path / MANIFEST_NAME).read_bytes()
    for length in range(0, len(whole) - 1, 7):
        (tmp_path / MANIFEST_NAME).write_bytes(whole[:length])
        assert verify(tmp_path, hashes=False), length
    changed = json.loads(whole)
    del changed["files"]["a.bin"]
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(changed))
    assert "digest" in verify(tmp_path)[0]


def test_a_named_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST_NAME)
    assert verify(tmp_path) == [f"{tmp_path / MANIFEST_NAME} is not a regular file"]
    (tmp_path / MANIFEST_NAME).unlink()
    fill(tmp_path)
    write_manifest(tmp_path)
    (tmp_path / "a.bin").unlink()
    os.mkfifo(tmp_path / "a.bin")
    assert verify(tmp_path) == ["a.bin is not a regular file"]


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/hostname", "deep/../a.bin", "", ".", "deep//er/b.bin", "linked/file", "a\0b"]
)
def test_manifest_cannot_lead_out_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").write_text("secret")
    (root / "linked").symlink_to(tmp_path / "target")
    files = {name: {"size": 6, "hash": "0"}}
    digest = hashlib.sha256(json.dumps(files, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (root / MANIFEST_NAME).write_text(
        json.dumps({"version": 1, "algorithm": "sha256", "digest": digest, "files": files})
    )
    [problem] = verify(root)
    assert "not a plain path" in problem


def test_links_and_special_files_are_not_checkpointed(tmp_path: Path) -> None:
    for number, make in enumerate(
        (
            lambda path: path.symlink_to("/etc/hostname"),
            lambda path: os.mkfifo(path),
            lambda path: path.symlink_to("/etc"),
        )
    ):
        root = tmp_path / str(number)
        root.mkdir()
        make(root / "odd")
        fsync_tree(root)
        with pytest.raises(CheckpointError, match="odd is a symbolic link or special file"):
            write_manifest(root)


class Scalar:
    """Like a zero-dimensional array."""

    ndim = 0

    def item(self) -> float:
        return 0.5


def test_training_info_is_plain_json(caplog: pytest.LogCaptureFixture) -> None:
    info = {"step": 3, "nested": {"list": (1, None, True)}, "scalar": Scalar(), "bad": float("inf")}
    assert plain_json(info) == {"step": 3, "nested": {"list": [1, None, True]}, "scalar": 0.5, "bad": None}
    assert "training_info.bad = inf" in caplog.text
    with pytest.raises(CheckpointError, match=r"training_info\.a\[1\] is a bytes"):
        plain_json({"a": [1, b"x"]})
    with pytest.raises(CheckpointError, match="has the key 3"):
        plain_json({"a": {3: 1}})


def test_metric_is_found_beside_or_among_the_metrics() -> None:
    assert metric_of({"accuracy": 1}, "accuracy") == 1.0
    assert metric_of({"metrics": {"accuracy": 0.25}}, "accuracy") == 0.25
    for info in ({}, {"accuracy": None}, {"accuracy": True}, {"accuracy": "high"}, {"metrics": 3}):
        assert metric_of(info, "accuracy") is None


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("what", ["directory", "file", "file over another"])
def test_a_rename_whose_reply_was_lost_is_done(
    number: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, real = tmp_path / "source", tmp_path / "target", os.rename
    source.mkdir() if what == "directory" else source.write_text("new")
    if what == "file over another":
        target.write_text("old")

    def lose_reply(old: Path, new: Path) -> None:
        real(old, new)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "rename", lose_reply)
    (commit_directory if what == "directory" else rename_surely)(source, target)
    assert not source.exists() and (target.is_dir() or target.read_text() == "new")


def test_a_rename_that_was_not_done_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        rename_surely(tmp_path / "source", tmp_path / "target")
    (tmp_path / "source").mkdir()

    def fail(old: Path, new: Path) -> None:
        raise OSError(errno.ENOENT, "no such file")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(FileNotFoundError):
        rename_surely(tmp_path / "source", tmp_path / "target")

    def another_takes_it(old: Path, new: Path) -> None:
        Path(new).mkdir()
        Path(old).rmdir()
        fail(old, new)

    monkeypatch.setattr(os, "rename", another_takes_it)
    with pytest.raises(FileNotFoundError):
        rename_surely(tmp_path / "source", tmp_path / "target")
