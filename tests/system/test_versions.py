"""What version 0.1 wrote is read: a run of each of two backends goes on from its checkpoint, and a converted
model verifies.

``tests/data/runs-0.1.tar.xz`` holds two runs of four steps of supervised fine-tuning at tensor parallel 2,
made by version 0.1 (commit 047aee1): what they had left after step 2, and as ``expected`` their rows and
weights after step 4; and a conversion of their model.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from converters.command import main as convert
from megarl import env
from tests.system.whole_runs import ROOT
from tests.tiers import slow

ARCHIVE = Path(__file__).parents[1] / "data" / "runs-0.1.tar.xz"
CLOCKS = ("timing/", "performance/", "time")


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(CLOCKS)} for line in lines]


@pytest.mark.parametrize("backend", ["megatron", pytest.param("dtensor", marks=slow)])
def test_a_run_of_an_older_version_goes_on(backend: str, stored: Path) -> None:
    # a program of its own: its paths are relative, and workers of a Ray that runs already would look for them
    # elsewhere
    command = [sys.executable, "-m", "megarl", "train", f"{backend}.yaml"]
    done = subprocess.run(
        command, env=env.snapshot() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    expected, reached = rows(stored / "expected" / backend), rows(stored / backend)
    assert [row["step"] for row in reached] == [1, 2, 3, 4]
    for one, other in zip(reached, expected, strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=1e-5)
    there = load_file(stored / "expected" / backend / "model.safetensors")
    here = load_file(stored / backend / "hf" / "step_4" / "model.safetensors")
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        torch.testing.assert_close(tensor, there[name], rtol=0, atol=2e-6)


def test_a_conversion_of_an_older_version_verifies(stored: Path) -> None:
    assert convert(["verify", "conv", "model"]) == 0
    assert convert(["export", "conv", "back"]) == 0
    assert (stored / "back" / "model.safetensors").is_file()
    there, here = (
        load_file(stored / "model" / "model.safetensors"),
        load_file(stored / "back" / "model.safetensors"),
    )
    assert all(torch.equal(here[name], there[name]) for name in there)
