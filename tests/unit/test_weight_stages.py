"""Refits of a policy with several pipeline stages: each sends its own weights over a group of its own; ranks
are threads here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.distributed.virtual_cluster import free_port
from megarl.errors import RefitError
from megarl.weight_sync.broadcast import BUFFERS, HEADER, WeightBroadcaster, WeightListener
from megarl.weight_sync.manifest import Manifest, Stages
from megarl.weight_sync.plan import TensorInfo
from megarl.weight_sync.rendezvous import Rendezvous
from megarl.weight_sync.transfer_group import TransferGroup
from tests.unit.test_weight_broadcast import HOST, ending_when_here, joining, together
from tests.unit.test_weight_sync import assert_same

# as interleaved stages have them, the first one with the tied output layer behind all
OWN = [
    ["embed", "layer.2", "layer.3", "output"],
    ["layer.0", "layer.1", "layer.4"],
    ["layer.5", "layer.6", "layer.7", "norm"],
]
ORDER = ["embed", *(f"layer.{index}" for index in range(8)), "norm", "output"]
# one weight a group, but for the small ones
BUDGET = 3_000


def weights(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    sizes = {"embed": 600, "norm": 7, "output": 500, "layer.4": 0}
    return {name: torch.randn(sizes.get(name, 400), generator=generator) for name in ORDER}


MANIFEST = Manifest.of(iter(weights(0).items()))
STAGES = Stages.of(MANIFEST, OWN)


def stream(stage: int, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    return iter([(name, state[name]) for name in OWN[stage]])


def joining_one(port: int, rank: int, stage: int = 0, **changes: Any) -> Callable[[], TransferGroup]:
    options = {"digest": MANIFEST.digest, "buffer_bytes": BUDGET, "stages": STAGES, "stage": stage, **changes}
    return joining(port, rank, **options)


class Ranks:
    """Three stages and two engines, connected."""

    def __init__(self, *, with_checksum: bool = False, **changes: Any) -> None:
        port = free_port(HOST)
        senders = [joining_one(port, 0, stage, **(changes if stage == 0 else {})) for stage in range(3)]
        self.groups = together(*senders, joining_one(port, 1), joining_one(port, 2))
        assert all(isinstance(group, TransferGroup) for group in self.groups), self.groups
        self.senders = [
            WeightBroadcaster(group, MANIFEST, with_checksum=with_checksum) for group in self.groups[:3]
        ]
        self.listeners = [WeightListener(group, MANIFEST) for group in self.groups[3:]]
        self.received: list[list[tuple[str, Tensor]]] = [[], []]

    def load(self, rank: int, tensors: list[tuple[str, Tensor]]) -> None:
        self.received[rank] += [(name, tensor.clone()) for name, tensor in tensors]

    def refit(self, streams: list[Any], versions: list[int], loads: list[Any] | None = None) -> list[Any]:
        """What the three senders and the two engines return or raise."""
        self.received = [[], []]
        taken = loads or [self.load, self.load]
        sending = [
            lambda one=one, part=part, version=version: one.send(part, version)
            for one, part, version in zip(self.senders, streams, versions, strict=True)
        ]
        receiving = [
            lambda rank=rank: self.listeners[rank].receive(lambda tensors: taken[rank](rank, tensors))
            for rank in (0, 1)
        ]
        return together(*sending, *receiving)

    def works(self, version: int, state: dict[str, Tensor] | None = None) -> None:
        """A whole refit of all."""
        sent = state or weights(version)
        assert (
            self.refit([stream(stage, sent) for stage in range(3)], [version] * 3)
            == [None] * 3 + [version] * 2
        )
        for received in self.received:
            assert [name for name, _ in received] == ORDER
            assert_same(dict(received), sent)

    def serves_nothing(self) -> bool:
        return [one.version for one in self.listeners] == [None, None]


@pytest.mark.parametrize("with_checksum", [False, True])
def test_engines_get_the_weights_of_all_stages_in_the_one_order(with_checksum: bool) -> None:
    ranks = Ranks(with_checksum=with_checksum)
    sent: list[dict[int, int]] = []
    for group in ranks.groups[:3]:
        sent.append(_counted(group))
    for version in (2, 3):
        ranks.works(version)
    assert [set(bytes_of) for bytes_of in sent] == [{0}, {1}, {2}], (
        "each stage sends over its own group, and nothing else"
    )


def _counted(group: TransferGroup) -> dict[int, int]:
    """Bytes by the stage over whose group they go."""
    sent: dict[int, int] = {}
    broadcast = group.broadcast

    def counting(buffer: Tensor, stage: int) -> Any:
        sent[stage] = sent.get(stage, 0) + buffer.numel()
        return broadcast(buffer, stage)

    group.broadcast = counting  # type: ignore[method-assign]
    return sent


def test_stages_pack_beside_one_another_and_an_engine_has_two_buffers_for_all() -> None:
    """The first weight waits until the last stage has filled one of its buffers and begins with the other."""
    ranks = Ranks()
    full = Event()

    def late() -> Iterator[tuple[str, Tensor]]:
        assert full.wait(60.0), "the last stage did not pack while the first one did"
        yield from stream(0, weights(1))

    def early() -> Iterator[tuple[str, Tensor]]:
        for index, weight in enumerate(stream(2, weights(1))):
            if index == BUFFERS - 1:
                full.set()
            yield weight

    assert ranks.refit([late(), stream(1, weights(1)), early()], [1, 1, 1]) == [None] * 3 + [1] * 2
    for one in (*ranks.senders, *ranks.listeners):
        assert sum(buffer.numel() for buffer in one._memory) == BUFFERS * (HEADER + BUDGET)


@pytest.mark.parametrize(("stage", "name"), [(0, "embed"), (1, "layer.1"), (2, "norm")])
def test_what_one_stage_cannot_send_no_engine_serves_and_the_next_refit_works(stage: int, name: str) -> None:
    ranks = Ranks()
    ranks.works(1)
    state = weights(2)
    streams = [stream(one, {**state, name: torch.zeros(3, 3)} if one == stage else state) for one in range(3)]
    outcomes = ranks.refit(streams, [2] * 3)
    assert all(isinstance(one, RefitError) for one in outcomes), outcomes
    assert f"gives {name} [3, 3] float32 where {name}" in str(outcomes[stage])
    who = f"pipeline stage {stage}" if stage else "rank 0"
    assert all(f"{who}: the policy gives {name} [3, 3]" in str(outcomes[one]) for one in {0, 1, 2} - {stage})
    assert all("the policy aborted the refit" in str(one) for one in outcomes[3:])
    assert ranks.serves_nothing()
    assert [next(one, None) for one in streams] == [None] * 3, (
        "gathering is collective: the streams have to be taken to their end"
    )
    ranks.works(3)


def test_what_one_engine_cannot_load_of_one_stage_is_an_error_of_all_stages() -> None:
    ranks = Ranks()

    def full(rank: int, tensors: list[tuple[str, Tensor]]) -> None:
        if "norm" in dict(tensors):
            raise MemoryError("no room for norm")

    outcomes = ranks.refit([stream(stage, weights(1)) for stage in range(3)], [1] * 3, [ranks.load, full])
    assert all(
        isinstance(one, RefitError) and "rank 2: MemoryError: no room for norm" in str(one)
        for one in outcomes[:4]
    ), outcomes
    assert isinstance(outcomes[4], MemoryError) and ranks.serves_nothing()
    ranks.works(2)


def test_stages_with_weights_of_two_versions_are_refused() -> None:
    ranks = Ranks()
    outcomes = ranks.refit([stream(stage, weights(1)) for stage in range(3)], [1, 2, 1])
    assert all(
        isinstance(one, RefitError)
        and "version 2 of layer.0 came after version 1 of other weights" in str(one)
        for one in outcomes
    )
    assert ranks.serves_nothing()
    ranks.works(3)


# the handshake


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 1, "world_size": 5}, "rank 1 expects world_size 5 instead of 3"),
        ({"rank": 0, "stage": 2, "world_size": 2}, "pipeline stage 2 expects world_size 2 instead of 3"),
        ({"rank": 0, "stage": 2, "digest": "other"}, "pipeline stage 2 expects manifest 'other'"),
        ({"rank": 0, "stage": 3}, "pipeline stage 3 is outside the 3 stages"),
        ({"rank": 0, "stage": 1}, "pipeline stage 1 connected twice"),
        ({"rank": 3}, "rank 3 is outside the 3 ranks"),
    ],
)
def test_who_is_wrong_is_refused_on_all_sides_though_others_are_missing(
    wrong: dict[str, Any], message: str
) -> None:
    """Rank 2 never comes, and the handshake has hours."""
    port = free_port(HOST)
    right = [
        joining_one(port, 0, stage, handshake_s=7200.0)
        for stage in range(3)
        if (stage, 2) != (2, wrong.get("stage"))
    ]
    outcomes = together(*right, joining_one(port, **wrong))
    assert all(isinstance(outcome, RefitError) and message in str(outcome) for outcome in outcomes), outcomes


def test_a_stage_that_does_not_come_is_named() -> None:
    port = free_port(HOST)
    meeting = Rendezvous(HOST, port, keeps=True, seconds=20.0)
    first = ending_when_here(meeting, 2, joining_one(port, 0, rendezvous=meeting))
    outcomes = together(first, joining_one(port, 0, 1), joining_one(port, 2))
    message = "ranks [1] of 3 and the sender of pipeline stage 2 did not connect within 20 s"
    assert all(isinstance(outcome, RefitError) and message in str(outcome) for outcome in outcomes), outcomes


# the first rank gives up first, of the others one that hears nothing in its own time
WAITS = {0: 1.0, 1: 1.0, 4: 3.0}


def test_who_does_not_come_to_the_end_of_a_refit_is_named() -> None:
    port = free_port(HOST)
    senders = [joining_one(port, 0, stage, collective_s=1.0) for stage in range(3)]
    groups = together(*senders, joining_one(port, 1), joining_one(port, 2))

    outcomes = together(
        *(
            lambda group=groups[place], seconds=seconds: group.agree("", seconds)
            for place, seconds in WAITS.items()
        )
    )
    assert all(isinstance(outcome, RefitError) for outcome in outcomes), outcomes
    assert "the refit ended without ranks [1] of 3 and the sender of pipeline stage 2: " in str(outcomes[0])
    assert all(
        f"without the policy at {HOST}:{port} or another engine: " in str(outcome) for outcome in outcomes[1:]
    )


def test_stages_that_come_after_an_engine_was_refused_hear_why() -> None:
    """As they do where the engine is faster: the first rank listens until they have been there."""
    port = free_port(HOST)

    def said(join: Callable[[], TransferGroup]) -> str:
        # not pytest.raises, which keeps the error, and the error what it came from: the store has to go when
        # its owner does
        try:
            join()
        except RefitError as error:
            return str(error)
        return "joined"

    meeting, refused = Rendezvous(HOST, port, keeps=True), Event()
    accept, accepted = meeting._accept, itertools.count(1)

    def accepting() -> Any:
        if next(accepted) == 2:
            refused.set()
        return accept()

    def late(stage: int) -> str:
        assert refused.wait(60.0)
        return said(joining_one(port, 0, stage))

    meeting._accept = accepting  # type: ignore[method-assign]
    first, engine = joining_one(port, 0, rendezvous=meeting), joining_one(port, 1, world_size=7)
    outcomes = together(lambda: said(first), lambda: said(engine), lambda: late(1), lambda: late(2))
    assert all("rank 1 expects world_size 7 instead of 3" in outcome for outcome in outcomes), outcomes


def test_all_take_the_smallest_buffer_that_a_sender_has() -> None:
    port = free_port(HOST)
    senders = [joining_one(port, 0, stage, buffer_bytes=BUDGET + 256 * abs(stage - 1)) for stage in range(3)]
    made = together(*senders, joining_one(port, 1, buffer_bytes=0), joining_one(port, 2, buffer_bytes=0))
    assert [(group.buffer_bytes, group.stages) for group in made] == [(BUDGET, STAGES)] * 5


# who sends what


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 700)), min_size=1, max_size=12))
def test_groups_are_neighbours_of_one_stage_and_together_all_weights(layout: list[tuple[int, int]]) -> None:
    manifest = Manifest(
        tuple(TensorInfo(f"w{index}", (size,), torch.float32) for index, (_, size) in enumerate(layout))
    )
    stages = Stages.of(
        manifest,
        [[f"w{index}" for index, (owner, _) in enumerate(layout) if owner == stage] for stage in range(4)],
    )
    assert stages.count == 4
    parts = list(stages.parts(manifest, BUDGET))
    assert [index for _, part in parts for index in range(part.first, part.stop)] == list(range(len(layout)))
    for stage, part in parts:
        assert part.nbytes <= BUDGET and {layout[index][0] for index in range(part.first, part.stop)} == {
            stage
        }
    for (stage, part), (following, after) in itertools.pairwise(parts):
        assert stage != following or part.nbytes + manifest.group(after.first, 1).nbytes > BUDGET, (
            "no more groups than are needed"
        )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([["embed"], ["layer.0"]], "no pipeline stage sends layer.1 and 8 more weights"),
        ([ORDER, ["norm"]], "pipeline stage 0 sends 11 weights, of which 10 are its own in order"),
        ([ORDER[:4], [*ORDER[4:], "more"]], "pipeline stage 1 sends 8 weights, of which 7"),
        ([ORDER[:4], ORDER[:3:-1]], "pipeline stage 1 sends 7 weights, of which 7"),
    ],
)
def test_stages_that_do_not_send_every_weight_once_in_order_are_refused(
    names: list[list[str]], message: str
) -> None:
    with pytest.raises(RefitError, match=re.escape(message)):
        Stages.of(MANIFEST, names)


def test_runs_of_another_model_are_refused() -> None:
    with pytest.raises(RefitError, match="stages send 10 weights of 11"):
        list(Stages(2, ((0, 4), (1, 6))).parts(MANIFEST, BUDGET))
