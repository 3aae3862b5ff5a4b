"""Pool of worker processes on one machine that run jobs over gloo, each job with its own number of ranks.

A server process imports torch, transformers and Megatron once and forks the workers, so that a worker starts
in a fraction of a second and shares this memory. All sockets listen on the loopback interface only.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import multiprocessing
import os
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from megarl import env
from megarl.distributed.worker_stacks import read_stack, register_stacks

LOOPBACK = "127.0.0.1"
JOB_SECONDS = 300
COLLECTIVE_SECONDS = 120
GRACE_SECONDS = 3.0
# torch's caches keep process groups of earlier jobs, whose threads wake up a hundred times a second. Above
# this number of threads, forking a new process is cheaper.
THREADS_KEPT = 60
PRELOADED = ("megarl.parity.preload",)


class JobError(AssertionError):
    """A job failed on a rank. The message contains that rank's traceback."""


class WorkerPool:
    """Pool that runs a function on any number of processes with an initialised gloo group.

    Functions and arguments are pickled and sent through pipes, so functions must be importable. If a rank
    fails while others may wait for it in a collective, all processes are replaced.

    Args:
        job_seconds: time limit of a job in seconds.
        preload: modules that the server imports before it forks the first worker.
    """

    def __init__(self, job_seconds: float = JOB_SECONDS, preload: Sequence[str] = PRELOADED) -> None:
        self._job_seconds = job_seconds
        # Forking this process would copy locks that threads of torch or gloo hold. The server only imports.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._workers: list[tuple[Any, Connection]] = []
        self._store: dist.TCPStore | None = None
        self._numbers = itertools.count()
        self._dead = False

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run ``function(*arguments)`` on ``world`` ranks and return the results in rank order.

        Raises:
            JobError: the function failed on a rank.
            TimeoutError: a rank did not finish in time. The message contains the stacks of these ranks.
        """
        port = self._serve_store()
        while len(self._workers) < world:
            self._workers.append(self._start(port))
        connections = [connection for _, connection in self._workers[:world]]
        job = f"job{next(self._numbers)}"
        for rank, connection in enumerate(connections):
            with contextlib.suppress(
                BrokenPipeError
            ):  # The process died between two jobs; reading its reply reports that.
                connection.send((function, job, rank, world, arguments))
        return self._collect(connections, function.__name__)

    def _collect(self, connections: Sequence[Connection], name: str) -> list[Any]:
        results: list[Any] = [None] * len(connections)
        errors: dict[int, str] = {}
        stacks = ""
        waiting = dict(zip(connections, range(len(connections)), strict=True))
        while waiting:
            # After a failure, give the other ranks only a moment: they may wait for the failed rank in a
            # collective.
            ready = wait(list(waiting), timeout=GRACE_SECONDS if errors else self._job_seconds)
            if not ready:
                # If all errors are transport errors, the cause is in a rank that is still waiting, so read
                # the stacks before killing it.
                stacks = self._stacks(sorted(waiting.values())) if all(map(_is_echo, errors.values())) else ""
                self.kill()
                if errors:
                    break
                raise TimeoutError(
                    f"ranks {sorted(waiting.values())} of {name} gave no result in "
                    f"{self._job_seconds:g} s{stacks}"
                )
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                status, value, spent = self._receive(rank, connection)
                if spent:
                    self._replace(rank)
                if status == "ok":
                    results[rank] = value
                else:
                    errors[rank] = value
        if errors:
            if self._dead:
                self.kill()
                self._dead = False
            # Prefer the rank that failed by itself to ranks that only lost their connection to it.
            rank = min(errors, key=lambda rank: (_is_echo(errors[rank]), rank))
            raise JobError(f"rank {rank} of {name}:\n{errors[rank]}{stacks}")
        return results

    def _stacks(self, ranks: Sequence[int]) -> str:
        """Return the stacks of all threads of the given ranks, which did not reply."""
        return "".join(f"\n--- rank {rank} ---\n{read_stack(self._workers[rank][0].pid)}" for rank in ranks)

    def _receive(self, rank: int, connection: Any) -> tuple[str, Any, bool]:
        """Return the status, the result or traceback, and True if the process has too many threads and must
        be replaced."""
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._workers[rank][0]
            # The exit code is available only after joining.
            process.join(timeout=10)
            self._dead = True
            return "error", f"the process died with exit code {process.exitcode}", False

    def _replace(self, rank: int) -> None:
        """Replace a worker process by a new one."""
        process, connection = self._workers[rank]
        connection.close()
        process.kill()
        process.join()
        self._workers[rank] = self._start(self._serve_store())

    def _serve_store(self) -> int:
        """Return the port of the TCP store that the processes of a job rendezvous through."""
        if self._store is None:
            listener = socket.create_server((LOOPBACK, 0))
            port = listener.getsockname()[1]
            # Pass a socket bound to the loopback interface; a store's own socket would listen on all
            # interfaces.
            self._store = dist.TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        return int(self._store.port)

    def _start(self, port: int) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, port), daemon=False)
        process.start()
        # Close the parent's copy of the worker's end. Otherwise the pipe would stay open after the worker's
        # death.
        there.close()
        return process, here

    def close(self) -> None:
        """Ask all processes to exit, and kill those that do not exit within two seconds."""
        for _, connection in self._workers:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process, _ in self._workers:
            process.join(timeout=2)
        self.kill()

    def kill(self) -> None:
        """Kill all processes immediately; the next job starts new ones."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _is_echo(error: str) -> bool:
    # An error of gloo about a lost connection contains the path of its transport's source file.
    return "gloo/transport" in error


def _serve(connection: Connection, port: int) -> None:
    """Worker main loop: execute jobs until None arrives or the pipe is closed."""
    env.set_variables({"OMP_NUM_THREADS": "1", "MEGARL_DEVICE": "cpu", "TOKENIZERS_PARALLELISM": "false"})
    import faulthandler
    import warnings

    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.enable()
    register_stacks()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store: dist.TCPStore | None = None
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        if job is None:
            return
        function, name, rank, world, arguments = job
        try:
            if store is None:
                store = dist.TCPStore(
                    LOOPBACK, port, is_master=False, timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS)
                )
            answer = ("ok", _in_group(store, name, rank, world, function, arguments))
        # Report SystemExit and KeyboardInterrupt too; otherwise the worker would end without a reply.
        except BaseException:
            answer = ("error", traceback.format_exc())
        connection.send((*answer, len(os.listdir("/proc/self/task")) > THREADS_KEPT))


def _end_with_parent() -> None:
    """Exit when the pool's process ends, even if this process is waiting in a collective that no other rank
    will join."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is always somebody's child"
    parent.join()
    os._exit(1)


def _in_group(
    store: dist.Store,
    name: str,
    rank: int,
    world: int,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> Any:
    """Return the result of ``function(*arguments)`` run in a new gloo process group."""
    env.set_variables({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    timeout = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
    # The store outlives the job, so each job needs its own key prefix.
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world, timeout=timeout
    )
    try:
        # Without this barrier, a rank that finishes early could close a connection that a slower rank is
        # still waiting for.
        dist.barrier()
        return function(*arguments)
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        # A model in a reference cycle keeps its process groups alive, and their threads wake up often.
        gc.collect()
