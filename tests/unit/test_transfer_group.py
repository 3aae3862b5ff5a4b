"""A rank that dies while bytes are on their way to it, or from it, is missed by the other side at once."""

from __future__ import annotations

import datetime
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
from torch import Tensor

from megarl import env
from megarl.distributed import run_secret
from megarl.distributed.virtual_cluster import free_port
from megarl.errors import RefitError
from megarl.weight_sync import line as lines
from megarl.weight_sync import transfer_group
from megarl.weight_sync.line import Line
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
    """All processes of a test belong to one run: this one may have drawn a secret before, as the driver of
    another test's workers."""
    monkeypatch.setenv(run_secret.VARIABLE, "a" * 64)


def join(
    port: int,
    rank: int,
    collective_s: float = LONG,
    world_size: int = 2,
    asks: bool | None = None,
    device: torch.device = CPU,
) -> TransferGroup:
    """With ``asks`` a group that waits as one on a GPU does."""
    group = TransferGroup(
        HOST, port, world_size, rank, digest="same", device=device, collective_s=collective_s
    )
    group._asks = group._asks if asks is None else asks
    return group


def begin(group: TransferGroup) -> tuple[Tensor, list[torch.distributed.Work]]:
    """Send ones, or receive them."""
    buffer = torch.full([BYTES], int(group.sends), dtype=torch.uint8)
    return buffer, [group.broadcast(buffer)]


def comes(buffer: Tensor) -> None:
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
def test_a_rank_killed_while_bytes_are_on_their_way_is_missed_and_a_new_group_works(
    killed: int, asks: bool
) -> None:
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
            with pytest.raises(
                RefitError, match=f"the weight transfer failed: rank {killed} disconnected; make a new group"
            ):
                group.wait(works)
        else:
            group.wait(works)
            assert bool(buffer.all())
        group.close()
        other.join()
        assert other.exitcode == (-signal.SIGKILL if dies else 0)


class Operation:
    """An operation of a GPU, which is done at the ``done``-th question or never; a wait for one that is not
    done would not end."""

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


def group_of_gpu(seconds: float, lost: tuple[int, ...] = ()) -> TransferGroup:
    """As far as it takes part in waiting."""
    group: Any = TransferGroup.__new__(TransferGroup)
    group._asks, group._collective = True, datetime.timedelta(seconds=seconds)
    group._rendezvous = SimpleNamespace(lost=lambda: lost, members=Members(3, 1))
    return group


def test_operations_of_a_gpu_are_asked_whether_they_are_done_and_given_up_at_their_time() -> None:
    operations = [Operation(done=3), Operation(done=1), Operation()]
    works: list[Any] = [*operations]
    with pytest.raises(
        RefitError,
        match=r"the weight transfer failed: an operation did not finish within 0\.01 s; make a new group",
    ):
        group_of_gpu(0.01).wait(works)
    assert works == [] and [one.waited for one in operations] == [1, 1, 0]
    assert [one.asked for one in operations[:2]] == [3, 1]


def test_an_operation_of_a_gpu_that_failed_says_why() -> None:
    works: list[Any] = [Operation(done=2, error=dist.DistBackendError("NCCL error: remote process exited"))]
    with pytest.raises(
        RefitError, match=r"the weight transfer failed: NCCL error: remote process exited; make a new group"
    ):
        group_of_gpu(LONG).wait(works)


def test_a_rank_that_is_gone_ends_the_wait_for_an_operation_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_group, "_LOOK", datetime.timedelta(seconds=0.01))
    with pytest.raises(
        RefitError, match=r"the weight transfer failed: rank 2 disconnected; make a new group"
    ):
        group_of_gpu(LONG, (2,)).wait([Operation()])  # type: ignore[list-item]


def test_a_group_of_gpus_has_no_watchdog_and_connections_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert (
        sender._asks and engine._asks and (sender._rendezvous.lost(), engine._rendezvous.lost()) == ([], [])
    )
    engine.close()
    assert sender._rendezvous.lost() == [1]
    sender.close()


@slow
def test_who_has_all_bytes_misses_a_sender_that_broke_off_because_of_another() -> None:
    port = free_port(HOST)
    other = multiprocessing.get_context("spawn").Process(
        target=other_side, args=(port, 1, True, 3), daemon=True
    )
    other.start()
    with ThreadPoolExecutor(2) as pool:
        sender, engine = pool.map(lambda rank: join(port, rank, world_size=3), (0, 2))
        (_, sent), (_, came) = begin(sender), begin(engine)
        engine.wait(came)
        word = pool.submit(engine.agree, "", LONG)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        other.kill()
        with pytest.raises(
            RefitError, match=r"the weight transfer failed: rank 1 disconnected; make a new group"
        ):
            sender.wait(sent)
        sender.close()
        with pytest.raises(RefitError, match=f"the refit ended without the policy at {HOST}:{port}"):
            word.result()
        engine.close()


def survive(port: int, sender: int) -> None:
    """The process of a listener that kills the sender, misses it, and ends."""
    group = join(port, 1, collective_s=3600.0)
    buffer, works = begin(group)
    comes(buffer)
    os.kill(sender, signal.SIGKILL)
    with pytest.raises(
        RefitError, match=r"the weight transfer failed: rank 0 disconnected; make a new group"
    ):
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


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HOST, 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def test_a_connection_that_a_forked_process_has_too_ends_with_the_rank() -> None:
    ours, theirs = connected()
    left, right = Line(ours), Line(theirs)
    assert not right.is_gone()
    left.say("over")
    with ours.dup():
        left.close()
        assert right.hear(LONG) == "over" and right.is_gone()
    right.close()


def test_a_host_that_vanishes_is_asked_after() -> None:
    for connection in connected():
        line = Line(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60
        line.close()


def test_another_program_at_the_door_is_no_member() -> None:
    """One that says something else, and one that leaves; they come before the rank that is waited for."""
    port = free_port(HOST)
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(join, port, 0)
        for words in (b"GET / HTTP/1.1\r\n\r\n and more", b""):
            with socket.socket() as stranger:
                while stranger.connect_ex((HOST, port)):
                    pass
                stranger.sendall(words)
        engine = join(port, 1)
        sender = sending.result()
        (_, sent), (came, coming) = begin(sender), begin(engine)
        for group, works in ((sender, sent), (engine, coming)):
            pool.submit(group.wait, works).result()
        assert came.all()
    engine.close()
    assert sender._rendezvous.lost() == [1]
    sender.close()


def test_a_line_without_an_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_LONGEST_BYTES", 2**17)
    ours, theirs = connected()
    line = Line(theirs)
    with ThreadPoolExecutor(1) as pool:
        saying = pool.submit(ours.sendall, b"x" * 2**24)
        with pytest.raises(ConnectionError, match="the connection ended"):
            line.hear(LONG)
        line.close()
        assert isinstance(saying.exception(), OSError)
    ours.close()
