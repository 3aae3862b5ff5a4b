"""A training step of the real Megatron worker against a plain loop on transformers: same weights, data, micro-batches and optimizer.

With two tensor-parallel ranks the worker has two cores and the plain loop one; rank 0 runs both in turn while rank 1 waits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.point import Metric, Point
from tests.dist.pool import WorkerPool

if TYPE_CHECKING:
    from megarl.models.policy import PolicyConfig

# float32, the sums in another order, carried on through the optimizer steps of all repeats
TOLERANCE = 1e-5


def measure(quick: bool) -> Iterator[Point]:
    """One and two tensor-parallel ranks x micro-batches a step."""
    from benchmarks import tiny

    pool = WorkerPool()
    try:
        with tempfile.TemporaryDirectory() as directory:
            model = tiny.save_model(Path(directory) / "model")
            for ranks in (1, 2):
                for count in (8,) if quick else (1, 2, 4, 8):
                    config = tiny.policy_config(model, micro_batch=tiny.ROWS // count, tensor_parallel=ranks)
                    measured = pool.run(ranks, _compare, config, 2 if quick else 7)[0]
                    yield Point({"tensor_parallel": ranks, "micro_batches": count}, _metrics(measured))
    finally:
        pool.close()


def _metrics(measured: Mapping[str, list[float]]) -> dict[str, Metric]:
    pairs = zip(measured["worker_losses"], measured["bare_losses"], strict=True)
    difference = max(abs(one - other) / other for one, other in pairs)
    assert difference < TOLERANCE, f"losses differ by {difference:.2e}: {measured}"
    assert measured["worker_losses"][-1] < measured["worker_losses"][0], "training on one batch did not lower its loss"
    return {
        "worker_step": Metric.ratio("the bare step", measured["worker"], measured["bare"]),
        "worker_step_seconds": Metric.of("s", measured["worker"]),
        "bare_step_seconds": Metric.of("s", measured["bare"]),
        "loss_difference": Metric.of("largest relative difference of the losses of a step", [difference]),
    }


def _compare(config: PolicyConfig, repeats: int) -> dict[str, list[float]]:
    """On every rank: seconds of ``repeats`` steps after two of warm-up, and the losses of all."""
    import torch.distributed as dist

    from benchmarks import tiny
    from benchmarks.bare_loop import BareLoop
    from benchmarks.timing import collector_off, seconds_of
    from megarl.algorithms.loss_functions import NLLLoss
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker

    worker = MegatronPolicyWorker(config, None, init_reference_model=False)
    bare = BareLoop(Path(config["model_name"]), config["train_micro_batch_size"]) if dist.get_rank() == 0 else None
    batch: BatchedDataDict[Any] = BatchedDataDict(tiny.make_batch(seed=1))
    measured: dict[str, list[float]] = {"worker": [], "bare": [], "worker_losses": [], "bare_losses": []}
    warm_up = 2
    with collector_off():
        for turn in range(warm_up + repeats):
            dist.barrier()
            took = seconds_of(lambda: measured["worker_losses"].append(float(worker.train(data=batch, loss_fn=NLLLoss())["global_loss"])))
            bare_took = seconds_of(lambda: measured["bare_losses"].append(bare.step(batch))) if bare is not None else 0.0
            if turn >= warm_up:
                measured["worker"].append(took)
                measured["bare"].append(bare_took)
    worker.backend.close()
    return measured
