"""Where the parts of a policy are: what moves at each transition, and what is refused."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from megarl.distributed.device import DeviceRuntime
from megarl.errors import StateError
from megarl.models.engine import offload_state
from megarl.models.engine.offload_state import HostCopies, OffloadState, OffloadStates

ON_DEVICE = {
    OffloadState.TRAINING: {"parameters", "gradients", "optimizer"},
    OffloadState.INFERENCE: {"parameters"},
    OffloadState.OFFLOADED: set(),
}


class Parts:
    """Records moves and refuses those that would do nothing."""

    def __init__(self) -> None:
        self.on_device = {"parameters", "gradients", "optimizer"}
        self.order: list[tuple[str, str]] = []

    def move(self, part: str, place: str) -> None:
        assert (part in self.on_device) == (place == "host"), f"{part} is at {place} already"
        self.order.append((part, place))
        (self.on_device.add if place == "device" else self.on_device.remove)(part)


@pytest.mark.parametrize(
    "path", list(itertools.product(OffloadState, repeat=3)), ids=lambda path: "-".join(s.name for s in path)
)
def test_every_path_moves_exactly_what_has_to_move(path: tuple[OffloadState, ...]) -> None:
    parts = Parts()
    offload_states = OffloadStates(parts.move, has_optimizer=True)
    for state in path:
        offload_states.enter(state, "test")
        assert offload_states.offload_state is state
        assert parts.on_device == ON_DEVICE[state]
        for part in ("parameters", "gradients", "optimizer"):
            if part in ON_DEVICE[state]:
                offload_states.require(part, "method", "remedy")
            else:
                with pytest.raises(
                    StateError, match=rf"method\(\) needs {part}.*{state.name}.*call remedy\(\) first"
                ):
                    offload_states.require(part, "method", "remedy")


def test_parameters_come_back_before_what_depends_on_them() -> None:
    parts = Parts()
    offload_states = OffloadStates(parts.move, has_optimizer=True)
    offload_states.enter(OffloadState.OFFLOADED, "test")
    parts.order.clear()
    offload_states.enter(OffloadState.TRAINING, "test")
    assert parts.order == [("parameters", "device"), ("gradients", "device"), ("optimizer", "device")]


def test_without_an_optimizer_training_is_refused_and_nothing_moves() -> None:
    parts = Parts()
    offload_states = OffloadStates(parts.move, has_optimizer=False)
    assert offload_states.offload_state is OffloadState.INFERENCE
    with pytest.raises(StateError, match=r"prepare_for_training.*init_optimizer=False"):
        offload_states.enter(OffloadState.TRAINING, "prepare_for_training")
    assert offload_states.offload_state is OffloadState.INFERENCE and parts.order == []


def test_a_move_that_fails_leaves_the_state_as_it_was() -> None:
    def fail(part: str, place: str) -> None:
        raise MemoryError(part)

    offload_states = OffloadStates(fail, has_optimizer=True)
    with pytest.raises(MemoryError):
        offload_states.enter(OffloadState.OFFLOADED, "test")
    assert offload_states.offload_state is OffloadState.TRAINING


def test_what_left_before_a_move_failed_is_not_to_be_used() -> None:
    parts = Parts()

    def fail_once(part: str, place: str) -> None:
        if failing == part:
            raise MemoryError(part)
        parts.move(part, place)

    failing = "optimizer"
    offload_states = OffloadStates(fail_once, has_optimizer=True)
    with pytest.raises(MemoryError):
        offload_states.enter(OffloadState.OFFLOADED, "test")
    assert parts.on_device == {"optimizer"}
    for part in ("parameters", "gradients", "optimizer"):
        with pytest.raises(StateError, match="call prepare_for_training"):
            offload_states.require(part, "train", "prepare_for_training")
    failing = ""
    offload_states.enter(OffloadState.TRAINING, "test")
    assert parts.on_device == {"parameters", "gradients", "optimizer"}
    offload_states.require("optimizer", "train", "prepare_for_training")


def test_what_stays_is_not_moved_and_not_to_be_used() -> None:
    parts = Parts()
    offload_states = OffloadStates(parts.move, has_optimizer=True)
    assert not offload_states.enter(OffloadState.INFERENCE, "test", stays=True)
    assert parts.order == []
    with pytest.raises(StateError, match="needs optimizer"):
        offload_states.require("optimizer", "train", "prepare_for_training")
    assert not offload_states.enter(OffloadState.TRAINING, "test")
    assert parts.order == []
    # what stayed leaves when another wants the device, once
    offload_states.enter(OffloadState.INFERENCE, "test", stays=True)
    assert offload_states.enter(OffloadState.INFERENCE, "test")
    assert offload_states.enter(OffloadState.OFFLOADED, "test")
    assert parts.order == [("gradients", "host"), ("optimizer", "host"), ("parameters", "host")]
    assert offload_states.enter(OffloadState.INFERENCE, "test", stays=True)
    assert parts.on_device == {"parameters"}


def host_copies() -> HostCopies:
    return HostCopies(DeviceRuntime(torch.device("cpu"), "gloo"))


def test_host_copies_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd sizes, scalars, empty tensors, several types and several blocks; what is copied is the same to the
    bit, without overlap."""
    monkeypatch.setattr(offload_state, "_BLOCK", 2048)
    seed = random.randrange(2**32)
    print("seed", seed)
    draw, copies = random.Random(seed), host_copies()
    types = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    shapes = [(draw.randrange(40), draw.randrange(1, 30)) for _ in range(30)] + [(), (0,), (1,), (5000,)]
    tensors = [torch.randint(0, 200, shape).to(draw.choice(types)) for shape in shapes]
    first = copies.fill(tensors)
    assert all(
        torch.equal(copy, tensor) and copy.dtype == tensor.dtype
        for copy, tensor in zip(first, tensors, strict=True)
    )
    assert all(
        copy.data_ptr() != tensor.data_ptr()
        for copy, tensor in zip(first, tensors, strict=True)
        if tensor.numel()
    )
    assert copies.copied == sum(tensor.nbytes for tensor in tensors)
    changed = [tensor + 1 for tensor in tensors]
    again = copies.fill(changed)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(again, changed, strict=True))
    assert [copy.data_ptr() for copy in again] == [copy.data_ptr() for copy in first]


def test_host_copies_of_other_tensors_are_new() -> None:
    copies = host_copies()
    (first,) = copies.fill([torch.ones(3)])
    second = copies.fill([torch.full((3,), 2.0), torch.zeros(2)])
    assert first.tolist() == [1, 1, 1] and [copy.tolist() for copy in second] == [[2, 2, 2], [0, 0]]


def test_what_is_a_copy_already_is_not_copied() -> None:
    """A second way out without one back, as when an engine wants the device of a policy that is in host
    memory."""
    copies, held = host_copies(), {"moment": torch.arange(4.0)}

    def each(move: object) -> None:
        held["moment"] = move(held["moment"])  # type: ignore[operator]

    copies.take(each)
    place = held["moment"].data_ptr()
    copies.take(each)
    assert (
        held["moment"].data_ptr() == place and copies.copied == 16 and held["moment"].tolist() == [0, 1, 2, 3]
    )
