"""Peak rates of devices: the manufacturer's figure for a known device, otherwise the measured rate of a
matrix product."""

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
"""Dense bfloat16 (and float16) tensor-core peaks in TFLOP/s, from NVIDIA's data sheets, by a part of the
device's name."""

HALF = frozenset({"bfloat16", "float16"})
_SECONDS = 0.05
_REPEATS = 3


def known_peak(device_name: str, precision: str) -> float | None:
    """Return the peak of a device in FLOP/s; None for a device or precision that is not in the table.

    Args:
        device_name: name that CUDA reports, for example ``NVIDIA H100 80GB HBM3``.
        precision: precision of the matrix products, as in ``policy.precision``. Float32 has no entry, because
            its rate depends on whether TF32 is allowed.
    """
    if precision not in HALF:
        return None
    words = f" {device_name.replace('-', ' ')} "
    # Take the longest name that fits, so that "H100 PCIe" is not taken for "H100".
    fitting = [name for name in PEAK_TFLOPS if f" {name} " in words]
    return PEAK_TFLOPS[max(fitting, key=len)] * 1e12 if fitting else None


def measured_rate(device: torch.device, precision: str) -> float:
    """Return the FLOP/s of a large square matrix product on a device, the best of some repeats of about 50
    ms.

    Args:
        device: the device; a CPU uses torch's current number of threads.
        precision: dtype of the matrices.
    """
    import torch

    # A GPU reaches its peak only in large products; a CPU would take seconds for one of that size.
    size = 8192 if device.type == "cuda" else 512
    left = torch.ones(size, size, device=device, dtype=getattr(torch, precision))
    right, out = torch.ones_like(left), torch.empty_like(left)

    def seconds(calls: int) -> float:
        # A GPU works in the background, so start the clock only when it has nothing left to do.
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            torch.mm(left, right, out=out)
        _wait(device)
        return time.perf_counter() - start

    seconds(1)  # This call chooses and loads a kernel.
    calls = max(1, round(_SECONDS / max(seconds(1), 1e-9)))
    return 2.0 * size**3 * calls / min(seconds(calls) for _ in range(_REPEATS))


def _wait(device: torch.device) -> None:
    """Wait until the device has completed its work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
