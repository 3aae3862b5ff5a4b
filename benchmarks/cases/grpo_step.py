"""A GRPO step by phase: generation, log-probabilities, training, rest; against TRL's GRPOTrainer, or a loop by hand where TRL is missing.

The same model, prompts, answers, reward and optimizer, one rank and one thread, in turn. TRL computes no log-probabilities before it trains
once on a batch. Log-probabilities and gradient of one batch are compared with a plain model of the same weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.point import Metric, Point, sides
from benchmarks.timing import Spent

if TYPE_CHECKING:
    from benchmarks.grpo_sides import Task
    from megarl.models.policy import PolicyConfig

BACKENDS = ("megatron", "dtensor")
ANSWERS, NEW_TOKENS = 8, 8
WARM_UP = 2


def measure(quick: bool) -> Iterator[Point]:
    """Backends."""
    from benchmarks.grpo_sides import Task, prompts_of
    from benchmarks.ranks import Ranks
    from megarl.quickstart.material import write_problems

    against = "TRL" if find_spec("trl") else "a loop by hand (TRL is not installed: pip install 'megarl[bench]')"
    with tempfile.TemporaryDirectory() as temporary, Ranks() as ranks:
        root, count = Path(temporary), 4 if quick else 32
        prompts = prompts_of(write_problems(root / "problems.jsonl", count, 1), count)
        task = Task(_model(root / "model"), prompts, ANSWERS, NEW_TOKENS)
        for backend in BACKENDS:
            [measured] = ranks.run(1, _compare, _config(task, backend), task, 2 if quick else 7)
            yield Point({"backend": backend, "against": against}, _metrics(measured, task), _run(measured, task))


def _model(directory: Path) -> Path:
    """Half a million random weights with the quickstart's tokenizer."""
    from benchmarks import tiny
    from benchmarks.subject import NARROW
    from megarl.quickstart.material import make_tokenizer

    tokenizer = make_tokenizer()
    tiny.save_model(directory, 64, **{**NARROW, "vocab_size": len(tokenizer)})
    tokenizer.save_pretrained(directory)
    return directory


def _config(task: Task, backend: str) -> dict[str, Any]:
    from benchmarks.grpo_sides import BETAS, CLIP, EPSILON, LEARNING_RATE
    from benchmarks.subject import Work, policy_of

    generation = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": None, "stop_token_ids": [], "pad_token_id": 0}
    changes: dict[str, Any] = {"generation": generation, "generation_batch_size": task.rows, "max_grad_norm": CLIP}
    if backend == "megatron":
        adam = {"lr": LEARNING_RATE, "min_lr": LEARNING_RATE, "weight_decay": 0.0, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1]}
        changes["megatron_cfg"] = {"optimizer": {**adam, "adam_eps": EPSILON, "clip_grad": CLIP}}
    else:
        kwargs = {"lr": LEARNING_RATE, "weight_decay": 0.0, "betas": list(BETAS), "eps": EPSILON}
        changes["optimizer"] = {"name": "torch.optim.AdamW", "kwargs": kwargs}
    return policy_of(task.model, backend, Work(task.rows, 64), **changes)


def _compare(config: PolicyConfig, task: Task, repeats: int) -> dict[str, Any]:
    """What every phase of both sides took, and how far megarl's numbers are from a plain model's."""
    import gc

    from transformers import AutoModelForCausalLM

    from benchmarks.device import gemm_rate
    from benchmarks.grpo_sides import TRL, ByHand, Ours, assert_same

    ours = Ours(config, task)
    off = assert_same(ours, AutoModelForCausalLM.from_pretrained(task.model).float())
    other = TRL(task) if find_spec("trl") else ByHand(task)
    lengths: list[int] = []

    def turn(counts: bool) -> None:
        batch, _ = ours.step(counts)
        lengths[:] = batch["input_lengths"].tolist()
        gc.collect()

    other.run(repeats, WARM_UP, turn)
    ours.worker.backend.close()
    return {"ours": ours.phases.spent, "other": other.spent, "off": off, "lengths": lengths, "gemm": gemm_rate()}


def _metrics(measured: Mapping[str, Any], task: Task) -> dict[str, Metric]:
    from benchmarks.flops import forward_flops, training_flops
    from benchmarks.subject import config_of

    ours, other = measured["ours"], measured["other"]
    metrics: dict[str, Metric] = {}
    for phase, spent in ours.items():
        if phase == "rest" or phase not in other:
            metrics |= _alone(phase, spent)
        else:
            metrics |= sides(phase, spent, f"the other's {phase}", other[phase])
    lengths, step = measured["lengths"], ours["step"].wall
    # each answer's prompt is passed once, and each of its tokens; then log-probabilities, then training
    done = 2 * forward_flops(config_of(task.model), lengths) + training_flops(config_of(task.model), lengths)
    metrics["step_seconds"] = Metric.of("s", step)
    metrics["tokens_per_second"] = Metric.of("tokens of prompts and answers a second", [sum(lengths) / took for took in step])
    metrics["mfu"] = Metric.of("share of the rate of matrix products here", [done / took / measured["gemm"] for took in step])
    return {**metrics, **{f"{name}_difference": Metric.of("from a plain model", [value]) for name, value in measured["off"].items()}}


def _alone(phase: str, spent: Spent) -> dict[str, Metric]:
    """Seconds of a phase that the other side has not, or has for other things."""
    return {f"{phase}_seconds": Metric.of("s", spent.wall), f"{phase}_cpu_seconds": Metric.of("CPU s", spent.cpu)}


def _run(measured: Mapping[str, Any], task: Task) -> dict[str, int | float | str]:
    lengths = measured["lengths"]
    facts: dict[str, int | float | str] = {"algorithm": "GRPO", "model": "Qwen2, half a million weights", "policy_lag": 0, "gpus": 0}
    facts |= {"longest": max(lengths), "mean_length": sum(lengths) / len(lengths)}
    facts |= {"generation_batch": task.rows, "training_batch": task.rows}
    return {**facts, "generation_layout": "one rank", "training_layout": "one rank"}
