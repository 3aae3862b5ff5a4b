"""The driver's side of a refit of engines apart: ports that are another's, and groups that break. Ranks are
threads with real groups."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megarl.algorithms.refit import Refit, connect
from megarl.distributed.virtual_cluster import free_port
from megarl.errors import RefitError, WorkerError, WorkerLostError
from megarl.weight_sync.broadcast import WeightBroadcaster, WeightListener
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.transfer_group import TransferGroup

CPU, HOST, ENGINES = torch.device("cpu"), "127.0.0.1", 2
WEIGHTS = {"embed": torch.arange(30.0), "norm": torch.ones(3)}
MANIFEST = Manifest.of(iter(WEIGHTS.items()))


class Workers:
    """Ranks that do one call after another, as actors do."""

    def __init__(self, ranks: int) -> None:
        self._pools = [ThreadPoolExecutor(1) for _ in range(ranks)]

    def call(self, *actions: Callable[[], Any]) -> list[Future[Any]]:
        return [pool.submit(action) for pool, action in zip(self._pools, actions, strict=True)]

    def get_all_worker_results(self, futures: list[Future[Any]]) -> list[Any]:
        return [future.result(60) for future in futures]


class OneRank:
    """A policy; ``ports`` are where its first rank is told to listen."""

    def __init__(self, ports: list[int]) -> None:
        self.worker_group: Any = Workers(1)
        self.worker_group.cluster = self
        self.sender: WeightBroadcaster | None = None
        self.version = 0
        self._ports = iter(ports)

    def get_master_address_and_port(self) -> tuple[str, int]:
        return HOST, next(self._ports)

    def prepare_refit_info(self) -> dict[str, Any]:
        return MANIFEST.description()

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Future[Any]]:
        def join() -> None:
            options = {"buffer_bytes": 4096, "handshake_s": 20.0}
            self.sender = WeightBroadcaster(
                TransferGroup(ip, port, world_size, 0, digest=MANIFEST.digest, device=CPU, **options),
                MANIFEST,
            )

        return self.worker_group.call(join)

    def broadcast_weights_for_collective(self) -> list[Future[Any]]:
        def send() -> None:
            assert self.sender is not None
            self.sender.send(iter(WEIGHTS.items()), self.version)

        return self.worker_group.call(send)


class TwoEngines:
    """Engines; at port ``taken`` they give up soon."""

    def __init__(self, taken: int = 0) -> None:
        self._taken = taken
        self.worker_group: Any = Workers(ENGINES)
        self.ranks, self.connected, self.version = ENGINES, False, None
        self.listeners: dict[int, WeightListener] = {}

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        assert info == MANIFEST.description()

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Future[Any]]:
        self.connected = True

        def join(rank: int) -> None:
            seconds = 0.3 if port == self._taken else 20.0
            group = TransferGroup(
                ip, port, world_size, rank, digest=MANIFEST.digest, device=CPU, handshake_s=seconds
            )
            self.listeners[rank] = WeightListener(group, MANIFEST)

        return self.worker_group.call(*(lambda rank=rank: join(rank) for rank in range(1, ENGINES + 1)))

    def update_weights_from_collective(self) -> list[Future[Any]]:
        self.version = None
        return self.worker_group.call(
            *(lambda one=one: one.receive(lambda _: None) for one in self.listeners.values())
        )

    def results(self, futures: list[Future[Any]]) -> list[Any]:
        return self.worker_group.get_all_worker_results(futures)

    def disconnect(self) -> None:
        self.connected = False

    def loaded(self, versions: list[int]) -> None:
        [self.version] = set(versions)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of another program, which takes connections and says nothing."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_is_another_s_is_replaced(taken: int) -> None:
    policy, generation = OneRank([taken, free_port(HOST)]), TwoEngines(taken)
    connect(policy, generation)  # type: ignore[arg-type]
    assert generation.connected and policy.sender is not None and len(generation.listeners) == ENGINES


def test_a_lost_worker_is_the_cause_of_its_peers_failures() -> None:
    """The first rank reports a broken connection before the loss of the second is asked for."""

    def fail(error: Exception) -> Callable[[], None]:
        def call() -> None:
            raise error

        return call

    policy, generation = OneRank([free_port(HOST)]), TwoEngines()
    policy.worker_group = Workers(2)
    policy.worker_group.cluster = policy
    broken, lost = WorkerError("Connection closed by peer"), WorkerLostError("rank 1 died")
    policy.init_collective = lambda *_: policy.worker_group.call(  # type: ignore[method-assign]
        fail(broken), fail(lost)
    )
    generation.init_collective = lambda *_: generation.worker_group.call(  # type: ignore[method-assign]
        fail(RefitError("no policy")), fail(RefitError("no policy"))
    )
    with pytest.raises(WorkerLostError, match="rank 1 died"):
        connect(policy, generation)  # type: ignore[arg-type]
    assert not generation.connected


def test_engines_that_were_not_connected_are_so_at_the_next_refit(taken: int) -> None:
    policy, generation = OneRank([taken, taken, taken, free_port(HOST)]), TwoEngines(taken)
    refit = Refit(policy, generation, colocated=False)  # type: ignore[arg-type]
    with pytest.raises(RefitError, match="the port cannot be taken"):
        refit.bring_up_to_date()
    refit.bring_up_to_date()
    assert generation.version == 0 and not refit.stale


def test_a_group_that_broke_is_made_anew_at_the_next_refit() -> None:
    policy, generation = OneRank([free_port(HOST), free_port(HOST)]), TwoEngines()
    refit = Refit(policy, generation, colocated=False)  # type: ignore[arg-type]
    refit.bring_up_to_date()
    generation.listeners[2].close()
    policy.version, refit.stale = 1, True
    with pytest.raises(RefitError, match="init_collective"):
        refit.bring_up_to_date()
    assert generation.version is None and refit.stale
    refit.bring_up_to_date()
    assert generation.version == 1 and not refit.stale
