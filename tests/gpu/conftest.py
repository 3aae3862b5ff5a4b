"""The processes that own devices in these tests: torch, Megatron and NCCL start in them once, and a failed
job ends one."""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl import env
from tests.gpu import jobs
from tests.models import make_tiny

JOB_SECONDS = 300.0
DEVICE = env.text("MEGARL_GPU_TESTS_ON") or "cuda"
"""``cpu`` tries the bodies of these tests where there is no GPU; what a device alone can show is then left
out."""
ON_GPU = DEVICE == "cuda"
WITH_TE = ON_GPU and importlib.util.find_spec("transformer_engine_torch") is not None
"""Transformer Engine with its part for torch is installed: whether it then makes the layers is what a test
asks."""
needs_device = pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a CUDA device")
SHARED_SINCE = 23_000
"""NCCL 2.30, as ``ncclGetVersion`` says it: from then on ranks may share a device."""


def nccl_version() -> int:
    """Number of the NCCL that torch uses, a preloaded one too; torch itself tells that which it was built
    with. 0 where there is none."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def lack_of_devices(devices: int) -> str | None:
    """Return why two ranks cannot talk over NCCL; None where they can, on two devices or on one."""
    if devices >= 2:
        return None
    if devices == 0 or env.text(SHARING) != "1":
        return f"needs two CUDA devices, or {SHARING}=1 and NCCL 2.30 or newer on one"
    found = nccl_version()
    return None if found >= SHARED_SINCE else f"{SHARING}=1 needs NCCL 2.30 or newer, and this is {found}"


SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
_LACK = lack_of_devices(torch.cuda.device_count()) if ON_GPU else None
needs_two_ranks = pytest.mark.skipif(_LACK is not None, reason=str(_LACK))
KINDS = {
    "gpu_attention": "attention kernels",
    "gpu_worker": "a worker alone: numbers, offload, generation, resume",
    "gpu_training": "packed bfloat16, recompute, experts, Transformer Engine",
    "gpu_handover": "weights from process to process, and how fast they leave and come back to the device",
    "gpu_vllm": "vLLM beside the policy: sleep, refits by IPC, CUDA graphs, log-probabilities",
    "gpu_pair": "two ranks over NCCL, on two devices or on one that NCCL lets them share",
}
"""Marks by which each kind of test runs alone, for example ``-m gpu_handover``, with what it shows."""


def pytest_configure(config: pytest.Config) -> None:
    for name, what in KINDS.items():
        config.addinivalue_line("markers", f"{name}: on a GPU: {what}")


class DeviceProcess:
    """Runs functions in a process of its own on ``device``.

    After a failure the next job gets a new process: an error of CUDA stays with the process it happened in.

    Args:
        device: ``cuda`` or ``cpu``.
        local_rank: which of the devices.
        rank, world_size, port: of the group of ranks that it is in, and where that meets; a group of its own
            by default.
        start: called in the process first, with these arguments.
    """

    def __init__(
        self,
        device: str,
        local_rank: int = 0,
        rank: int = 0,
        world_size: int = 1,
        port: int = 0,
        *,
        start: Callable[..., None] = jobs.start,
    ) -> None:
        self._place, self._start = (device, local_rank, rank, world_size, port), start
        self._executor: ProcessPoolExecutor | None = None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Start ``function(*arguments)``; both have to be importable or picklable."""
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(
                1, mp_context=context, initializer=self._start, initargs=self._place
            )
        return self._executor.submit(function, *arguments)

    def result(self, future: Future[Any]) -> Any:
        """What a job returned; its error ends the process."""
        try:
            return future.result(timeout=JOB_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function(*arguments)`` returns."""
        return self.result(self.submit(function, *arguments))

    def close(self) -> None:
        """End the process, whatever it is doing."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        processes = list((executor._processes or {}).values())
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


class DevicePair:
    """Two processes that are the two ranks of one group, on two devices where there are two."""

    def __init__(self, device: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.ranks = [DeviceProcess(device, rank, rank, 2, port) for rank in range(2)]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(*arguments)`` returns on each rank; the error of one ends both, which would wait
        for each other."""
        futures = [process.submit(function, *arguments) for process in self.ranks]
        try:
            return [process.result(future) for process, future in zip(self.ranks, futures, strict=True)]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End both."""
        for process in self.ranks:
            process.close()


@pytest.fixture(scope="session")
def cuda() -> Iterator[DeviceProcess]:
    process = DeviceProcess(DEVICE)
    yield process
    process.close()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny Hugging Face models by family; qwen2 has a tied output layer."""
    root = tmp_path_factory.mktemp("models")
    return {
        family: make_tiny(root / family, family, tied=family == "qwen2", seed=seed)
        for seed, family in enumerate(("llama", "qwen2", "qwen3"))
    }


# heads as wide as those of small real models, which every kernel of attention serves
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SPARSE = {**WIDE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.fixture(scope="session")
def wide_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models with heads of width 64, one of them a mixture of experts."""
    root = tmp_path_factory.mktemp("wide")
    families = {"qwen2": (True, WIDE), "qwen3": (False, WIDE), "qwen3_moe": (False, SPARSE)}
    return {
        family: make_tiny(
            root / family,
            family,
            tied=tied,
            seed=seed,
            max_position_embeddings=512,
            initializer_range=0.05,
            **sizes,
        )
        for seed, (family, (tied, sizes)) in enumerate(families.items())
    }
