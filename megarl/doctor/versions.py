"""Check installed versions against megarl's package metadata, and the machine's processors, memory and
limits."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from megarl import __version__
from megarl.config.engines import ENGINES, engine_kind
from megarl.distributed import nvml
from megarl.doctor.check import Check, Room, Verdict
from megarl.env import DISTRIBUTION, installation, installed_version

ROOM = Room("versions")
SHOWN = ("torch", "megatron-core", "transformers", "ray")
"""Packages that are always reported; others only if they are missing or too old."""
DEPRECATES_GPT_MODEL = Version("0.19")
GPT_MODEL = (
    " (deprecates its GPTModel, which works; policy.megatron_cfg.model_class: hybrid trains the "
    "HybridModel that replaces it)"
)
_SLURM_S = 20.0


def check_versions() -> Iterator[Check]:
    """Yield the checks of Python, megarl, required packages, optional packages and Slurm."""
    yield ROOM.ok("python", platform.python_version())
    yield ROOM.ok("megarl", __version__)
    required = [requirement for requirement in requirements_of(DISTRIBUTION) if applies(requirement)]
    for name in SHOWN:
        if name not in {requirement.name for requirement in required}:
            required.append(Requirement(name))
    for requirement in sorted(required, key=lambda one: (one.name not in SHOWN, one.name)):
        check = check_package(requirement)
        if requirement.name in SHOWN or check.verdict is not Verdict.OK:
            yield check
    what_for = "GPU kernels; without it Megatron runs on the portable layers"
    # Its torch extension is compiled at installation. With build isolation, pip would compile it against the
    # newest torch, not the installed one.
    yield _optional("Transformer Engine", ("transformer-engine",), "te", what_for, "--no-build-isolation ")
    for kind in map(engine_kind, ENGINES):
        what_for = "a faster engine for generation; without it the policy generates itself"
        yield _optional(kind.title, kind.distributions, kind.extra.split()[0], what_for)
    yield check_slurm()


def constraints_file() -> str:
    """Return the repository's file with tested versions for machines like this one (GPU or CPU)."""
    return "constraints-gpu.txt" if nvml.count_devices() else "constraints-cpu.txt"


def check_package(requirement: Requirement) -> Check:
    """Check that a package is installed in a required version."""
    version = installed_version(requirement.name)
    fix = f"pip install -c {constraints_file()} '{requirement.name}{requirement.specifier}'"
    if version is None:
        return ROOM.failed(requirement.name, "not installed", fix)
    # A specifier excludes pre-releases by default, but the installed version may be one.
    if not requirement.specifier.contains(version, prereleases=True):
        return ROOM.failed(requirement.name, f"{version}, {requirement.specifier} is required", fix)
    note = (
        GPT_MODEL if requirement.name == "megatron-core" and Version(version) >= DEPRECATES_GPT_MODEL else ""
    )
    return ROOM.ok(requirement.name, f"{version}{note}")


def check_slurm(timeout_s: float = _SLURM_S) -> Check:
    """Check that ``sbatch`` runs on this machine.

    Args:
        timeout_s: seconds until it must have replied.
    """
    program = shutil.which("sbatch")
    if program is None:
        fix = "run this on a login node of the cluster; to try it on one machine: apt-get install slurm-wlm"
        return ROOM.absent("Slurm", "no sbatch on PATH (only needed to submit jobs)", fix)
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return ROOM.warning("Slurm", f"{program} --version: {error}", "scontrol ping")
    if answer.returncode:
        return ROOM.warning(
            "Slurm", f"{program} --version failed: {' '.join(answer.stderr.split())[:120]}", "scontrol ping"
        )
    return ROOM.ok("Slurm", answer.stdout.strip())


def requirements_of(name: str) -> list[Requirement]:
    """Return the requirements of an installed package, with those of its extras; empty if it is not
    installed. Requirements that cannot be parsed are skipped."""
    found = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for text in importlib.metadata.requires(name) or ():
            with contextlib.suppress(InvalidRequirement):
                found.append(Requirement(text))
    return found


def applies(requirement: Requirement) -> bool:
    """Return whether a requirement applies on this machine, without extras."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _optional(title: str, packages: Sequence[str], extra: str, what_for: str, options: str = "") -> Check:
    for name in packages:
        version = installed_version(name)
        if version is not None:
            return ROOM.ok(title, f"{version} ({name})")
    fix = f"{installation(extra, options)}   (on a machine with an NVIDIA GPU)"
    return ROOM.absent(title, f"not installed ({what_for})", fix)


SYSTEM = Room("system")
GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = 2 * GIB
"""Bytes for a refit buffer and some Ray objects."""
LEAST_OPEN_FILES = 4096
"""Open files that a driver needs: Ray has several sockets per worker; data loaders and checkpoint shards need
files."""
LEAST_LOCKED_MEMORY = 64 * GIB
"""Bytes of lockable memory that NCCL needs with InfiniBand. It registers its buffers, and GPUDirect those of
torch, and registered memory counts as locked."""
INFINIBAND = Path("/sys/class/infiniband")


def check_system() -> Iterator[Check]:
    """Yield the checks of processors, memory and limits."""
    memory = psutil.virtual_memory()
    yield SYSTEM.ok("processors", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable")
    yield SYSTEM.ok("memory", f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB")
    usage = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    yield judge_shared_memory(usage.total if usage else 0, usage.free if usage else 0)
    yield judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield judge_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], infiniband_devices())


def judge_shared_memory(size: int, free: int) -> Check:
    """Check that ``/dev/shm`` is large enough for refits and Ray.

    Args:
        size: total bytes.
        free: free bytes.
    """
    found = f"{size / GIB:.2f} GiB"
    if free >= LEAST_SHARED_MEMORY:
        return SYSTEM.ok(str(SHARED_MEMORY), found)
    if size >= LEAST_SHARED_MEMORY:
        found = (
            f"{free / GIB:.2f} of {found} free, at least {LEAST_SHARED_MEMORY // GIB} GiB are "
            "needed for refits and Ray"
        )
        return SYSTEM.warning(
            str(SHARED_MEMORY),
            found,
            f"ls -lt {SHARED_MEMORY}   (files left by killed programs may be deleted)",
        )
    fix = f"mount -o remount,size=8G {SHARED_MEMORY}   (Docker: --shm-size=8g)"
    return SYSTEM.warning(
        str(SHARED_MEMORY),
        f"{found}, at least {LEAST_SHARED_MEMORY // GIB} GiB are needed for refits and Ray",
        fix,
    )


def judge_open_files(soft: int, hard: int) -> Check:
    """Check that the limit on open files suffices for the driver of many workers.

    Args:
        soft: current limit.
        hard: highest value to which the user may raise it.
    """
    infinite = resource.RLIM_INFINITY
    if soft == infinite or soft >= LEAST_OPEN_FILES:
        return SYSTEM.ok("open files", "no limit" if soft == infinite else f"{soft:,}")
    # Without root, a process may raise its soft limit only up to the hard limit.
    reachable = 65536 if hard == infinite else min(hard, 65536)
    fix = (
        f"ulimit -n {reachable}"
        if reachable >= LEAST_OPEN_FILES
        else "raise nofile in /etc/security/limits.conf, then log in again"
    )
    return SYSTEM.warning("open files", f"{soft:,}, at least {LEAST_OPEN_FILES:,} are needed", fix)


def infiniband_devices() -> list[str]:
    """Return the InfiniBand and RoCE devices of this host."""
    return sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def judge_locked_memory(soft: int, infiniband: Sequence[str]) -> Check:
    """Check that NCCL may register memory with InfiniBand devices.

    Args:
        soft: limit on locked memory in bytes.
        infiniband: devices; without any, every limit passes.
    """
    name, infinite = "locked memory", resource.RLIM_INFINITY
    found = "no limit" if soft == infinite else f"{soft / 2**20:,.0f} MiB"
    # Only RDMA registers memory, which locks it.
    if not infiniband:
        return SYSTEM.ok(name, f"{found}; no InfiniBand here")
    if soft == infinite or soft >= LEAST_LOCKED_MEMORY:
        return SYSTEM.ok(name, f"{found}, for {', '.join(infiniband)}")
    fix = (
        "ulimit -l unlimited   (Slurm: PropagateResourceLimitsExcept=MEMLOCK, and LimitMEMLOCK=infinity for "
        "slurmd; "
        "Docker: --ulimit memlock=-1; else memlock in /etc/security/limits.conf)"
    )
    return SYSTEM.warning(name, f"{found}, NCCL over {', '.join(infiniband)} needs no limit", fix)
