"""What torch.compile keeps on disk, and unpickles, lies where nobody else can write."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl import env
from megarl.distributed import worker_shell
from megarl.distributed.worker_shell import own_compile_cache

NAME = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The machine's temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with env.variables({NAME: ""}):
        yield tmp_path


def usual(temporary: Path) -> Path:
    return temporary / f"torchinductor_{worker_shell.os.geteuid()}"


def test_it_is_made_for_the_user_alone_and_kept(temporary: Path) -> None:
    own_compile_cache()
    assert env.text(NAME) == str(usual(temporary))
    assert usual(temporary).stat().st_mode & 0o777 == 0o700
    (usual(temporary) / "compiled").touch()
    with env.variables({NAME: ""}):
        own_compile_cache()
        assert env.text(NAME) == str(usual(temporary))


def others_may_write(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)


def leads_elsewhere(directory: Path) -> None:
    (directory.parent / "elsewhere").mkdir()
    directory.symlink_to(directory.parent / "elsewhere")


@pytest.mark.parametrize("made", [others_may_write, leads_elsewhere])
def test_what_others_may_write_into_is_not_read(
    made: object, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(usual(temporary))  # type: ignore[operator]
    own_compile_cache()
    chosen = Path(env.text(NAME) or "")
    assert chosen != usual(temporary) and chosen.stat().st_mode & 0o777 == 0o700
    assert "is not this user's alone" in caplog.text


def test_the_directory_of_another_user_is_not_read(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = worker_shell.os.geteuid()
    (temporary / f"torchinductor_{me + 1}").mkdir(mode=0o700)
    monkeypatch.setattr(worker_shell.os, "geteuid", lambda: me + 1)
    own_compile_cache()
    assert Path(env.text(NAME) or "").name.startswith("megarl-compiled-")


def test_what_is_set_stays(temporary: Path) -> None:
    with env.variables({NAME: str(temporary / "mine")}):
        own_compile_cache()
        assert env.text(NAME) == str(temporary / "mine")
