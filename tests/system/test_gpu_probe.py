"""The probe of one GPU, tried on a CPU: every part that does not need a device runs, and one that fails hides
no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tiers import slow

pytestmark = slow
ROOT = Path(__file__).parents[2]
TINY = (
    "--device",
    "cpu",
    "--size",
    "tiny",
    "--rows",
    "6",
    "--longest",
    "64",
    "--tokens",
    "128",
    "--steps",
    "2",
)


def probe(out: Path, *arguments: str, code: str = "") -> tuple[int, dict[str, Any]]:
    start = f"{code}; import sys; from benchmarks.gpu_probe import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start] if code else [sys.executable, "-m", "benchmarks.gpu_probe"]
    done = subprocess.run(
        [*command, *TINY, "--out", str(out), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text())


def test_every_part_runs(tmp_path: Path) -> None:
    code, found = probe(tmp_path / "probe.json")
    assert code == 0 and found["failed"] == {}, found["failed"]
    figures = found["figures"]
    assert figures["refits, weights that arrived wrong"][1] == 0
    assert figures["micro-batches"] > 1 and figures["train s"] > 0 and figures["loss"] > 0
    assert 0 < figures["train, share of the product's rate"] < 1 and figures["checkpoint s, GB"][1] > 0
    assert set(found["seconds"]) == {
        "facts",
        "gemm",
        "build",
        "train",
        "logprobs",
        "syncs",
        "kernels",
        "moves",
        "export",
        "ipc",
        "checkpoint",
        "generation",
    }


def test_a_part_that_fails_hides_no_other(tmp_path: Path) -> None:
    broken = "import megarl.weight_sync.manifest as m; m.Manifest.groups = lambda *a: 1 / 0"
    code, found = probe(tmp_path / "probe.json", "--only", "ipc", "export", code=broken)
    assert code == 1 and set(found["failed"]) == {"ipc"} and "ZeroDivisionError" in found["failed"]["ipc"]
    assert (
        set(found["seconds"]) == {"gemm", "build", "export", "ipc"}
        and "export of all weights s, GB/s" in found["figures"]
    )
