"""An import shared by several calls, one after the other or at once; and what an interrupted call says and leaves."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from converters import importing
from converters.command import INTERRUPTED, main
from tests.unit.converters_tiny import save_tiny
from tests.unit.test_conversion import contents


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_SMALLEST_FILE", 8_000)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "hf", "qwen3_moe")
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "whole")]) == 0
    assert len(list((tmp_path / "whole").glob("__*.distcp"))) > 5
    return tmp_path / "hf"


def part(hf: Path, which: str, *more: str, target: str = "mcore") -> int:
    return main(["import", str(hf), str(hf.parent / target), "--part", which, *more])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("order", [*itertools.permutations("123")])
def test_parts_in_any_order_make_the_same_bytes(order: tuple[str, ...], hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for done, which in enumerate(order, 1):
        assert not (hf.parent / "mcore").exists()
        capsys.readouterr()
        assert part(hf, f"{which}/3", "--json") == 0
        assert sorted(json.loads(capsys.readouterr().out).get("waits_for", [])) == sorted(map(int, order[done:]))
    assert contents(hf.parent / "mcore") == contents(hf.parent / "whole")
    assert names(hf.parent) == ["hf", "mcore", "whole"]


def test_parts_at_once(hf: Path) -> None:
    """Each in a process of its own."""
    command = [sys.executable, "-m", "converters", "import", str(hf), str(hf.parent / "mcore"), "--part"]
    # files of the usual size: one part has the only file, the others have none
    running = [subprocess.Popen([*command, f"{which}/3"], stderr=subprocess.PIPE, text=True) for which in (1, 2, 3)]
    errors = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], errors
    assert main(["verify", str(hf), str(hf.parent / "mcore")]) == 0
    assert names(hf.parent) == ["hf", "mcore", "whole"]


def test_a_killed_part_is_done_again(hf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Killed(BaseException):
        pass

    original, written = importing._write_file, []

    def dying(*arguments: Any) -> None:
        if written:
            raise Killed
        original(*arguments)
        written.append(arguments[2])

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(importing, "_write_file", dying)
        part(hf, "2/3", "--workers", "1")
    assert part(hf, "1/3") == part(hf, "3/3") == 0 and not (hf.parent / "mcore").exists()
    capsys.readouterr()
    assert part(hf, "2/3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["resumed_bytes"] > 0
    assert contents(hf.parent / "mcore") == contents(hf.parent / "whole")


def test_a_file_of_another_part_that_is_cut_off_is_missed(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert part(hf, "1/2") == 0
    first = hf.parent / ".mcore.partial" / "__0_0.distcp"
    first.write_bytes(first.read_bytes()[:-9])
    capsys.readouterr()
    assert part(hf, "2/2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["waits_for"] == [1]
    assert part(hf, "1/2") == 0
    assert contents(hf.parent / "mcore") == contents(hf.parent / "whole")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--part", "2/3", "--dtype", "bfloat16"], "was planned otherwise: --dtype"),
        (["--part", "2/4"], "work that is divided otherwise (.journal-1-of-3.jsonl)"),
        ([], "holds parts of this work (.journal-1-of-3.jsonl)"),
    ],
)
def test_calls_that_do_not_belong_together(more: list[str], said: str, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert part(hf, "1/3") == 0
    before = contents(hf.parent / ".mcore.partial")
    assert main(["import", str(hf), str(hf.parent / "mcore"), *more]) == 2
    assert said in capsys.readouterr().err
    assert contents(hf.parent / ".mcore.partial") == before
    assert part(hf, "2/3") == part(hf, "3/3") == 0
    assert contents(hf.parent / "mcore") == contents(hf.parent / "whole")


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b"])
def test_parts_that_are_none(text: str, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        part(hf, text)
    assert "is no part; write 1/8 to 8/8" in capsys.readouterr().err


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_call_says_what_it_left(
    way: signal.Signals, hf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), way)
        time.sleep(30)

    target = hf.parent / "mcore"
    with monkeypatch.context() as patch:
        patch.setattr(importing, "finish_checkpoint", interrupted)
        assert main(["import", str(hf), str(target)]) == INTERRUPTED
    assert ".mcore.partial keeps 0.00 GB of finished work, with which the same command goes on" in capsys.readouterr().err
    assert names(hf.parent) == [".mcore.partial", "hf", "whole"]
    assert main(["import", str(hf), str(target), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["resumed_bytes"] == facts["bytes"] and names(hf.parent) == ["hf", "mcore", "whole"]


def test_an_interrupted_call_that_had_finished_nothing_leaves_nothing(
    hf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importing, "_finished_files", interrupted)
    assert main(["import", str(hf), str(hf.parent / "mcore")]) == INTERRUPTED
    assert "nothing was finished, and nothing is left" in capsys.readouterr().err
    assert names(hf.parent) == ["hf", "whole"]
