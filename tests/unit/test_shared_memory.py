"""Little room in /dev/shm is said before a process dies of it, and where one has died."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from megarl.distributed import shared_memory
from megarl.distributed.shared_memory import LITTLE, SharedMemoryWatch, free_bytes, note_of_full_memory


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The file system, played: ``room.blocks`` of 4096 bytes are free."""
    played = SimpleNamespace(blocks=0)
    monkeypatch.setattr(
        shared_memory.os,
        "statvfs",
        lambda path: SimpleNamespace(f_bavail=played.blocks, f_frsize=4096, f_bsize=1),
    )
    return played


def test_little_room_is_said_once_until_there_is_more(
    room: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    watch = SharedMemoryWatch(8 * LITTLE)
    with caplog.at_level(logging.WARNING):
        for free, said in [(LITTLE, 0), (LITTLE - 4096, 1), (0, 1), (LITTLE, 1), (4096, 2)]:
            room.blocks = free // 4096
            watch.look()
            assert len(caplog.records) == said, free
    assert caplog.messages[1].startswith(
        "/dev/shm has 0.0 MiB free, and Ray's object store may need up to 512 MiB there"
    )
    assert "Fix" in caplog.messages[0]


def test_a_store_elsewhere_needs_no_room(room: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    SharedMemoryWatch(0).look()
    # a small store is whole there
    room.blocks = 1000
    SharedMemoryWatch(4_096_000).look()
    assert not caplog.records
    room.blocks = 999
    SharedMemoryWatch(4_096_000).look()
    assert len(caplog.records) == 1


def test_the_death_of_a_process_has_a_note_only_where_there_is_no_room(
    room: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.blocks = LITTLE // 4096
    assert note_of_full_memory() == "" and free_bytes() == LITTLE
    room.blocks -= 1
    assert "/dev/shm has 64.0 MiB free" in note_of_full_memory() and "Fix" in note_of_full_memory()

    def missing(path: object) -> object:
        raise FileNotFoundError

    monkeypatch.setattr(shared_memory.os, "statvfs", missing)
    assert note_of_full_memory() == "" and free_bytes() is None
    SharedMemoryWatch(1).look()
