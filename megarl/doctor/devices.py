"""Checks of GPUs, their driver, and whether torch can use them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.doctor.check import Check, Room, Verdict

ROOM = Room("devices")
GIB = 2**30
OLDEST_DRIVER = {12: "525", 13: "580"}
"""Oldest driver that supports a major version of CUDA (CUDA release notes, "CUDA toolkit and minimum required
driver version")."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver reports it. Memory is in bytes, 0 if the driver does not report it. ``fault`` is
    the reason why the driver cannot query the GPU.

    ``capability`` is the compute capability, for example (9, 0) for an H100; (0, 0) if the driver does not
    report it.
    """

    name: str
    memory: int
    used: int
    fault: str = ""
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver: its version, the newest CUDA that it supports (12080 is 12.8), and its GPUs."""

    version: str
    cuda: int
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class DriverFault:
    """A driver that is present but does not work, with its error message."""

    text: str


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The CUDA version of torch (``"12.8"``; None for CPUs), the number of GPUs that it can use, and the
    architectures of its kernels.

    ``kernels`` has the names of ``torch.cuda.get_arch_list``, for example ``("sm_80", "sm_90",
    "compute_90")``; empty if torch reports none.
    """

    cuda: str | None
    gpus: int
    kernels: tuple[str, ...] = ()

    def serves(self, capability: tuple[int, int]) -> bool:
        """Return whether this torch has kernels for a GPU of that compute capability, or code that the driver
        can compile for it.

        Kernels run on their own generation and on later ones of the same major number. Kernels whose name
        ends in an a run on their own generation only. Code that the driver compiles runs on all later
        generations, unless its name ends in an f (CUDA programming guide, "Compute Capabilities").
        """
        if not self.kernels or capability == (0, 0):
            return True
        for kind, major, minor, letter in re.findall(
            r"\b(sm|compute)_(\d+)(\d)([a-z]?)\b", " ".join(self.kernels)
        ):
            built = (int(major), int(minor))
            reaches = (kind == "compute" and not letter) or built[0] == capability[0]
            if built == capability or (letter != "a" and built < capability and reaches):
                return True
        return False


def check_devices() -> list[Check]:
    """Check the driver, every GPU, and torch's use of them."""
    try:
        import torch

        driver = read_driver()
    except (ImportError, OSError) as error:  # OSError means that a library that torch loads is missing.
        found = f"cannot be queried: {' '.join(str(error).split())}"
        return [
            ROOM.failed(
                "GPU", found, "pip install -c constraints-gpu.txt --force-reinstall torch nvidia-ml-py"
            )
        ]
    gpus = torch.cuda.device_count() if isinstance(driver, Driver) else 0
    kernels = tuple(torch.cuda.get_arch_list()) if gpus else ()
    return list(judge(driver, TorchBuild(torch.version.cuda, gpus, kernels)))


def read_driver() -> Driver | DriverFault | None:
    """Query the driver through NVML, and return its facts or its fault; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    # A machine without a driver has no fault: runs use its CPU.
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        # A driver that does not respond is a fault rather than absent: after an update it may not match its
        # library.
        return DriverFault(str(error))
    try:
        # NVML also lists GPUs that CUDA_VISIBLE_DEVICES hides from torch.
        gpus = tuple(map(_gpu, range(pynvml.nvmlDeviceGetCount())))
        return Driver(pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2(), gpus)
    except pynvml.NVMLError as error:
        return DriverFault(str(error))
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    import pynvml

    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = str(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError as error:
        return Gpu("", 0, 0, str(error))
    capability = (0, 0)
    with contextlib.suppress(
        pynvml.NVMLError, AttributeError
    ):  # The driver or the library may be too old for this query.
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = (int(major), int(minor))
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError_NotSupported:  # It shares the memory of the host.
        return Gpu(name, 0, 0, capability=capability)
    except pynvml.NVMLError as error:
        return Gpu(name, 0, 0, str(error), capability)
    return Gpu(name, int(memory.total), int(memory.used), capability=capability)


def judge(driver: Driver | DriverFault | None, torch: TorchBuild) -> Iterator[Check]:
    """Yield the checks that follow from the driver and the torch build."""
    built = f"torch is built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPUs'}"
    if isinstance(driver, DriverFault):
        fix = (
            "nvidia-smi   (reports the same); after an update of the driver: reboot, or reload its "
            "kernel module"
        )
        yield ROOM.failed("NVIDIA driver", driver.text, fix)
        return
    if driver is None:
        fix = "" if torch.cuda is None else "install the NVIDIA driver, if this machine has a GPU"
        yield ROOM.absent("GPU", f"no NVIDIA driver; {built}; runs use the CPU over gloo", fix)
        return
    newest = f"{driver.cuda // 1000}.{driver.cuda % 1000 // 10}"
    yield ROOM.ok("NVIDIA driver", f"{driver.version}, supports CUDA up to {newest}")
    if not driver.gpus:
        yield ROOM.absent("GPU", f"the driver sees none; {built}; runs use the CPU over gloo")
        return
    for index, gpu in enumerate(driver.gpus):
        yield _judge_gpu(index, gpu)
    if torch.cuda is None:
        yield ROOM.failed(
            "CUDA",
            f"{built}, so the GPUs are unused",
            "pip install -c constraints-gpu.txt --force-reinstall torch   (a CUDA build)",
        )
    # Compare only major versions: within one, a driver also supports later minor versions.
    elif int(torch.cuda.split(".")[0]) > driver.cuda // 1000:
        major = int(torch.cuda.split(".")[0])
        driver_wanted = f" to {OLDEST_DRIVER[major]} or newer" if major in OLDEST_DRIVER else ""
        fix = (
            f"update the driver{driver_wanted}, or install a torch for CUDA {newest} or older (and what "
            "was built for it: vLLM, NCCL)"
        )
        yield ROOM.failed("CUDA", f"{built}, the driver supports at most {newest}", fix)
    elif strange := [gpu for gpu in driver.gpus if not torch.serves(gpu.capability)]:
        (major, minor), has = strange[0].capability, ", ".join(torch.kernels)
        found = (
            f"{built}, without kernels for {strange[0].name} (compute capability {major}.{minor}); it "
            f"has {has}"
        )
        yield ROOM.failed(
            "CUDA", found, "install a torch whose CUDA supports this GPU; CUDA 13 starts at 7.5"
        )
    elif torch.gpus < len(driver.gpus):
        fix = (
            "echo $CUDA_VISIBLE_DEVICES   (hides GPUs); python -c 'import torch; "
            "torch.cuda.init()'   (shows the error)"
        )
        verdict = Verdict.WARNING if torch.gpus else Verdict.FAILED
        yield ROOM.of(verdict, "CUDA", f"torch can use {torch.gpus} of {len(driver.gpus)} GPUs", fix)
    else:
        yield ROOM.ok("CUDA", f"{built} and uses {torch.gpus} GPUs")


def _judge_gpu(index: int, gpu: Gpu) -> Check:
    name = f"GPU {index}"
    if gpu.fault:
        return ROOM.warning(
            name,
            " ".join(f"{gpu.name} {gpu.fault}".split()),
            "nvidia-smi; dmesg | grep NVRM   (shows the reason)",
        )
    if not gpu.memory:
        return ROOM.ok(name, f"{gpu.name}, uses the memory of the host")
    found = f"{gpu.name}, {gpu.memory / GIB:.0f} GiB, {gpu.used / GIB:.1f} GiB in use"
    # A driver itself uses some memory. More than a tenth belongs to another program, so that a run may not
    # fit.
    if gpu.used > gpu.memory // 10:
        return ROOM.warning(name, found, "nvidia-smi   (shows who uses it)")
    return ROOM.ok(name, found)
