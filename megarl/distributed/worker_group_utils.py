"""Small helpers of worker groups: merging of Ray options, profiler options, thread counts, and the prefix
that names a worker in errors."""

from __future__ import annotations

import copy
import fnmatch
import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from megarl import env

RayOptions: TypeAlias = Mapping[str, Any]
"""Options of a Ray actor, or a part of them, as its decorator and its callers give them. Ray checks them."""
_SHORT_AXIS_NAMES = {
    "pipeline_parallel": "pp",
    "data_parallel": "dp",
    "context_parallel": "cp",
    "tensor_parallel": "tp",
    "expert_parallel": "ep",
    "expert_tensor_parallel": "etp",
}


def recursive_merge_options(default_options: RayOptions, extra_options: RayOptions) -> RayOptions:
    """Merge two nested option mappings. Values of ``extra_options`` override those of ``default_options``.
    The result is a deep copy.

    Ray stores the profiler option of a decorated actor class as ``runtime_env["_nsight"]``, but accepts it
    only as ``"nsight"``. It is renamed before the merge, unless ``nsight`` is also given.
    """
    default_copy = _with_public_nsight_key(default_options)
    extra_copy = _with_public_nsight_key(extra_options)
    return _merge(default_copy, extra_copy)


def _with_public_nsight_key(options: RayOptions) -> RayOptions:
    result = copy.deepcopy(dict(options))
    runtime_env = result.get("runtime_env")
    if isinstance(runtime_env, Mapping) and "_nsight" in runtime_env:
        renamed = dict(runtime_env)
        stored = renamed.pop("_nsight")
        renamed.setdefault("nsight", stored)
        result["runtime_env"] = renamed
    return result


def _merge(default: RayOptions, extra: RayOptions) -> RayOptions:
    merged = dict(default)
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def get_nsight_config_if_pattern_matches(
    worker_name: str, patterns: str | None = None, step_range: str | None = None
) -> dict[str, dict[str, str]]:
    """Return the entry of a Ray runtime environment that runs a worker under NVIDIA Nsight Systems; ``{}`` if
    no pattern matches.

    Args:
        worker_name: name of the worker or of its group, for example ``lm_policy``.
        patterns: comma-separated shell patterns (``*policy*,vllm*``); None reads
            ``MEGARL_NSYS_WORKER_PATTERNS``.
        step_range: ``start:stop`` of the profiled steps, which becomes part of the report's file name; None
            reads ``MEGARL_NSYS_PROFILE_STEP_RANGE``.
    """
    pattern_text = patterns if patterns is not None else env.text("MEGARL_NSYS_WORKER_PATTERNS", "")
    steps = step_range if step_range is not None else env.text("MEGARL_NSYS_PROFILE_STEP_RANGE", "")
    wanted = filter(None, map(str.strip, (pattern_text or "").split(",")))
    if not any(fnmatch.fnmatch(worker_name, pattern) for pattern in wanted):
        return {}
    return {
        "nsight": {
            "t": "cuda,cudnn,cublas,nvtx",
            # %p is replaced by the process id, so that every worker writes its own report.
            "o": f"'{worker_name}_{steps}_%p'",
            "stop-on-exit": "true",
            # Record only the range that DeviceRuntime.profiler_start opens.
            "capture-range": "cudaProfilerApi",
            "capture-range-end": "stop",
        }
    }


MOST_THREADS = 16
"""Maximum OpenMP threads of a rank with a GPU. Its threads only copy, tokenize and read files, so more would
be idle."""


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_of_rank(cores: int, ranks: int) -> int:
    """Return the number of OpenMP threads of a rank with a GPU: its share of the node's cores, at most
    ``MOST_THREADS``.

    Ranks on a CPU have one thread each (set by the caller), because they occupy the cores themselves.
    """
    return min(max(cores // ranks, 1), MOST_THREADS)


def format_coordinates(rank: int, coordinates: Mapping[str, int] | None, host: str) -> str:
    """Return the prefix of a worker's error messages, for example ``[pp1 dp0 cp0 tp1 node7]``; without axes,
    ``[rank3 node7]``."""
    if not coordinates:
        return f"[rank{rank} {host}]"
    axes = " ".join(f"{_SHORT_AXIS_NAMES.get(axis, axis)}{index}" for axis, index in coordinates.items())
    return f"[{axes} {host}]"
