"""A GRPO step by phase: generation, log-probabilities, training and the rest. It is compared with TRL's
GRPOTrainer, or with a loop by hand if TRL is not installed.

Both sides have the same model, prompts, responses, reward and optimizer, on one rank and one thread, measured
alternately. TRL computes no log-probabilities before it trains once on a batch, and takes a ratio of exactly
1. megarl's step is measured with ``loss_fn.force_on_policy_ratio``, which means the same, and without it, as
by default. Log-probabilities and the gradient of one batch are compared with a plain model of the same
weights.

The same step is then measured on two ranks, whose losses must be equal. Their core-seconds are compared with
those of one rank and with a lower limit: two ranks that do half of the work each without communicating, plus
the step's collectives by themselves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.options import ONE_RANK, Layout
from benchmarks.point import Metric, Point, sides
from benchmarks.timing import Spent, over_ranks

if TYPE_CHECKING:
    from benchmarks.grpo_sides import Task
    from benchmarks.ranks import Ranks
    from megarl.config.policy import PolicyConfig

BACKENDS = ("megatron", "dtensor")
ANSWERS, NEW_TOKENS = 8, 8
WARM_UP = 2
LAYOUTS = {"dp": Layout(dp=2), "tp": Layout(tp=2)}
HALVES = {
    "dp": "two ranks apart, each on half of the prompts",
    "tp": "two ranks apart, each with a model of half the heads, inner width and vocabulary",
}
LOSS_TOLERANCE = 1e-5  # Relative; the sides sum in different orders.


def measure(quick: bool) -> Iterator[Point]:
    """Yield points for each backend: with a ratio of 1, with the ratio to the policy before the update, and
    on two ranks."""
    from benchmarks.grpo_sides import Task, prompts_of
    from benchmarks.ranks import Ranks
    from megarl.quickstart.material import write_problems

    against = (
        "TRL"
        if find_spec("trl")
        else "a loop by hand (TRL is not installed: pip install 'megarl-trainer[bench]')"
    )
    # Use two pools: one rank of each runs at the same time, without being in one group.
    with tempfile.TemporaryDirectory() as temporary, Ranks() as ranks, Ranks() as others:
        root, count = Path(temporary), 4 if quick else 32
        prompts = prompts_of(write_problems(root / "problems.jsonl", count, 1), count)
        task = Task(_model(root / "model"), prompts, ANSWERS, NEW_TOKENS)
        for backend in BACKENDS:
            for on_policy in (True, False):
                [measured] = ranks.run(
                    1, _compare, _config(task, backend), task, on_policy, 2 if quick else 5
                )
                ratio = "exactly 1" if on_policy else "to the policy before"
                yield Point(
                    {"backend": backend, "ratio": ratio, "against": against},
                    _metrics(measured, task),
                    _run(measured, task, ratio),
                )
        repeats, narrow = 2 if quick else 4, _model(root / "narrow", parts=2)
        halves = {"dp": replace(task, prompts=task.prompts[::2]), "tp": replace(task, model=narrow)}
        for backend in BACKENDS:
            alone = ranks.run(1, _steps, _config(task, backend), task, repeats)
            for divided, layout in LAYOUTS.items():
                half = _beside_each_other(
                    (ranks, others), _config(halves[divided], backend), halves[divided], repeats
                )
                measured = ranks.run(layout.ranks, _steps, _config(task, backend, layout), task, repeats)
                yield Point(
                    {"backend": backend, "layout": str(layout)},
                    _of_layout(measured, alone, half, HALVES[divided]),
                )


def _model(directory: Path, parts: int = 1) -> Path:
    """Save half a million random weights with the quickstart's tokenizer, and return the directory. With
    several ``parts``, the sizes are those of one tensor-parallel rank of ``parts`` ranks."""
    from benchmarks import tiny
    from benchmarks.subject import NARROW
    from megarl.quickstart.material import make_tokenizer

    tokenizer = make_tokenizer()
    sizes: dict[str, int] = {**NARROW, "vocab_size": len(tokenizer)}
    divided = {
        size: -(-sizes[size] // parts)
        for size in ("vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    }
    # Keep the size of a head if there are fewer heads: by default it would follow from their number.
    tiny.save_model(
        directory, 64, **{**sizes, **divided}, head_dim=sizes["hidden_size"] // sizes["num_attention_heads"]
    )
    tokenizer.save_pretrained(directory)
    return directory


def _config(task: Task, backend: str, layout: Layout = ONE_RANK) -> dict[str, Any]:
    from benchmarks import tiny
    from benchmarks.grpo_sides import BETAS, CLIP, EPSILON, LEARNING_RATE
    from benchmarks.subject import Work, policy_of

    generation = {**tiny.SAMPLED, "max_new_tokens": NEW_TOKENS}
    changes: dict[str, Any] = {
        "generation": generation,
        "generation_batch_size": task.rows,
        "max_grad_norm": CLIP,
    }
    if backend == "megatron":
        adam = {
            "lr": LEARNING_RATE,
            "min_lr": LEARNING_RATE,
            "weight_decay": 0.0,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
        }
        changes["megatron_cfg"] = {"optimizer": {**adam, "adam_eps": EPSILON, "clip_grad": CLIP}}
    else:
        kwargs = {"lr": LEARNING_RATE, "weight_decay": 0.0, "betas": list(BETAS), "eps": EPSILON}
        changes["optimizer"] = {"name": "torch.optim.AdamW", "kwargs": kwargs}
    return policy_of(task.model, backend, Work(task.rows, 64), layout, **changes)


def _compare(config: PolicyConfig, task: Task, on_policy: bool, repeats: int) -> dict[str, Any]:
    """Return the times of each phase of both sides, and the difference of megarl's numbers from a plain
    model's."""
    import gc

    from transformers import AutoModelForCausalLM

    from benchmarks.device import gemm_rate
    from benchmarks.grpo_sides import TRL, ByHand, Ours, assert_same

    ours = Ours(config, task, on_policy)
    # Compare before the first step, while both sides have the weights that are on disk.
    off = assert_same(ours, AutoModelForCausalLM.from_pretrained(task.model).float())
    other = TRL(task) if find_spec("trl") else ByHand(task)
    lengths: list[int] = []

    def turn(counts: bool) -> None:
        batch, _ = ours.step(counts)
        lengths[:] = batch["input_lengths"].tolist()
        gc.collect()

    other.run(repeats, WARM_UP, turn)
    ours.worker.backend.close()
    return {
        "ours": ours.phases.spent,
        "other": other.spent,
        "off": off,
        "lengths": lengths,
        "gemm": gemm_rate(),
    }


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
    # Each response's prompt is computed once, and so is each of its tokens; log-probabilities, if there are
    # any, and training follow.
    done = (2 if "logprobs" in ours else 1) * forward_flops(config_of(task.model), lengths) + training_flops(
        config_of(task.model), lengths
    )
    metrics["step_seconds"] = Metric.of("s", step)
    metrics["tokens_per_second"] = Metric.of(
        "tokens of prompts and answers a second", [sum(lengths) / took for took in step]
    )
    metrics["mfu"] = Metric.of(
        "share of the rate of matrix products here", [done / took / measured["gemm"] for took in step]
    )
    return {
        **metrics,
        **{
            f"{name}_difference": Metric.of("from a plain model", [value])
            for name, value in measured["off"].items()
        },
    }


def _steps(config: PolicyConfig, task: Task, repeats: int) -> dict[str, Any]:
    """Return, on every rank, the seconds of each phase of its steps, the loss and gradient norm of the first
    step, and the seconds of the step's collectives alone."""
    import gc

    import torch.distributed as dist

    from benchmarks import collectives
    from benchmarks.grpo_sides import Ours
    from benchmarks.timing import collector_off

    ours = Ours(config, task, on_policy=True)
    results = []
    with collector_off():
        for turn in range(WARM_UP + repeats):
            dist.barrier()
            results.append(ours.step(turn >= WARM_UP)[1])
            gc.collect()
        # Record a separate step, because recording takes time too.
        with collectives.Recorded() as recorded:
            ours.step(counts=False)
        alone = collectives.send(recorded.found, repeats)
    ours.worker.backend.close()
    # Return the numbers of the first step: in later ones, rounding differences from other orders of summation
    # have grown.
    return {
        "ours": ours.phases.spent,
        "collectives": alone,
        "number": len(recorded.found),
        "group": max((each.ranks for each in recorded.found), default=1),
        "numbers": [float(results[0][key]) for key in ("global_loss", "grad_norm")],
    }


def _beside_each_other(
    pools: Sequence[Ranks], config: PolicyConfig, task: Task, repeats: int
) -> list[dict[str, Any]]:
    """Measure ``_steps`` on one rank of each pool at the same time. These ranks share memory and caches, and
    do not communicate."""
    with ThreadPoolExecutor(len(pools)) as threads:
        return [
            rank
            for ranks in threads.map(lambda pool: pool.run(1, _steps, config, task, repeats), pools)
            for rank in ranks
        ]


def _of_layout(
    ranks: Sequence[Mapping[str, Any]],
    alone: Sequence[Mapping[str, Any]],
    halves: Sequence[Mapping[str, Any]],
    name: str,
) -> dict[str, Metric]:
    """Return the core-seconds of all ranks as ratios to those of one rank and to their lower limit: two ranks
    that do half of the work each without communicating, plus the step's collectives by themselves. The two
    halves exceed one rank only by costs that do not shrink with the size, and by work that both
    tensor-parallel ranks do.

    Args:
        ranks: measurements of each rank of the layout.
        alone: measurements of one rank by itself.
        halves: measurements of each of the two halves.
        name: name of the two halves.

    Raises:
        AssertionError: loss or gradient norm of the first step differ by more than rounding.
    """
    pairs = zip(ranks[0]["numbers"], alone[0]["numbers"], strict=True)
    # Divide by at least 1, because a relative difference means nothing for a loss near 0.
    off = max(abs(one - other) / max(abs(other), 1.0) for one, other in pairs)
    assert off < LOSS_TOLERANCE, (
        f"loss and gradient norm {ranks[0]['numbers']} are not those of one rank, {alone[0]['numbers']}"
    )
    metrics: dict[str, Metric] = {}
    for phase in ("step", "generation", "training"):
        spent, single = over_ranks([rank["ours"][phase] for rank in ranks]), alone[0]["ours"][phase]
        metrics[f"{phase}_core_seconds_to_one_rank"] = Metric.ratio(
            "core-seconds of one rank", spent.cpu, single.cpu
        )
        apart = over_ranks([rank["ours"][phase] for rank in halves]).cpu
        metrics[f"{phase}_core_seconds_to_two_halves"] = Metric.ratio(name, spent.cpu, apart)
        metrics[f"{phase}_two_halves_to_one_rank"] = Metric.of(
            "ratio of a limit, which is not megarl's to keep, to core-seconds of one rank",
            [one / other for one, other in zip(apart, single.cpu, strict=True)],
        )
        metrics[f"{phase}_core_seconds"] = Metric.of("CPU s", spent.cpu)
        metrics[f"{phase}_seconds"] = Metric.of("s", spent.wall)
    sent = over_ranks([rank["collectives"] for rank in ranks])
    whole = over_ranks([rank["ours"]["step"] for rank in ranks]).cpu
    halved = over_ranks([rank["ours"]["step"] for rank in halves]).cpu
    limit = [apart + sending for apart, sending in zip(halved, sent.cpu, strict=True)]
    metrics["step_core_seconds_to_limit"] = Metric.ratio(
        f"{name}, and the step's collectives alone", whole, limit
    )
    metrics["step_limit_to_one_rank"] = Metric.ratio(
        "core-seconds of one rank", limit, alone[0]["ours"]["step"].cpu
    )
    metrics["collectives_core_seconds"] = Metric.of("CPU s", sent.cpu)
    metrics["collectives"] = Metric.of("a step and rank", [ranks[0]["number"]])
    metrics["collectives_ranks"] = Metric.of("ranks of the group of each", [ranks[0]["group"]])
    return {
        **metrics,
        "difference": Metric.of(
            "largest relative difference of loss and gradient norm from one rank's", [off]
        ),
    }


def _alone(phase: str, spent: Spent) -> dict[str, Metric]:
    """Return the seconds of a phase that the other side does not have, or that covers other work there."""
    return {
        f"{phase}_seconds": Metric.of("s", spent.wall),
        f"{phase}_cpu_seconds": Metric.of("CPU s", spent.cpu),
    }


def _run(measured: Mapping[str, Any], task: Task, ratio: str) -> dict[str, int | float | str]:
    lengths = measured["lengths"]
    facts: dict[str, int | float | str] = {
        "algorithm": f"GRPO, ratio {ratio}",
        "model": "Qwen2, half a million weights",
        "policy_lag": 0,
        "gpus": 0,
    }
    facts |= {"longest": max(lengths), "mean_length": sum(lengths) / len(lengths)}
    facts |= {"generation_batch": task.rows, "training_batch": task.rows}
    return {**facts, "generation_layout": "one rank", "training_layout": "one rank"}
