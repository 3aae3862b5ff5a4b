"""Places that do not answer, and a run's own directory that is gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.lock import RunLock
from megarl.checkpoint.manifest import verify, write_manifest
from megarl.cli import main
from megarl.config import places
from megarl.config.places import places_of, read_in_time, require_answers
from megarl.errors import StateError
from megarl.observe.launches import read_launches
from megarl.observe.sinks import MetricSinks
from megarl.run.run import run
from megarl.watch.run_state import read_run_state
from megarl.watch.status import as_plain
from tests.tiers import sampled
from tests.unit.driver_runs import STEPS, PolicyMaker, comparable, final_weights, make_config


@pytest.fixture
def dead_mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stand-in: a look at anything below waits until the end of the test, as one waits in the kernel."""
    released, mount = threading.Event(), Path("/mnt/of-a-dead-server")

    def stat(path: Path) -> object:
        if Path(path).is_relative_to(mount):
            released.wait()
        return os.stat(path)

    monkeypatch.setattr(places, "_stat", stat)
    monkeypatch.setattr(places, "PATIENCE_S", 0.2)
    yield mount
    released.set()


KEYS: dict[str, str] = {
    "run_dir": "run_dir={}",
    "policy.model_name": "policy.model_name={}",
    "policy.tokenizer.name": "policy.tokenizer.name={}",
    "data.cache_dir": "data.cache_dir={}",
    "data.train.path": "data.train.path={}",
    "data.validation.path": "data.validation.path={}",
    "checkpointing.checkpoint_dir": "+checkpointing.checkpoint_dir={}",
    "checkpointing.signing_key_file": "+checkpointing.signing_key_file={}",
    "logger.log_dir": "+logger.log_dir={}",
}


@pytest.mark.parametrize("key", KEYS)
def test_a_place_on_a_dead_mount_is_named(
    key: str, dead_mount: Path, tmp_path: Path, model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything else looks there, and would wait for ever."""
    import yaml

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(make_config("sft", tmp_path / "run", model, data)))
    assert main(["train", str(tmp_path / "run.yaml"), KEYS[key].format(dead_mount / "x"), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert (
        f"{key} = '{dead_mount / 'x'}': it has not answered for 0.2 s, as on a mount whose server is gone. "
        "Fix"
    ) in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words", [["train", "{}/run.yaml"], ["status", "{}"], ["plot", ".", "{}"], ["samples", "{}"]]
)
def test_a_command_line_may_name_one_too(
    words: list[str], dead_mount: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(dead_mount) for word in words]) == 2
    assert "has not answered for 0.2 s" in capsys.readouterr().err


def leads_to(path: Any, mount: Path) -> bool:
    return isinstance(path, str | os.PathLike) and Path(os.path.realpath(path)).is_relative_to(mount)


@sampled(3)
@pytest.mark.parametrize(
    ("command", "how", "remembers"),
    [
        ("status", "named", False),
        ("status", "named", True),
        ("status", "a link", False),
        ("status", "a link", True),
        ("samples", "a link", False),
        ("samples", "a link", True),
        # the other way it has drawn pictures before
        ("plot", "a link", False),
    ],
)
def test_a_run_that_leads_to_a_dead_mount_is_named(
    command: str,
    how: str,
    remembers: bool,
    dead_mount: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its own directory answers. A client that remembers still says that something is there, and then waits
    for what is in it."""
    import yaml

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 5.0, "timing/step_s": 1.0}\n')
    if how == "a link":
        inner = "samples" if command == "samples" else "checkpoints"
        (tmp_path / inner).symlink_to(dead_mount / inner)
    else:
        section = {"checkpoint_dir": str(dead_mount / "checkpoints")}
        (tmp_path / "config.yaml").write_text(
            yaml.safe_dump({"run_dir": "/somewhere", "checkpointing": section})
        )
    released, stat, listdir = threading.Event(), os.stat, os.listdir

    def look(path: Any, *more: Any, **others: Any) -> os.stat_result:
        is_there = leads_to(path, dead_mount)
        if is_there and not remembers:
            released.wait()
        return stat(tmp_path if is_there else path, *more, **others)

    def names(path: Any = ".") -> list[str]:
        if leads_to(path, dead_mount):
            released.wait()
        return listdir(path)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", look)
            patched.setattr(os, "listdir", names)
            assert main([command, str(tmp_path)]) == 2
    finally:
        released.set()
    said = capsys.readouterr()
    assert (
        f"run directory {tmp_path}: it, or the target of its link, has not answered for 0.2 s, as on a mount "
        "whose server is gone"
    ) in said.err
    assert not said.out


def test_what_is_read_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it is read; the stand-in says when that is."""
    read, looks = threading.Event(), [0]

    def busy() -> float:
        looks[0] += 1
        if looks[0] == 30:
            read.set()
        return float(looks[0])

    monkeypatch.setattr(places, "_LOOK_S", 0.001)
    monkeypatch.setattr(places, "_busy_s", busy)
    assert read_in_time(lambda: (read.wait(), 5), "a place", 0.001) == (True, 5)
    with pytest.raises(KeyError, match="of the read"):
        read_in_time(lambda: {}["of the read"], "a place")


READS = """
import sys, threading
from megarl.checkpoint import manifest
from megarl.config.places import read_in_time
manifest.hash_of = lambda path: threading.Event().wait()
try:
    read_in_time(lambda: manifest.verify(sys.argv[1]), "a place", 0.2)
except ValueError as error:
    print(error)
"""


def test_files_that_are_hashed_on_a_dead_mount_do_not_keep_the_program(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path)
    assert verify(tmp_path) == []
    done = subprocess.run(
        [sys.executable, "-c", READS, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("a place: it, or the target of its link, has not answered for 0.2 s")


def test_every_place_is_looked_at_once_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    barrier = threading.Barrier(4, timeout=60)

    def stat(path: Path) -> None:
        looked.append(str(path))
        barrier.wait()
        raise FileNotFoundError

    monkeypatch.setattr(places, "_stat", stat)
    source = {"path": "c"}
    config: dict[str, Any] = {
        "run_dir": "a",
        "policy": {"model_name": "b", "tokenizer": None},
        "data": {"train": [source, {"path": "d"}]},
    }
    config["data"]["validation"] = source
    found = dict(places_of(config))
    assert found == {
        "run_dir": "a",
        "policy.model_name": "b",
        "data.train.0.path": "c",
        "data.train.1.path": "d",
        "data.validation.path": "c",
    }
    require_answers(found, 60.0)
    assert sorted(looked) == ["a", "b", "c", "d"]
    for odd in ({}, {"policy": 3, "data": []}, {"run_dir": None, "data": {"train": "x"}}):
        assert dict(places_of(odd)) == {}
    monkeypatch.undo()
    require_answers({"run_dir": "\0"}, 60.0)


@sampled(2)
@pytest.mark.parametrize("how", ["removed", "renamed", "replaced", "without its lock"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_run_whose_directory_is_gone_ends_and_writes_no_more(
    how: str, call: int, tmp_path: Path, model: str, data: str
) -> None:
    run_dir = tmp_path / "run"

    def lose(number: int) -> None:
        if number != call:
            return
        if how == "without its lock":
            (run_dir / "run.lock").unlink()
        elif how == "removed":
            shutil.rmtree(run_dir)
        else:
            run_dir.rename(tmp_path / "elsewhere")
        if how == "replaced":
            run_dir.mkdir()
            (run_dir / "launches.jsonl").write_text("")

    maker = PolicyMaker(at_call=lose)
    with pytest.raises(
        StateError, match=rf"run directory {run_dir} was removed, renamed or replaced while .* Fix"
    ):
        run(make_config("sft", run_dir, model, data), maker)
    assert maker.policies[0].trained_steps == call
    if how == "without its lock":
        assert not (run_dir / "checkpoints" / f"step_{call}").exists()
        assert run(make_config("sft", run_dir, model, data), PolicyMaker()) == 0
        return
    left = {path.name: path.read_text() for path in run_dir.iterdir()} if run_dir.exists() else None
    assert left == ({"launches.jsonl": ""} if how == "replaced" else None)
    if how == "renamed":
        # brought back, it goes on
        (tmp_path / "elsewhere").rename(run_dir)
        assert run(make_config("sft", run_dir, model, data), PolicyMaker()) == 0


def test_a_lock_knows_its_place(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    lock.require_place()
    with lock:
        lock.require_place()
        (tmp_path / "run" / "more").touch()
        lock.require_place()
        (tmp_path / "run").rename(tmp_path / "other")
        with pytest.raises(StateError, match="it no longer exists"):
            lock.require_place()


def test_a_clock_that_is_set_back_changes_nothing(
    tmp_path: Path, model: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in: each time that anybody asks, it is an hour earlier. What people are shown is never
    negative."""
    assert run(make_config("sft", tmp_path / "whole", model, data), PolicyMaker()) == 0
    real, asked = time.time, [0]

    def back() -> float:
        asked[0] += 1
        return real() - 3600 * asked[0]

    with monkeypatch.context() as patched:
        patched.setattr(time, "time", back)
        patched.setattr(MetricSinks.__init__, "__defaults__", (back,))
        assert run(make_config("sft", tmp_path / "run", model, data), PolicyMaker()) == 0
        assert asked[0] > STEPS, "nobody has asked for the time"
        told = as_plain(read_run_state(tmp_path / "run"))
    assert comparable(tmp_path / "run") == comparable(tmp_path / "whole")
    one, other = final_weights(tmp_path / "run"), final_weights(tmp_path / "whole")
    assert all(bool((one[name] == other[name]).all()) for name in other)
    assert (
        told["state"] == "finished"
        and told["checkpoint"]["age_s"] >= 0
        and told["last_row_age_s"] >= 0
        and told["step_s"] >= 0
    )
    [launch] = read_launches(tmp_path / "run")
    assert launch.end is not None and launch.end < launch.start
