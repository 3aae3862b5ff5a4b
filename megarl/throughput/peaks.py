"""Peak FLOP/s of devices: from NVIDIA's data sheets for known GPUs, otherwise the measured rate of a
matmul."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PEAK_TFLOPS: Mapping[str, float] = MappingProxyType(
    {
        "GB200": 2500.0,
        "B200": 2250.0,
        "H200": 989.4,
        "GH200": 989.4,
        "H100 NVL": 835.5,
        "H100 PCIe": 756.5,
        "H100": 989.4,
        "H800": 989.4,
        "H20": 148.0,
        "A100": 311.9,
        "A800": 311.9,
        "L40S": 362.1,
        "L4": 121.0,
        "A10G": 70.0,
        "A10": 125.0,
    }
)
"""Part of the device's name -> dense bfloat16 or float16 tensor-core peak in TFLOP/s, from NVIDIA's data
sheets."""

HALF = frozenset({"bfloat16", "float16"})
_SECONDS = 0.05
_REPEATS = 3


def known_peak(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device; None if the table lacks the device or the precision.

    Args:
        device_name: name that CUDA reports, such as ``NVIDIA H100 80GB HBM3``.
        precision: ``policy.precision``. Float32 is not in the table, because its rate depends on TF32.
    """
    if precision not in HALF:
        return None
    words = f" {device_name.replace('-', ' ')} "
    # Use the longest matching name, so that "H100 PCIe" is not taken for "H100".
    fitting = [name for name in PEAK_TFLOPS if f" {name} " in words]
    return PEAK_TFLOPS[max(fitting, key=len)] * 1e12 if fitting else None


def measured_rate(device: torch.device, precision: str) -> float:
    """Measure the FLOP/s of a large square matmul on a device: the best of 3 measurements of about 50 ms.

    Args:
        device: the device; a CPU uses torch's current number of threads.
        precision: dtype of the matrices.
    """
    import torch

    # A GPU needs large matmuls to reach its peak; on a CPU these would take seconds.
    size = 8192 if device.type == "cuda" else 512
    left = torch.ones(size, size, device=device, dtype=getattr(torch, precision))
    right, out = torch.ones_like(left), torch.empty_like(left)

    def seconds(calls: int) -> float:
        # GPU work is asynchronous, so start the clock when the device is idle.
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            torch.mm(left, right, out=out)
        _wait(device)
        return time.perf_counter() - start

    seconds(1)  # Warm up: the first call selects and loads a kernel.
    calls = max(1, round(_SECONDS / max(seconds(1), 1e-9)))
    return 2.0 * size**3 * calls / min(seconds(calls) for _ in range(_REPEATS))


def _wait(device: torch.device) -> None:
    """Wait until the device is idle."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
