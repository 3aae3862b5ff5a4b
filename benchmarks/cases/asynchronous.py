"""Steps of asynchronous training against steps that alternate sampling and training: with stages that only
sleep, and in whole runs.

Generation should take twice as long as the rest of a step, so that an asynchronous step takes two thirds of
the time at best. In the whole runs, a trainer and an engine of one rank each have their own core, in both
modes.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from benchmarks.cases.startup import QUICKSTART, ROOT
from benchmarks.point import Metric, Point

# The first batch of a run is sampled before any training, so that a run of n steps takes at least
# (2 n + 1) / (3 n) of the time in turn: 0.675 with 40 steps, two thirds with very many.
GENERATION_S, TRAINING_S, STEPS = 0.2, 0.1, 40
GROUPS, GROUP_S, LONGEST, LOOKAHEAD = 16, 0.025, 8, 4
REPEATS, QUICK_REPEATS = 5, 1
PROMPTS, ANSWERS, NEW_TOKENS = 4, 2, 96
WARM_UP, COUNTED = 3, 8
_LOOK_EVERY, _LONGEST = 0.1, 300.0
IN_TURN: tuple[str, ...] = ("grpo.async_grpo.enabled=false",)
BESIDE: tuple[str, ...] = ("grpo.async_grpo.enabled=true",)


def measure(quick: bool) -> Iterator[Point]:
    """Yield points that compare both kinds of steps, measured alternately."""
    repeats = QUICK_REPEATS if quick else REPEATS
    sleeping = [(_sleeping(0), _sleeping(1)) for _ in range(repeats)]
    in_turn, beside = zip(*sleeping, strict=True)
    yield Point({"stages": "sleep"}, _metrics(in_turn, beside))
    in_turn, ready = [[_sleeping_groups(ahead) for _ in range(repeats)] for ahead in (0, LOOKAHEAD)]
    yield Point(
        {"stages": "sleep, one group of 16 takes 8 times as long, ready first"}, _metrics(in_turn, ready)
    )
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        arguments = _material(work)
        rows: dict[tuple[str, ...], list[dict[str, float]]] = {IN_TURN: [], BESIDE: []}
        for _ in range(repeats):
            for way, found in rows.items():
                found.append(_run(work, [*arguments, *way]))
        steps = {way: [row["step_s"] for row in found] for way, found in rows.items()}
        generation = [row["generation_s"] / (row["step_s"] - row["generation_s"]) for row in rows[IN_TURN]]
        waits = [row.get("rollout_wait_s", 0.0) / row["step_s"] for row in rows[BESIDE]]
        more = {
            "generation_over_rest": Metric.of("ratio to the rest of a step in turn", generation),
            "wait_share": Metric.of("share of a step that waits for rollouts", waits),
        }
        yield Point({"stages": "a run"}, {**_metrics(steps[IN_TURN], steps[BESIDE]), **more})


def _metrics(in_turn: Sequence[float], beside: Sequence[float]) -> dict[str, Metric]:
    return {"step": Metric.ratio("a step in turn", beside, in_turn), "step_seconds": Metric.of("s", beside)}


def _sleeping(lag: int) -> float:
    """Return the seconds of a step whose stages only sleep. A ``lag`` of 0 alternates sampling and
    training."""
    from megarl.algorithms.ahead import HeldEngines, SamplingAhead
    from megarl.algorithms.rollout_source import WaitingBatches
    from megarl.observe.timing import PhaseTimer

    def sample(step: int) -> Any:
        time.sleep(GENERATION_S)
        # None would be no batch, which would be sampled again when it is asked for.
        return step

    refit: Any = SimpleNamespace(bring_up_to_date=lambda: None)
    timers = PhaseTimer(), PhaseTimer()
    ahead = SamplingAhead(sample, lag, STEPS, HeldEngines(refit), WaitingBatches(), *timers)
    begun = time.perf_counter()
    for step in range(1, STEPS + 1):
        ahead.next(step) if lag else sample(step)
        time.sleep(TRAINING_S)
        ahead.settle()
    ahead.close()
    return (time.perf_counter() - begun) / STEPS


def _sleeping_groups(lookahead: int) -> float:
    """Return the seconds of a step whose groups only sleep. With a ``lookahead`` of 0, a step waits for the
    slowest group."""
    from megarl.algorithms.ready_first import Order, ReadyFirst
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.observe.timing import PhaseTimer
    from megarl.rollout.collector import Rollouts

    def seconds(ordinal: int) -> float:
        return GROUP_S * (LONGEST if ordinal % GROUPS == ordinal // GROUPS % GROUPS else 1)

    if not lookahead:
        begun = time.perf_counter()
        for _ in range(STEPS):
            time.sleep(GROUP_S * LONGEST)
            time.sleep(GROUP_S * LONGEST / 2)
        return (time.perf_counter() - begun) / STEPS

    def collect(index: int, ordinal: int, version: int, timer: PhaseTimer) -> Rollouts:
        time.sleep(seconds(ordinal))
        return Rollouts(BatchedDataDict({"weight_version": torch.tensor([version])}), [], {})

    class _Order:
        taken = epoch = 0

        def take(self, count: int) -> list[int]:
            self.taken += count
            return [0] * count

    nothing: Any = SimpleNamespace(
        **dict.fromkeys(("pause", "close", "bring_up_to_date"), lambda: None),
        **dict.fromkeys(("resume", "write"), lambda *_: None),
        take_busy_seconds=lambda: 0.0,
        failed=False,
    )
    order: Any = _Order()
    join: Any = lambda groups: groups[0]  # noqa: E731
    schedule = Order(GROUPS, lookahead, lookahead, drops=False)
    timers = PhaseTimer(), PhaseTimer()
    ready = ReadyFirst(schedule, collect, join, nothing, nothing, order, STEPS, *timers, nothing)
    begun = time.perf_counter()
    for step in range(1, STEPS + 1):
        ready.next(step)
        time.sleep(GROUP_S * LONGEST / 2)
        ready.settle()
    return (time.perf_counter() - begun) / STEPS


def _material(work: Path) -> list[str]:
    """Save a random model of hidden size 256 and 4 layers with the quickstart's vocabulary, and return the
    arguments of a run with this model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from megarl.quickstart.material import make_model, write_problems

    make_model(work / "model", 1)
    config = Qwen2Config.from_pretrained(work / "model")
    config.update(
        {
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        }
    )
    # The config was made for two layers and has two types, but transformers requires one for each layer.
    config.layer_types = ["full_attention"] * 4
    Qwen2ForCausalLM(config).save_pretrained(work / "model")
    write_problems(work / "train.jsonl", 1024, 1)
    return [
        *(
            str(QUICKSTART / "grpo.yaml"),
            "--with",
            str(QUICKSTART / "apart.yaml"),
            "--with",
            str(QUICKSTART / "asynchronous.yaml"),
        ),
        f"policy.model_name={work / 'model'}",
        f"data.train.path={work / 'train.jsonl'}",
        "data.validation=null",
        "cluster.gpus_per_node=2",
        "policy.megatron_cfg.tensor_model_parallel_size=1",
        f"grpo.num_prompts_per_step={PROMPTS}",
        f"grpo.num_generations_per_prompt={ANSWERS}",
        f"policy.train_global_batch_size={PROMPTS * ANSWERS}",
        f"policy.generation.max_new_tokens={NEW_TOKENS}",
        "policy.max_total_sequence_length=128",
        f"grpo.max_num_steps={WARM_UP + COUNTED}",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "policy.generation.engine_check.sequences=0",
        "checkpointing.enabled=false",
    ]


def _run(work: Path, arguments: Sequence[str]) -> dict[str, float]:
    """Return the median seconds of each phase, over the steps after warm-up."""
    with tempfile.TemporaryDirectory(dir=work) as run, tempfile.TemporaryFile() as said:
        command = [sys.executable, "-m", "megarl.cli", "train", *arguments, f"run_dir={run}"]
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        begun, pinned = time.perf_counter(), set[int]()
        while process.poll() is None:
            assert time.perf_counter() - begun < _LONGEST, f"no end within {_LONGEST:g} s"
            if len(pinned) < 2:
                _pin(psutil.Process(process.pid), pinned)
            time.sleep(_LOOK_EVERY)
        said.seek(0)
        assert process.returncode == 0, said.read().decode(errors="replace")[-3000:]
        assert len(pinned) == 2, "the trainer and the engine were not both seen"
        lines = (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > WARM_UP]
    names = {name for row in rows for name in row if name.startswith("timing/")}
    return {
        name.removeprefix("timing/"): statistics.median(row.get(name, 0.0) for row in rows) for name in names
    }


def _pin(root: psutil.Process, pinned: set[int]) -> None:
    """Pin all threads of the trainer to the first core and those of the engine to the second core, as soon as
    each process exists."""
    from megarl.distributed.worker_stacks import worker_of
    from megarl.models.policy.policy_engines import WORKERS

    with contextlib.suppress(psutil.Error, ProcessLookupError):
        for child in root.children(recursive=True):
            name = worker_of(child.pid)
            if name is None or child.pid in pinned:
                continue
            core = int(name.startswith(WORKERS))
            for thread in child.threads():
                psutil.Process(thread.id).cpu_affinity([core])
            pinned.add(child.pid)
