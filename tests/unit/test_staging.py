"""Tensors that are copied to memory, and the files that another process makes of them: those that would have
been written at once."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat, _write_item
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megarl.checkpoint import background, staging
from megarl.checkpoint.background import memory_of, waits_in_memory
from megarl.checkpoint.staged_file import description_name, open_staged
from megarl.checkpoint.staging import RankWriter, StagingBuffer, StagingBuffers, staged, staged_results
from megarl.errors import CheckpointError
from tests.tiers import slow

NAME = "__0_0.distcp"
DESCRIPTION = description_name(NAME)
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
KINDS = ("whole", "transposed", "part", "every other", "repeated", "sizes of 1", "number", "empty", "bytes")


def tensor_of(kind: str, dtype: torch.dtype, seed: int) -> Any:
    """Five rows of seven in one form or another; every value differs from the others, and from those of
    another seed."""
    if kind == "bytes":
        return io.BytesIO(bytes(range(seed % 200, seed % 200 + seed % 7)))
    values = (torch.arange(35) + seed).to(torch.float32).to(dtype).view(5, 7)
    forms = {
        "whole": values,
        "transposed": values.t(),
        "part": values[1:4],
        "every other": values[:, ::2],
        "repeated": values[:1].expand(3, 7),
        "sizes of 1": values[2:3].as_strided((1, 7), (100, 1)).clone(memory_format=torch.preserve_format),
        "number": values[3, 4],
        "empty": values[:0],
    }
    return forms[kind]


def items_of(data: list[Any]) -> tuple[list[tuple[WriteItem, Any]], list[tuple[WriteItem, Any]]]:
    """What is no tensor, and the tensors."""
    pairs = [
        (
            WriteItem(
                MetadataIndex(f"piece {n}"),
                WriteItemType.BYTE_IO if isinstance(each, io.BytesIO) else WriteItemType.TENSOR,
            ),
            each,
        )
        for n, each in enumerate(data)
    ]
    return [pair for pair in pairs if isinstance(pair[1], io.BytesIO)], [
        pair for pair in pairs if not isinstance(pair[1], io.BytesIO)
    ]


def as_dcp_writes(path: Path, data: list[Any]) -> list[WriteResult]:
    """Each tensor in memory of its own, as DCP has it."""
    plain, tensors = items_of(data)
    alone = [
        (item, each if each.untyped_storage().nbytes() == each.nbytes else each.clone())
        for item, each in tensors
    ]
    transforms = FileSystemWriter(path.parent).transforms
    with path.open("wb") as file:
        return [
            _write_item(transforms, file, each, item, NAME, SerializationFormat.TORCH_SAVE)
            for item, each in (*plain, *alone)
        ]


def stage(buffer: StagingBuffer, directory: Path, data: list[Any]) -> list[WriteResult]:
    directory.mkdir(parents=True, exist_ok=True)
    plain, tensors = items_of(data)
    return staged_results(
        buffer, directory / NAME, NAME, plain, [(item, staged(each)) for item, each in tensors]
    )


def move_files(source: Path, target: Path) -> Any:
    return background.move_files(source, target, open_staged(source))


@pytest.fixture
def buffer() -> Iterator[StagingBuffer]:
    buffer = StagingBuffer()
    yield buffer
    buffer.close()


WANTED = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(DTYPES)), max_size=9)


@given(st.lists(WANTED, min_size=1, max_size=3))
def test_the_file_is_the_one_that_would_have_been_written(
    tmp_path_factory: pytest.TempPathFactory, saves: list[list[tuple[str, torch.dtype]]]
) -> None:
    """To the last byte, also when a save is larger or smaller than the one before in the same memory."""
    root, buffer = tmp_path_factory.mktemp("staging"), StagingBuffer()
    try:
        for number, wanted in enumerate(saves):
            source, target = root / f"memory {number}", root / f"disk {number}"
            target.mkdir()
            data = [tensor_of(kind, dtype, 10 * number + n) for n, (kind, dtype) in enumerate(wanted)]
            assert stage(buffer, source, data) == as_dcp_writes(root / "expected", data)
            content = (root / "expected").read_bytes()
            known = move_files(source, target)
            assert known == {NAME: {"size": len(content), "hash": hashlib.sha256(content).hexdigest()}}
            assert (target / NAME).read_bytes() == content and not list(source.iterdir())
    finally:
        buffer.close()


def test_values_are_those_of_the_copy(buffer: StagingBuffer, tmp_path: Path) -> None:
    values = torch.arange(7.0)
    stage(buffer, tmp_path / "memory", [values])
    values.zero_()
    (tmp_path / "disk").mkdir()
    move_files(tmp_path / "memory", tmp_path / "disk")
    assert torch.equal(torch.load(tmp_path / "disk" / NAME), torch.arange(7.0))


def test_memory_is_kept_from_save_to_save(buffer: StagingBuffer, tmp_path: Path) -> None:
    def inode_and_size() -> tuple[int, int]:
        memory = json.loads((tmp_path / DESCRIPTION).read_text())["memory"]
        status = os.stat(f"/proc/self/fd/{memory['descriptor']}")
        return status.st_ino, status.st_size

    found = []
    for rows in (3, 1, 9, 3):
        stage(buffer, tmp_path, [torch.ones(rows, 1000)])
        found.append(inode_and_size())
    assert len({inode for inode, _ in found}) == 1 and [size for _, size in found] == [
        12032,
        12032,
        36032,
        36032,
    ]


RANK = """
import sys
sys.path[:] = {path!r}
from pathlib import Path
import torch
from megarl.checkpoint.staging import StagingBuffer
from tests.unit.test_staging import stage
buffer = StagingBuffer()
stage(buffer, Path(sys.argv[1]), [torch.arange(7.0), torch.ones(3, 5)])
print("staged", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has staged a file, and waits."""
    command = [sys.executable, "-c", RANK.format(path=sys.path), str(tmp_path / "memory")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "staged\n"
    yield process
    process.kill()
    process.communicate()


@slow
def test_a_rank_may_end_when_its_memory_is_open(rank: subprocess.Popen[str], tmp_path: Path) -> None:
    opened = open_staged(tmp_path / "memory")
    rank.kill()
    rank.communicate()
    opened[DESCRIPTION].write(tmp_path)
    as_dcp_writes(tmp_path / "expected", [torch.arange(7.0), torch.ones(3, 5)])
    assert (tmp_path / NAME).read_bytes() == (tmp_path / "expected").read_bytes()


@slow
def test_a_rank_that_has_ended_is_told_of(rank: subprocess.Popen[str], tmp_path: Path) -> None:
    rank.kill()
    rank.communicate()
    with pytest.raises(
        CheckpointError,
        match=rf"the memory of process {rank.pid} that holds {NAME} cannot be opened: the process has ended",
    ):
        open_staged(tmp_path / "memory")


def test_memory_of_another_one_under_the_same_number_is_not_taken(
    buffer: StagingBuffer, tmp_path: Path
) -> None:
    stage(buffer, tmp_path, [torch.arange(7.0)])
    description = tmp_path / DESCRIPTION
    said = json.loads(description.read_text())
    said["memory"]["inode"] += 1
    description.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="another process has its id"):
        move_files(tmp_path, tmp_path)


@pytest.mark.parametrize("length", [3, 300_000], ids=["at the end", "while it is written"])
def test_a_full_disk_is_told(buffer: StagingBuffer, tmp_path: Path, length: int) -> None:
    stage(buffer, tmp_path / "memory", [torch.zeros(length)])
    (tmp_path / NAME).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        move_files(tmp_path / "memory", tmp_path)
    assert caught.value.errno == errno.ENOSPC


def test_a_disk_that_has_room_for_the_beginning_is_told(buffer: StagingBuffer, tmp_path: Path) -> None:
    """Of a tensor whose values do not go there torch itself says only that it is at another position than it
    thought."""
    stage(buffer, tmp_path / "memory", [torch.zeros(300_000)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            move_files(tmp_path / "memory", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_tells_of_a_disk_that_has_room_for_the_beginning(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"it": torch.zeros(300_000)}, storage_writer=RankWriter(tmp_path, None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [(error, _)] = caught.value.failures.values()
    assert isinstance(error, OSError) and error.errno == errno.EFBIG


def test_an_archive_of_another_length_than_its_index_says_is_refused(
    buffer: StagingBuffer, tmp_path: Path
) -> None:
    stage(buffer, tmp_path, [torch.arange(7.0)])
    description = tmp_path / DESCRIPTION
    said = json.loads(description.read_text())
    said["pieces"][0]["length"] += 64
    description.write_text(json.dumps(said))
    with pytest.raises(
        CheckpointError, match=r"a tensor of __0_0\.distcp takes \d+ bytes, and its index says \d+"
    ):
        move_files(tmp_path, tmp_path)


def test_without_memory_it_is_not_begun(buffer: StagingBuffer, tmp_path: Path) -> None:
    with mock.patch.object(staging, "available_bytes", return_value=5000):
        stage(buffer, tmp_path, [torch.zeros(1000)])
        with pytest.raises(
            CheckpointError, match="8000 bytes more of memory are needed to copy it, and 5000 are available"
        ):
            stage(buffer, tmp_path / "more", [torch.zeros(3000)])
    assert not list((tmp_path / "more").iterdir())


def test_only_what_waits_in_memory_is_staged(tmp_path: Path) -> None:
    memory, buffers = memory_of(tmp_path, "node"), StagingBuffers()
    assert waits_in_memory(memory) and waits_in_memory(memory / "policy" / "weights")
    for other in (
        tmp_path,
        Path("/dev/shm"),
        Path("/dev/shm/runs/checkpoints"),
        Path(f"/dev/shm/runs/{memory.name}"),
        Path(f"/data{memory}"),
    ):
        assert not waits_in_memory(other) and buffers.of(other) is None
    weights = buffers.of(memory / "policy" / "weights")
    assert weights is not None and weights is buffers.of(memory / "policy" / "weights")
    assert weights is not buffers.of(memory / "policy" / "optimizer")


def test_memory_is_given_back_where_a_checkpoint_is_written_at_once(tmp_path: Path) -> None:
    """Also what was staged before the next directory had no room."""
    buffers = StagingBuffers()
    weights = buffers.of(memory_of(tmp_path) / "policy" / "weights")
    assert weights is not None
    stage(weights, tmp_path, [torch.arange(7.0)])
    descriptor = json.loads((tmp_path / DESCRIPTION).read_text())["memory"]["descriptor"]
    assert os.path.exists(f"/proc/self/fd/{descriptor}") and buffers.of(tmp_path / "weights") is None
    assert not os.path.exists(f"/proc/self/fd/{descriptor}")


@pytest.mark.parametrize("content", ["plain text", "[]", "{}", '{"pieces": []}', "3"])
def test_a_file_of_the_model_is_not_taken_for_one_of_ours(tmp_path: Path, content: str) -> None:
    (tmp_path / DESCRIPTION).write_text(content)
    with pytest.raises(
        CheckpointError,
        match=r"is not a file of megarl. Fix: no file of the model may be called \*\.distcp\.staged",
    ):
        open_staged(tmp_path)
    (tmp_path / DESCRIPTION).rename(tmp_path / "a.staged")
    assert open_staged(tmp_path) == {}


def test_a_process_that_may_not_be_looked_into_is_told_of(buffer: StagingBuffer, tmp_path: Path) -> None:
    stage(buffer, tmp_path, [torch.arange(7.0)])
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with (
        mock.patch.object(os, "open", side_effect=refused),
        pytest.raises(CheckpointError, match=r"Permission denied\. Fix: run driver"),
    ):
        open_staged(tmp_path)


PRINTING = """
import sys
sys.path[:] = {path!r}
sys.modules["torch"] = type(sys)("torch")
sys.modules["torch"].__getattr__ = lambda name: print("hello from a library") or 1 / 0
from megarl.checkpoint.node_memory import main
main(*sys.argv[1:])
"""


def test_what_a_library_prints_is_no_answer(buffer: StagingBuffer, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    stage(buffer, tmp_path / "memory", [torch.arange(7.0)])
    command = [sys.executable, "-c", PRINTING.format(path=sys.path), str(tmp_path / "memory")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        # that the memory be opened, and where to write
        process.stdin.write(f"null\n{json.dumps(str(tmp_path))}\n".encode())
        process.stdin.flush()
        answers, beside = process.stdout.read().splitlines(), process.stderr.read()
    assert process.returncode == 1 and json.loads(answers[-1]) == {
        "reason": "ZeroDivisionError: division by zero"
    }
    assert len(answers) == 2 and json.loads(answers[0])["kept_bytes"] > 0
    assert b"hello from a library" in beside
