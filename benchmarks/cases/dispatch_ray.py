"""A batch handed to a worker group, against one copy of its bytes, an empty call of an actor, and bare Ray actors given the same shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.point import Metric, Point
from benchmarks.timing import cpu_in_turn, in_turn
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.named_sharding import NamedSharding
from megarl.distributed.ray_runtime import init_ray
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup

AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
LENGTH = 512
BYTES = 1_000_000, 16_000_000


class Receiver:
    """Takes a shard as ``train`` does and proves that it arrived."""

    def train(self, data: Any, scale: int) -> int:
        """Sum of the tokens times ``scale``."""
        return int(data["input_ids"].sum()) * scale

    def nothing(self) -> None:
        """An empty call."""


def measure(quick: bool) -> Iterator[Point]:
    """Workers, all of them data-parallel or in tensor-parallel pairs that share a shard."""
    torch.set_num_threads(1)
    init_ray(num_cpus=16, log_to_driver=False)
    try:
        for data, tensor in [(2, 1)] if quick else [(2, 1), (2, 2)]:
            for size in BYTES[:1] if quick else BYTES:
                metrics = _metrics(data, tensor, size, 5 if quick else 7)
                yield Point({"data_parallel": data, "tensor_parallel": tensor, "bytes": size}, metrics)
    finally:
        ray.shutdown()


def _metrics(data: int, tensor: int, size: int, repeats: int) -> dict[str, Metric]:
    cluster = RayVirtualCluster([data * tensor], use_gpus=False)
    sharding = NamedSharding(np.arange(data * tensor).reshape(1, data, 1, tensor), AXES)
    builder = RayWorkerBuilder(f"{__name__}.Receiver")
    group = RayWorkerGroup(cluster, builder, sharding_annotations=sharding, name_prefix="receiver", init_timeout_s=120)
    actors = [ray.remote(num_cpus=0)(Receiver).remote() for _ in range(data * tensor)]
    try:
        batch = _batch(size)
        actions: dict[str, Callable[[], Any]] = {
            "group": partial(_through_group, group, batch, data),
            "actors": partial(_through_actors, actors, batch, data, tensor),
            "empty_group": lambda: group.get_all_worker_results(group.run_all_workers_single_data("nothing")),
            "empty": lambda: ray.get(actors[0].nothing.remote()),
            "copy": lambda: [column.clone() for column in batch.values()],
        }
        seconds = in_turn(actions, repeats=repeats, warm_up=3)
        cpu = cpu_in_turn({name: actions[name] for name in ("group", "copy")}, repeats)
        return {
            "group_cpu": Metric.ratio("CPU seconds of one copy of the bytes", cpu["group"], cpu["copy"]),
            "group_call_over_copy": Metric.ratio("one copy of the bytes", seconds["group"], seconds["copy"]),
            "group_call": Metric.ratio("an empty call of one actor", seconds["group"], seconds["empty"]),
            "group_call_over_actors": Metric.ratio("bare actors given the same shards", seconds["group"], seconds["actors"]),
            "empty_group_call": Metric.ratio("an empty call of one actor", seconds["empty_group"], seconds["empty"]),
            "group_call_seconds": Metric.of("s", seconds["group"]),
            "empty_seconds": Metric.of("s", seconds["empty"]),
            "copy_seconds": Metric.of("s", seconds["copy"]),
            "group_cpu_seconds": Metric.of("s", cpu["group"]),
        }
    finally:
        group.shutdown(force=True)
        for actor in actors:
            ray.kill(actor)
        cluster.shutdown()


def _batch(size: int) -> BatchedDataDict[Any]:
    """About so many bytes: token ids, mask and lengths, without padding."""
    rows = size // (LENGTH * 12 + 8) // 4 * 4
    ids = torch.arange(rows * LENGTH).reshape(rows, LENGTH) % 32_000
    return BatchedDataDict({"input_ids": ids, "token_mask": torch.ones(rows, LENGTH), "input_lengths": torch.full((rows,), LENGTH)})


def _check(sums: list[int], batch: BatchedDataDict[Any]) -> None:
    expected = int(batch["input_ids"].sum()) * 3
    assert sum(sums) == expected, f"workers summed {sum(sums)}, expected {expected}"


def _through_group(group: RayWorkerGroup, batch: BatchedDataDict[Any], data: int) -> None:
    future = group.run_all_workers_sharded_data(
        "train",
        data=batch.shard_by_batch_size(data),
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=["pipeline_parallel", "context_parallel", "tensor_parallel"],
        output_is_replicated=["pipeline_parallel", "context_parallel", "tensor_parallel"],
        common_kwargs={"scale": 3},
    )
    _check(group.get_all_worker_results(future), batch)


def _through_actors(actors: list[Any], batch: BatchedDataDict[Any], data: int, tensor: int) -> None:
    shards = batch.shard_by_batch_size(data)
    futures = [actor.train.remote(data=shards[rank // tensor], scale=3) for rank, actor in enumerate(actors)]
    _check(ray.get(futures)[::tensor], batch)
