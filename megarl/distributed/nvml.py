"""Identity, free memory, power and utilization of this process's GPUs, from NVIDIA's management library
(NVML).

Unlike torch's allocator, NVML counts the memory of all processes on a GPU, and its UUID of a GPU is the same
in every process. Functions take a GPU's index among those visible to this process, as torch does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl import env

MEBIBYTE = 1024 * 1024
_KERNEL_LIST = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """Current readings of a GPU.

    Attributes:
        free_mb: memory that no process has allocated, in MiB.
        power_w: power in watts; None if the GPU does not report it.
        utilization_percent: percentage of the last sampling period (up to a second) in which a kernel ran;
            None if the GPU does not report it.
    """

    free_mb: float
    power_w: float | None
    utilization_percent: float | None


@contextlib.contextmanager
def nvml_context() -> Iterator[Any]:
    """Yield the module ``pynvml``, initialized.

    Raises:
        RuntimeError: there is no NVIDIA driver, or it does not reply.
    """
    try:
        # Import it here, because most of megarl also runs on machines without an NVIDIA driver, where the
        # library cannot be loaded.
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        # NVML's own errors, and the various errors of a library that is missing or cannot be loaded.
        raise RuntimeError(f"NVML cannot be used: {error}") from error
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def count_devices() -> int:
    """Return the number of GPUs of this machine, even if ``CUDA_VISIBLE_DEVICES`` hides some. If NVML is not
    available, count those that the driver lists in /proc; 0 without a driver."""
    try:
        with nvml_context() as nvml:
            return int(_asked(nvml, nvml.nvmlDeviceGetCount))
    except RuntimeError:
        # In a container, the library may be missing although the driver's files in /proc exist.
        return len(list(_KERNEL_LIST.glob("*")))


def device_id_to_physical_device_id(device_id: int) -> int:
    """Return the driver's index of a GPU.

    Args:
        device_id: index of the GPU in ``CUDA_VISIBLE_DEVICES``; without the variable, the driver's index
            itself.

    Raises:
        RuntimeError: there is no such GPU, or the driver does not reply.
    """
    with nvml_context() as nvml:
        return int(_asked(nvml, lambda: nvml.nvmlDeviceGetIndex(_handle(nvml, device_id))))


def get_device_uuid(device_idx: int) -> str:
    """Return the unique id of a GPU: ``GPU-<uuid>``, or ``MIG-<uuid>`` for a partition of one. For argument
    and errors, see ``device_id_to_physical_device_id``."""
    with nvml_context() as nvml:
        # Older versions of pynvml return bytes.
        found = _asked(nvml, lambda: nvml.nvmlDeviceGetUUID(_handle(nvml, device_idx)))
        return found.decode() if isinstance(found, bytes) else str(found)


def get_free_memory_bytes(device_idx: int) -> float:
    """Return the bytes of a GPU's memory that no process has allocated. For argument and errors, see
    ``device_id_to_physical_device_id``."""
    with nvml_context() as nvml:
        return float(_asked(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, device_idx)).free))


def gpu_figures(device_idx: int) -> GpuFigures:
    """Return the current free memory, power and utilization of a GPU. For argument and errors, see
    ``device_id_to_physical_device_id``."""
    with nvml_context() as nvml:
        handle = _asked(nvml, lambda: _handle(nvml, device_idx))
        free = _asked(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).free)
        # Power is in milliwatts. Some GPUs do not report it, and MIG partitions do not report utilization.
        power = _where_supported(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        used = _where_supported(nvml, lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        return GpuFigures(free / MEBIBYTE, power, used)


def _handle(nvml: Any, device_idx: int) -> Any:
    """Return NVML's handle of entry ``device_idx`` of ``CUDA_VISIBLE_DEVICES``, which contains indices or
    UUIDs."""
    # Map the position here, because NVML counts all GPUs of the machine and does not read this variable.
    visible = list(filter(None, map(str.strip, (env.text("CUDA_VISIBLE_DEVICES") or "").split(","))))
    if not visible:
        return nvml.nvmlDeviceGetHandleByIndex(device_idx)
    if not 0 <= device_idx < len(visible):
        names = ",".join(visible)
        raise RuntimeError(
            f"device {device_idx}: CUDA_VISIBLE_DEVICES = {names!r} names {len(visible)}. Fix: give one of "
            "these"
        )
    name = visible[device_idx]
    return (
        nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdecimal()
        else nvml.nvmlDeviceGetHandleByUUID(name)
    )


def _asked(nvml: Any, question: Any) -> Any:
    try:
        return question()
    except nvml.NVMLError as error:
        raise RuntimeError(f"NVML does not answer: {error}") from error


def _where_supported(nvml: Any, question: Any) -> float | None:
    try:
        return float(question())
    except nvml.NVMLError:
        return None
