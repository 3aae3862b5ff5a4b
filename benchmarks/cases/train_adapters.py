"""A training step of low-rank adapters against a step of all weights of the same model, by one rank.

The model is wide enough that products of matrices decide. The limit is two thirds: a step of adapters has no
products for the gradients of weights, one third of the products of a step of all weights, and almost no
optimizer states.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.options import Options
from benchmarks.point import Metric, Point, sides

if TYPE_CHECKING:
    from benchmarks.timing import Spent
    from megarl.config.policy import PolicyConfig

BACKENDS = ("megatron", "dtensor")
RANK = 16
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
ROWS, LENGTH, MICRO_BATCHES = 8, 128, 2
TOKENS = ROWS * LENGTH // MICRO_BATCHES
PACKED = {"enabled": True, "train_mb_tokens": TOKENS, "logprob_mb_tokens": TOKENS}
PEFT = {"enabled": True, "dim": RANK, "alpha": 2 * RANK, "target_modules": []}


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """Yield one point for each backend and kind of micro-batches."""
    from benchmarks import tiny
    from benchmarks.ranks import Ranks
    from benchmarks.subject import Work, policy_of

    work = Work(ROWS, LENGTH, MICRO_BATCHES)
    with tempfile.TemporaryDirectory() as directory, Ranks(options.device) as ranks:
        model = tiny.save_model(Path(directory) / "model", LENGTH, **SIZES)
        for backend in BACKENDS:
            for batching, changes in (("padded", {}), ("packed", {"sequence_packing": PACKED})):
                full, adapters = (
                    policy_of(model, backend, work, device=options.device, **changes, **more)
                    for more in ({}, {"peft": PEFT})
                )
                [(spent, losses)] = ranks.run(
                    1, _compare, {"full": full, "adapters": adapters}, work, 2 if quick else 5, options.device
                )
                yield Point(
                    {"backend": backend, "batching": batching, "rank": RANK, "tokens": ROWS * LENGTH},
                    _metrics(spent, losses),
                )


def _metrics(spent: Mapping[str, Spent], losses: Mapping[str, list[float]]) -> dict[str, Metric]:
    # The first step of both reads the same weights, because an adapter begins as zero.
    first = abs(losses["full"][0] - losses["adapters"][0]) / losses["full"][0]
    assert first < 1e-5, f"first losses differ by {first:.2e}: {losses}"
    assert all(found[-1] < found[0] for found in losses.values()), f"a side did not learn: {losses}"
    return {
        **sides("step", spent["adapters"], "a step of all weights", spent["full"]),
        "loss_difference": Metric.of("relative difference of the first losses", [first]),
    }


def _compare(
    configs: Mapping[str, PolicyConfig], work: Any, repeats: int, device: str
) -> tuple[dict[str, Spent], dict[str, list[float]]]:
    """Return the times of steps of each configuration, measured alternately, and their losses."""
    from benchmarks import tiny
    from benchmarks.device import clock_of
    from benchmarks.subject import batch_of
    from benchmarks.timing import spent_in_turn
    from megarl.algorithms.loss_functions import NLLLoss
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy.batch_plan import shard_batch

    config = configs["full"]
    batch: BatchedDataDict[Any] = BatchedDataDict(batch_of(Path(config["model_name"]), work))
    # Only packed micro-batches need a plan, which is the same for both sides.
    share = shard_batch(batch, config, 1, phase="train", global_batch=work.rows).shards[0]
    workers = {side: tiny.worker_of(config) for side, config in configs.items()}
    losses: dict[str, list[float]] = {side: [] for side in configs}

    def step(side: str) -> None:
        trained = workers[side].train(data=share, loss_fn=NLLLoss())
        losses[side].append(float(trained["global_loss"]))

    actions = {side: partial(step, side) for side in configs}
    spent = spent_in_turn(actions, repeats=repeats, warm_up=2, clock=clock_of(device))
    for worker in workers.values():
        worker.backend.close()
    return spent, losses
