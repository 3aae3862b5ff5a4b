"""Memory of a training step on each rank as more context-parallel ranks share one long sequence, against that of one rank alone.

Two measures, each of the worst rank: what the kernel says the process needed at its worst moment beyond what it held between steps (DTensor
holds no gradients between steps and gathers weights inside them; Megatron keeps both), and the bytes that autograd kept for the backward
pass, which depend on no allocator. Activations can fall to one over the ranks; gathered keys and values do not fall.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.point import Metric, Point
from megarl.parity.pool import WorkerPool

if TYPE_CHECKING:
    from megarl.models.policy import PolicyConfig

# float32, the sums in another order, carried on through the optimizer steps of all repeats
TOLERANCE = 1e-5
WAYS = (("all_gather", 2), ("all_gather", 4), ("p2p", 2), ("p2p", 4))


def measure(quick: bool) -> Iterator[Point]:
    """Megatron and DTensor x gathered and circulating keys and values x 1, 2 and 4 ranks."""
    from benchmarks import tiny

    # of the resident memory of four ranks on fewer cores one peak in ten is a tenth too large
    length, repeats = (128, 1) if quick else (1536, 3)
    pool = WorkerPool()
    try:
        with tempfile.TemporaryDirectory() as directory:
            model = tiny.save_model(Path(directory) / "model", length)
            for backend in ("megatron", "dtensor"):
                alone = pool.run(1, _train, _config(model, backend, length, 1, None), length, repeats)
                yield _point(backend, "none", length, alone, alone)
                for way, ranks in WAYS:
                    measured = pool.run(ranks, _train, _config(model, backend, length, ranks, way), length, repeats)
                    yield _point(backend, way, length, measured, alone)
    finally:
        pool.close()


def _config(model: Path, backend: str, length: int, ranks: int, way: str | None) -> dict[str, Any]:
    from benchmarks import tiny

    context = {"context_parallel_size": ranks, "context_parallel_comm_type": way}
    batch = {"train_global_batch_size": 1, "max_total_sequence_length": length}
    return tiny.policy_config(model, micro_batch=1, backend=backend, ranks=ranks, **batch, **{f"{backend}_cfg": context})


def _point(
    backend: str, way: str, length: int, measured: Sequence[Mapping[str, list[float]]], alone: Sequence[Mapping[str, list[float]]]
) -> Point:
    """Of the rank that needed most."""
    difference = max(abs(here - there) / there for rank in measured for here, there in zip(rank["losses"], alone[0]["losses"], strict=True))
    assert difference < TOLERANCE, f"losses differ by {difference:.2e}: {measured} and {alone}"
    metrics = {"loss_difference": Metric.of("largest relative difference of the losses of a step", [difference])}
    for name in ("peak", "saved"):
        worst, reference = _worst(measured, name), _worst(alone, name)
        metrics[f"{name}_ratio"] = Metric.ratio("one rank alone", worst, reference)
        metrics[name] = Metric.of("MiB", worst)
    return Point({"backend": backend, "communication": way, "context_parallel": len(measured), "tokens": length}, metrics)


def _worst(ranks: Sequence[Mapping[str, list[float]]], name: str) -> list[float]:
    return [max(samples) for samples in zip(*(rank[name] for rank in ranks), strict=True)]


def _train(config: PolicyConfig, length: int, repeats: int) -> dict[str, list[float]]:
    """On every rank: MiB of ``repeats`` steps at their peak and kept for the backward pass, and the losses; one step of warm-up before."""
    import torch

    from benchmarks import tiny
    from benchmarks.memory import peak_of, saved_for_backward
    from megarl.algorithms.loss_functions import NLLLoss
    from megarl.distributed.batched_data_dict import BatchedDataDict

    worker = tiny.worker_of(config)
    ids = torch.randint(2, tiny.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    batch: BatchedDataDict[Any] = BatchedDataDict(
        {"input_ids": ids, "input_lengths": torch.tensor([length]), "token_mask": torch.ones(1, length), "sample_mask": torch.ones(1)}
    )
    measured: dict[str, list[float]] = {"peak": [], "saved": [], "losses": []}

    def step() -> None:
        measured["losses"].append(float(worker.train(data=batch, loss_fn=NLLLoss())["global_loss"]))

    step()
    for _ in range(repeats):
        measured["peak"].append(peak_of(step))
        with saved_for_backward() as saved:
            step()
        measured["saved"].append(saved.peak)
    worker.backend.close()
    return measured
