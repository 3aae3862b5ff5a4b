"""Whole runs of the program as a user starts them, killed when a test says so: what they leave behind and
what processes they had."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
LONGEST_FAREWELL_S = 30.0
"""That workers, Ray and its agents may outlive their driver."""
_POLL_S = 0.02
_FIND_S = 0.5
_ADAM = {
    "name": "torch.optim.AdamW",
    "kwargs": {"lr": "${policy.learning_rate}", "weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1.0e-8},
}
ON_TORCH: dict[str, dict[str, Any]] = {
    "dtensor": {
        "policy": {
            "megatron_cfg": {"enabled": False},
            "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 2},
            "optimizer": _ADAM,
        }
    },
    "fsdp1": {"policy": {"megatron_cfg": {"enabled": False}, "optimizer": _ADAM}},
}
"""What puts a configuration of ``write_config`` on the torch backends, with the same optimizer."""
_CLOCKS = ("time", "timing/", "performance/")


@dataclass(frozen=True, slots=True)
class Material:
    """What runs are made from: a tiny model, one that was taught enough to be rewarded now and then, and
    problems."""

    model: Path
    taught: Path
    train: Path
    validation: Path


def make_material(directory: Path, teach: bool = True) -> Material:
    """Quickstart problems and models in ``directory``; without ``teach`` the taught model is the untaught
    one."""
    material = Material(
        directory / "model",
        directory / ("taught" if teach else "model"),
        directory / "train.jsonl",
        directory / "validation.jsonl",
    )
    make_model(material.model, seed=1)
    write_problems(material.train, 37, seed=1)
    write_problems(material.validation, 5, 1000, "validation")
    if teach:
        _teach(material.model, material.taught)
    return material


def _teach(model: Path, out: Path) -> None:
    """Some seconds of plain supervised training: without any right answer GRPO would have no gradient, and
    nothing could differ."""
    tokenizer, network = (
        AutoTokenizer.from_pretrained(model),
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
    )
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


def write_config(
    path: Path, algorithm: str, material: Material, save_period: int = 1, **changes: Any
) -> Path:
    """A configuration of few, small steps on tensor parallel 2 that inherits from the quickstart's;
    ``changes`` replace whole sections."""
    source = {"prompt_key": "prompt", "answer_key": "answer"}
    config: dict[str, Any] = {
        "defaults": str(CONFIGS / f"{algorithm}.yaml"),
        "policy": {
            "model_name": str(material.model if algorithm == "sft" else material.taught),
            "train_global_batch_size": 6 if algorithm == "sft" else 8,
            "train_micro_batch_size": 3 if algorithm == "sft" else 4,
            "generation_batch_size": 13,
            "logprob_batch_size": 5,
        },
        "data": {"train": {"path": str(material.train), **source}},
        "checkpointing": {"save_period": save_period, "keep_top_k": None},
        **changes,
    }
    if algorithm != "sft":
        config[algorithm] = {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 6,
            "max_num_steps": STEPS,
            "val_period": 2,
            "val_batch_size": 4,
            "max_val_samples": 5,
        }
        if algorithm == "ppo":
            config["ppo"]["critic_warmup_steps"] = 1
        config["data"]["validation"] = {"path": str(material.validation), **source}
    else:
        config["sft"] = {"max_num_steps": STEPS}
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of ``megarl train``. All its processes are found by the numbers of its session and of those
    that its Ray has."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output_file: Path
    started: float
    patience_s: float = LONGEST_WAIT_S
    sessions: set[int] = field(default_factory=set)

    def output(self, since: int = 0) -> str:
        """What it has written to its console so far, from a number of ``spoken`` bytes on."""
        return self.output_file.read_bytes()[since:].decode(errors="replace")

    def spoken(self) -> int:
        """Bytes that it has written to its console so far."""
        return self.output_file.stat().st_size

    def finish(self) -> int:
        """Wait until it ends by itself; its exit code."""
        deadline = time.monotonic() + self.patience_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end:\n{self.output()[-3000:]}"
            self.find_sessions()
            self.stay(_FIND_S)
        code = self.process.returncode
        self.check_nothing_runs()
        return code

    def await_moment(self, happened: Callable[[], bool]) -> None:
        """Wait for a moment; fail if the launch ends before it."""
        deadline = time.monotonic() + self.patience_s
        while not happened():
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode} before its moment:\n{self.output()[-3000:]}"
            )
            assert time.monotonic() < deadline, f"the moment never came:\n{self.output()[-3000:]}"
            self.stay(_POLL_S)

    def kill_when(self, happened: Callable[[], bool]) -> None:
        """Wait for a moment and kill the driver there, as a machine would: it has no say and its workers are
        not told."""
        self.await_moment(happened)
        self.find_sessions()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LONGEST_FAREWELL_S)
        self.check_nothing_runs()

    def stay(self, seconds: float) -> None:
        """Let it run on for a while."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def logged(self, step: int) -> Callable[[], bool]:
        """The moment when this launch has logged a step; rows of earlier launches do not count."""
        return lambda: any(
            row["step"] == step and row["time"] >= self.started for row in read_rows(self.run_dir)
        )

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

    def find_sessions(self) -> None:
        """Note the sessions of what the driver has started, while it lives to be asked."""
        self.sessions.add(self.process.pid)
        if self.process.poll() is not None:
            return
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(ProcessLookupError):
                    self.sessions.add(os.getsid(child.pid))

    def processes(self) -> dict[int, str]:
        """Process id and command line of everything this launch started and that still runs."""
        self.find_sessions()
        found = {}
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(each.pid) in self.sessions and each.status() != psutil.STATUS_ZOMBIE:
                    found[each.pid] = " ".join(each.cmdline())
        return found

    def check_nothing_runs(self) -> None:
        """Fail when a process of this launch outlives it for long."""
        deadline = time.monotonic() + LONGEST_FAREWELL_S
        while left := self.processes():
            assert time.monotonic() < deadline, f"still running after the end of the driver: {left}"
            with contextlib.suppress(psutil.Error):
                psutil.Process(min(left)).wait(_POLL_S)


class Launches:
    """Starts launches, and kills at the end of the tests whatever a failed test has left of them.

    Args:
        patience_s: longest wait for a moment or the end of one; whoever reaches it has hung.
    """

    def __init__(self, patience_s: float = LONGEST_WAIT_S) -> None:
        self.all: list[Launch] = []
        self.patience_s = patience_s

    def start(
        self,
        config: Path,
        run_dir: Path,
        arguments: Sequence[str] = (),
        changed: Mapping[str, str] | None = None,
        terminal: int | None = None,
        directory: Path = ROOT,
        prefix: Sequence[str] = (),
    ) -> Launch:
        """``megarl train CONFIG run_dir=... ARGUMENTS`` in a process of its own.

        Args:
            config: file of the configuration.
            run_dir: directory of the run.
            arguments: further overrides and options.
            changed: environment variables.
            terminal: descriptor of one that it gets as its own; None writes to ``output_file``.
            directory: that it works in.
            prefix: of its command: a program that becomes the run.
        """
        number = len(self.all)
        output_file = run_dir.with_name(f"{run_dir.name}.{number}.log")
        command = [
            *prefix,
            sys.executable,
            "-m",
            "megarl.cli",
            "train",
            str(config),
            f"run_dir={run_dir}",
            *arguments,
        ]
        # What this process' own Ray has set is not for them.
        variables = {name: value for name, value in env.snapshot().items() if not name.startswith("RAY_")}
        with output_file.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=directory,
                env={**variables, "OMP_NUM_THREADS": "1", **(changed or {})},
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=output if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                # whoever runs the tests in the background ignores some signals, and these programs would too
                preexec_fn=lambda: _as_from_a_shell(terminal),
                start_new_session=True,
            )
        self.all.append(Launch(process, run_dir, output_file, time.time(), self.patience_s))
        return self.all[-1]

    def finish(self, config: Path, run_dir: Path) -> Path:
        """Run a configuration to its end, undisturbed; the run's directory."""
        launch = self.start(config, run_dir)
        assert launch.finish() == 0, launch.output()[-5000:]
        return run_dir

    def close(self) -> None:
        """End everything."""
        for launch in self.all:
            for pid in launch.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            launch.process.wait(LONGEST_FAREWELL_S)


def _as_from_a_shell(terminal: int | None) -> None:
    for each in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    if terminal is not None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The whole rows of a run's log; a line that is just being written does not count."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    """The rows without clock readings."""
    return [
        {key: value for key, value in row.items() if not key.startswith(_CLOCKS)}
        for row in read_rows(run_dir)
    ]
