"""A pool of worker processes on one machine that run any number of jobs over gloo, each in its own layout.

Torch, transformers and Megatron are imported once, in a server process from which the workers are forked, so
that a worker starts in a fraction of a second and shares their memory. No socket listens beyond loopback.
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
# torch's caches keep groups that a job leaves behind, and their threads wake up a hundred times a second.
# With more threads than this, forking a new process costs less.
THREADS_KEPT = 60
PRELOADED = ("megarl.parity.preload",)


class JobError(AssertionError):
    """A job failed on a rank. The message holds that rank's traceback."""


class WorkerPool:
    """A pool that runs functions on ``world`` processes with an initialised gloo group.

    Functions and arguments travel by pickle through pipes, so functions must be importable. If a rank fails
    while another still works, and so may wait in a collective indefinitely, all processes are replaced.

    Args:
        job_seconds: longest time that a job may take.
        preload: modules that the server imports before it forks the first worker.
    """

    def __init__(self, job_seconds: float = JOB_SECONDS, preload: Sequence[str] = PRELOADED) -> None:
        self._job_seconds = job_seconds
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._workers: list[tuple[Any, Connection]] = []
        self._store: dist.TCPStore | None = None
        self._numbers = itertools.count()
        self._dead = False

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the result of ``function(*arguments)`` on each rank.

        Raises:
            JobError: the function failed on a rank.
            TimeoutError: a rank did not reply in time. The message holds the stacks of such ranks.
        """
        port = self._serve_store()
        while len(self._workers) < world:
            self._workers.append(self._start(port))
        connections = [connection for _, connection in self._workers[:world]]
        job = f"job{next(self._numbers)}"
        for rank, connection in enumerate(connections):
            with contextlib.suppress(
                BrokenPipeError
            ):  # It died between two jobs, which reading its reply will show.
                connection.send((function, job, rank, world, arguments))
        return self._collect(connections, function.__name__)

    def _collect(self, connections: Sequence[Connection], name: str) -> list[Any]:
        results: list[Any] = [None] * len(connections)
        errors: dict[int, str] = {}
        stacks = ""
        waiting = dict(zip(connections, range(len(connections)), strict=True))
        while waiting:
            # Once a rank has failed, the others get only a moment, because they may wait for it in a
            # collective.
            ready = wait(list(waiting), timeout=GRACE_SECONDS if errors else self._job_seconds)
            if not ready:
                # A rank whose peer is gone or hangs fails in the transport. The reason is in the error of
                # another rank, or in a stack.
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
            # Report the rank that failed by itself before those that lost their peer because of it.
            rank = min(errors, key=lambda rank: (_is_echo(errors[rank]), rank))
            raise JobError(f"rank {rank} of {name}:\n{errors[rank]}{stacks}")
        return results

    def _stacks(self, ranks: Sequence[int]) -> str:
        """Return the stacks of all threads of ranks that do not reply."""
        return "".join(f"\n--- rank {rank} ---\n{read_stack(self._workers[rank][0].pid)}" for rank in ranks)

    def _receive(self, rank: int, connection: Any) -> tuple[str, Any, bool]:
        """Return the status, the result or traceback, and whether the process is about to end."""
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._workers[rank][0]
            process.join(timeout=10)
            self._dead = True
            return "error", f"the process died with exit code {process.exitcode}", False

    def _replace(self, rank: int) -> None:
        """Replace a process that ends by itself with a new one."""
        process, connection = self._workers[rank]
        connection.close()
        process.kill()
        process.join()
        self._workers[rank] = self._start(self._serve_store())

    def _serve_store(self) -> int:
        """Return the port of the store through which the processes of a job find one another."""
        if self._store is None:
            listener = socket.create_server((LOOPBACK, 0))
            port = listener.getsockname()[1]
            # Give the store a socket that listens on one interface; by itself it would listen on every
            # interface.
            self._store = dist.TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        return int(self._store.port)

    def _start(self, port: int) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, port), daemon=False)
        process.start()
        # Close the worker's end here, so that the worker's death ends the pipe.
        there.close()
        return process, here

    def close(self) -> None:
        """Let all processes end."""
        for _, connection in self._workers:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process, _ in self._workers:
            process.join(timeout=2)
        self.kill()

    def kill(self) -> None:
        """End all processes, whatever they are doing; the next job gets new ones."""
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
    return "gloo/transport" in error


def _serve(connection: Connection, port: int) -> None:
    """Run a worker process: execute jobs until None arrives or the other end is gone."""
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
        except BaseException:
            answer = ("error", traceback.format_exc())
        connection.send((*answer, len(os.listdir("/proc/self/task")) > THREADS_KEPT))


def _end_with_parent() -> None:
    """End this process once the pool's process is gone, even in the middle of a collective that no other rank
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
    """Return the result of ``function(*arguments)`` inside a new gloo group."""
    env.set_variables({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    timeout = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
    # Use a prefix, because the store outlives the job, and the keys of the next job have to differ.
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world, timeout=timeout
    )
    try:
        # Without the barrier, a rank that is done before another has connected would close the connection
        # that the other waits for.
        dist.barrier()
        return function(*arguments)
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        # A model in a reference cycle keeps its groups alive, and each group has threads that wake up often.
        gc.collect()
