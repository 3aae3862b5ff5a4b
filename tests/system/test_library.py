"""``megarl.train`` in real processes: a script, ``python -c``, a notebook, Ctrl-C, and a caller that is
killed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl import env
from megarl.library.run import Run
from tests.tiers import slow
from tests.unit.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "configs/examples/grpo.ipynb"
TWICE = """
import megarl

rows = [{"prompt": f"{each}+1="} for each in range(12)]
for letter in "12":
    reward = lambda response: float(letter in response)
    run = megarl.train("grpo", "model", rows, reward, max_num_steps=2, max_new_tokens=3, progress=False)
    print(run, len(run.metrics["reward"]), run.model_dir.name, len(run.samples()), sep="|")
"""
LONG = """
import megarl

rows = [{"prompt": f"{each}+1="} for each in range(12)]
try:
    reward = lambda response: float(len(response))
    sizes = {"max_num_steps": STEPS, "max_new_tokens": 3, "save_period": 100000}
    megarl.train("grpo", "model", rows, reward, run_dir="mine", **sizes)
except KeyboardInterrupt as error:
    print("interrupted:", *error.__notes__)
print(megarl.Run("mine").checkpoint.name)
"""


def started(program: list[str], place: Path) -> subprocess.Popen[str]:
    variables = {**env.snapshot(), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-u", *program],
        cwd=place,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stdout is not None
    lines = ""
    for line in process.stdout:
        lines += line
        if re.search(pattern, line):
            return lines
    raise AssertionError(f"{pattern} did not come:\n{lines}")


def test_a_program_trains_twice_with_closures(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=1)
    process = started(["-c", TWICE], tmp_path)
    said, _ = process.communicate(timeout=400)
    assert said.splitlines()[-2:] == [
        "megarl.Run('runs/grpo-model-1')|2|step_2|32",
        "megarl.Run('runs/grpo-model-2')|2|step_2|32",
    ], said


@slow
def test_ctrl_c_saves_and_the_same_call_goes_on_and_a_killed_caller_leaves_no_orphan(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=1)
    (tmp_path / "long.py").write_text(LONG.replace("STEPS", "100000"))
    process = started(["long.py"], tmp_path)
    read_until(process, r"^step +3/")
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and "interrupted: the same call with run_dir='mine' resumes" in rest
    saved = int(rest.splitlines()[-1].removeprefix("step_"))
    assert saved >= 3

    process = started(["long.py"], tmp_path)
    assert f"resumed after step {saved}" in read_until(process, rf"^step +{saved + 2}/")
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 120
    while int(Run(tmp_path / "mine").checkpoint.name.removeprefix("step_")) <= saved:
        assert time.monotonic() < deadline, "the run of a killed caller was not saved"
        time.sleep(0.2)


@slow
def test_a_failed_run_is_an_error_of_the_call(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=1)
    program = LONG.replace("float(len(response))", "[1.0, 2.0]").replace("STEPS", "2")
    said, _ = started(["-c", program], tmp_path).communicate(timeout=300)
    assert "megarl.errors.MegarlError: the reward <lambda> failed on each of the 64 responses" in said
    assert "it returned [1.0, 2.0], and a number is wanted" in said


@slow
def test_the_notebook_runs_as_printed_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert "step  1/30" in text and "\x1b[2K" not in text, (
        "progress is lines, not a bar that is drawn again and again"
    )
    data = [output["data"] for output in outputs if output["output_type"] == "execute_result"]
    assert any("image/png" in each for each in data) and any(
        "<table>" in each.get("text/html", "") for each in data
    )
    metrics = Run(tmp_path / "runs/grpo-sft-model-1-1").metrics
    rewards = [reward for reward in metrics["reward"] if reward is not None]
    assert len(rewards) == 30 and sum(rewards[-10:]) > sum(rewards[:10])
    # megarl.eval finds what the run's own last validation found
    accuracy = [value for value in metrics["validation/accuracy"] if value is not None][-1]
    assert str(accuracy) in [each["text/plain"] for each in data]
