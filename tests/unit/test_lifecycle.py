"""Where the parts of a policy are: what moves at each transition, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from megarl.errors import StateError
from megarl.models.engine.offload_state import OffloadState, OffloadStates

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


@pytest.mark.parametrize("path", list(itertools.product(OffloadState, repeat=3)), ids=lambda path: "-".join(s.name for s in path))
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
                with pytest.raises(StateError, match=rf"method\(\) needs {part}.*{state.name}.*call remedy\(\) first"):
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
