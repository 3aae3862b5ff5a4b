"""The quickstart's first steps, as a newcomer starts it: SFT, GRPO, plot, and an export that plain transformers scores alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.system.whole_runs import LONGEST_WAIT_S, ROOT

# enough supervised steps for some right answers
STEPS = {"sft": 60, "grpo": 2}


# forty seconds: the first thing that a newcomer does, and the only whole program of the default tier that trains on two ranks
def test_the_first_steps_of_the_quickstart(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.quickstart", "--steps", *map(str, STEPS.values()), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_WAIT_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    directory = tmp_path / "seed-1"
    for part, steps in STEPS.items():
        rows = [json.loads(line) for line in (directory / part / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if row["step"]] == list(range(1, steps + 1))
    summary = json.loads((directory / "summary.json").read_text())
    assert 0 < summary["accuracy_transformers"] == summary["accuracy_after"] < 1
    assert Path(summary["plot"]).stat().st_size > 10_000
    assert f"Hugging Face model: {summary['model']}" in done.stdout.replace("\n", "")
