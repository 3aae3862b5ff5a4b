"""GPUs, their driver, and whether torch can use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.doctor.check import Check, Verdict

ROOM = "devices"
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver sees it; memory in bytes, 0 where the driver does not say it. ``fault`` is why it cannot be asked."""

    name: str
    memory: int
    used: int
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver: its version, the newest CUDA it serves (12080 is 12.8), and its GPUs."""

    version: str
    cuda: int
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class DriverFault:
    """A driver that is there and does not answer, in its own words."""

    text: str


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Torch build: what torch was built for (``"12.8"``; None for CPUs), and how many GPUs it can use."""

    cuda: str | None
    gpus: int


def check_devices() -> list[Check]:
    """The driver, every GPU, and torch's use of them."""
    try:
        import torch

        driver = read_driver()
    except (ImportError, OSError) as error:  # OSError: a library that torch loads is missing
        found = f"cannot be looked for: {' '.join(str(error).split())}"
        return [Check(ROOM, "GPU", Verdict.FAILED, found, "pip install --force-reinstall torch nvidia-ml-py")]
    return list(judge(driver, TorchBuild(torch.version.cuda, torch.cuda.device_count() if isinstance(driver, Driver) else 0)))


def read_driver() -> Driver | DriverFault | None:
    """Return what the driver says, through NVML; None without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        return DriverFault(str(error))
    try:
        gpus = tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
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
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError_NotSupported:  # it shares that of the host
        return Gpu(name, 0, 0)
    except pynvml.NVMLError as error:
        return Gpu(name, 0, 0, str(error))
    return Gpu(name, int(memory.total), int(memory.used))


def judge(driver: Driver | DriverFault | None, torch: TorchBuild) -> Iterator[Check]:
    """Return what driver and torch mean for a run."""
    built = f"torch is built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPUs'}"
    if isinstance(driver, DriverFault):
        fix = "nvidia-smi   (says the same); after an update of the driver: reboot, or load its kernel module anew"
        yield Check(ROOM, "NVIDIA driver", Verdict.FAILED, driver.text, fix)
        return
    if driver is None:
        fix = "" if torch.cuda is None else "install the NVIDIA driver, if this machine has a GPU"
        yield Check(ROOM, "GPU", Verdict.ABSENT, f"no NVIDIA driver; {built}; runs use the CPU over gloo", fix)
        return
    newest = f"{driver.cuda // 1000}.{driver.cuda % 1000 // 10}"
    yield Check(ROOM, "NVIDIA driver", Verdict.OK, f"{driver.version}, serves CUDA up to {newest}")
    if not driver.gpus:
        yield Check(ROOM, "GPU", Verdict.ABSENT, f"the driver sees none; {built}; runs use the CPU over gloo")
        return
    yield from (_judge_gpu(index, gpu) for index, gpu in enumerate(driver.gpus))
    if torch.cuda is None:
        yield Check(ROOM, "CUDA", Verdict.FAILED, f"{built}, so the GPUs lie idle", "pip install --force-reinstall torch   (a CUDA build)")
    elif int(torch.cuda.split(".")[0]) > driver.cuda // 1000:
        fix = f"update the driver, or install a torch for CUDA {newest} or older"
        yield Check(ROOM, "CUDA", Verdict.FAILED, f"{built}, the driver serves at most {newest}", fix)
    elif torch.gpus < len(driver.gpus):
        fix = "echo $CUDA_VISIBLE_DEVICES   (hides GPUs); python -c 'import torch; torch.cuda.init()'   (says what is wrong)"
        verdict = Verdict.WARNING if torch.gpus else Verdict.FAILED
        yield Check(ROOM, "CUDA", verdict, f"torch can use {torch.gpus} of {len(driver.gpus)} GPUs", fix)
    else:
        yield Check(ROOM, "CUDA", Verdict.OK, f"{built} and uses {torch.gpus} GPUs")


def _judge_gpu(index: int, gpu: Gpu) -> Check:
    name = f"GPU {index}"
    if gpu.fault:
        return Check(ROOM, name, Verdict.WARNING, " ".join(f"{gpu.name} {gpu.fault}".split()), "nvidia-smi; dmesg | grep NVRM   (says why)")
    if not gpu.memory:
        return Check(ROOM, name, Verdict.OK, f"{gpu.name}, memory of the host")
    found = f"{gpu.name}, {gpu.memory / GIB:.0f} GiB, {gpu.used / GIB:.1f} GiB in use"
    if gpu.used > gpu.memory // 10:
        return Check(ROOM, name, Verdict.WARNING, found, "nvidia-smi   (shows who uses it)")
    return Check(ROOM, name, Verdict.OK, found)
