"""Whole runs of the program as a user starts them, killed when a test says so: what they leave behind and what processes they had."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl import env
from megarl.data.datasets import Example
from megarl.distributed.token_batches import supervised_batch
from megarl.quickstart.material import generate_problems, make_model, write_problems

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "quickstart"
STEPS = 4
# Far above what a loaded machine needs; a test that reaches it has hung.
LONGEST_WAIT_S = 600.0
LONGEST_FAREWELL_S = 60.0
_POLL_S = 0.02
# Ray's own two agents look only every half minute whether their node still lives.
_SLOW_TO_LEAVE = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
_CLOCKS = ("time", "timing/", "performance/")


@dataclass(frozen=True, slots=True)
class Material:
    """What runs are made from: a tiny model, one that was taught enough to be rewarded now and then, and problems."""

    model: Path
    taught: Path
    train: Path
    validation: Path


def make_material(directory: Path, teach: bool = True) -> Material:
    """Quickstart problems and models in ``directory``; without ``teach`` the taught model is the untaught one."""
    material = Material(
        directory / "model", directory / ("taught" if teach else "model"), directory / "train.jsonl", directory / "validation.jsonl"
    )
    make_model(material.model, seed=1)
    write_problems(material.train, 37, seed=1)
    write_problems(material.validation, 5, 1000, "validation")
    if teach:
        _teach(material.model, material.taught)
    return material


def _teach(model: Path, out: Path) -> None:
    """Some seconds of plain supervised training: without any right answer GRPO would have no gradient, and nothing could differ."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    problems = generate_problems(64 * 48, seed=7)
    for start in range(0, len(problems), 64):
        examples = []
        for each in problems[start : start + 64]:
            answer_ids = (*tokenizer(each.answer)["input_ids"], tokenizer.eos_token_id)
            examples.append(Example(0, tuple(tokenizer(each.prompt)["input_ids"]), answer_ids, each.answer))
        batch = supervised_batch(examples, tokenizer.pad_token_id)
        labels = batch["input_ids"].masked_fill(batch["token_mask"] == 0, -100)
        network(input_ids=batch["input_ids"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(out)
    tokenizer.save_pretrained(out)


def write_config(path: Path, algorithm: str, material: Material, save_period: int = 1, **changes: Any) -> Path:
    """A configuration of few, small steps on tensor parallel 2 that inherits from the quickstart's; ``changes`` replace whole sections."""
    source = {"prompt_key": "prompt", "answer_key": "answer"}
    config: dict[str, Any] = {
        "defaults": str(CONFIGS / f"{algorithm}.yaml"),
        "policy": {
            "model_name": str(material.taught if algorithm == "grpo" else material.model),
            "train_global_batch_size": 8 if algorithm == "grpo" else 6,
            "train_micro_batch_size": 4 if algorithm == "grpo" else 3,
            "generation_batch_size": 13,
            "logprob_batch_size": 5,
        },
        "data": {"train": {"path": str(material.train), **source}},
        "checkpointing": {"save_period": save_period, "keep_top_k": None},
        **changes,
    }
    if algorithm == "grpo":
        config["grpo"] = {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 6,
            "max_num_steps": STEPS,
            "val_period": 2,
            "val_batch_size": 4,
            "max_val_samples": 5,
        }
        config["data"]["validation"] = {"path": str(material.validation), **source}
    else:
        config["sft"] = {"max_num_steps": STEPS}
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of ``megarl train``, in a session of its own, by whose number all its processes are found."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output_file: Path
    started: float

    def output(self) -> str:
        """What it has written to its console so far."""
        return self.output_file.read_text(errors="replace")

    def finish(self) -> int:
        """Wait until it ends by itself; its exit code."""
        code = self.process.wait(LONGEST_WAIT_S)
        self.check_nothing_runs()
        return code

    def await_moment(self, happened: Callable[[], bool]) -> None:
        """Wait for a moment; fail if the launch ends before it."""
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not happened():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before its moment:\n{self.output()[-3000:]}"
            assert time.monotonic() < deadline, f"the moment never came:\n{self.output()[-3000:]}"
            self.stay(_POLL_S)

    def kill_when(self, happened: Callable[[], bool]) -> None:
        """Wait for a moment and kill the driver there, as a machine would: it has no say and its workers are not told."""
        self.await_moment(happened)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LONGEST_FAREWELL_S)
        self.check_nothing_runs()

    def stay(self, seconds: float) -> None:
        """Let it run on for a while."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def logged(self, step: int) -> Callable[[], bool]:
        """The moment when this launch has logged a step; rows of earlier launches do not count."""
        return lambda: any(row["step"] == step and row["time"] >= self.started for row in read_rows(self.run_dir))

    def committed(self, step: int) -> Callable[[], bool]:
        """The moment when a step's checkpoint is visible."""
        return (self.run_dir / "checkpoints" / f"step_{step}").exists

    def writing(self, step: int) -> Callable[[], bool]:
        """The moment when the workers have begun to write a step's checkpoint."""
        policy = self.run_dir / "checkpoints" / f"tmp_step_{step}" / "policy"
        return lambda: policy.is_dir() and any(path.is_file() for path in policy.rglob("*"))

    def workers_are_up(self) -> bool:
        """The moment when worker processes run."""
        return any("WorkerShell" in name for name in self.processes().values())

    def processes(self) -> dict[int, str]:
        """Process id and command line of everything this launch started and that still runs."""
        found = {}
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(each.pid) == self.process.pid and each.status() != psutil.STATUS_ZOMBIE:
                    found[each.pid] = " ".join(each.cmdline())
        return found

    def check_nothing_runs(self, agents_too: bool = False) -> None:
        """Fail when a process of this launch outlives it for long; Ray's two slow agents only count with ``agents_too``."""
        deadline = time.monotonic() + LONGEST_FAREWELL_S * (2 if agents_too else 1)
        while left := {pid: name for pid, name in self.processes().items() if agents_too or not name.startswith(_SLOW_TO_LEAVE)}:
            assert time.monotonic() < deadline, f"still running after the end of the driver: {left}"
            with contextlib.suppress(psutil.Error):
                psutil.Process(min(left)).wait(_POLL_S)


class Launches:
    """Starts launches, and kills at the end of the tests whatever a failed test has left of them."""

    def __init__(self) -> None:
        self.all: list[Launch] = []

    def start(self, config: Path, run_dir: Path, overrides: Sequence[str] = ()) -> Launch:
        """``megarl train CONFIG run_dir=... OVERRIDES`` in a process of its own."""
        number = len(self.all)
        output_file = run_dir.with_name(f"{run_dir.name}.{number}.log")
        command = [sys.executable, "-m", "megarl.cli", "train", str(config), f"run_dir={run_dir}", *overrides]
        # What this process' own Ray has set is not for them.
        variables = {name: value for name, value in env.snapshot().items() if not name.startswith("RAY_")}
        with output_file.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**variables, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.all.append(Launch(process, run_dir, output_file, time.time()))
        return self.all[-1]

    def close(self) -> None:
        """End everything."""
        for launch in self.all:
            for pid in launch.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            launch.process.wait(LONGEST_FAREWELL_S)


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The whole rows of a run's log; a line that is just being written does not count."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    """The rows without clock readings."""
    return [{key: value for key, value in row.items() if not key.startswith(_CLOCKS)} for row in read_rows(run_dir)]
