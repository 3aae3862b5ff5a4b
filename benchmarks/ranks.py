"""Ranks that run a function together: the pool of gloo workers on a CPU, or one process per CUDA device."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from megarl.parity.pool import WorkerPool

# This is less than ``runner.CASE_SECONDS``, at which a case ends without naming the rank that hangs.
RANK_SECONDS = 500
CPU_RANKS = 64


class Ranks:
    """Ranks of one machine, used as a context manager that ends all of them.

    Args:
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._pool = WorkerPool(RANK_SECONDS) if device == "cpu" else None

    @property
    def most(self) -> int:
        """The largest possible number of ranks: one per CUDA device; on a CPU, ranks may share cores."""
        import torch

        return torch.cuda.device_count() if self._device == "cuda" else CPU_RANKS

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the result of ``function(*arguments)`` on each rank.

        Raises:
            AssertionError: the function failed on a rank; the message holds that rank's traceback.
        """
        if self._pool is not None:
            return self._pool.run(world, function, *arguments)
        return in_processes(world, self._device, function, *arguments)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()


def in_processes(world: int, device: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``function(*arguments)`` in a new process per rank, with torchrun's environment variables and a
    process group, and return the results of all ranks."""
    # Use spawn, because CUDA cannot be used in a fork of a process that has already used it.
    context = multiprocessing.get_context("spawn")
    # Closing the probe frees the port, and rank 0 binds it shortly after.
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    started = [
        context.Process(target=_serve, args=(there, rank, world, port, device, function, arguments))
        for rank, (_, there) in enumerate(pipes)
    ]
    for process, (_, there) in zip(started, pipes, strict=True):
        process.start()
        # Close the rank's end here, so that the rank's death ends the pipe.
        there.close()
    try:
        answers = [
            here.recv() if here.poll(RANK_SECONDS) else (False, f"no answer in {RANK_SECONDS} s")
            for here, _ in pipes
        ]
    except EOFError:
        answers = [(False, "a rank died without a word")]
    finally:
        for process in started:
            process.join(timeout=10)
            process.kill()
            process.join()
    failed = [
        f"rank {rank} of {function.__name__}:\n{answer}"
        for rank, (good, answer) in enumerate(answers)
        if not good
    ]
    if failed:
        raise AssertionError("\n".join(failed))
    return [answer for _, answer in answers]


def _serve(
    answers: Any,
    rank: int,
    world: int,
    port: int,
    device: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MEGARL_DEVICE": device}
    )
    os.environ.update(
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
    )
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        answers.send((True, function(*arguments)))
        dist.destroy_process_group()
    # Catch SystemExit too, because otherwise nobody learns why a rank does not reply.
    except BaseException:
        answers.send((False, traceback.format_exc()))
