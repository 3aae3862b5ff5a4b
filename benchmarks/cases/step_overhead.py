"""A training step of a real worker against a plain loop on transformers: same weights, data, micro-batches and optimizer.

Every backend alone, and on two ranks: tensor parallel where the backend has it, data parallel on FSDP1. With two ranks the worker has two
cores and the plain loop one; rank 0 runs both in turn while rank 1 waits.
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
# (tensor parallel, data parallel)
LAYOUTS = {"megatron": ((1, 1), (2, 1)), "dtensor": ((1, 1), (2, 1)), "fsdp1": ((1, 1), (1, 2))}


def measure(quick: bool) -> Iterator[Point]:
    """Backends x one and two ranks x micro-batches a step."""
    from benchmarks import tiny

    pool = WorkerPool()
    try:
        with tempfile.TemporaryDirectory() as directory:
            model = tiny.save_model(Path(directory) / "model")
            for backend, layouts in LAYOUTS.items():
                for tensor, data in layouts:
                    for count in (8,) if quick else (1, 2, 4, 8):
                        if count * data > tiny.ROWS:
                            continue  # less than a row for each rank
                        parameters = {"backend": backend, "tensor_parallel": tensor, "data_parallel": data, "micro_batches": count}
                        yield Point(parameters, _metrics(_measured(pool, model, backend, tensor, data, count, 2 if quick else 7)))
    finally:
        pool.close()


def _measured(pool: WorkerPool, model: Path, backend: str, tensor: int, data: int, count: int, repeats: int) -> Mapping[str, list[float]]:
    from benchmarks import tiny

    rows = tiny.ROWS // (count * data)
    config = tiny.policy_config(model, micro_batch=rows, backend=backend, tensor_parallel=tensor, ranks=tensor * data)
    measured: Mapping[str, list[float]] = pool.run(tensor * data, _compare, config, rows * data, repeats)[0]
    return measured


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


def _compare(config: PolicyConfig, bare_rows: int, repeats: int) -> dict[str, list[float]]:
    """On every rank: seconds of ``repeats`` steps after two of warm-up, and the losses of all; ``bare_rows`` at once in the bare loop."""
    import torch.distributed as dist

    from benchmarks import tiny
    from benchmarks.bare_loop import BareLoop
    from benchmarks.timing import collector_off, seconds_of
    from megarl.algorithms.loss_functions import NLLLoss
    from megarl.distributed.batched_data_dict import BatchedDataDict

    worker = tiny.worker_of(config)
    bare = BareLoop(Path(config["model_name"]), bare_rows) if dist.get_rank() == 0 else None
    batch: BatchedDataDict[Any] = BatchedDataDict(tiny.make_batch(seed=1))
    groups = worker.backend.groups
    share = batch.shard_by_batch_size(groups.data_size, batch_size=tiny.ROWS)[groups.data_rank]
    measured: dict[str, list[float]] = {"worker": [], "bare": [], "worker_losses": [], "bare_losses": []}
    warm_up = 2
    with collector_off():
        for turn in range(warm_up + repeats):
            dist.barrier()
            took = seconds_of(lambda: measured["worker_losses"].append(float(worker.train(data=share, loss_fn=NLLLoss())["global_loss"])))
            bare_took = seconds_of(lambda: measured["bare_losses"].append(bare.step(batch))) if bare is not None else 0.0
            if turn >= warm_up:
                measured["worker"].append(took)
                measured["bare"].append(bare_took)
    worker.backend.close()
    return measured
