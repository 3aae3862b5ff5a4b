"""Cost of a start in CPU and wall seconds: of a command that only prints, of a dry run, and of a tiny GRPO
run until its first step is done. The baselines are an empty interpreter, ``import torch``, and TRL's trainer
if it is installed. The limit of a run is a program that starts Ray with one worker, imports at the same time
megarl's own modules that driver and worker need, with Megatron-Core, and does nothing else.

CPU seconds are those of a program and of everything that it starts, including Ray's processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.point import Metric, Point

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart"
RECIPE = "grpo-qwen2.5-1.5b-1gpu-megatron"
SPEAKING = {"--help": ["--help"], "convert --help": ["convert", "--help"], "recipes": ["recipes"]}
BACKENDS = ("megatron", "dtensor")
PROMPTS, ANSWERS = 32, 8
_ASK_EVERY, _LOOK_EVERY = 0.02, 0.25
_LONGEST = 300.0
_TRL = """
import json, sys
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
model, lines, out = sys.argv[1:]
rows = [json.loads(line) for line in open(lines, encoding="utf-8")]
data = Dataset.from_list([{{"prompt": row["prompt"], "answer": row["answer"]}} for row in rows])
def reward(completions, answer, **_):
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer)]
options = GRPOConfig(
    output_dir=out, per_device_train_batch_size={batch}, num_generations={answers}, max_completion_length=8,
    max_steps=1, learning_rate=1e-3, beta=0.0, use_cpu=True, report_to=[],
    save_strategy="no", disable_tqdm=True)
tokenizer = AutoTokenizer.from_pretrained(model)
trainer = GRPOTrainer(
    model=model, processing_class=tokenizer, reward_funcs=reward, args=options, train_dataset=data)
trainer.train()
open(out + "/done", "w").write("1")
"""
# This program does the least that a run with Ray needs: a driver and a worker load their libraries at the
# same time, and do nothing else.
_RAY = """
import importlib, sys
import ray
model, out, of_driver, of_worker = sys.argv[1:]
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
@ray.remote
class WorkerShell:
    def ready(self, modules):
        for module in modules:
            importlib.import_module(module)
worker = WorkerShell.remote()
ready = worker.ready.remote(of_worker.split())
for module in of_driver.split():
    importlib.import_module(module)
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(model)
ray.get(ready)
open(out + "/done", "w").write("1")
"""
_MODEL = "transformers.models.qwen2.modeling_qwen2"
# For each limit, these are the modules that the driver and the worker import.
_LIMITS = {
    "Ray and megarl's modules": (
        "transformers.models.auto.tokenization_auto megarl.models.policy.lm_policy",
        f"megarl.models.policy.megatron_policy_worker {_MODEL}",
    ),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that a program took until it was done.

    Attributes:
        cpu: CPU seconds of all its processes.
        wall: wall seconds.
        parts: CPU seconds of a run by kind of process: ``driver``, ``workers``, and ``ray`` for Ray's own;
            empty for a command.
    """

    cpu: float
    wall: float
    parts: Mapping[str, float] = field(default_factory=dict)


def measure(quick: bool) -> Iterator[Point]:
    """Yield one point for each command and limit, then for whole runs on one rank."""
    repeats = 1 if quick else 2
    python = [sys.executable, "-c"]
    limits = {"python -c pass": [*python, "pass"], "import torch": [*python, "import torch"]}
    commands = {f"megarl {name}": _megarl(*arguments) for name, arguments in SPEAKING.items()}
    commands["megarl train RECIPE --dry-run"] = _megarl("train", RECIPE, "--dry-run")
    costs = _in_turn(
        {name: _until_exit(command) for name, command in {**limits, **commands}.items()}, repeats
    )
    for name in (*limits, *commands):
        found = _metrics(costs[name], costs["python -c pass"], "an empty interpreter")
        # A limit has no ratios, because it is not megarl's code.
        yield Point(
            {"command": name},
            found if name in commands else {key: found[key] for key in found if not key.endswith("ratio")},
        )
    with tempfile.TemporaryDirectory() as directory:
        yield from _runs(Path(directory), 1 if quick else 2)


def _runs(work: Path, repeats: int) -> Iterator[Point]:
    """Yield the cost of starting a tiny GRPO run on one rank, until its first step is in
    ``metrics.jsonl``."""
    from megarl.quickstart.material import make_model, write_problems

    model, problems = work / "model", work / "train.jsonl"
    make_model(model, 1)
    write_problems(problems, 512, 1)
    actions = {f"megarl on {backend}": _first_step(work, backend, model, problems) for backend in BACKENDS}
    has_trl = importlib.util.find_spec("trl") is not None
    if has_trl:
        actions["trl"] = _trl(work, model, problems)
    else:
        print("trl is not installed: its start is left out", file=sys.stderr)
    actions |= {name: _ray(work, model, *modules) for name, modules in _LIMITS.items()}
    if not has_trl:
        actions["import torch"] = _until_exit([sys.executable, "-c", "import torch"])
    costs = _in_turn(actions, repeats, warm_up=0)  # The commands above have already read the files.
    against, what = ("trl", "TRL's trainer") if has_trl else ("import torch", "import torch")
    for name in actions:
        found = _metrics(costs[name], costs[against], what)
        # A limit has no ratios, because it is not megarl's code.
        yield Point(
            {"run": name},
            found
            if name.startswith("megarl")
            else {key: found[key] for key in found if not key.endswith("ratio")},
        )


def _metrics(costs: Sequence[Cost], against: Sequence[Cost], what: str) -> dict[str, Metric]:
    return {
        **{
            f"{part}_cpu": Metric.of("CPU s", [cost.parts[part] for cost in costs]) for part in costs[0].parts
        },
        "cpu": Metric.of("CPU s", [cost.cpu for cost in costs]),
        "wall": Metric.of("s", [cost.wall for cost in costs]),
        "wall_ratio": Metric.ratio(what, [cost.wall for cost in costs], [cost.wall for cost in against]),
        "cpu_ratio": Metric.ratio(what, [cost.cpu for cost in costs], [cost.cpu for cost in against]),
    }


def _in_turn(
    actions: dict[str, Callable[[], Cost]], repeats: int, *, warm_up: int = 1
) -> dict[str, list[Cost]]:
    """Return the costs of each action, round by round, after warm-up rounds that put the files into the page
    cache."""
    costs: dict[str, list[Cost]] = {name: [] for name in actions}
    for turn in range(warm_up + repeats):
        for name, action in actions.items():
            cost = action()
            if turn >= warm_up:
                costs[name].append(cost)
    return costs


def _megarl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "megarl.cli", *arguments]


def _first_step(work: Path, backend: str, model: Path, problems: Path) -> Callable[[], Cost]:
    size = "tensor_model_parallel_size" if backend == "megatron" else "tensor_parallel_size"
    changes = [
        f"policy.model_name={model}",
        f"data.train.path={problems}",
        "data.validation=null",
        "cluster.gpus_per_node=1",
        f"policy.{backend}_cfg.{size}=1",
        f"grpo.num_prompts_per_step={PROMPTS}",
        f"grpo.num_generations_per_prompt={ANSWERS}",
        f"policy.train_global_batch_size={PROMPTS * ANSWERS}",
        "grpo.max_num_steps=1",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "checkpointing.enabled=false",
    ]
    layers = ["--with", str(QUICKSTART / f"{backend}.yaml")]

    def start() -> Cost:
        with tempfile.TemporaryDirectory(dir=work) as run:
            command = _megarl("train", str(QUICKSTART / "grpo.yaml"), *layers, *changes, f"run_dir={run}")
            return _cost(command, Path(run) / "metrics.jsonl", ends=False)

    return start


def _trl(work: Path, model: Path, problems: Path) -> Callable[[], Cost]:
    program = work / "with_trl.py"
    program.write_text(_TRL.format(batch=PROMPTS * ANSWERS, answers=ANSWERS), encoding="utf-8")

    def start() -> Cost:
        with tempfile.TemporaryDirectory(dir=work) as out:
            return _cost(
                [sys.executable, str(program), str(model), str(problems), out], Path(out) / "done", ends=False
            )

    return start


def _ray(work: Path, model: Path, of_driver: str, of_worker: str) -> Callable[[], Cost]:
    program = work / "with_ray.py"
    program.write_text(_RAY, encoding="utf-8")

    def start() -> Cost:
        with tempfile.TemporaryDirectory(dir=work) as out:
            command = [sys.executable, str(program), str(model), out, of_driver, of_worker]
            return _cost(command, Path(out) / "done", ends=False)

    return start


def _until_exit(command: Sequence[str]) -> Callable[[], Cost]:
    return lambda: _cost(command, None, ends=True)


def _cost(command: Sequence[str], sign: Path | None, *, ends: bool) -> Cost:
    """Return the cost of a program and of everything that it starts.

    Args:
        command: the program.
        sign: a file that marks the end of the measurement once it has content; None to measure until the
            program ends.
        ends: the program must exit successfully, and the kernel's figures of it and its children are used.
    """
    before, started, parts = os.times(), time.perf_counter(), dict[str, float]()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as said:
        # Start a new session, so that a kill reaches all processes of the command.
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        if ends:
            # os.times counts only children that were waited for.
            code = process.wait(_LONGEST)
            wall, after = time.perf_counter() - started, os.times()
            cpu = after.children_user + after.children_system - before.children_user - before.children_system
        else:
            assert sign is not None
            parts, code = _watch(process, sign, started)
            cpu, wall = sum(parts.values()), time.perf_counter() - started
            _end(process)
        said.seek(0)
        assert code == 0, (
            f"{' '.join(command)} left with {code}: {said.read().decode(errors='replace')[-2000:]}"
        )
    return Cost(cpu, wall, parts)


def _watch(process: subprocess.Popen[bytes], sign: Path, started: float) -> tuple[dict[str, float], int]:
    """Return the CPU seconds of a program and all its descendants until the file ``sign`` has content. A
    process that has ended counts with the last value that was read."""
    seen: dict[int, tuple[str, float]] = {}
    root, looked, code = psutil.Process(process.pid), 0.0, 0
    while not (sign.is_file() and sign.stat().st_size):
        # Look only now and then, because a look takes some milliseconds of a core that the program may need.
        if time.perf_counter() - looked > _LOOK_EVERY:
            _look(root, seen)
            looked = time.perf_counter()
        # The process may end right after it has written the sign.
        if process.poll() is not None and not (sign.is_file() and sign.stat().st_size):
            code = process.returncode or 1
            break
        assert time.perf_counter() - started < _LONGEST, f"no first step within {_LONGEST:g} s"
        time.sleep(_ASK_EVERY)
    _look(root, seen)
    parts: dict[str, float] = {}
    for kind, seconds in seen.values():
        parts[kind] = parts.get(kind, 0.0) + seconds
    return parts, code


def _look(root: psutil.Process, seen: dict[int, tuple[str, float]]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times, before = each.cpu_times(), seen.get(each.pid, ("", 0.0))[0]
                # Remember the kind, because a worker that has ended and was not waited for has no command
                # line.
                is_worker = before == "workers" or "WorkerShell" in " ".join(each.cmdline())
                # Leave out the seconds of its children, each of which is counted itself.
                seen[each.pid] = (
                    "driver" if each == root else "workers" if is_worker else "ray",
                    times.user + times.system,
                )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the program end by itself, so that it also ends what it started."""
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
