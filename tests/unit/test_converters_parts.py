"""A conversion shared by several calls, one after the other or at once; and what an interrupted call says and
leaves."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from converters import importing
from converters.command import INTERRUPTED, main
from converters.conversion import Conversion
from tests.unit.converters_tiny import save_tiny
from tests.unit.test_conversion import contents


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_SMALLEST_FILE", 8_000)


SHARDS = ("--max-shard-size", "40000")


@dataclass(frozen=True)
class Shared:
    """A conversion of several files, with the result of one call to compare with.

    Attributes:
        action: sub-command.
        source, target, complete: directories: what is converted, what the parts make, what one call made.
        files: names of its files of weights, in order.
        options: of all calls.
    """

    action: str
    source: Path
    target: Path
    complete: Path
    files: list[str]
    options: tuple[str, ...]

    @property
    def partial(self) -> Path:
        return self.target.parent / f".{self.target.name}.partial"

    def call(self, *more: str) -> int:
        return main([self.action, str(self.source), str(self.target), *self.options, *more])

    def part(self, which: str, *more: str) -> int:
        return self.call("--part", which, *more)

    def command(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "converters",
            self.action,
            str(self.source),
            str(self.target),
            *self.options,
        ]

    def left(self) -> list[str]:
        """What stands where the target is made."""
        return sorted(path.name for path in self.target.parent.iterdir())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in either format, made of several files by one call: ``hf``, ``import``; ``import``,
    ``export``."""
    place = tmp_path_factory.mktemp("models")
    save_tiny(place / "hf", "qwen3_moe")
    (place / "hf" / "tokenizer.json").write_text('{"a": 1}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importing, "_SMALLEST_FILE", 8_000)
        assert main(["import", str(place / "hf"), str(place / "import")]) == 0
    assert main(["export", str(place / "import"), str(place / "export"), *SHARDS]) == 0
    return place


@pytest.fixture(params=["import", "export"])
def shared(request: pytest.FixtureRequest, models: Path, tmp_path: Path) -> Shared:
    ways = {
        "import": ("hf", (), "__*.distcp"),
        "export": ("import", SHARDS, "model-*.safetensors"),
    }
    source, options, pattern = ways[request.param]
    complete = models / request.param
    files = sorted((path.name for path in complete.glob(pattern)), key=lambda name: (len(name), name))
    assert len(files) > 5
    return Shared(request.param, models / source, tmp_path / "out", complete, files, options)


@pytest.mark.parametrize("order", [*itertools.permutations("123")])
def test_parts_in_any_order_make_the_same_bytes(
    order: tuple[str, ...], shared: Shared, capsys: pytest.CaptureFixture[str]
) -> None:
    for done, which in enumerate(order, 1):
        assert not shared.target.exists()
        capsys.readouterr()
        assert shared.part(f"{which}/3", "--json") == 0
        assert sorted(json.loads(capsys.readouterr().out).get("waits_for", [])) == sorted(
            map(int, order[done:])
        )
    assert contents(shared.target) == contents(shared.complete)
    assert shared.left() == ["out"]


def test_parts_write_their_own_files_alone(shared: Shared) -> None:
    assert shared.part("2/3") == 0
    written = {path.name for path in shared.partial.iterdir()}
    assert written & set(shared.files) == set(shared.files[1::3])


@pytest.mark.parametrize("shared", ["export"], indirect=True)
def test_parts_at_once(shared: Shared) -> None:
    """Each in a process of its own."""
    running = [
        subprocess.Popen([*shared.command(), "--part", f"{which}/2"], stderr=subprocess.PIPE, text=True)
        for which in (1, 2)
    ]
    errors = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    assert contents(shared.target) == contents(shared.complete)
    assert shared.left() == ["out"]


def test_parts_at_once_in_one_process(shared: Shared) -> None:
    """All begin and end at about the same time, so that several may find that they are the last."""
    codes: dict[int, int] = {}

    def one(which: int) -> None:
        codes[which] = shared.part(f"{which}/6", "--workers", "1")

    threads = [threading.Thread(target=one, args=(which,)) for which in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes.values()) == {0} and len(codes) == 6
    assert contents(shared.target) == contents(shared.complete)
    assert shared.left() == ["out"]


def test_a_killed_part_is_done_again(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(BaseException):
        pass

    original, written = Conversion.write, []

    def dying(*arguments: Any) -> None:
        if written:
            raise Killed
        original(*arguments)
        written.append(arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Conversion, "write", dying)
        shared.part("2/3", "--workers", "1")
    assert shared.part("1/3") == shared.part("3/3") == 0 and not shared.target.exists()
    capsys.readouterr()
    assert shared.part("2/3", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert 0 < facts["resumed_bytes"] < facts["bytes"]
    assert contents(shared.target) == contents(shared.complete)


def test_a_part_that_is_repeated(shared: Shared, capsys: pytest.CaptureFixture[str]) -> None:
    assert shared.part("1/2") == 0
    capsys.readouterr()
    assert shared.part("1/2", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["resumed_bytes"] == facts["bytes"] and facts["waits_for"] == [2]
    assert shared.part("2/2") == 0
    assert contents(shared.target) == contents(shared.complete)
    capsys.readouterr()
    assert shared.part("1/2") == 2
    assert "out exists" in capsys.readouterr().err and shared.left() == ["out"]


def test_a_part_that_is_being_repeated_is_not_done(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that ends meanwhile does not take the directory away from it."""
    assert shared.part("1/2") == 0
    inner: list[int] = []

    def other_part(*_: Any) -> None:
        if not inner:
            inner.append(0)
            inner[0] = shared.part("2/2")
            assert not shared.target.exists()

    damage = shared.partial / shared.files[0]
    damage.write_bytes(damage.read_bytes()[:-9])
    original = Conversion.write
    monkeypatch.setattr(Conversion, "write", lambda *arguments: (other_part(), original(*arguments)))
    assert shared.part("1/2", "--workers", "1") == 0 and inner == [0]
    assert contents(shared.target) == contents(shared.complete)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def change_a_weight(path: Path) -> None:
    """In the middle, where tensors are."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, change_a_weight, Path.unlink])
def test_a_file_of_another_part_that_is_damaged_is_missed(
    damage: Callable[[Path], None], shared: Shared, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shared.part("1/2") == 0
    damage(shared.partial / shared.files[2])
    capsys.readouterr()
    assert shared.part("2/2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["waits_for"] == [1]
    assert not shared.target.exists()
    assert shared.part("1/2") == 0
    assert contents(shared.target) == contents(shared.complete)


@pytest.mark.parametrize("shared", ["export"], indirect=True)
def test_the_header_of_a_file_of_another_part(shared: Shared, capsys: pytest.CaptureFixture[str]) -> None:
    assert shared.part("1/2") == 0
    first = shared.partial / shared.files[0]
    first.write_bytes(first.read_bytes().replace(b"weight", b"height", 1))
    capsys.readouterr()
    assert shared.part("2/2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["waits_for"] == [1]
    assert shared.part("1/2") == 0
    assert contents(shared.target) == contents(shared.complete)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--part", "2/3", "--dtype", "bfloat16"], "was planned differently: --dtype"),
        (["--part", "2/4"], "work that is divided differently (.journal-1-of-3.jsonl)"),
        ([], "holds parts of this work (.journal-1-of-3.jsonl)"),
    ],
)
def test_calls_that_do_not_belong_together(
    more: list[str], said: str, shared: Shared, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shared.part("1/3") == 0
    before = contents(shared.partial)
    assert shared.call(*more) == 2
    assert said in capsys.readouterr().err
    assert contents(shared.partial) == before
    assert shared.left() == [".out.partial"]
    assert shared.part("2/3") == shared.part("3/3") == 0
    assert contents(shared.target) == contents(shared.complete)


@pytest.mark.parametrize("shared", ["export"], indirect=True)
def test_parts_of_an_export_with_other_files(
    shared: Shared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last part writes them, so that all have to mean the same ones."""
    assert shared.part("1/2") == 0
    other = tmp_path / "other"
    shutil.copytree(shared.source / "huggingface", other)
    (other / "chat_template.jinja").write_text("{{ x }}")
    assert shared.part("2/2", "--hf-config", str(other)) == 2
    assert (
        ".journal-1-of-2.jsonl was planned differently: the files beside the weights"
        in capsys.readouterr().err
    )


def test_the_only_part_that_began_may_change_its_mind(shared: Shared) -> None:
    """No file of the earlier plan stays in the result."""
    assert shared.part("1/2", "--dtype", "bfloat16") == 0
    stray = shared.partial / "__99_0.distcp"
    stray.write_bytes(b"of the earlier plan")
    assert shared.part("1/2") == shared.part("2/2") == 0
    assert contents(shared.target) == contents(shared.complete)


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_part_says_what_it_left(
    way: signal.Signals, shared: Shared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted while it makes one of the finished files: here, as it looks at those of the others."""

    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), way)
        time.sleep(30)

    assert shared.part("1/2") == 0
    with monkeypatch.context() as patch:
        patch.setattr("converters.checkpoint.work.RunOptions.parts_to_wait_for", interrupted)
        assert shared.part("2/2") == INTERRUPTED
    assert (
        ".out.partial keeps 0.00 GB of finished work; the same command continues from there"
        in capsys.readouterr().err
    )
    assert shared.left() == [".out.partial"]
    assert shared.part("2/2", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["resumed_bytes"] == facts["bytes"] and shared.left() == ["out"]
    assert contents(shared.target) == contents(shared.complete)


def test_an_interrupted_part_that_had_finished_nothing(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves nothing of its own, and the others' work."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "write", interrupted)
        assert shared.part("1/2") == INTERRUPTED
    assert "nothing was finished, and nothing is left" in capsys.readouterr().err and shared.left() == []
    assert shared.part("2/2") == 0
    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "write", interrupted)
        assert shared.part("1/2") == INTERRUPTED
    assert ".out.partial keeps 0.00 GB of finished work" in capsys.readouterr().err and shared.left() == [
        ".out.partial"
    ]
    assert shared.part("1/2") == 0
    assert contents(shared.target) == contents(shared.complete)


def test_parts_for_megatron_lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "hf", "llama")
    command = ["import", str(tmp_path / "hf"), "--layout", "megatron-lm"]
    assert main([*command, str(tmp_path / "complete")]) == 0
    assert main([*command, str(tmp_path / "parts"), "--part", "2/2"]) == 0
    original = importing.finish_checkpoint

    def finish(*arguments: Any) -> None:
        """While another part fails, and takes the file away that names the checkpoint."""
        (tmp_path / "parts" / "latest_checkpointed_iteration.txt").unlink()
        original(*arguments)

    monkeypatch.setattr(importing, "finish_checkpoint", finish)
    assert main([*command, str(tmp_path / "parts"), "--part", "1/2"]) == 0
    assert contents(tmp_path / "parts") == contents(tmp_path / "complete")


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b"])
def test_parts_that_are_none(text: str, shared: Shared, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        shared.part(text)
    assert "is no part; write 1/8 to 8/8" in capsys.readouterr().err


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_call_says_what_it_left(
    way: signal.Signals, shared: Shared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), way)
        time.sleep(30)

    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "finish", interrupted)
        assert shared.call() == INTERRUPTED
    assert (
        ".out.partial keeps 0.00 GB of finished work; the same command continues from there"
        in capsys.readouterr().err
    )
    assert shared.left() == [".out.partial"]
    assert shared.call("--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["resumed_bytes"] == facts["bytes"] and shared.left() == ["out"]


def test_an_interrupted_call_that_had_finished_nothing_leaves_nothing(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversion, "write", interrupted)
    assert shared.call() == INTERRUPTED
    assert "nothing was finished, and nothing is left" in capsys.readouterr().err
    assert shared.left() == []
