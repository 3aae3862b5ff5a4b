"""The memory of a node in which a checkpoint waits, and its process: all nodes make one checkpoint, and
nothing is left behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from megarl.checkpoint import background, node_memory
from megarl.checkpoint.background import memory_of, seal, take_memory, tidy_memory
from megarl.checkpoint.manifest import MANIFEST_NAME, verify, write_manifest
from megarl.checkpoint.node_memory import NodeMemory
from megarl.checkpoint.staging import StagingBuffer, staged
from megarl.errors import CheckpointError
from tests.node_writers import LONGEST_S, await_end, writer_of, writers
from tests.tiers import slow

NODES = ("n1", "n2")
FILES: dict[str, dict[str, bytes]] = {
    "n1": {
        "policy/weights/__0_0.distcp": os.urandom(70_001),
        "policy/weights/.metadata": b"index",
        "policy/optimizer/__0_0.distcp": b"",
        "policy/weights/hf/config.json": b"{}",
    },
    "n2": {
        "policy/weights/__1_0.distcp": os.urandom(3),
        "policy/optimizer/__1_0.distcp": os.urandom(40_000),
        "critic/weights/__1_0": b"c",
    },
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A begun checkpoint, below a directory of checkpoints."""
    path = tmp_path / "checkpoints" / "tmp_step_3"
    path.mkdir(parents=True)
    (path / "training_info.json").write_bytes(b'{"step": 3}')
    return path


@pytest.fixture
def memories(target: Path) -> Iterator[dict[str, NodeMemory]]:
    found = {node: NodeMemory(str(target.parent), node) for node in NODES}
    yield found
    for memory in found.values():
        memory.free()


def fill(directory: str | Path | None, files: dict[str, bytes]) -> Path:
    assert directory is not None
    for name, content in files.items():
        path = Path(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return Path(directory)


def test_the_files_of_all_nodes_make_the_checkpoint_that_one_writes(
    target: Path, tmp_path: Path, memories: dict[str, NodeMemory]
) -> None:
    whole = fill(tmp_path / "whole", {"training_info.json": b'{"step": 3}', **FILES["n1"], **FILES["n2"]})
    seal(whole)
    places = {node: fill(memory.take(100_000), FILES[node]) for node, memory in memories.items()}
    assert len(set(places.values())) == 2 and all(
        path.stat().st_mode & 0o777 == 0o700 for path in places.values()
    )
    with ThreadPoolExecutor() as pool:
        said = list(pool.map(lambda memory: memory.write(str(target)), memories.values()))
    assert [set(each) for each in said] == [set(FILES[node]) for node in NODES]
    write_manifest(target, said[0] | said[1])
    assert (target / MANIFEST_NAME).read_bytes() == (whole / MANIFEST_NAME).read_bytes() and verify(
        target
    ) == []
    for name in json.loads((whole / MANIFEST_NAME).read_text())["files"]:
        assert (target / name).read_bytes() == (whole / name).read_bytes(), name
    assert not any(path.exists() for path in places.values())
    # and once more, with the same processes gone
    again = fill(memories["n1"].take(1), {"x": b"x"})
    assert again == places["n1"] and memories["n1"].write(str(target)).keys() == {"x"}


def test_each_file_is_on_the_disk_before_it_leaves_memory_and_so_are_the_directories(
    target: Path, tmp_path: Path
) -> None:
    source, order = fill(tmp_path / "memory", FILES["n1"]), []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        order.append(path)
        if path.is_file():
            assert (source / path.relative_to(target)).is_file()
        real(descriptor)

    with mock.patch.object(os, "fsync", fsync):
        node_memory.written(source, target, {})
    files = {target / name for name in FILES["n1"]}
    directories = [
        target / name for name in ("policy/weights/hf", "policy/weights", "policy/optimizer", "policy", ".")
    ]
    assert set(order[: len(files)]) == files and order[len(files) :] == directories
    assert not [path for path in source.rglob("*") if path.is_file()]


def test_no_room_is_known_before(target: Path, memories: dict[str, NodeMemory]) -> None:
    full = mock.patch.object(background, "available_bytes", return_value=1)
    with full:
        assert memories["n1"].take(1) is None
    assert writers(target.parent) == [] and not memory_of(target.parent, "n1").exists()


def test_a_full_disk_is_told(target: Path, memories: dict[str, NodeMemory]) -> None:
    (target / "policy" / "weights").mkdir(parents=True)
    (target / "policy" / "weights" / "__1_0.distcp").symlink_to("/dev/full")
    place = fill(memories["n2"].take(1), FILES["n2"])
    with pytest.raises(CheckpointError, match="No space left on device"):
        memories["n2"].write(str(target))
    assert not place.exists()


def test_ranks_that_have_another_memory_are_told_of(target: Path, memories: dict[str, NodeMemory]) -> None:
    memories["n1"].take(1)
    with pytest.raises(CheckpointError, match="no rank has written a file to /dev/shm"):
        memories["n1"].write(str(target))


def test_memory_that_was_freed_has_nothing_to_write(target: Path, memories: dict[str, NodeMemory]) -> None:
    memories["n1"].take(1)
    memories["n1"].free()
    with pytest.raises(CheckpointError, match="no checkpoint waits in the memory of this node"):
        memories["n1"].write(str(target))


@slow
def test_ranks_may_end_when_their_memory_is_held(target: Path, memories: dict[str, NodeMemory]) -> None:
    """And what they keep for the next checkpoint is not needed once more."""
    place = fill(memories["n1"].take(1), FILES["n1"])
    buffer = StagingBuffer()
    buffer.write(place / "policy" / "weights" / "__9_0.distcp", [b"bytes", staged(torch.arange(7.0))])
    assert memories["n1"].hold() == 128
    buffer.close()
    files = memories["n1"].write(str(target))
    assert files.keys() == FILES["n1"].keys() | {"policy/weights/__9_0.distcp"}
    content = (target / "policy" / "weights" / "__9_0.distcp").read_bytes()
    assert content.startswith(b"bytes") and torch.equal(
        torch.load(io.BytesIO(content[5:])), torch.arange(7.0)
    )
    with mock.patch.object(background, "available_bytes", return_value=0):
        assert memories["n1"].take(100) is not None and memories["n1"].take(104) is None


def test_memory_that_cannot_be_held_is_told_of(target: Path, memories: dict[str, NodeMemory]) -> None:
    place = fill(memories["n1"].take(1), FILES["n1"])
    buffer = StagingBuffer()
    buffer.write(place / "__9_0.distcp", [b"bytes"])
    buffer.close()
    with pytest.raises(
        CheckpointError,
        match=rf"the memory of process {os.getpid()} that holds __9_0\.distcp cannot be opened",
    ):
        memories["n1"].hold()
    assert not place.exists() and writers(target.parent) == []
    memories["n1"].free()
    with pytest.raises(CheckpointError, match="no checkpoint waits in the memory of this node"):
        memories["n1"].hold()


def test_a_process_that_is_killed_is_told_of_and_nothing_is_left(
    target: Path, memories: dict[str, NodeMemory]
) -> None:
    place = fill(memories["n2"].take(1), FILES["n2"])
    writer_of(target.parent, "n2").kill()
    with pytest.raises(CheckpointError, match="was killed"):
        memories["n2"].write(str(target))
    memories["n2"].free()
    assert not place.exists()


def test_signals_to_all_processes_do_not_end_it(target: Path, memories: dict[str, NodeMemory]) -> None:
    fill(memories["n1"].take(1), FILES["n1"])
    writer = writer_of(target.parent, "n1")
    assert writer.ppid() != os.getpid(), "Ray kills the children of its workers"
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        writer.send_signal(each)
    assert memories["n1"].write(str(target)).keys() == FILES["n1"].keys()


@pytest.mark.parametrize("stopped", [False, True], ids=["at work", "stopped"])
def test_what_is_no_longer_wanted_is_ended_while_it_is_written(
    stopped: bool, target: Path, memories: dict[str, NodeMemory]
) -> None:
    place = fill(memories["n1"].take(1), FILES["n1"])
    writer = writer_of(target.parent, "n1")
    if stopped:
        writer.suspend()
    with (
        ThreadPoolExecutor(1) as pool,
        mock.patch.object(node_memory, "_END_S", 0.5 if stopped else LONGEST_S),
    ):
        write = pool.submit(memories["n1"].write, str(target)) if stopped else None
        memories["n1"].free()
        if write is not None:
            assert isinstance(write.exception(LONGEST_S), CheckpointError)
    await_end(writer)
    assert not place.exists()


ASKER = """
import sys, threading
sys.path[:] = {path!r}
from megarl.checkpoint.node_memory import NodeMemory
memory = NodeMemory(sys.argv[1], "n1", has_child=sys.argv[2] == "True")
print(memory.take(1), flush=True)
for line in sys.stdin:
    threading.Thread(target=memory.write, args=(line.strip(),)).start()
"""


@pytest.mark.parametrize("writes", [False, True], ids=["before it writes", "while it writes"])
@pytest.mark.parametrize("has_child", [False, True], ids=["nobody's child", "a child"])
def test_the_process_ends_with_who_has_started_it_and_takes_the_memory_along(
    has_child: bool, writes: bool, target: Path
) -> None:
    command = [sys.executable, "-c", ASKER.format(path=sys.path), str(target.parent), str(has_child)]
    asker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert asker.stdout is not None and asker.stdin is not None
    place = fill(asker.stdout.readline().strip(), FILES["n1"])
    assert place == memory_of(target.parent, "n1")
    writer = writer_of(target.parent, "n1")
    assert os.getsid(writer.pid) != os.getsid(asker.pid) and (writer.ppid() == asker.pid) == has_child
    if writes:
        writer.suspend()
        asker.stdin.write(f"{target}\n")
        asker.stdin.flush()
    asker.kill()
    asker.communicate()
    writer.resume()
    await_end(writer)
    assert not place.exists()


def test_what_killed_launches_have_left_goes_whatever_the_node_was_called(
    target: Path, tmp_path: Path
) -> None:
    left = [
        fill(take_memory(target.parent, 1, node), {"left/x": b"x"})
        for node in ("", "of an earlier Ray", "n1")
    ]
    other = fill(take_memory(tmp_path / "of another run", 1, "n1"), {"x": b"x"})
    try:
        assert len({*left, other}) == 4
        tidy_memory(target.parent)
        assert not any(path.exists() for path in left) and other.is_dir()
    finally:
        tidy_memory(tmp_path / "of another run")
    assert not other.exists()


def test_names_that_are_known_belong_to_the_manifest_also_where_they_are_not_seen_yet(target: Path) -> None:
    fill(target, {"policy/a": b"abc"})
    known = {"policy/late": {"size": 7, "hash": "00"}, "policy/a": {"size": 3, "hash": "11"}}
    files = write_manifest(target, known)["files"]
    assert list(files) == ["policy/a", "policy/late", "training_info.json"]
    assert files["policy/a"] == known["policy/a"], "it is not read again"
    assert (
        len(verify(target, hashes=False)) == 1
        and "policy/late cannot be read" in verify(target, hashes=False)[0]
    )
