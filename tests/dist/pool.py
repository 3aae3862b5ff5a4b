"""A pool of gloo workers, started once a test session: each process imports torch and Megatron once and then runs any number of layouts."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

JOB_SECONDS = 300


def _serve(connection: Connection) -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", "MEGARL_DEVICE": "cpu", "TOKENIZERS_PARALLELISM": "false"})
    import faulthandler
    import warnings

    faulthandler.enable()
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        job = connection.recv()
        if job is None:
            return
        function, rank, world, port, arguments = job
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
        try:
            store = dist.TCPStore(
                "127.0.0.1",
                port,
                world,
                is_master=rank == 0,
                timeout=datetime.timedelta(seconds=60),
                master_listen_fd=_listen(port) if rank == 0 else None,
            )
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=120))
            result = ("ok", function(*arguments))
        except BaseException:
            result = ("error", traceback.format_exc())
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        connection.send(result)


def _listen(port: int) -> int:
    """A listening socket on loopback; by itself the store would listen on every interface."""
    listener = socket.create_server(("127.0.0.1", port))
    return listener.detach()


class WorkerPool:
    """Runs functions on ``world`` processes with an initialised gloo group.

    Functions and arguments travel by pickle, so functions have to be importable. A failing rank ends the job: the others may wait in a
    collective for ever, so all processes are replaced.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(*arguments)`` returned on each rank."""
        while len(self._workers) < world:
            self._workers.append(self._start())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        connections = [connection for _, connection in self._workers[:world]]
        for rank, connection in enumerate(connections):
            connection.send((function, rank, world, port, arguments))
        results: list[Any] = [None] * world
        waiting = dict(zip(connections, range(world), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=JOB_SECONDS)
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(waiting.values())} of {function.__name__} gave no answer in {JOB_SECONDS} s")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    status, value = connection.recv()
                except EOFError:
                    process = self._workers[rank][0]
                    process.join(timeout=10)
                    status, value = "error", f"the process died with exit code {process.exitcode}"
                if status == "error":
                    self.close()
                    raise AssertionError(f"rank {rank} of {function.__name__}:\n{value}")
                results[rank] = value
        return results

    def _start(self) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there,), daemon=False)
        process.start()
        there.close()
        return process, here

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            with contextlib.suppress(OSError):
                connection.send(None)
                process.join(timeout=2)
                connection.close()
            process.kill()
            process.join()
        self._workers.clear()
