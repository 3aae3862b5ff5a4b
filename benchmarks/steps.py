"""A training step of a worker, measured alternately with the code that a person would write instead, on all
ranks of a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.point import Metric, sides
from benchmarks.timing import Spent, over_ranks

if TYPE_CHECKING:
    from benchmarks.options import Layout
    from benchmarks.subject import Work
    from megarl.config.policy import PolicyConfig

# This allows for sums in different orders, whose differences pass through the optimizer steps of all repeats.
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}
WARM_UP = 2


@dataclass(slots=True)
class Measured:
    """Measurements of one rank.

    Attributes:
        spent: seconds by side: ``worker`` and the requested ones of ``bare`` (on the first rank) and
            ``fsdp2`` (on all ranks).
        losses: losses of every step of each side, including warm-up; for ``fsdp2``, this rank's share.
        gemm: rate of a matrix product on this rank, in operations per second.
    """

    spent: dict[str, Spent] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    gemm: float = 0.0


def compare_steps(
    config: PolicyConfig, work: Work, layout: Layout, rivals: Sequence[str], repeats: int, device: str = "cpu"
) -> Measured:
    """Measure, on every rank, alternating steps of the worker and of its rivals, from the same weights on the
    same batch."""
    import gc

    import torch.distributed as dist

    from benchmarks import tiny
    from benchmarks.device import clock_of, gemm_rate
    from benchmarks.subject import batch_of
    from benchmarks.timing import collector_off

    worker = tiny.worker_of(config)
    batch = batch_of(Path(config["model_name"]), work)
    actions: dict[str, Callable[[], float]] = {"worker": step_of(worker, batch, work.rows)}
    actions.update(_rivals(rivals, Path(config["model_name"]), batch, work, layout, device))
    measured = Measured(
        {side: Spent() for side in actions}, {side: [] for side in actions}, gemm_rate(device)
    )
    clock = clock_of(device)
    with collector_off():
        for turn in range(WARM_UP + repeats):
            for side, step in actions.items():
                # Without the barrier, a rank would also be charged for the delay of another rank.
                dist.barrier()
                with measured.spent[side].repeat(turn >= WARM_UP, clock):
                    loss = step()
                measured.losses[side].append(loss)
            # Collect garbage between repeats, while no side's clock runs.
            gc.collect()
    worker.backend.close()
    return measured


def step_of(worker: Any, batch: Mapping[str, Any], rows: int) -> Callable[[], float]:
    """Return a function that trains a worker for one step on its share of a batch, and returns the loss
    before the step."""
    from megarl.algorithms.loss_functions import NLLLoss
    from megarl.distributed.batched_data_dict import BatchedDataDict

    groups = worker.backend.groups
    data: BatchedDataDict[Any] = BatchedDataDict(batch)
    share = data.shard_by_batch_size(groups.data_size, batch_size=rows)[groups.data_rank]
    return lambda: float(worker.train(data=share, loss_fn=NLLLoss())["global_loss"])


def _rivals(
    names: Sequence[str], model: Path, batch: Mapping[str, Any], work: Work, layout: Layout, device: str
) -> dict[str, Callable[[], float]]:
    """Return the step functions of the other sides. The bare loop runs in one process; on other ranks its
    step does nothing."""
    import torch.distributed as dist

    from benchmarks.bare_loop import BareLoop, FSDP2Loop

    found: dict[str, Callable[[], float]] = {}
    if "bare" in names:
        bare = BareLoop(model, work.rows // work.micro_batches, device) if dist.get_rank() == 0 else None
        found["bare"] = (lambda: bare.step(batch)) if bare is not None else (lambda: 0.0)
    if "fsdp2" in names:
        # FSDP2 divides the rows over all ranks, whatever the worker's layout is.
        sharded = FSDP2Loop(model, max(1, work.rows // layout.ranks // work.micro_batches), device)
        found["fsdp2"] = lambda: sharded.step(batch)
    return found


def metrics_of(
    ranks: Sequence[Measured], config: Any, lengths: list[int], device: str = "cpu"
) -> dict[str, Metric]:
    """Return the ratios to the rivals, the tokens per second, and the share of the rate of matrix products.
    Equal losses are asserted."""
    from benchmarks.flops import training_flops

    worker = over_ranks([rank.spent["worker"] for rank in ranks])
    metrics: dict[str, Metric] = {}
    if "bare" in ranks[0].spent:
        metrics |= sides("step", worker, "the bare step", ranks[0].spent["bare"])
    if "fsdp2" in ranks[0].spent:
        fsdp2 = over_ranks([rank.spent["fsdp2"] for rank in ranks])
        metrics |= {
            f"fsdp2_{name}": metric
            for name, metric in sides("step", worker, "a step of torch's FSDP2", fsdp2).items()
        }
    reachable = sum(rank.gemm for rank in ranks)
    done = training_flops(config, lengths)
    metrics["tokens_per_second"] = Metric.of(
        "valid tokens a second", [sum(lengths) / took for took in worker.wall]
    )
    metrics["mfu"] = Metric.of(
        "share of the rate of matrix products on all ranks", [done / took / reachable for took in worker.wall]
    )
    metrics["gemm_gflops"] = Metric.of("GFLOP/s of a matrix product on one rank", [ranks[0].gemm / 1e9])
    return {
        **metrics,
        "loss_difference": Metric.of(
            "largest relative difference of the losses of a step", [difference(ranks, device)]
        ),
    }


def difference(ranks: Sequence[Measured], device: str = "cpu") -> float:
    """Return the largest relative difference between the sides in the loss of a step.

    Raises:
        AssertionError: losses differ by more than rounding, or training on one batch did not lower the loss.
    """
    losses = dict(ranks[0].losses)
    if "fsdp2" in losses:
        # Each of FSDP2's ranks knows only a share of the loss, but each rank of the worker knows all of it.
        losses["fsdp2"] = [sum(step) for step in zip(*(rank.losses["fsdp2"] for rank in ranks), strict=True)]
    worker = losses.pop("worker")
    found = max(
        (
            abs(one - other) / other
            for side in losses.values()
            for one, other in zip(worker, side, strict=True)
        ),
        default=0.0,
    )
    assert found < TOLERANCE[device], f"losses differ by {found:.2e}: worker {worker}, others {losses}"
    # Sides that all fail to train would agree as well, so check that the loss falls.
    assert worker[-1] < worker[0], f"training on one batch did not lower its loss: {worker}"
    return found
