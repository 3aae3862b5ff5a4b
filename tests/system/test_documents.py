"""Programs that the documents print run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from megarl import env
from megarl.quickstart.material import make_model
from tests.tiers import slow

ROOT = Path(__file__).parents[2]


@slow
def test_the_policy_example_runs_as_printed(tmp_path: Path) -> None:
    text = (ROOT / "megarl/README.md").read_text()
    [program] = re.findall(r"```python\n(import torch\n.*?)```", text, re.DOTALL)
    make_model(tmp_path / "model", seed=1)
    variables = {**env.snapshot(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=variables,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^torch\.Size\(\[4, \d+\]\)$", done.stdout, re.MULTILINE), done.stdout
    assert (tmp_path / "out/model.safetensors").is_file()
