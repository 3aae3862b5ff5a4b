"""Weights over a group of their own: the handshake, whole refits, and engines that leave; ranks are threads here."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.errors import RefitError
from megarl.weight_sync.broadcast import WeightBroadcaster, WeightListener
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.transfer_group import TransferGroup
from tests.unit.test_weight_sync import assert_same, weights

CPU = torch.device("cpu")
MANIFEST = Manifest.of(iter(weights().items()))
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def together(*actions: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, run side by side."""
    with ThreadPoolExecutor(len(actions)) as pool:
        futures: list[Future[Any]] = [pool.submit(action) for action in actions]
        return [future.exception() or future.result() for future in futures]


def joining(port: int, rank: int, **changes: Any) -> Callable[[], TransferGroup]:
    options = {"world_size": 3, "digest": MANIFEST.digest, "buffer_bytes": 26_000, "handshake_s": 20.0, "collective_s": 20.0, **changes}
    return lambda: TransferGroup(HOST, port, rank=rank, device=CPU, **options)


@pytest.fixture
def groups() -> list[TransferGroup]:
    port = free_port()
    made = together(*(joining(port, rank) for rank in range(3)))
    assert all(isinstance(group, TransferGroup) for group in made), made
    return made


def listening(group: TransferGroup) -> Callable[[], tuple[int, dict[str, torch.Tensor]]]:
    listener = WeightListener(group, MANIFEST)
    received: dict[str, torch.Tensor] = {}

    def listen() -> tuple[int, dict[str, torch.Tensor]]:
        received.clear()
        version = listener.receive(lambda tensors: received.update({name: tensor.clone() for name, tensor in tensors}))
        assert listener.version == version
        return version, dict(received)

    return listen


@pytest.mark.parametrize("with_checksum", [False, True])
def test_every_engine_rank_gets_every_version(groups: list[TransferGroup], with_checksum: bool) -> None:
    policy = WeightBroadcaster(groups[0], MANIFEST, with_checksum=with_checksum)
    engines = [listening(group) for group in groups[1:]]
    for version in (3, 4, 9):
        sent = weights(version)
        nothing, *received = together(lambda sent=sent, version=version: policy.send(iter(sent.items()), version), *engines)
        assert nothing is None
        for found, tensors in received:
            assert found == version
            assert_same(tensors, sent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 4}, "rank 2 expects world_size 4 for 3"),
        ({"digest": "other"}, "rank 2 expects manifest 'other'"),
    ],
)
def test_a_rank_that_expects_something_else_is_refused_on_all_sides(changes: dict[str, Any], message: str) -> None:
    port = free_port()
    outcomes = together(joining(port, 0), joining(port, 1), joining(port, 2, **changes))
    assert all(isinstance(outcome, RefitError) and message in str(outcome) for outcome in outcomes), outcomes


def test_a_missing_rank_and_one_taken_twice_are_named() -> None:
    port = free_port()
    outcomes = together(joining(port, 0, handshake_s=3.0), joining(port, 1), joining(port, 1))
    assert sum("rank 1 was there already" in str(outcome) for outcome in outcomes) == 1
    assert sum("ranks [2] of 3 did not come within 3 s" in str(outcome) for outcome in outcomes) == 2


def test_a_rank_beyond_the_policy_s_world_is_refused() -> None:
    port = free_port()
    outcomes = together(joining(port, 0), joining(port, 1), joining(port, 2), joining(port, 5))
    assert "rank 5 is outside the 3 ranks" in str(outcomes[3])
    assert all(isinstance(outcome, TransferGroup) for outcome in outcomes[:3])


def test_a_taken_port_and_an_absent_policy_are_errors() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(RefitError, match="the port cannot be taken"):
            joining(port, 0, handshake_s=2.0)()
    with pytest.raises(RefitError, match="the policy does not answer"):
        joining(free_port(), 1, handshake_s=2.0)()


def test_weights_that_were_not_announced_are_refused_and_the_stream_is_taken_to_its_end(groups: list[TransferGroup]) -> None:
    policy = WeightBroadcaster(groups[0], MANIFEST)
    wrong = {**weights(), "embed": torch.zeros(2)}
    stream = iter(wrong.items())
    with pytest.raises(RefitError, match="gives embed where embed"):
        policy.send(stream, 1)
    assert next(stream, None) is None


def test_changed_bytes_are_found(groups: list[TransferGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = WeightBroadcaster(groups[0], MANIFEST, with_checksum=True)
    engines = [listening(group) for group in groups[1:]]
    broadcast = groups[0].broadcast

    def damaged(buffer: torch.Tensor) -> dist.Work:
        buffer[300] ^= 1
        return broadcast(buffer)

    monkeypatch.setattr(groups[0], "broadcast", damaged)
    monkeypatch.setattr("megarl.weight_sync.broadcast.CONFIRM_SECONDS", 1.0)
    outcomes = together(lambda: policy.send(iter(weights().items()), 1), *engines)
    assert "did not confirm" in str(outcomes[0])
    assert all("embed on have another checksum" in str(outcome) for outcome in outcomes[1:])
