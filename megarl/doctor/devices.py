"""Check the NVIDIA driver and GPUs, and whether torch can use them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.doctor.check import Check, Room, Verdict

ROOM = Room("devices")
GIB = 2**30
OLDEST_DRIVER = {12: "525", 13: "580"}
"""Major CUDA version -> oldest driver that supports it (CUDA release notes, "CUDA toolkit and minimum
required driver version")."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver reports it.

    Attributes:
        name: product name.
        memory: bytes; 0 if not reported.
        used: bytes in use.
        fault: error of the driver's query; empty if it succeeded.
        capability: compute capability, (9, 0) for an H100; (0, 0) if not reported.
    """

    name: str
    memory: int
    used: int
    fault: str = ""
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Driver:
    """An NVIDIA driver that works.

    Attributes:
        version: version of the driver.
        cuda: newest supported CUDA; 12080 means 12.8.
        gpus: all GPUs, also those hidden by ``CUDA_VISIBLE_DEVICES``.
    """

    version: str
    cuda: int
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class DriverFault:
    """An NVIDIA driver that is installed but does not work, with its error message."""

    text: str


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Properties of the installed torch.

    Attributes:
        cuda: CUDA version such as ``"12.8"``; None for a CPU build.
        gpus: number of GPUs that torch can use.
        kernels: result of ``torch.cuda.get_arch_list``, such as ``("sm_80", "sm_90", "compute_90")``; empty
            if unknown.
    """

    cuda: str | None
    gpus: int
    kernels: tuple[str, ...] = ()

    def serves(self, capability: tuple[int, int]) -> bool:
        """Return whether torch has kernels for a compute capability, or PTX that the driver can compile for
        it.

        An ``sm`` kernel runs on its own generation and later ones with the same major number, but with suffix
        ``a`` only on its own. PTX (``compute``) runs on all later generations, but with suffix ``f`` only on
        those with the same major number (CUDA programming guide, "Compute Capabilities").
        """
        if not self.kernels or capability == (0, 0):
            return True
        for kind, major, minor, letter in re.findall(
            r"\b(sm|compute)_(\d+)(\d)([a-z]?)\b", " ".join(self.kernels)
        ):
            built = (int(major), int(minor))
            # PTX (compute_) runs on all newer GPUs, machine code (sm_) on newer GPUs of its major version,
            # and code with the letter a on exactly one.
            reaches = (kind == "compute" and not letter) or built[0] == capability[0]
            if built == capability or (letter != "a" and built < capability and reaches):
                return True
        return False


def check_devices() -> list[Check]:
    """Check the driver, every GPU, and torch's use of the GPUs."""
    try:
        import torch

        driver = read_driver()
    except (ImportError, OSError) as error:  # OSError: a library that torch loads is missing.
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
    """Query the driver through NVML. Return its facts or its fault, or None if there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    # No driver is no fault: runs use the CPU.
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        # After an update, the loaded driver may not match its library. That is a fault, not a missing driver.
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
    # (0, 0) means unknown; ``TorchBuild.serves`` accepts it.
    capability = (0, 0)
    # These are raised if the driver or the library is too old for the query.
    with contextlib.suppress(pynvml.NVMLError, AttributeError):
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
    """Yield the checks that follow from the driver and the installed torch."""
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
    # A driver supports later minor versions of its major CUDA version too.
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
    # The driver itself uses some memory. If more than a tenth is used, another program holds it, and a run
    # may not fit.
    if gpu.used > gpu.memory // 10:
        return ROOM.warning(name, found, "nvidia-smi   (shows who uses it)")
    return ROOM.ok(name, found)
