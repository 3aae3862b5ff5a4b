"""The process that owns the device in these tests: torch, Megatron and NCCL start in it once, and a failed job ends it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import jobs
from tests.models import make_tiny

JOB_SECONDS = 300.0


class DeviceProcess:
    """Runs functions in a process of its own on ``device``.

    After a failure the next job gets a new process: an error of CUDA stays with the process it happened in.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._executor: ProcessPoolExecutor | None = None

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function(*arguments)`` returns; both have to be importable or picklable."""
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(1, mp_context=context, initializer=jobs.start, initargs=(self._device,))
        try:
            return self._executor.submit(function, *arguments).result(timeout=JOB_SECONDS)
        except BaseException:
            self.close()
            raise

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


@pytest.fixture(scope="session")
def cuda() -> Iterator[DeviceProcess]:
    process = DeviceProcess("cuda")
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
