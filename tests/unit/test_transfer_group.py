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

import pytest
import torch
import torch.distributed as dist

from megarl.distributed.virtual_cluster import free_port
from megarl.errors import RefitError
from megarl.weight_sync.liveness import Liveness
from megarl.weight_sync.transfer_group import TransferGroup
from tests.tiers import sampled, slow

HOST = "127.0.0.1"
BYTES = 2**28
# of an operation whose peer is gone; what gloo itself would wait for
LONG = 20.0


def join(port: int, rank: int, collective_s: float = LONG, world_size: int = 2) -> TransferGroup:
    return TransferGroup(HOST, port, world_size, rank, digest="same", device=torch.device("cpu"), collective_s=collective_s)


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
@pytest.mark.parametrize("killed", [0, 1], ids=["sender", "listener"])
def test_a_rank_killed_while_bytes_are_on_their_way_is_missed_and_a_new_group_works(killed: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    for dies in (True, False):
        port = free_port(HOST)
        other = spawn.Process(target=other_side, args=(port, killed, dies), daemon=True)
        other.start()
        group = join(port, 1 - killed)
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
