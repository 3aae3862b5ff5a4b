"""A training step on packed and on dynamic micro-batches against one on padded rows, with the same weights,
samples and token budget.

Lengths follow the profiles of published runs, scaled down so that the longest sequence has ``LONGEST``
tokens. Every kind of batching gets micro-batches of at most ``ROWS_AT_ONCE`` longest sequences, padding
included. The limit is the waste of padding: padded tokens over valid tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lengths import PROFILES, draw_lengths
from benchmarks.point import Metric, Point
from megarl.parity.pool import WorkerPool

if TYPE_CHECKING:
    from megarl.config.policy import PolicyConfig

LONGEST = 160
ROWS = 16
ROWS_AT_ONCE = 4
WAYS = ("padded", "dynamic", "packed")
# This allows for float32 sums in different orders.
TOLERANCE = 1e-5


def measure(quick: bool) -> Iterator[Point]:
    """Yield one point for each of the four profiles."""
    from benchmarks import tiny

    pool = WorkerPool()
    try:
        with tempfile.TemporaryDirectory() as directory:
            model = tiny.save_model(Path(directory) / "model", LONGEST)
            for name in ("short",) if quick else PROFILES:
                lengths = scaled_lengths(name)
                measured = pool.run(1, _compare, [_config(model, way) for way in WAYS], lengths, 2)[0]
                yield Point(
                    {"profile": name, "sequences": ROWS, "longest": LONGEST}, _metrics(measured, lengths)
                )
    finally:
        pool.close()


def scaled_lengths(profile: str) -> list[int]:
    """Return ``ROWS`` lengths of a profile, scaled down to at most ``LONGEST``."""
    chosen = PROFILES[profile]
    # Make every sequence at least two tokens long, because one token alone has no target.
    return [max(2, length * LONGEST // chosen.longest) for length in draw_lengths(chosen, ROWS, seed=0)]


def _config(model: Path, way: str) -> dict[str, Any]:
    from benchmarks import tiny

    budget = {
        "enabled": True,
        "train_mb_tokens": ROWS_AT_ONCE * LONGEST,
        "logprob_mb_tokens": ROWS_AT_ONCE * LONGEST,
    }
    changes: dict[str, Any] = {"train_global_batch_size": ROWS, "max_total_sequence_length": LONGEST}
    if way == "packed":
        changes["sequence_packing"] = budget
    elif way == "dynamic":
        changes["dynamic_batching"] = {**budget, "sequence_length_round": 16}
    return tiny.policy_config(model, micro_batch=ROWS_AT_ONCE, tensor_parallel=1, **changes)


def _metrics(measured: Mapping[str, Sequence[float]], lengths: Sequence[int]) -> dict[str, Metric]:
    losses = [measured[f"{way}_loss"][0] for way in WAYS]
    difference = max(abs(loss - losses[0]) / losses[0] for loss in losses)
    assert difference < TOLERANCE, f"losses differ by {difference:.2e}: {losses}"
    valid = sum(lengths)
    return {
        **{
            f"{way}_speed": Metric.ratio(
                "padded rows, valid tokens a second", measured["padded"], measured[way]
            )
            for way in WAYS[1:]
        },
        "limit": Metric.of("ratio of padded to valid tokens", [ROWS * LONGEST / valid]),
        **{
            f"{way}_tokens_per_second": Metric.of(
                "valid tokens a second", [valid / took for took in measured[way]]
            )
            for way in WAYS
        },
        "loss_difference": Metric.of("largest relative difference of the losses of a step", [difference]),
    }


def _compare(configs: Sequence[PolicyConfig], lengths: Sequence[int], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of ``repeats`` steps of each kind of batching, measured alternately after one
    warm-up step, and the loss of the first step."""
    import torch

    from benchmarks.timing import collector_off, seconds_of
    from benchmarks.tiny import VOCABULARY
    from megarl.algorithms.loss_functions import NLLLoss
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy.batch_plan import shard_batch
    from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker

    sizes = torch.tensor(lengths)
    inside = torch.arange(LONGEST)[None] < sizes[:, None]
    ids = torch.randint(2, VOCABULARY, (ROWS, LONGEST), generator=torch.Generator().manual_seed(0)) * inside
    batch: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": sizes,
            "token_mask": inside.float(),
            "sample_mask": torch.ones(ROWS),
        }
    )
    # Use one worker with the same weights for all ways of batching; it reads the way from its configuration
    # at each call.
    worker = MegatronPolicyWorker(configs[0], None, init_reference_model=False)
    shards = [shard_batch(batch, config, 1, phase="train", global_batch=ROWS).shards[0] for config in configs]
    measured: dict[str, list[float]] = {key: [] for way in WAYS for key in (way, f"{way}_loss")}
    # Compute the losses first, because a step changes the weights.
    with collector_off():
        for way, config, shard in zip(WAYS, configs, shards, strict=True):
            worker.cfg = config
            evaluated = worker.train(data=shard, loss_fn=NLLLoss(), eval_mode=True)
            measured[f"{way}_loss"].append(float(evaluated["global_loss"]))
        for turn in range(1 + repeats):
            for way, config, shard in zip(WAYS, configs, shards, strict=True):
                worker.cfg = config
                took = seconds_of(lambda shard=shard: worker.train(data=shard, loss_fn=NLLLoss()))
                if turn:
                    measured[way].append(took)
    worker.backend.close()
    return measured
