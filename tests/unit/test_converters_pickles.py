"""No pickle is read by the converters but through the reader that knows a few names: watched in programs of
their own."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.command import main
from megarl import env
from tests.tiers import slow
from tests.unit.converters_tiny import save_tiny
from tests.unit.foreign_checkpoints import megatron_lm
from tests.unpickling.watch import PickleWatch

ROOT = Path(__file__).parents[2]
RUN = """
import json, sys
from converters.command import main
for words in json.loads(sys.argv[1]):
    print(main(words), flush=True)
"""


class Payload:
    """Leaves a directory when it is unpickled by something that runs what it names."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def watched(commands: list[list[str]], directory: Path) -> tuple[list[int], str, PickleWatch]:
    """Exit codes of commands in one process, what it said, and what it unpickled."""
    watch = PickleWatch(directory / "pickles")
    watch.directory.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)],
        env={**env.snapshot(), **watch.variables, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert watch.watched()
    return (
        [int(line) for line in done.stdout.splitlines() if line.isdigit()],
        done.stdout + done.stderr,
        watch,
    )


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "hf", "llama")
    return tmp_path / "mcore"


@slow
def test_nothing_that_converters_read_is_unpickled(tmp_path: Path, megatron: Path) -> None:
    """All kinds of what they read: Hugging Face, our own, and a checkpoint of Megatron-LM with its arguments
    and objects; and payloads in each file of it that is a pickle."""
    hf, foreign = str(tmp_path / "hf"), megatron_lm(tmp_path / "foreign", "llama")
    assert main(["import", hf, str(megatron)]) == 0
    poisoned, ran = [], tmp_path / "ran"
    for source in (megatron, foreign):
        for file in sorted(
            path
            for path in source.rglob("*")
            if path.is_file() and path.suffix in {".pt", ".pth", ".metadata", ""}
        ):
            content = pickle.dumps(Payload(ran))
            if file.suffix in {".pt", ".pth"}:
                stream = io.BytesIO()
                torch.save({"state": Payload(ran)}, stream)
                content = stream.getvalue()
            elif file.name != ".metadata":
                continue
            poisoned.append(shutil.copytree(source, tmp_path / f"poisoned-{len(poisoned)}"))
            (poisoned[-1] / file.relative_to(source)).write_bytes(content)
    assert len(poisoned) >= 3
    commands = [
        ["import", hf, str(tmp_path / "again")],
        ["export", str(megatron), str(tmp_path / "back")],
        ["verify", str(megatron), hf],
        ["inspect", str(megatron)],
        ["plan", str(megatron)],
        ["inspect", str(foreign), "--hf-config", hf],
        *(["inspect", str(each), "--hf-config", hf] for each in poisoned),
    ]
    codes, said, watch = watched(commands, tmp_path)
    assert codes == [0] * 6 + [2] * len(poisoned), said
    assert said.count("do not trust this file") == len(poisoned), said
    found = watch.found()
    assert not found, "\n".join(found)[:20_000]
    assert not ran.exists()
