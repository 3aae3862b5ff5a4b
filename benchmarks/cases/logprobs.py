"""The log-probability phase of each backend's worker against a plain loop: the model of transformers,
log_softmax, gather.

Both compute the same rows in the same micro-batches, without gradients, and their log-probabilities are
compared. The size ``layers`` is dominated by the passes through the layers; ``vocabulary`` is dominated by
the output layer and the processing of its logits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.options import Options
from benchmarks.point import Metric, Point, sides
from benchmarks.timing import Spent

if TYPE_CHECKING:
    from benchmarks.subject import Work
    from megarl.config.policy import PolicyConfig

# These are rounding errors of float32, and of matrix products in bfloat16, for log-probabilities around -10.
TOLERANCE = {"cpu": 1e-4, "cuda": 0.2}


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """Yield one point for each size and backend, on one rank."""
    from benchmarks import tiny
    from benchmarks.ranks import Ranks
    from benchmarks.subject import batch_of, policy_of

    with tempfile.TemporaryDirectory() as directory, Ranks(options.device) as ranks:
        for size, model, work in _sizes(quick, options, Path(directory)):
            tokens = int(batch_of(model, work)["input_lengths"].sum())
            for backend in tiny.BACKENDS:
                policy = policy_of(model, backend, work, device=options.device)
                [(spent, error)] = ranks.run(1, _compare, policy, work, 3 if quick else 7, options.device)
                yield Point(
                    {"size": size, "backend": backend, "length": work.length}, _metrics(spent, error, tokens)
                )


def _sizes(quick: bool, options: Options, directory: Path) -> Iterator[tuple[str, Path, Work]]:
    from benchmarks.subject import NARROW, Work, model_of

    if options.model or options.tokens:
        lengths = options.tokens or (1024,)
        model = model_of(options, directory / "chosen", max(lengths))
        yield from (("chosen", model, Work(8, length)) for length in lengths)
        return
    yield "layers", model_of(options, directory / "layers", 64), Work(8 if quick else 32, 64)
    if not quick:
        yield (
            "vocabulary",
            model_of(options, directory / "vocabulary", 64, **{**NARROW, "vocab_size": 32_000}),
            Work(8, 64),
        )


def _metrics(spent: dict[str, Spent], error: float, tokens: int) -> dict[str, Metric]:
    return {
        **sides("logprobs", spent["worker"], "a plain loop", spent["plain"]),
        "tokens_per_second": Metric.of(
            "valid tokens a second", [tokens / took for took in spent["worker"].wall]
        ),
        "difference": Metric.of("largest difference of a log-probability", [error]),
    }


def _compare(config: PolicyConfig, work: Work, repeats: int, device: str) -> tuple[dict[str, Spent], float]:
    """Return the times of both sides, and the largest difference of their log-probabilities."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks import tiny
    from benchmarks.device import clock_of
    from benchmarks.subject import batch_of, rows_at_once
    from benchmarks.timing import spent_in_turn
    from megarl.distributed.batched_data_dict import BatchedDataDict

    batch = batch_of(Path(config["model_name"]), work)
    data: BatchedDataDict[Any] = BatchedDataDict({key: batch[key] for key in ("input_ids", "input_lengths")})
    worker = tiny.worker_of(config)
    worker.prepare_for_lp_inference()
    model = AutoModelForCausalLM.from_pretrained(config["model_name"], dtype=torch.float32).eval().to(device)
    found: dict[str, torch.Tensor] = {}

    def ours() -> None:
        # The first token has no log-probability, because nothing precedes it.
        found["worker"] = worker.get_logprobs(data=data)["logprobs"][:, 1:]

    def plain() -> None:
        parts = [
            _plain(model, ids, device) for ids in batch["input_ids"].to(device).split(rows_at_once(work))
        ]
        found["plain"] = torch.cat(parts).cpu()

    spent = spent_in_turn({"worker": ours, "plain": plain}, repeats=repeats, clock=clock_of(device))
    worker.backend.close()
    # Do not compare what the sides return for padding.
    error = float(((found["worker"] - found["plain"]) * batch["token_mask"][:, 1:]).abs().max())
    assert error < TOLERANCE[device], f"log-probabilities differ by {error:.2e}"
    return spent, error


def _plain(model: Any, ids: Any, device: str) -> Any:
    """Return the log-probabilities [rows, S-1] of one micro-batch."""
    import torch

    # On a GPU the worker computes in bfloat16.
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
