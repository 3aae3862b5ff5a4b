"""The environment of a result, besides the code: machine, versions, commit, load."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "megatron-core", "transformers", "ray", "numpy", "trl")


def commit() -> str:
    """Return the commit of the work tree, with ``+changes`` if tracked or new files differ from it;
    ``unknown`` without git."""
    try:
        head = _git("rev-parse", "HEAD")
        # This program writes the results, so a change of them does not change what was measured.
        changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def describe(device: str = "cpu") -> dict[str, Any]:
    """Return processor, cores, versions, device and the load of the last minute, ready for JSON."""
    # Count the cores that this process may use, which can be fewer than the machine has.
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "device": device,
        # The runner sets this number for every case (OMP_NUM_THREADS).
        "threads": 1,
        "load_before": load(),
    }


def load() -> float:
    """Return the load average of the last minute: the mean number of processes that wanted a core."""
    return round(os.getloadavg()[0], 2)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _processor() -> str:
    """Return the processor's name as the kernel knows it, with details that distinguish two processors of the
    same name."""
    wanted = ("model name", "model", "stepping")
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in wanted:
            found.setdefault(key.strip(), value.strip())
    if not found:
        return platform.processor() or platform.machine()
    return (
        f"{found.get('model name', platform.machine())} (model {found.get('model', '?')}, stepping "
        f"{found.get('stepping', '?')})"
    )
