"""The policy's computations in a step of a recipe, in the recipe's layout, on all nodes of the Ray cluster
that ``RAY_ADDRESS`` names.

Sequences of random tokens stand for responses, with log-normal lengths up to the recipe's longest. The limit
is a matrix product on one device of the same cluster, and the share of its rate that a phase reaches is the
phase's MFU. Training has three times the operations of log-probabilities; ``logprobs_over_third`` shows how
far their times are from this ratio. Generation is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.options import Options
from benchmarks.point import Metric, Point

if TYPE_CHECKING:
    from megarl.distributed.batched_data_dict import BatchedDataDict


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """Yield one point for the recipe, or one for each length given by ``--tokens``."""
    import ray

    from megarl.data.tokenization import get_tokenizer
    from megarl.distributed.ray_runtime import init_ray
    from megarl.run.resume import ResumePoint
    from megarl.run.start import start_policy

    config = recipe(options)
    section = config["policy"]
    init_ray(log_to_driver=False)
    with ExitStack() as stack:
        # Put this on the stack first, so that Ray is shut down last.
        stack.callback(ray.shutdown)
        peak = _peak(options.device)
        tokenizer = get_tokenizer(
            section.get("tokenizer") or {"name": section["model_name"]}, section["trust_remote_code"]
        )
        policy = start_policy(config, tokenizer, ResumePoint(), stack)
        for longest in options.tokens or (section["max_total_sequence_length"],):
            batch = batch_for(section, longest, len(tokenizer))
            yield _point(config, batch, longest, _phases(policy, batch, 2 if quick else 5), peak)


def recipe(options: Options) -> dict[str, Any]:
    """Return the validated configuration of a recipe on the chosen device, with the policy only and without
    any output files.

    Raises:
        ValueError: no recipe was chosen.
    """
    from megarl.config import load_config
    from megarl.config.validate import validate_config

    if options.model is None or Path(options.model).suffix not in (".yaml", ".yml"):
        raise ValueError(
            f"--model {options.model}: not a recipe. Fix: name a YAML file, such as "
            "configs/grpo-qwen2.5-1.5b-megatron.yaml"
        )
    changes = [f"cluster.device={options.device}", "run_dir=runs/benchmark", "checkpointing.enabled=false"]
    return dict(validate_config(load_config(options.model, changes)))


def batch_for(policy: Mapping[str, Any], longest: int, vocabulary: int) -> BatchedDataDict[Any]:
    """Return a global batch of random tokens whose mean length is half of the longest."""
    import torch

    from benchmarks.lengths import Profile, draw_lengths
    from megarl.distributed.batched_data_dict import BatchedDataDict

    rows = policy["train_global_batch_size"]
    # Make every sequence at least two tokens long, because one token alone has no target.
    lengths = torch.tensor(
        [max(2, length) for length in draw_lengths(Profile(longest // 2, longest), rows, seed=0)]
    )
    lengths[0] = longest
    inside = torch.arange(longest)[None] < lengths[:, None]
    ids = torch.randint(2, vocabulary, (rows, longest), generator=torch.Generator().manual_seed(0)) * inside
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            "token_mask": inside.float(),
            "sample_mask": torch.ones(rows),
        }
    )


def _peak(device: str) -> float:
    """Return the rate of a matrix product on a device of the idle cluster, in operations per second."""
    import ray

    from benchmarks.device import gemm_rate

    return ray.get(ray.remote(num_cpus=1, num_gpus=int(device == "cuda"))(gemm_rate).remote(device))


def _phases(policy: Any, batch: Any, repeats: int) -> dict[str, list[float]]:
    """Return the wall seconds of the calls that a driver makes, after one warm-up call of each. A call
    returns when all ranks are done."""
    from megarl.algorithms.loss_functions import NLLLoss

    losses: list[float] = []
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "logprobs": (policy.prepare_for_lp_inference, lambda: policy.get_logprobs(batch)),
        "training": (
            policy.prepare_for_training,
            lambda: losses.append(float(policy.train(batch, NLLLoss())["loss"])),
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*calls, "step")}
    for turn in range(1 + repeats):
        begun = time.perf_counter()
        for name, (prepare, call) in calls.items():
            # Preparing counts for the step, but not for its phase.
            prepare()
            called = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - called)
        if turn:
            seconds["step"].append(time.perf_counter() - begun)
    assert losses[-1] < losses[0], f"training on one batch did not lower its loss: {losses}"
    return seconds


def _point(
    config: Mapping[str, Any], batch: Any, longest: int, seconds: Mapping[str, list[float]], peak: float
) -> Point:
    from transformers import AutoConfig

    from benchmarks.flops import forward_flops, training_flops
    from megarl.config.backend import enabled_backend

    policy, lengths = config["policy"], batch["input_lengths"].tolist()
    ranks = config["cluster"]["num_nodes"] * config["cluster"]["gpus_per_node"]
    model, gpus = (
        AutoConfig.from_pretrained(policy["model_name"]),
        ranks if config["cluster"]["device"] == "cuda" else 0,
    )
    done = {"logprobs": forward_flops(model, lengths), "training": training_flops(model, lengths)}
    done["step"] = done["logprobs"] + done["training"]
    metrics = {f"{name}_seconds": Metric.of("s", taken) for name, taken in seconds.items()}
    for name, taken in seconds.items():
        shares = [done[name] / took / ranks / peak for took in taken]
        metrics["mfu" if name == "step" else f"{name}_mfu"] = Metric.of(
            "share of the rate of matrix products on as many devices", shares
        )
    third = [took / 3 for took in seconds["training"]]
    metrics["logprobs_over_third"] = Metric.ratio("a third of the training phase", seconds["logprobs"], third)
    rate = Metric.of(
        "valid tokens a second and rank", [sum(lengths) / took / ranks for took in seconds["step"]]
    )
    metrics["tokens_per_second_per_gpu" if gpus else "tokens_per_second_per_rank"] = rate
    backend, layout = enabled_backend(policy), layout_in(policy, ranks)
    facts: dict[str, int | float | str] = {
        "algorithm": config["algorithm"],
        "model": Path(policy["model_name"]).name,
        "gpus": gpus,
    }
    facts |= {"longest": max(lengths), "mean_length": sum(lengths) / len(lengths)}
    facts |= {"training_batch": len(lengths), "training_layout": layout}
    parameters = {"model": facts["model"], "backend": backend, "layout": layout, "longest": longest}
    return Point({**parameters, "nodes": config["cluster"]["num_nodes"]}, metrics, facts)


def layout_in(policy: Mapping[str, Any], ranks: int) -> str:
    """Return the layout of a policy, in the notation of the command line."""
    from benchmarks.options import Layout
    from megarl.config.backend import enabled_backend

    names = {
        "megatron": ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        "dtensor": ("tensor_parallel_size", "", "context_parallel_size"),
    }
    backend = enabled_backend(policy)
    section = policy.get(f"{backend}_cfg") or {}
    tp, pp, cp = (section.get(name, 1) for name in names.get(backend, ("", "", "")))
    return str(Layout(tp=tp, pp=pp, cp=cp, dp=ranks // (tp * pp * cp)))
