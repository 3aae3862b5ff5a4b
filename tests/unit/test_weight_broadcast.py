"""Weights over a group of their own: the handshake, whole refits, and engines that leave; ranks are threads
here."""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.virtual_cluster import free_port
from megarl.errors import RefitError
from megarl.weight_sync.broadcast import WeightBroadcaster, WeightListener
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.plan import FlatBucket, FlatBucketIterator
from megarl.weight_sync.rendezvous import Members, Rendezvous
from megarl.weight_sync.transfer_group import TransferGroup
from tests.memory_limit import no_more_memory_than
from tests.unit.test_weight_sync import assert_same, weights

CPU = torch.device("cpu")
MANIFEST = Manifest.of(iter(weights().items()))
HOST = "127.0.0.1"


def together(*actions: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, run side by side."""
    with ThreadPoolExecutor(len(actions)) as pool:
        futures: list[Future[Any]] = [pool.submit(action) for action in actions]
        return [future.exception() or future.result() for future in futures]


def joining(port: int, rank: int, **changes: Any) -> Callable[[], TransferGroup]:
    options = {
        "world_size": 3,
        "digest": MANIFEST.digest,
        "buffer_bytes": 26_000,
        "handshake_s": 20.0,
        "collective_s": 20.0,
        **changes,
    }
    return lambda: TransferGroup(HOST, port, rank=rank, device=CPU, **options)


@pytest.fixture
def groups() -> list[TransferGroup]:
    port = free_port(HOST)
    made = together(*(joining(port, rank) for rank in range(3)))
    assert all(isinstance(group, TransferGroup) for group in made), made
    return made


def listening(group: TransferGroup) -> Callable[[], tuple[int, dict[str, Tensor]]]:
    listener = WeightListener(group, MANIFEST)
    received: dict[str, Tensor] = {}

    def listen() -> tuple[int, dict[str, Tensor]]:
        received.clear()
        version = listener.receive(
            lambda tensors: received.update({name: tensor.clone() for name, tensor in tensors})
        )
        assert listener.version == version
        return version, dict(received)

    return listen


@pytest.mark.parametrize("with_checksum", [False, True])
def test_every_engine_rank_gets_every_version(groups: list[TransferGroup], with_checksum: bool) -> None:
    policy = WeightBroadcaster(groups[0], MANIFEST, with_checksum=with_checksum)
    engines = [listening(group) for group in groups[1:]]
    for version in (3, 4, 9):
        refit(policy, engines, weights(version), version)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 4}, "rank 1 expects world_size 4 instead of 3"),
        ({"digest": "other"}, "rank 1 expects manifest 'other'"),
        ({"rank": 5}, "rank 5 is outside the 3 ranks"),
    ],
)
def test_a_rank_that_expects_something_else_is_refused_though_others_are_missing(
    changes: dict[str, Any], message: str
) -> None:
    """The third rank never comes, and the handshake has hours: who is wrong is refused when it comes."""
    port = free_port(HOST)
    outcomes = together(joining(port, 0, handshake_s=7200.0), joining(port, **{"rank": 1, **changes}))
    assert all(isinstance(outcome, RefitError) and message in str(outcome) for outcome in outcomes), outcomes


def test_a_rank_that_comes_twice_is_refused_on_all_sides() -> None:
    port = free_port(HOST)
    outcomes = together(joining(port, 0, handshake_s=7200.0), joining(port, 1), joining(port, 1))
    assert all(
        isinstance(outcome, RefitError) and "rank 1 connected twice" in str(outcome) for outcome in outcomes
    ), outcomes


def ending_when_here(
    meeting: Rendezvous, count: int, join: Callable[[], TransferGroup]
) -> Callable[[], TransferGroup]:
    """The policy's first rank, whose time is over as soon as ``count`` others have said who they are."""

    accept, accepted = meeting._accept, itertools.count(1)

    def accepting() -> Any:
        line = accept()
        if next(accepted) == count:
            meeting._ends = 0.0
        return line

    meeting._accept = accepting  # type: ignore[method-assign]
    return join


def test_a_missing_rank_is_named_and_one_too_many_is_refused() -> None:
    port = free_port(HOST)
    meeting = Rendezvous(HOST, port, keeps=True, seconds=20.0)
    outcomes = together(ending_when_here(meeting, 1, joining(port, 0, rendezvous=meeting)), joining(port, 1))
    assert all("ranks [2] of 3 did not connect within 20 s" in str(outcome) for outcome in outcomes), outcomes
    port = free_port(HOST)
    made = together(*(joining(port, rank) for rank in range(3)))
    assert all(isinstance(group, TransferGroup) for group in made)
    with pytest.raises(RefitError, match="the policy does not answer"):
        joining(port, 5, handshake_s=0.1)()


def test_a_taken_port_and_an_absent_policy_are_errors() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(RefitError, match="the port cannot be taken"):
            joining(port, 0, handshake_s=2.0)()
    with pytest.raises(RefitError, match="the policy does not answer"):
        joining(free_port(HOST), 1, handshake_s=2.0)()


@pytest.mark.parametrize("address", [HOST, "::1", "localhost"])
def test_who_is_not_on_the_policy_s_network_does_not_reach_it(address: str) -> None:
    if address == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("there is no IPv6 here")
    port, before = free_port(HOST), listening_ports()
    meeting = Rendezvous(address, port, keeps=True)
    with pytest.raises(RefitError, match="the port cannot be taken"):
        Rendezvous(address, port, keeps=True)
    assert listening_ports() - before == {port}
    other = Rendezvous(address, port, keeps=False)
    together(lambda: meeting.judge({}, Members(2, 1), 0, ()), lambda: other.introduce({}, 1, 0, 0))
    meeting.store.set("said", "hello")
    assert other.store.get("said") == b"hello"
    # by then the store listens, and nobody is waited for any more
    assert len(listening_ports() - before) == 1
    for one in (meeting, other):
        one.close()


def listening_ports() -> set[int]:
    """Ports at which this process listens, each at a loopback address."""
    found = [one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
    assert all(ipaddress.ip_address(address.ip).is_loopback for address in found)
    return {address.port for address in found}


def test_an_address_of_another_host_is_an_error() -> None:
    with pytest.raises(
        RefitError,
        match=r"no group for weights at 203\.0\.113\.1:\d+: the port cannot be taken \(.*assign requested "
        r"address",
    ):
        Rendezvous("203.0.113.1", free_port(HOST), keeps=True)


def test_another_program_s_port_that_says_nothing_is_an_error_in_time() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        with pytest.raises(RefitError, match=r"the policy gave no verdict within 0\.1 s \(timed out\)"):
            joining(listener.getsockname()[1], 1, handshake_s=0.1)()


def refit(policy: WeightBroadcaster, engines: list[Any], sent: dict[str, Tensor], version: int) -> None:
    nothing, *received = together(lambda: policy.send(iter(sent.items()), version), *engines)
    assert nothing is None
    for found, tensors in received:
        assert found == version
        assert_same(tensors, sent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"embed": torch.zeros(2)},
            r"gives embed \[2\] float32 where embed \[131, 48\] float32 was announced",
        ),
        ({"norm": torch.zeros(5)}, r"gives norm \[5\] float32 where norm \[5\] float64 was announced"),
        ({"more": torch.zeros(5)}, "gives more after the last weight"),
    ],
)
def test_weights_that_were_not_announced_are_refused_by_all_and_the_next_refit_works(
    groups: list[TransferGroup], changes: dict[str, Tensor], message: str
) -> None:
    policy = WeightBroadcaster(groups[0], MANIFEST)
    engines = [listening(group) for group in groups[1:]]
    refit(policy, engines, weights(1), 1)
    stream = iter({**weights(2), **changes}.items())
    error, *others = together(lambda: policy.send(stream, 2), *engines)
    assert isinstance(error, RefitError) and re.search(message, str(error))
    assert next(stream, None) is None, "gathering is collective: the stream has to be taken to its end"
    assert all(
        isinstance(other, RefitError) and "the policy aborted the refit" in str(other) for other in others
    )
    refit(policy, engines, weights(3), 3)


def error_of(groups: list[TransferGroup], stream: Iterator[tuple[str, Tensor]]) -> Any:
    """What the policy says of a stream that fails. The engines hear that it gave up, and the next refit
    works."""
    policy = WeightBroadcaster(groups[0], MANIFEST)
    engines = [listening(group) for group in groups[1:]]
    error, *others = together(lambda: policy.send(stream, 2), *engines)
    assert all(
        isinstance(other, RefitError) and "the policy aborted the refit" in str(other) for other in others
    )
    refit(policy, engines, weights(3), 3)
    return error


def test_a_model_that_fails_while_its_weights_are_gathered_is_the_error_and_the_next_refit_works(
    groups: list[TransferGroup],
) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(weights().items()))
        raise ZeroDivisionError

    assert isinstance(error_of(groups, broken()), ZeroDivisionError)


def test_a_model_that_fails_again_while_the_rest_is_gathered_is_the_first_error(
    groups: list[TransferGroup],
) -> None:
    class Broken(FlatBucketIterator):
        calls = 0

        def take(self, most: int) -> FlatBucket | None:
            self.calls += 1
            raise MemoryError(f"no memory, call {self.calls}")

        def __next__(self) -> tuple[str, Tensor]:
            raise StopIteration

    error = error_of(groups, Broken())
    assert isinstance(error, MemoryError) and str(error) == "no memory, call 1"


def test_an_interrupted_policy_is_waited_for_by_nobody(groups: list[TransferGroup]) -> None:
    policy = WeightBroadcaster(groups[0], MANIFEST)
    engines = [listening(group) for group in groups[1:]]

    def interrupted() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(weights().items()))
        raise KeyboardInterrupt

    error, *others = together(lambda: policy.send(interrupted(), 2), *engines)
    assert isinstance(error, KeyboardInterrupt)
    assert all(
        isinstance(other, RefitError) and "weight transfer failed" in str(other) for other in others
    ), others
    assert not any("Timed out" in str(other) for other in others), others


def test_changed_bytes_are_found_and_the_next_refit_works(
    groups: list[TransferGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = WeightBroadcaster(groups[0], MANIFEST, with_checksum=True)
    engines = [listening(group) for group in groups[1:]]
    broadcast = groups[0].broadcast

    def damaged(buffer: Tensor, *stage: int) -> dist.Work:
        buffer[300] ^= 1
        return broadcast(buffer, *stage)

    monkeypatch.setattr(groups[0], "broadcast", damaged)
    error, *others = together(lambda: policy.send(iter(weights().items()), 1), *engines)
    assert isinstance(error, RefitError) and re.search(
        r"rank 1: .*embed on have another checksum.* rank 2: ", str(error)
    )
    assert all("embed on have another checksum" in str(other) for other in others)
    monkeypatch.undo()
    refit(policy, engines, weights(2), 2)


def test_what_one_engine_cannot_load_no_engine_serves(groups: list[TransferGroup]) -> None:
    policy = WeightBroadcaster(groups[0], MANIFEST)
    listeners = [WeightListener(group, MANIFEST) for group in groups[1:]]

    def full(_: object) -> None:
        raise MemoryError("no room for embed")

    error, first, second = together(
        lambda: policy.send(iter(weights().items()), 1),
        lambda: listeners[0].receive(full),
        lambda: listeners[1].receive(lambda _: None),
    )
    assert isinstance(error, RefitError) and "rank 1: MemoryError: no room for embed" in str(error)
    assert (
        isinstance(first, MemoryError)
        and isinstance(second, RefitError)
        and "other engines could not load" in str(second)
    )
    assert [listener.version for listener in listeners] == [None, None]
    kept: dict[str, Tensor] = {}
    outcomes = together(
        lambda: policy.send(iter(weights(4).items()), 4),
        *(lambda one=one: one.receive(kept.update) for one in listeners),
    )
    assert outcomes == [None, 4, 4]


def test_an_engine_without_memory_for_its_buffers_is_refused_at_once_and_no_one_waits_for_it() -> None:
    port = free_port(HOST)
    options = {"buffer_bytes": 2**26, "collective_s": 7200.0}
    first, second, third = together(*(joining(port, rank, **options) for rank in range(3)))
    policy, other = WeightBroadcaster(first, MANIFEST), listening(third)
    with (
        no_more_memory_than(2**24, [os.getpid()]),
        pytest.raises(
            RefitError,
            match=r"no memory for 2 buffers of 67109120 bytes.* set a smaller policy\.refit_buffer_size_gb",
        ),
    ):
        WeightListener(second, MANIFEST)
    outcomes = together(lambda: policy.send(iter(weights(0).items()), 0), other)
    assert all(isinstance(outcome, RefitError) for outcome in outcomes), outcomes
    port = free_port(HOST)
    first, second, third = together(*(joining(port, rank) for rank in range(3)))
    sent = weights(1)
    refit(WeightBroadcaster(first, MANIFEST), [listening(second), listening(third)], sent, 1)
