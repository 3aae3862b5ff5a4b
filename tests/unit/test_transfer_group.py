"""A rank that dies while bytes are on their way to it, or from it, is missed by the other side at once."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl import env
from megarl.distributed import run_secret
from megarl.distributed.virtual_cluster import free_port
from megarl.errors import RefitError
from megarl.weight_sync import transfer_group
from megarl.weight_sync.liveness import Liveness
from megarl.weight_sync.rendezvous import Members
from megarl.weight_sync.transfer_group import TransferGroup
from tests.tiers import sampled, slow

HOST = "127.0.0.1"
BYTES = 2**28
# of an operation whose peer is gone; what gloo itself would wait for
LONG = 20.0


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of a test belong to one run: this one may have drawn a secret before, as the driver of another test's workers."""
    monkeypatch.setenv(run_secret.VARIABLE, "a" * 64)


def join(
    port: int, rank: int, collective_s: float = LONG, world_size: int = 2, asks: bool | None = None, device: torch.device = CPU
) -> TransferGroup:
    """With ``asks`` a group that waits as one on a GPU does."""
    group = TransferGroup(HOST, port, world_size, rank, digest="same", device=device, collective_s=collective_s)
    group._asks = group._asks if asks is None else asks
    return group


def begin(group: TransferGroup) -> tuple[torch.Tensor, list[torch.distributed.Work]]:
    """Send ones, or receive them."""
    buffer = torch.full([BYTES], int(group.sends), dtype=torch.uint8)
    return buffer, [group.broadcast(buffer)]


def comes(buffer: torch.Tensor) -> None:
    """Until the first bytes are there."""
    while not buffer[0]:
        pass


def other_side(port: int, rank: int, dies: bool, world_size: int = 2) -> None:
    """The process of ``rank``; a listener that is to die stops where some of the bytes have come."""
    group = join(port, rank, world_size=world_size)
    buffer, works = begin(group)
    if dies and not group.sends:
        comes(buffer)
        os.kill(os.getpid(), signal.SIGSTOP)
    group.wait(works)


@sampled(1)
@pytest.mark.parametrize("asks", [False, True], ids=["waits", "asks"])
@pytest.mark.parametrize("killed", [0, 1], ids=["sender", "listener"])
def test_a_rank_killed_while_bytes_are_on_their_way_is_missed_and_a_new_group_works(killed: int, asks: bool) -> None:
    spawn = multiprocessing.get_context("spawn")
    for dies in (True, False):
        port = free_port(HOST)
        other = spawn.Process(target=other_side, args=(port, killed, dies), daemon=True)
        other.start()
        group = join(port, 1 - killed, asks=asks)
        buffer, works = begin(group)
        if dies:
            if group.sends:
                os.waitid(os.P_PID, other.pid, os.WSTOPPED)
            else:
                comes(buffer)
            other.kill()
            with pytest.raises(RuntimeError, match=f"^rank {killed} went away$"):
                group.wait(works)
        else:
            group.wait(works)
            assert bool(buffer.all())
        group.close()
        other.join()
        assert other.exitcode == (-signal.SIGKILL if dies else 0)


class Operation:
    """An operation of a GPU, which is done at the ``done``-th question or never; a wait for one that is not done would not end."""

    def __init__(self, done: int | None = None, error: Exception | None = None) -> None:
        self.asked, self.waited = 0, 0
        self._done, self._error = done, error

    def is_completed(self) -> bool:
        self.asked += 1
        return self._done is not None and self.asked >= self._done

    def is_success(self) -> bool:
        raise NotImplementedError("of NCCL's it is not known")

    def wait(self, *arguments: object) -> bool:
        assert self._done is not None and self.asked >= self._done and not arguments
        self.waited += 1
        if self._error is not None:
            raise self._error
        return True


def group_of_gpu(seconds: float, lifelines: Any = None) -> TransferGroup:
    """As far as it takes part in waiting."""
    group = TransferGroup.__new__(TransferGroup)
    group._asks, group._collective = True, datetime.timedelta(seconds=seconds)
    group._lifelines, group._members = lifelines or Liveness({}), Members(3, 1)
    return group


def test_operations_of_a_gpu_are_asked_whether_they_are_done_and_given_up_at_their_time() -> None:
    operations = [Operation(done=3), Operation(done=1), Operation()]
    works: list[Any] = [*operations]
    with pytest.raises(RuntimeError, match=r"^an operation was not done after 0\.01 s$"):
        group_of_gpu(LONG).wait(works, datetime.timedelta(seconds=0.01))
    assert works == [] and [one.waited for one in operations] == [1, 1, 0]
    assert [one.asked for one in operations[:2]] == [3, 1]


def test_an_operation_of_a_gpu_that_failed_says_why() -> None:
    works: list[Any] = [Operation(done=2, error=dist.DistBackendError("NCCL error: remote process exited"))]
    with pytest.raises(RuntimeError, match=r"^NCCL error: remote process exited$"):
        group_of_gpu(LONG).wait(works)


def test_a_rank_that_is_gone_ends_the_wait_for_an_operation_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_group, "_LOOK", datetime.timedelta(seconds=0.01))
    with pytest.raises(RuntimeError, match=r"^rank 2 went away$"):
        group_of_gpu(LONG, SimpleNamespace(lost=lambda: [2])).wait([Operation()])  # type: ignore[list-item]


def test_a_group_of_gpus_has_no_watchdog_and_connections_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's group is played by gloo's."""
    seen: list[str | None] = []

    def nccl(store: Any, rank: int, size: int, options: Any) -> Any:
        seen.append(env.text("TORCH_NCCL_BLOCKING_WAIT"))
        return dist.ProcessGroupGloo(store, rank, size, options._timeout)

    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(nccl, "Options", SimpleNamespace, raising=False)
    port = free_port(HOST)
    with ThreadPoolExecutor(2) as pool:
        sender, engine = pool.map(lambda rank: join(port, rank, device=torch.device("cuda", 0)), (0, 1))
    assert seen == ["1", "1"]
    assert sender._asks and engine._asks and (sender._lifelines.lost(), engine._lifelines.lost()) == ([], [])
    engine.close()
    assert sender._lifelines.lost() == [1]
    sender.close()


@slow
def test_who_has_all_bytes_misses_a_sender_that_broke_off_because_of_another() -> None:
    port = free_port(HOST)
    other = multiprocessing.get_context("spawn").Process(target=other_side, args=(port, 1, True, 3), daemon=True)
    other.start()
    with ThreadPoolExecutor(2) as pool:
        sender, engine = pool.map(lambda rank: join(port, rank, world_size=3), (0, 2))
        (_, sent), (_, came) = begin(sender), begin(engine)
        engine.wait(came)
        word = pool.submit(engine.agree, 1, "", LONG)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        other.kill()
        with pytest.raises(RuntimeError, match=r"^rank 1 went away$"):
            sender.wait(sent)
        sender.close()
        with pytest.raises(RefitError, match="rank 0 went away"):
            word.result()
        engine.close()


def survive(port: int, sender: int) -> None:
    """The process of a listener that kills the sender, misses it, and ends."""
    group = join(port, 1, collective_s=3600.0)
    buffer, works = begin(group)
    comes(buffer)
    os.kill(sender, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"^rank 0 went away$"):
        group.wait(works)
    group.close()
    assert [thread.name for thread in threading.enumerate() if thread.daemon] == ["weights-in-flight"]


@slow
@pytest.mark.timeout(120)
def test_who_missed_another_can_end_though_an_operation_waits_for_an_hour() -> None:
    spawn = multiprocessing.get_context("spawn")
    port = free_port(HOST)
    sender = spawn.Process(target=other_side, args=(port, 0, True), daemon=True)
    sender.start()
    survivor = spawn.Process(target=survive, args=(port, sender.pid), daemon=True)
    survivor.start()
    survivor.join()
    assert survivor.exitcode == 0


def test_a_connection_that_a_forked_process_has_too_ends_with_the_rank() -> None:
    ours, theirs = socket.create_server((HOST, 0)), socket.socket()
    theirs.connect(ours.getsockname())
    accepted, _ = ours.accept()
    left, right = Liveness({1: accepted}), Liveness({0: theirs})
    with accepted.dup():
        left.close()
        assert right.lost() == [0]


def test_a_host_that_vanishes_is_asked_after() -> None:
    ours, theirs = socket.create_server((HOST, 0)), socket.socket()
    theirs.connect(ours.getsockname())
    for line in (theirs, ours.accept()[0]):
        Liveness({0: line})
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60


def test_another_program_at_the_door_is_no_member() -> None:
    """One that says something else, and one that leaves; they come before the two that are waited for."""
    store, left = dist.HashStore(), datetime.timedelta(seconds=20)
    with ThreadPoolExecutor(1) as pool:
        keeping = pool.submit(Liveness.keep, store, "door", HOST, 1, 2, left)
        store.wait(["door"], left)
        ip, port, _ = json.loads(store.get("door"))
        for words in (b"GET / HTTP/1.1\r\n\r\n and more", b""):
            with socket.create_connection((ip, port)) as stranger:
                stranger.sendall(words)
        first, second = (Liveness.hold(store, {0: "door"}, number, left) for number in (1, 2))
        kept = keeping.result()
    assert (kept.lost(), first.lost(), second.lost()) == ([], [], [])
    second.close()
    assert (kept.lost(), first.lost()) == ([2], [])
    kept.close()
    assert first.lost() == [0]


def test_who_does_not_come_is_not_waited_for_beyond_the_deadline() -> None:
    with pytest.raises(OSError, match="timed out"):
        Liveness.keep(dist.HashStore(), "door", HOST, 1, 1, datetime.timedelta(seconds=0.2))


@slow
def test_who_gives_up_is_missed_by_those_that_had_come() -> None:
    store, left = dist.HashStore(), datetime.timedelta(seconds=20)
    with ThreadPoolExecutor(1) as pool:
        keeping = pool.submit(Liveness.keep, store, "left early", HOST, 1, 2, datetime.timedelta(seconds=3))
        alone = Liveness.hold(store, {0: "left early"}, 1, left)
        # the error keeps all that it went by
        gave_up = keeping.exception()
        assert isinstance(gave_up, TimeoutError) and alone.lost() == [0]

        keeping = pool.submit(Liveness.keep, store, "door", HOST, 1, 1, left)
        store.set("nobody", json.dumps([HOST, free_port(HOST), ""]))
        with pytest.raises(ConnectionRefusedError) as refused:
            Liveness.hold(store, {0: "door", 1: "nobody"}, 1, left)
        assert keeping.result().lost() == [1] and refused.value.__traceback__ is not None
