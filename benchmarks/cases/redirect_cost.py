"""What Megatron-Core's CUDA literals cost on a CPU: a redirected torch call against a plain one, and the share of a training step.

The share is the redirected calls of a step, counted by kind, times what the redirection adds to one, over the time of the step.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import tiny
from benchmarks.point import Metric, Point
from benchmarks.timing import collector_off, in_turn, seconds_of
from megarl.models.megatron import cuda_redirect
from megarl.parity.pool import WorkerPool

if TYPE_CHECKING:
    from megarl.models.policy import PolicyConfig

CALLS = 5000


def measure(quick: bool) -> Iterator[Point]:
    """Single calls of three kinds, then steps of 1 and 8 micro-batches on one rank."""
    assert cuda_redirect.needed(), "this process has CUDA: nothing is redirected here"
    torch.set_num_threads(1)
    added: dict[str, float] = {}
    for name, call in _calls().items():
        seconds = in_turn({"plain": partial(_plain, call), "redirected": partial(_redirected, call)}, repeats=3 if quick else 15)
        extra = [1e6 * (one - other) / CALLS for one, other in zip(seconds["redirected"], seconds["plain"], strict=True)]
        added[name] = statistics.median(extra)
        ratio = Metric.ratio("a plain call", seconds["redirected"], seconds["plain"])
        yield Point({"call": name}, {"redirected": ratio, "added": Metric.of("microseconds a call", extra)})
    pool = WorkerPool()
    try:
        with tempfile.TemporaryDirectory() as directory:
            model = tiny.save_model(Path(directory) / "model")
            for count in (8,) if quick else (1, 8):
                config = tiny.policy_config(model, micro_batch=tiny.ROWS // count, tensor_parallel=1)
                measured = pool.run(1, _steps, config, 2 if quick else 7)[0]
                yield Point({"micro_batches": count}, _share(measured, added))
    finally:
        pool.close()


def _calls() -> dict[str, Callable[[], Any]]:
    """Cheap calls, so that what is added shows. Half of what Megatron's loops ask of a tensor is a property."""
    one, other = torch.zeros(4), torch.ones(4)
    return {"property": lambda: one.shape, "operation": lambda: torch.add(one, other), "constructor": lambda: torch.empty(1, device="cpu")}


def _plain(call: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        call()


def _redirected(call: Callable[[], Any]) -> None:
    with cuda_redirect.cuda_literals():
        _plain(call)


def _share(measured: Mapping[str, list[float]], added: Mapping[str, float]) -> dict[str, Metric]:
    seconds = measured["seconds"]
    properties, others = statistics.median(measured["properties"]), statistics.median(measured["others"])
    cost = 1e-6 * (properties * added["property"] + others * added["operation"])
    return {
        "redirected_properties": Metric.of("calls a step", measured["properties"]),
        "redirected_others": Metric.of("calls a step", measured["others"]),
        "share_of_step": Metric.of("ratio to the step", [cost / step for step in seconds]),
        "step_seconds": Metric.of("s", seconds),
    }


def _steps(config: PolicyConfig, repeats: int) -> dict[str, list[float]]:
    """In a worker process: seconds of plain steps, then redirected calls of as many steps; after two of warm-up each."""
    from megarl.algorithms.loss_functions import NLLLoss
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker

    worker = MegatronPolicyWorker(config, None, init_reference_model=False)
    batch: BatchedDataDict[Any] = BatchedDataDict(tiny.make_batch(seed=1))
    step = partial(worker.train, data=batch, loss_fn=NLLLoss())
    with collector_off():
        seconds = [seconds_of(step) for _ in range(2 + repeats)][2:]
    original = cuda_redirect.CudaLiterals
    measured: dict[str, list[float]] = {"seconds": seconds, "properties": [], "others": []}
    setattr(cuda_redirect, "CudaLiterals", _Counting)  # noqa: B010
    try:
        for _ in range(repeats):
            _Counting.properties = _Counting.others = 0
            step()
            measured["properties"].append(_Counting.properties)
            measured["others"].append(_Counting.others)
    finally:
        setattr(cuda_redirect, "CudaLiterals", original)  # noqa: B010
        worker.backend.close()
    return measured


class _Counting(cuda_redirect.CudaLiterals):
    """Counts what it redirects."""

    properties = 0
    others = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            _Counting.properties += 1
        else:
            _Counting.others += 1
        return super().__torch_function__(func, types, args, kwargs)
