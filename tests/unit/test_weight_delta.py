"""Refits that send what changed alone: exact to the bit, bound to a version, whole where that is less; ranks are threads here."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.distributed.virtual_cluster import free_port
from megarl.errors import RefitError
from megarl.weight_sync import broadcast
from megarl.weight_sync.broadcast import WeightBroadcaster, WeightListener, apply_delta, changed, delta_bytes, write_delta
from megarl.weight_sync.transfer_group import TransferGroup
from tests.unit.test_weight_broadcast import HOST, MANIFEST, joining, listening, refit, together
from tests.unit.test_weight_sync import weights

WORDS = (1, 2, 4, 8)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def carried(base: torch.Tensor, new: torch.Tensor, word: int) -> tuple[torch.Tensor, int]:
    """What a receiver that had ``base`` has in the end, and how many words travelled."""
    positions = changed(base, new, word, most=1 << 30)
    assert positions is not None
    buffer = torch.full((delta_bytes(positions.numel(), word),), 255, dtype=torch.uint8)
    write_delta(positions, new, word, buffer)
    kept = base.clone()
    apply_delta(kept, buffer, positions.numel(), word)
    return kept, positions.numel()


@given(st.integers(0, 40), st.sampled_from(WORDS), st.data())
def test_a_delta_carries_every_change_and_nothing_else(count: int, word: int, data: st.DataObject) -> None:
    before = data.draw(st.binary(min_size=8 * count, max_size=8 * count))
    after = bytearray(before)
    for place in data.draw(st.lists(st.integers(0, max(8 * count - 1, 0)), max_size=8)) if count else []:
        after[place] = data.draw(st.integers(0, 255))
    base, new = (torch.tensor(list(content), dtype=torch.uint8) for content in (before, bytes(after)))
    kept, travelled = carried(base, new, word)
    assert torch.equal(kept, new)
    cut = [np.frombuffer(content, dtype=np.uint8).reshape(-1, word) for content in (before, bytes(after))]
    assert travelled == int((cut[0] != cut[1]).any(axis=1).sum())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_a_nan_keeps_its_payload_and_a_zero_its_sign(kind: torch.dtype) -> None:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize]
    nan = torch.full((4,), float("nan"), dtype=kind).view(integer)
    base = torch.cat([nan, torch.zeros(4, dtype=kind).view(integer)])
    new = base.clone()
    new[1] ^= 3
    new[5] = torch.tensor([-0.0], dtype=kind).view(integer)[0]
    kept, travelled = carried(bits(base), bits(new), kind.itemsize)
    assert travelled == 2 and torch.equal(kept.view(integer), new)
    assert carried(bits(base), bits(base), kind.itemsize)[1] == 0


def test_more_than_its_share_is_no_delta() -> None:
    base, new = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    new[:400] = 1
    size = delta_bytes(100, 4)
    found = changed(base, new, 4, most=size)
    assert found is not None and found.tolist() == list(range(100))
    assert changed(base, new, 4, most=size - 1) is None


# over a group


@pytest.fixture
def groups() -> list[TransferGroup]:
    port = free_port(HOST)
    made = together(joining(port, 0, delta_share=0.3), joining(port, 1), joining(port, 2))
    assert [group.delta_share for group in made] == [0.3] * 3
    return made


@pytest.fixture
def travelled(groups: list[TransferGroup], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every buffer that the policy sends."""
    sent: list[int] = []
    broadcast = groups[0].broadcast

    def counting(buffer: torch.Tensor, *stage: int) -> Any:
        sent.append(buffer.numel())
        return broadcast(buffer, *stage)

    monkeypatch.setattr(groups[0], "broadcast", counting)
    return sent


def sparse(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The same weights, but for a few: one becomes NaN, one -0.0."""
    generator = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in state.items()}
    places = torch.randint(131 * 48, (40,), generator=generator)
    new["embed"].view(-1)[places] = torch.randn(40, generator=generator)
    new["embed"].view(-1)[places[0]] = float("nan")
    new["layer.scale"] = torch.tensor(-0.0)
    return new


def test_what_changed_alone_travels_and_what_arrives_is_exact(groups: list[TransferGroup], travelled: list[int]) -> None:
    policy = WeightBroadcaster(groups[0], MANIFEST, with_checksum=True)
    engines = [listening(group) for group in groups[1:]]
    state = weights(1)
    refit(policy, engines, state, 1)
    whole = sum(travelled)
    for version in (2, 5, 6):
        state = sparse(state, version)
        travelled.clear()
        refit(policy, engines, state, version)
        assert 0 < sum(travelled) < whole / 5
    travelled.clear()
    refit(policy, engines, weights(7), 7)
    # the small weights change as well, so that everything is beyond its share
    assert sum(travelled) == whole


def test_after_a_refit_that_failed_everything_comes(groups: list[TransferGroup], travelled: list[int]) -> None:
    policy = WeightBroadcaster(groups[0], MANIFEST)
    engines = [listening(group) for group in groups[1:]]
    state = weights(1)
    refit(policy, engines, state, 1)
    whole = sum(travelled)
    wrong = {**sparse(state, 2), "norm": torch.zeros(2)}
    error, *others = together(lambda: policy.send(iter(wrong.items()), 2), *engines)
    assert isinstance(error, RefitError) and all("the policy gave the refit up" in str(other) for other in others)
    travelled.clear()
    refit(policy, engines, sparse(state, 3), 3)
    assert sum(travelled) == whole


@pytest.mark.parametrize("what", ["changed", "apply_delta"])
def test_no_memory_for_what_changed_is_an_error_for_all_at_once_and_the_next_refit_works(
    groups: list[TransferGroup], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    policy = WeightBroadcaster(groups[0], MANIFEST)
    engines = [listening(group) for group in groups[1:]]
    state = weights(1)
    refit(policy, engines, state, 1)
    calls = []

    def full(*arguments: Any) -> Any:
        calls.append(what)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("tried to allocate 4 MiB")
        return {"changed": changed, "apply_delta": apply_delta}[what](*arguments)

    monkeypatch.setattr(broadcast, what, full)
    state = sparse(state, 2)
    stream = iter(state.items())
    error, *others = together(lambda: policy.send(stream, 2), *engines)
    assert isinstance(error, RefitError) and re.search(r"no memory for what changed in \d+ bytes.*refit_delta_share: 0", str(error))
    assert next(stream, None) is None, "gathering is collective: the stream has to be taken to its end"
    assert all(isinstance(other, RefitError) for other in others)
    for version in (3, 4):
        state = sparse(state, version)
        refit(policy, engines, state, version)


def test_changes_against_another_version_are_refused(groups: list[TransferGroup]) -> None:
    policy = WeightBroadcaster(groups[0], MANIFEST)
    listeners = [WeightListener(group, MANIFEST) for group in groups[1:]]
    state = weights(1)

    def everybody(version: int) -> list[Any]:
        receiving = [lambda one=one: one.receive(lambda _: None) for one in listeners]
        return together(lambda: policy.send(iter(state.items()), version), *receiving)

    assert everybody(1) == [None, 1, 1]
    listeners[1]._channel._base_version = 0
    state = sparse(state, 2)
    error, first, second = everybody(2)
    assert "changes against version 1 of the weights came to an engine that has version 0" in str(second)
    assert isinstance(error, RefitError) and "rank 2: RefitError: changes against version 1" in str(error)
    assert isinstance(first, RefitError) and [one.version for one in listeners] == [None, None]
    assert everybody(3) == [None, 3, 3]
    assert everybody(4) == [None, 4, 4]


def test_a_share_beyond_everything_is_refused() -> None:
    with pytest.raises(RefitError, match=r"delta_share = 1.5: must lie in \[0, 1\]"):
        joining(free_port(HOST), 0, delta_share=1.5)()
