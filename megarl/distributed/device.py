"""The device runtime: the only module that knows whether this process computes on a CPU (gloo) or on a CUDA
device (NCCL)."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from converters.files.process import status_bytes
from megarl import env
from megarl.distributed import nvml
from megarl.errors import ConfigError, Violation

logger = logging.getLogger(__name__)
MEBIBYTE = 1024 * 1024
# cuBLAS, Transformer Engine and NCCL read these variables when they start. The values listed make them
# deterministic, with the preferred one first.
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring",),
}

FULL_FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Environment variables that keep cuBLAS from rounding operands of float32 products to TF32, no matter which
library calls it. cuBLAS reads them when it starts."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of this process in MiB: the allocator's figures on a CUDA device, the resident set and its peak
    on a CPU."""

    allocated_mb: float
    reserved_mb: float
    peak_allocated_mb: float
    peak_reserved_mb: float


@dataclass(frozen=True, slots=True)
class DeviceRuntime:
    """Device, communication backend and everything that differs between them.

    Attributes:
        device: where tensors of this process live.
        backend: name of the torch.distributed backend that serves this device.
    """

    device: torch.device
    backend: str

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_cuda else "cpu"

    def activate(self) -> None:
        """Make the device current in this thread."""
        if self.is_cuda:
            torch.cuda.set_device(self.device)

    def set_arithmetic(self, *, deterministic: bool = False) -> None:
        """Set how a CUDA device accumulates products, whatever torch's defaults are. Call it before the
        process group is joined.

        16-bit products are accumulated in float32: by default cuBLAS may add the parts of a split product in
        16 bits. Float32 products are not rounded to TF32; for those of Transformer Engine see
        ``FULL_FLOAT32``. On a CPU this does nothing.

        Args:
            deterministic: use only kernels that give the same bits every time, and one order of addition in
                NCCL. An operation without such a kernel raises RuntimeError. Not yet seen on a GPU.

        Raises:
            ConfigError: an environment variable contradicts the setting.
        """
        if not self.is_cuda:
            return
        products = torch.backends.cuda.matmul
        # torch allows both by default. They lose digits in long sums, so that a parallel layout would differ
        # from plain transformers by more than rounding.
        products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = (
            False
        )
        products.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        if deterministic:
            self._set_deterministic()

    @staticmethod
    def _set_deterministic() -> None:
        for name, values in _DETERMINISTIC.items():
            found = env.text(name, values[0])
            if found not in values:
                bound = (
                    f"the environment has {name} = {found}, with which the same run may give different "
                    "results"
                )
                raise ConfigError(
                    [
                        Violation(
                            "policy.deterministic", True, bound, f"unset {name}, or set it to {values[0]}"
                        )
                    ]
                )
            env.set_variables({name: found})
        # The backward passes of these two kinds of attention have no deterministic kernel, while
        # FlashAttention's has one.
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.use_deterministic_algorithms(True)
        # Disable this, which would fill the memory of every torch.empty.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Return unused blocks of the allocator to the device."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def pin(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in page-locked host memory if that helps transfers, or the same tensor on
        a CPU."""
        # A CPU-only torch has no page-locked memory and would raise an error.
        return tensor.pin_memory() if self.is_cuda else tensor

    def lock_pages(self, tensor: Tensor) -> None:
        """Lock the pages of a tensor in host memory where they are, until the process ends; no-op on a CPU.
        Transfers are slower if the system refuses that."""
        if not self.is_cuda or not tensor.nbytes:
            return
        cudart = torch.cuda.cudart()
        if cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0) != cudart.cudaError.success:
            logger.warning("%d bytes of host memory cannot be locked: transfers are slower", tensor.nbytes)
            # The refused call leaves its error for the next kernel launch to raise, which resets it.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self.device)

    def memory(self) -> MemoryFigures:
        """Return the current and the peak memory."""
        if self.is_cuda:
            figures = (
                torch.cuda.memory_allocated(self.device),
                torch.cuda.memory_reserved(self.device),
                torch.cuda.max_memory_allocated(self.device),
                torch.cuda.max_memory_reserved(self.device),
            )
            return MemoryFigures(*(figure / MEBIBYTE for figure in figures))
        # Read the kernel's figures for this process, because torch has no allocator statistics on a CPU.
        resident, peak = status_bytes("VmRSS") / MEBIBYTE, status_bytes("VmHWM") / MEBIBYTE
        return MemoryFigures(resident, resident, peak, peak)

    def free_memory(self) -> int:
        """Return the bytes of a CUDA device that no process has allocated, as NVML reports them, or as CUDA
        does if NVML does not reply."""
        try:
            # NVML counts all processes and needs no CUDA context. cudaMemGetInfo would create one of several
            # hundred MiB.
            return int(nvml.get_free_memory_bytes(self.device.index))
        except RuntimeError:
            return int(torch.cuda.mem_get_info(self.device)[0])

    def memory_limit(self) -> int:
        """Return the bytes that this process may have at most: all of a CUDA device, or on a CPU the memory
        of the machine or less."""
        if self.is_cuda:
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        # Tests, and careful sites, limit the address space of a process, which cannot use any memory beyond
        # it.
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return machine if limit == resource.RLIM_INFINITY else min(machine, limit)

    def has_room(self, size: int, left: float) -> bool:
        """Return whether a CUDA device has ``size`` bytes free for this process, besides the share ``left``
        of its memory. A CPU never has: its only memory is the host's."""
        if not self.is_cuda:
            return False
        # Unused blocks of the allocator are free for this process, but not for any other.
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return (
            self.free_memory() + unused - size
            >= left * torch.cuda.get_device_properties(self.device).total_memory
        )

    def gpu_figures(self) -> dict[str, float]:
        """Return ``free_memory_mb``, ``power_w`` and ``utilization_percent`` of a CUDA device, as far as NVML
        reports them; empty on a CPU."""
        if not self.is_cuda:
            return {}
        try:
            found = nvml.gpu_figures(self.device.index)
        except RuntimeError:
            return {}
        figures = {
            "free_memory_mb": found.free_mb,
            "power_w": found.power_w,
            "utilization_percent": found.utilization_percent,
        }
        return {name: value for name, value in figures.items() if value is not None}

    def facts(self, named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Return rank, device, memory figures (MiB) and the first values of some parameters; needs
        torch.distributed."""
        name, parameter = next(iter(named_parameters))
        local_rank = env.integer("LOCAL_RANK", 0)
        figures = self.memory()
        return {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "local_rank": local_rank,
            "local_device_id": self.device.index if self.is_cuda else None,
            "global_device_id": local_rank,
            "device_count": torch.cuda.device_count() if self.is_cuda else 0,
            "device_name": self.device_name,
            "host": socket.gethostname(),
            "memory_allocated_mb": figures.allocated_mb,
            "memory_reserved_mb": figures.reserved_mb,
            "peak_memory_allocated_mb": figures.peak_allocated_mb,
            "peak_memory_reserved_mb": figures.peak_reserved_mb,
            **self.gpu_figures(),
            "parameter_sample": {
                name: {
                    "device": str(parameter.device),
                    "shape": list(parameter.shape),
                    "dtype": str(parameter.dtype),
                }
            },
            "env_vars": {
                key: value
                for key, value in env.snapshot().items()
                if key.startswith("CUDA") or key in {"LOCAL_RANK", "RANK", "WORLD_SIZE"}
            },
        }

    def reset_peak_memory(self) -> None:
        """Reset the peak figures. On a CPU there is nothing to reset: the kernel keeps the peak of the whole
        process."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def identity(self) -> str:
        """Return a name that distinguishes this device from every other: NVML's UUID of a GPU, the process of
        a CPU worker."""
        if self.is_cuda:
            with contextlib.suppress(RuntimeError):
                return nvml.get_device_uuid(self.device.index)
            # Use the form of NVML, so that processes give a GPU the same name whether or not NVML replies.
            return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
        return f"CPU-{os.uname().nodename}-{os.getpid()}"

    def profiler_start(self) -> None:
        """Open the CUDA profiler's capture range (for nsys); does nothing on a CPU."""
        if self.is_cuda:
            torch.cuda.profiler.start()

    def profiler_stop(self) -> None:
        """Close the CUDA profiler's capture range; does nothing on a CPU."""
        if self.is_cuda:
            torch.cuda.profiler.stop()

    def rng_state(self) -> dict[str, Tensor]:
        """Return the states of torch's generators, as byte tensors."""
        states = {"torch": torch.get_rng_state()}
        if self.is_cuda:
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def set_rng_state(self, states: Mapping[str, Tensor]) -> None:
        """Restore the states that ``rng_state`` returned."""
        torch.set_rng_state(states["torch"])
        if self.is_cuda and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)

    @contextlib.contextmanager
    def timed(self) -> Iterator[Stopwatch]:
        """Measure a block, including the device work it queued."""
        # Wait for earlier work, which is not part of the block.
        self.synchronize()
        watch = Stopwatch()
        start = time.perf_counter()
        try:
            yield watch
        finally:
            self.synchronize()
            watch.seconds = time.perf_counter() - start


@dataclass(slots=True)
class Stopwatch:
    """Seconds that a ``DeviceRuntime.timed`` block took."""

    seconds: float = 0.0


def sent_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on ``device``. The host does not wait for a copy to a CUDA device, because it copies
    from page-locked memory."""
    # Pin the tensor first: with pageable memory a non_blocking copy waits all the same, or it may read what
    # is written later.
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    random.seed(seed)
    # numpy accepts seeds of 32 bits, and torch of 64.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def wanted_device() -> str:
    """Return the value of ``MEGARL_DEVICE``: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ValueError: it has another value.
    """
    wanted = env.text("MEGARL_DEVICE") or "auto"
    if wanted not in {"auto", "cpu", "cuda"}:
        raise ValueError(f"MEGARL_DEVICE = {wanted!r}: expected auto, cpu or cuda")
    return wanted


def will_use_cuda() -> bool:
    """Return whether ``runtime`` will choose a CUDA device. CUDA is not initialized, so that processes forked
    afterwards may still use it."""
    # device_count() asks NVML, while is_available() may initialise the driver.
    return wanted_device() != "cpu" and torch.cuda.device_count() > 0


@lru_cache(maxsize=1)
def runtime() -> DeviceRuntime:
    """Return the runtime of this process.

    ``MEGARL_DEVICE`` (``auto``, ``cpu``, ``cuda``) decides, because it is read before there is a
    configuration; ``auto`` uses CUDA if there is a device. The CUDA device is ``LOCAL_RANK`` modulo the
    number of devices that this process can see.
    """
    wanted = wanted_device()
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ValueError(
            "MEGARL_DEVICE = 'cuda': this process sees no CUDA device; set cluster.device=cpu or run where "
            "there is one"
        )
    if wanted == "cpu" or not available:
        return DeviceRuntime(torch.device("cpu"), "gloo")
    # Take the remainder: Ray shows a worker only its own GPU, which then has index 0, while torchrun shows
    # all.
    return DeviceRuntime(
        torch.device("cuda", env.integer("LOCAL_RANK", 0) % torch.cuda.device_count()), "nccl"
    )


def runtime_on(device: torch.device) -> DeviceRuntime:
    """Return the runtime of a given device; a CUDA device without an index is the current one of this
    process."""
    if device.type != "cuda":
        return DeviceRuntime(device, "gloo")
    index = torch.cuda.current_device() if device.index is None else device.index
    return DeviceRuntime(torch.device("cuda", index), "nccl")


# These texts identify allocators without their own error class: torch's on a CPU, and C++'s if its error
# passes through torch.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` reports a lack of memory, on a CPU or a GPU, raised in this process or quoted
    from another."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        sign in str(error).lower() for sign in _NO_MEMORY
    )
