"""Worker classes that the tests of worker groups start by name. Torch is imported only where a collective
needs it."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from megarl.distributed import rendezvous
from megarl.errors import BatchError, ConfigError, StateError, Violation


class PlainWorker:
    """No torch: quick to start."""

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        self.arguments = (positional, keywords)
        self.noted: list[str] = []

    def get_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.arguments

    def environment(self, names: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def echo(self, **values: Any) -> tuple[int, dict[str, Any]]:
        return int(os.environ["RANK"]), values

    def overwrite(self, batch: Any) -> tuple[Any, list[str]]:
        """A copy of what came, after which it is written over; and what was warned of."""
        import copy
        import warnings

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            came = copy.deepcopy(batch)
            for column in batch.values():
                column.zero_()
        return came, [str(warning.message) for warning in warned]

    def note_first(self) -> None:
        self.noted.append("first")

    def note_second(self) -> None:
        self.noted.append("second")

    def refuse(self) -> None:
        raise StateError("refuse: this worker cannot do that")

    def notes(self) -> list[str]:
        """What was noted since the last time."""
        noted, self.noted = self.noted, []
        return noted

    def stream_notes(self) -> Iterator[str]:
        for note in self.notes():
            yield f"streamed {note}"

    def process_id(self) -> int:
        return os.getpid()

    def count(self, until: int) -> Iterator[str]:
        for index in range(until):
            yield f"{os.environ['RANK']}:{index}"

    def raise_error(self, kind: str) -> None:
        if kind == "batch":
            raise BatchError("sample_mask must be present in the batch")
        if kind == "config":
            raise ConfigError([Violation("policy.lr", -1, "must be > 0", "1e-6")])
        if kind == "unpicklable":
            error = ValueError("holds a lock")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            raise error
        raise ValueError("the inner reason")

    def fail_on(self, rank: int, way: str) -> int:
        """Rank ``rank`` fails, all others wait for ever."""
        if int(os.environ["RANK"]) == rank:
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "exit":
                os._exit(3)
            raise RuntimeError("broke on purpose")
        threading.Event().wait()
        return 0

    def hang_on_purpose(self, rank: int) -> int:
        if int(os.environ["RANK"]) == rank:
            threading.Event().wait()
        return rank

    def compute_for_ever(self, rank: int, way: str) -> None:
        """Rank ``rank`` computes for ever, or a child of it does; the others wait for ever."""
        if int(os.environ["RANK"]) != rank:
            threading.Event().wait()
        if way == "child":
            subprocess.run([sys.executable, "-c", "while True: pass"], check=False)
        while True:
            hashlib.sha256(b"0" * 100_000)

    def broadcast_weights_for_collective(self) -> None:
        """Wait for engines that do not come."""
        threading.Event().wait()

    def goodbye(self, directory: str) -> None:
        Path(directory, os.environ["RANK"]).touch()

    def leave_mark(self) -> None:
        Path(self.arguments[1]["directory"], os.environ["RANK"]).touch()


class TornWorker:
    """Rank 1 cannot be constructed, the others would wait for it."""

    def __init__(self, directory: str) -> None:
        Path(directory, str(os.getpid())).touch()
        if os.environ["RANK"] == "1":
            raise ValueError("no memory for the optimizer")
        threading.Event().wait()


class ConfiguredWorker(PlainWorker):
    """Asks for another environment, less CPU and one more constructor argument."""

    @staticmethod
    def configure_worker(
        num_gpus: float, bundle_indices: tuple[int, list[int]] | None
    ) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
        return {"num_cpus": 0}, {"COLOUR": "configured"}, {"seen": (num_gpus, bundle_indices)}


@ray.remote(
    num_cpus=0,
    runtime_env={"env_vars": {"COLOUR": "decorator", "SHAPE": "decorator", "OMP_NUM_THREADS": "7"}},
)
class DecoratedWorker(PlainWorker):
    """A class that is a Ray actor class already."""


class CollectiveWorker(PlainWorker):
    """Two or more of these meet over gloo in their constructors."""

    def __init__(self) -> None:
        import torch.distributed as dist

        super().__init__()
        rendezvous.init_process_group("gloo")
        self.rank = dist.get_rank()

    def sum(self, value: float) -> float:
        import torch

        total = torch.tensor([value], dtype=torch.float64)
        torch.distributed.all_reduce(total)
        return float(total)

    def sum_or_loop(self, looping_rank: int) -> float:
        """One rank never comes to the sum: it waits for what nobody does."""
        while self.rank == looping_rank:
            time.sleep(0.02)
        return self.sum(1.0)

    def mismatched(self) -> None:
        """Each waits for a message of another one that none sends."""
        import torch

        torch.distributed.recv(torch.zeros(3), src=1 - self.rank)

    def sum_or_fail(self, failing_rank: int, way: str) -> float:
        if self.rank == failing_rank:
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise BatchError(f"refused on rank {self.rank}")
        return self.sum(1.0)

    def meet_again(self) -> int:
        import torch.distributed as dist

        dist.destroy_process_group()
        rendezvous.init_process_group("gloo")
        return dist.get_world_size()

    def listening_addresses(self) -> list[str]:
        import psutil

        return [
            item.laddr.ip for item in psutil.Process().net_connections() if item.status == psutil.CONN_LISTEN
        ]
