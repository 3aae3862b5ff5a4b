"""Rules that determine the arguments of each worker in a call of a worker group. Plain functions without
Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.distributed.named_sharding import NamedSharding
from megarl.errors import BatchError, ConfigError


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """A call of one worker: its index, its keyword arguments, and whether its return value is part of the
    result."""

    worker: int
    kwargs: Mapping[str, object]
    returns: bool = True


def refuse_positional(method: str, positional: Sequence[Any]) -> None:
    """Reject positional arguments. Keywords name the data, so that nothing is sharded by mistake.

    Raises:
        BatchError: (also an AssertionError) there are positional arguments.
    """
    if positional:
        raise BatchError(
            f"{method}: {len(positional)} positional arguments; 0 are accepted, only keyword arguments. "
            "Fix: name them"
        )


def workers_on_first_of(
    sharding: NamedSharding | None, world_size: int, axes: Sequence[str] | None
) -> list[int]:
    """Return the indices of the workers whose coordinate on each of ``axes`` is 0; without axes, of all
    workers.

    Raises:
        ConfigError: (a ValueError) an axis is unknown, or there is no sharding.
    """
    if not axes:
        return list(range(world_size))
    known = _require(sharding)
    _check_axes(known, axes)
    return [worker for worker in range(world_size) if _is_first(known.get_worker_coords(worker), axes)]


def _is_first(coordinates: Mapping[str, int], axes: Iterable[str]) -> bool:
    return all(coordinates[axis] == 0 for axis in axes)


def plan_multiple_data(
    workers: Sequence[int], common_kwargs: Mapping[str, object], lists: Mapping[str, Sequence[Any]]
) -> list[WorkerCall]:
    """Give the i-th of ``workers`` item i of every list, and ``common_kwargs``.

    Raises:
        BatchError: a list does not have one item per worker. It is also an AssertionError, as NeMo-RL raises.
    """
    _check_distinct(common_kwargs, lists)
    for name, values in lists.items():
        _check_length(name, values, len(workers), f"one item for each of the {len(workers)} called workers")
    calls: list[WorkerCall] = []
    for index, worker in enumerate(workers):
        own = {name: values[index] for name, values in lists.items()}
        calls.append(WorkerCall(worker, {**own, **common_kwargs}))
    return calls


def plan_sharded_data(
    sharding: NamedSharding | None,
    *,
    in_sharded_axes: Sequence[str],
    replicate_on_axes: Sequence[str],
    output_is_replicated: Sequence[str],
    dummy_calls_on_free_axes: bool,
    common_kwargs: Mapping[str, object],
    nested: Mapping[str, object],
) -> list[WorkerCall]:
    """Give every worker its shard of the nested lists.

    A value ``v`` of ``nested`` is indexed as ``v[c0][c1]...`` with the worker's coordinates on
    ``in_sharded_axes``. Workers along ``replicate_on_axes`` get the same object. On any other axis (a free
    axis), only workers at coordinate 0 get data. The others are not called or, with
    ``dummy_calls_on_free_axes``, are called with None for every value. The result consists of the return
    values of workers with coordinate 0 on all of ``output_is_replicated`` and on all free axes.

    Raises:
        ConfigError: (a ValueError) there is no sharding, an axis is unknown, or an axis is both sharded and
            replicated.
        BatchError: (also an AssertionError) the length of a list is not the size of its axis.
    """
    known = _require(sharding)
    _check_axes(known, [*in_sharded_axes, *replicate_on_axes, *output_is_replicated])
    both = sorted(set(in_sharded_axes) & set(replicate_on_axes))
    if both:
        raise ConfigError(
            f"axes {both} are in in_sharded_axes and in replicate_on_axes: at most one is possible. Fix: "
            "drop one"
        )
    _check_distinct(common_kwargs, nested)
    free_axes = set(known.names).difference(in_sharded_axes, replicate_on_axes)
    calls: list[WorkerCall] = []
    for worker in range(known.size):
        coordinates = known.get_worker_coords(worker)
        if _is_first(coordinates, free_axes):
            shard = {
                name: _shard(name, value, known, in_sharded_axes, coordinates)
                for name, value in nested.items()
            }
            returns = _is_first(coordinates, output_is_replicated)
            calls.append(WorkerCall(worker, {**shard, **common_kwargs}, returns))
        elif dummy_calls_on_free_axes:
            calls.append(WorkerCall(worker, {**dict.fromkeys(nested), **common_kwargs}, False))
    return calls


def _require(sharding: NamedSharding | None) -> NamedSharding:
    if sharding is None:
        raise ConfigError(
            "sharding_annotations = None: axes need a NamedSharding. Fix: pass sharding_annotations to "
            "RayWorkerGroup"
        )
    return sharding


def _check_axes(sharding: NamedSharding, axes: Sequence[str]) -> None:
    unknown = sorted(set(axes).difference(sharding.names))
    if unknown:
        raise ConfigError(
            f"axes {unknown} not found in sharding annotations, which have {sharding.names}. Fix: correct "
            "the names"
        )


def _check_distinct(common_kwargs: Mapping[str, object], own: Mapping[str, object]) -> None:
    both = sorted(set(common_kwargs) & set(own))
    if both:
        raise BatchError(
            f"arguments {both} are given in common_kwargs and as data: one is possible. Fix: drop one"
        )


def _shard(
    name: str, value: Any, sharding: NamedSharding, axes: Sequence[str], coordinates: Mapping[str, int]
) -> Any:
    for axis in axes:
        _check_length(name, value, sharding.get_axis_size(axis), f"one item for each index of axis '{axis}'")
        value = value[coordinates[axis]]
    return value


def _check_length(name: str, value: Any, expected: int, reason: str) -> None:
    if not isinstance(value, (list, tuple)):
        raise BatchError(
            f"argument {name!r} is a {type(value).__name__}: a list of length {expected} is needed, "
            f"{reason}. Fix: shard it first"
        )
    if len(value) != expected:
        raise BatchError(
            f"argument {name!r} has length {len(value)}: {expected} is needed, {reason}. Fix: shard it into "
            f"{expected}"
        )
