"""GPUs, their driver, and whether torch can use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.doctor.check import Check, Verdict

ROOM = "devices"
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver sees it; memory in bytes."""

    name: str
    memory: int
    used: int


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver: its version, the newest CUDA it serves (12080 is 12.8), and its GPUs."""

    version: str
    cuda: int
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What torch was built for (``"12.8"``; None for CPUs), and how many GPUs it can use."""

    cuda: str | None
    gpus: int


def check_devices() -> list[Check]:
    """The driver, every GPU, and torch's use of them."""
    import torch

    driver = read_driver()
    return list(judge(driver, TorchBuild(torch.version.cuda, torch.cuda.device_count() if driver is not None else 0)))


def read_driver() -> Driver | None:
    """What the driver says, through NVML; None without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return Driver(pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2(), tuple(map(_gpu, handles)))
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object) -> Gpu:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(str(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used))


def judge(driver: Driver | None, torch: TorchBuild) -> Iterator[Check]:
    """What driver and torch mean for a run."""
    built = f"torch is built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPUs'}"
    if driver is None:
        fix = "" if torch.cuda is None else "install the NVIDIA driver, if this machine has a GPU"
        yield Check(ROOM, "GPU", Verdict.ABSENT, f"no NVIDIA driver; {built}; runs use the CPU over gloo", fix)
        return
    newest = f"{driver.cuda // 1000}.{driver.cuda % 1000 // 10}"
    yield Check(ROOM, "NVIDIA driver", Verdict.OK, f"{driver.version}, serves CUDA up to {newest}")
    for index, gpu in enumerate(driver.gpus):
        busy = gpu.used > gpu.memory // 10
        found = f"{gpu.name}, {gpu.memory / GIB:.0f} GiB, {gpu.used / GIB:.1f} GiB in use"
        yield Check(
            ROOM, f"GPU {index}", Verdict.WARNING if busy else Verdict.OK, found, "nvidia-smi   (shows who uses it)" if busy else ""
        )
    if torch.cuda is None and driver.gpus:
        yield Check(ROOM, "CUDA", Verdict.FAILED, f"{built}, so the GPUs lie idle", "pip install --force-reinstall torch   (a CUDA build)")
    elif torch.cuda is not None and int(torch.cuda.split(".")[0]) > driver.cuda // 1000:
        fix = f"update the driver, or install a torch for CUDA {newest} or older"
        yield Check(ROOM, "CUDA", Verdict.FAILED, f"{built}, the driver serves at most {newest}", fix)
    elif torch.gpus < len(driver.gpus):
        fix = "echo $CUDA_VISIBLE_DEVICES   (hides GPUs); python -c 'import torch; torch.cuda.init()'   (says what is wrong)"
        verdict = Verdict.WARNING if torch.gpus else Verdict.FAILED
        yield Check(ROOM, "CUDA", verdict, f"torch can use {torch.gpus} of {len(driver.gpus)} GPUs", fix)
    elif driver.gpus:
        yield Check(ROOM, "CUDA", Verdict.OK, f"{built} and uses {torch.gpus} GPUs")
