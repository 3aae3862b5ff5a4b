"""Checkpoints of more files than a process may have open."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from converters import importing
from converters.checkpoint.safetensors_file import OpenFiles
from converters.command import main
from converters.errors import ConversionError
from tests.open_files import open_files
from tests.unit.converters_tiny import save_tiny


def count(files: list[Path]) -> int:
    """How many of them are open."""
    held = open_files()
    return sum(held[str(path)] for path in files)


@pytest.fixture
def few_files() -> Iterator[int]:
    """The process may open 45 files more than it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = 45
    # descriptors have the lowest free numbers, and the limit is on the number
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + room, before[1]))
    yield room
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_conversion_of_more_files_than_may_be_open(
    tmp_path: Path, few_files: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importing, "_FILES", 500)
    monkeypatch.setattr(importing, "_SMALLEST_FILE", 1)
    save_tiny(tmp_path / "whole", "qwen3_moe")
    assert main(["import", str(tmp_path / "whole"), str(tmp_path / "mcore")]) == 0
    assert len(list((tmp_path / "mcore").glob("*_0.distcp"))) > few_files
    assert (
        main(
            [
                "export",
                str(tmp_path / "mcore"),
                str(tmp_path / "many"),
                "--max-shard-size",
                "1",
                "--workers",
                "4",
            ]
        )
        == 0
    )
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > few_files
    assert main(["import", str(tmp_path / "many"), str(tmp_path / "again"), "--workers", "4"]) == 0
    assert main(["verify", str(tmp_path / "many"), str(tmp_path / "again")]) == 0
    capsys.readouterr()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / str(number) for number in range(40)]
    for path in paths:
        path.write_text(path.name)
    return paths


def test_files_are_open_while_they_are_used(files: list[Path]) -> None:
    opened = OpenFiles()
    for path in files:
        with opened.use(path) as descriptor, opened.use(files[0]) as first:
            assert os.pread(descriptor, 9, 0).decode() == path.name and os.pread(first, 9, 0) == b"0"
            assert count(files) == 2
    assert count(files) == 0


def test_a_file_that_was_replaced_meanwhile_is_not_read(files: list[Path]) -> None:
    opened = OpenFiles()
    with opened.use(files[0]):
        pass
    files[1].rename(files[0])
    with (
        pytest.raises(ConversionError, match=f"{files[0]} has changed while it was in use"),
        opened.use(files[0]),
    ):
        pass


def test_what_cannot_be_opened(files: list[Path]) -> None:
    with (
        pytest.raises(ConversionError, match="nowhere cannot be read"),
        OpenFiles().use(files[0].parent / "nowhere"),
    ):
        pass
