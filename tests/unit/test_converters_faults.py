"""Disks that are full, files that cannot be read, places that cannot be written: one line, exit code 2, and
nothing that looks complete."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from converters import importing
from converters.checkpoint.source import open_source
from converters.command import main
from converters.importing import import_model
from converters.opening import open_megatron
from tests.unit.converters_tiny import save_tiny


@pytest.fixture
def hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(importing, "_SMALLEST_FILE", 8_000)
    save_tiny(tmp_path / "hf", "llama")
    return tmp_path / "hf"


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """A write behind it fails with EFBIG, as one on a full disk does with ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("converters:")]
    assert len(lines) == 1 and ". Fix: " in lines[0], lines
    return lines[0]


@pytest.mark.parametrize("size", [0, 5_000, 20_000])
@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_full_disk(
    direction: str, size: int, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And afterwards, once there is room, the same command ends as it would have."""
    mcore, out = tmp_path / "mcore", tmp_path / "out"
    argv = ["import", str(hf), str(out)] if direction == "import" else ["export", str(mcore), str(out)]
    assert direction == "import" or main(["import", str(hf), str(mcore)]) == 0
    capsys.readouterr()
    with no_file_larger_than(size):
        assert main(argv) == 2
    assert "File too large" in one_line(capsys)
    partial = tmp_path / ".out.partial"
    assert (
        not out.exists()
        and not (partial / ".metadata").exists()
        and not (partial / "conversion.json").exists()
    )
    assert main(argv) == 0 and not partial.exists()
    assert main(["verify", str(hf), str(out)]) == 0


def test_a_file_that_cannot_be_read(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel answers EIO to whoever reads a process's memory where it has none."""
    assert main(["import", str(hf), str(tmp_path / "mcore")]) == 0
    with (
        Path("/proc/self/mem").open("rb", buffering=0) as file,
        pytest.raises(OSError, match="Input/output error"),
    ):
        file.read(1)
    for path in (tmp_path / "mcore").glob("*_0.distcp"):
        path.unlink()
        path.symlink_to("/proc/self/mem")
    capsys.readouterr()
    for argv in (
        ["export", str(tmp_path / "mcore"), str(tmp_path / "back")],
        ["verify", str(tmp_path / "mcore")],
    ):
        assert main(argv) == 2
        assert "Input/output error" in one_line(capsys)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_directory_where_a_file_should_be(
    name: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "model.safetensors.index.json":
        (hf / "model.safetensors").rename(hf / "model-00001-of-00001.safetensors")
    (hf / name).unlink(missing_ok=True)
    (hf / name).mkdir()
    assert main(["import", str(hf), str(tmp_path / "out")]) == 2
    assert name in one_line(capsys) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["hf/config.json/out", "/proc/nowhere/out", "/dev/null/out"])
def test_places_where_nothing_can_be_made(
    target: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(hf), str(tmp_path / target)]) == 2
    one_line(capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_what_is_forbidden(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "locked").mkdir(0o500)
    assert main(["import", str(hf), str(tmp_path / "locked" / "out")]) == 2
    assert "Permission denied" in one_line(capsys)
    (hf / "model.safetensors").chmod(0)
    assert main(["import", str(hf), str(tmp_path / "out")]) == 2
    assert "Permission denied" in one_line(capsys)


def test_a_source_that_shrinks_meanwhile(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After everything was checked, and before the data are read."""
    from converters.errors import ConversionError
    from converters.importing import plan_import

    plan = plan_import(open_source(hf))
    size = (hf / "model.safetensors").stat().st_size
    os.truncate(hf / "model.safetensors", size - 5_000)
    with pytest.raises(ConversionError, match=r"the file ends .* bytes too early"):
        import_model(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConversionError):
        open_megatron(tmp_path / ".out.partial")
