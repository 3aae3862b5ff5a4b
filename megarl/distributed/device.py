"""The device runtime: the only module that distinguishes a CPU (gloo) from a CUDA device (NCCL)."""

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
# Values of environment variables that make cuBLAS, Transformer Engine and NCCL deterministic; the first one
# is the default. The libraries read them when they start.
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring",),
}

FULL_FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Environment variables that stop cuBLAS from rounding operands of float32 matmuls to TF32, no matter which
library calls it. cuBLAS reads them when it starts."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of this process in MiB. On a CUDA device these are the allocator's statistics; on a CPU, the
    resident set and its peak."""

    allocated_mb: float
    reserved_mb: float
    peak_allocated_mb: float
    peak_reserved_mb: float


@dataclass(frozen=True, slots=True)
class DeviceRuntime:
    """The device of this process and its communication backend, with all operations that depend on the kind
    of device.

    Attributes:
        device: device for the tensors of this process.
        backend: name of the torch.distributed backend for this device.
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
        """Set the precision of matmuls on a CUDA device, overriding torch's defaults. Call this before
        joining the process group. No-op on a CPU.

        16-bit matmuls accumulate in float32; by default cuBLAS may reduce partial sums of a split-K matmul in
        16 bits. Float32 matmuls do not use TF32; for those of Transformer Engine see ``FULL_FLOAT32``.

        Args:
            deterministic: use only kernels with bitwise reproducible results, and a fixed reduction order in
                NCCL. An operation without such a kernel raises RuntimeError. Untested on a GPU.

        Raises:
            ConfigError: an environment variable contradicts the setting.
        """
        if not self.is_cuda:
            return
        products = torch.backends.cuda.matmul
        # torch allows both by default. They lose digits in long sums, so the results of a parallel layout
        # would differ from transformers' by more than rounding.
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
        # The backward passes of these two attention backends are not deterministic. FlashAttention's can be.
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.use_deterministic_algorithms(True)
        # By default, deterministic mode also fills the memory of every torch.empty, which takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Return unused blocks of torch's allocator to the device."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def pin(self, tensor: Tensor) -> Tensor:
        """Copy ``tensor`` to page-locked host memory, for faster transfers. On a CPU, return the tensor
        itself."""
        # A CPU-only torch has no page-locked memory and would raise an error.
        return tensor.pin_memory() if self.is_cuda else tensor

    def lock_pages(self, tensor: Tensor) -> None:
        """Page-lock the memory of a tensor in place, until the process ends. No-op on a CPU. If the system
        refuses, log a warning; transfers are then slower."""
        if not self.is_cuda or not tensor.nbytes:
            return
        cudart = torch.cuda.cudart()
        if cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0) != cudart.cudaError.success:
            logger.warning("%d bytes of host memory cannot be locked: transfers are slower", tensor.nbytes)
            # The failed call leaves an error that the next kernel launch raises. Launch one here to clear it.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self.device)

    def memory(self) -> MemoryFigures:
        """Return the current memory use and its peak."""
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
        """Return the bytes of the CUDA device that no process has allocated. They come from NVML, or from
        CUDA if NVML is not available."""
        try:
            # NVML needs no CUDA context. cudaMemGetInfo would create one, which takes several hundred MiB.
            return int(nvml.get_free_memory_bytes(self.device.index))
        except RuntimeError:
            return int(torch.cuda.mem_get_info(self.device)[0])

    def memory_limit(self) -> int:
        """Return the maximum bytes that this process can use: all memory of a CUDA device, or on a CPU the
        machine's memory or the process's limit if less."""
        if self.is_cuda:
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        # Tests and some sites limit a process's address space.
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return machine if limit == resource.RLIM_INFINITY else min(machine, limit)

    def has_room(self, size: int, left: float) -> bool:
        """Return whether ``size`` more bytes on a CUDA device would leave the fraction ``left`` of its memory
        free. Always False on a CPU, whose tensors are in host memory already."""
        if not self.is_cuda:
            return False
        # This process can also use blocks that its allocator has cached.
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return (
            self.free_memory() + unused - size
            >= left * torch.cuda.get_device_properties(self.device).total_memory
        )

    def gpu_figures(self) -> dict[str, float]:
        """Return ``free_memory_mb``, ``power_w`` and ``utilization_percent`` of a CUDA device. Values that
        NVML does not report are omitted; empty on a CPU."""
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
        """Return rank, device and memory statistics (MiB) of this process, and device, shape and dtype of the
        first parameter. torch.distributed must be initialized."""
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
        """Reset the peak of memory use. No-op on a CPU, where the kernel records the peak of the whole
        process."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def identity(self) -> str:
        """Return a globally unique id: NVML's UUID of a GPU, or host and process id of a CPU worker."""
        if self.is_cuda:
            with contextlib.suppress(RuntimeError):
                return nvml.get_device_uuid(self.device.index)
            # Use NVML's format, so that all processes agree on the id even if NVML is not available to some.
            return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
        return f"CPU-{os.uname().nodename}-{os.getpid()}"

    def profiler_start(self) -> None:
        """Open the CUDA profiler's capture range, for nsys. No-op on a CPU."""
        if self.is_cuda:
            torch.cuda.profiler.start()

    def profiler_stop(self) -> None:
        """Close the CUDA profiler's capture range. No-op on a CPU."""
        if self.is_cuda:
            torch.cuda.profiler.stop()

    def rng_state(self) -> dict[str, Tensor]:
        """Return the states of torch's random generators as byte tensors."""
        states = {"torch": torch.get_rng_state()}
        if self.is_cuda:
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def set_rng_state(self, states: Mapping[str, Tensor]) -> None:
        """Restore states from ``rng_state``."""
        torch.set_rng_state(states["torch"])
        if self.is_cuda and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)

    @contextlib.contextmanager
    def timed(self) -> Iterator[Stopwatch]:
        """Measure the duration of a block, including the device work that it queues."""
        # Work that was queued before the block must not be measured.
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
    """Duration of a ``DeviceRuntime.timed`` block, set at its end."""

    seconds: float = 0.0


def sent_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to ``device``. The host does not wait for a copy to a CUDA device, because it goes
    through page-locked memory."""
    # Pin the tensor first. From pageable memory, a non_blocking copy either blocks anyway, or may read values
    # that are written later.
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def seed_everything(seed: int) -> None:
    """Seed the random generators of Python, numpy and torch (on all devices)."""
    random.seed(seed)
    # numpy accepts only 32-bit seeds.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def wanted_device() -> str:
    """Return the value of ``MEGARL_DEVICE``: ``auto`` (the default), ``cpu`` or ``cuda``.

    Raises:
        ValueError: it has another value.
    """
    wanted = env.text("MEGARL_DEVICE") or "auto"
    if wanted not in {"auto", "cpu", "cuda"}:
        raise ValueError(f"MEGARL_DEVICE = {wanted!r}: expected auto, cpu or cuda")
    return wanted


def will_use_cuda() -> bool:
    """Return whether ``runtime`` will choose a CUDA device. Does not initialize CUDA, so that processes
    forked afterwards can still use it."""
    # device_count() asks NVML. is_available() may initialize the CUDA driver.
    return wanted_device() != "cpu" and torch.cuda.device_count() > 0


@lru_cache(maxsize=1)
def runtime() -> DeviceRuntime:
    """Return the runtime of this process.

    ``MEGARL_DEVICE`` (``auto``, ``cpu`` or ``cuda``) selects the device; ``auto`` uses CUDA if there is a
    device. It is an environment variable because it is read before the configuration. The CUDA device is
    ``LOCAL_RANK`` modulo the number of visible devices.

    Raises:
        ValueError: ``MEGARL_DEVICE`` is cuda, but there is no CUDA device.
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
    # Under Ray a worker sees only its own GPU, with index 0; under torchrun it sees all of them. The
    # remainder is correct in both cases.
    return DeviceRuntime(
        torch.device("cuda", env.integer("LOCAL_RANK", 0) % torch.cuda.device_count()), "nccl"
    )


def runtime_on(device: torch.device) -> DeviceRuntime:
    """Return the runtime for a given device. A CUDA device without an index means this process's current
    one."""
    if device.type != "cuda":
        return DeviceRuntime(device, "gloo")
    index = torch.cuda.current_device() if device.index is None else device.index
    return DeviceRuntime(torch.device("cuda", index), "nccl")


# Messages of allocators without their own error class: torch's on a CPU, and that of C++, whose errors reach
# Python through torch.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` reports a lack of CPU or GPU memory. The error may come from this process, or
    quote that of another."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        sign in str(error).lower() for sign in _NO_MEMORY
    )
