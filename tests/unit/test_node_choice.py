"""Which node takes which part of a virtual cluster, and waiting until all nodes are there."""

from __future__ import annotations

import itertools
import random

import pytest

from megarl.distributed.node_choice import RayNode, ResourceInsufficientError, choose_nodes
from megarl.distributed.ray_nodes import _natural, wait_for_nodes
from megarl.errors import MissingNodesError

GPU = {"CPU": 1, "GPU": 1}


def node(name: str, gpus: int, free: int | None = None) -> RayNode:
    return RayNode(
        name, f"id-{name}", {"CPU": 64, "GPU": gpus}, {"CPU": 64, "GPU": gpus if free is None else free}
    )


def names(nodes: list[RayNode]) -> list[str]:
    return [node.name for node in nodes]


def test_equal_nodes_are_taken_in_their_order() -> None:
    nodes = [node(f"n{number}", 8) for number in range(4)]
    assert names(choose_nodes([8, 8, 8], GPU, nodes)) == ["n0", "n1", "n2"]
    assert names(choose_nodes([2, 2], GPU, nodes)) == ["n0", "n1"], (
        "room for both on one node is no reason to put them there"
    )


def test_unequal_nodes_get_what_they_can_hold() -> None:
    nodes = [node("small", 4), node("large", 8)]
    assert names(choose_nodes([4, 8], GPU, nodes)) == ["small", "large"]
    assert names(choose_nodes([8, 4], GPU, nodes)) == ["large", "small"]
    with pytest.raises(
        ResourceInsufficientError,
        match=r"small: 4, large: 8.*lower cluster.num_nodes or cluster.gpus_per_node",
    ):
        choose_nodes([8, 8], GPU, nodes)


def test_free_nodes_come_first_and_taken_ones_are_waited_for() -> None:
    nodes = [node("n0", 8, 0), node("n1", 8), node("n2", 8)]
    assert names(choose_nodes([8, 8], GPU, nodes)) == ["n1", "n2"]
    assert names(choose_nodes([8, 8, 8], GPU, nodes)) == ["n0", "n1", "n2"]


def test_every_resource_of_a_bundle_counts() -> None:
    scarce = RayNode("scarce", "a", {"CPU": 3, "GPU": 8}, {"CPU": 3, "GPU": 8})
    with pytest.raises(ResourceInsufficientError, match="scarce: 1"):
        choose_nodes([2], {"CPU": 2, "GPU": 1}, [scarce])


@pytest.mark.parametrize("seed", range(40))
def test_a_choice_is_found_whenever_there_is_one(seed: int) -> None:
    draw = random.Random(seed)
    nodes = [node(f"n{number}", draw.randint(0, 8)) for number in range(draw.randint(1, 5))]
    counts = [draw.randint(1, 8) for _ in range(draw.randint(1, 4))]
    possible = any(
        all(place.total["GPU"] >= count for place, count in zip(places, counts, strict=True))
        for places in itertools.permutations(nodes, len(counts))
    )
    if possible:
        chosen = choose_nodes(counts, GPU, nodes)
        assert len({place.name for place in chosen}) == len(counts)
        assert all(place.total["GPU"] >= count for place, count in zip(chosen, counts, strict=True))
    else:
        with pytest.raises(ResourceInsufficientError):
            choose_nodes(counts, GPU, nodes)


def test_nodes_are_awaited_until_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    arrivals = iter([[node("n1", 8)], [node("n1", 8)], [node("n2", 8), node("other", 8), node("n1", 8)]])
    waits: list[float] = []
    wait_for_nodes(["n1", "n2"], 60.0, lambda: next(arrivals), waits.append)
    assert len(waits) == 2


def test_missing_nodes_are_named() -> None:
    with pytest.raises(
        MissingNodesError, match=r"2 of 3 nodes did not join Ray within 0 s: n2, n10\."
    ) as caught:
        wait_for_nodes(["n1", "n2", "n10"], 0.0, lambda: [node("n1", 8)], lambda seconds: None)
    assert caught.value.exit_code == 3


def test_names_sort_like_slurm_s() -> None:
    assert sorted(["rack2-n1", "rack1-n10", "rack1-n9", "rack1"], key=_natural) == [
        "rack1",
        "rack1-n9",
        "rack1-n10",
        "rack2-n1",
    ]
