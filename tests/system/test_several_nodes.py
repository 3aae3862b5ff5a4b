"""Virtual clusters over several Ray nodes: real Ray nodes, side by side on this host, in a process of its
own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl import env
from tests.tiers import slow

# several Ray nodes start one after the other, which takes half a minute
pytestmark = slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What the program saw: see ``several_nodes``."""
    variables = {name: value for name, value in env.snapshot().items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "tests.system.several_nodes"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    # Ray says more on standard output when a node is lost.
    [line] = [line for line in done.stdout.splitlines() if line.startswith('{"pair"')]
    return json.loads(line)


def test_parts_lie_on_nodes_of_their_own_in_the_order_of_their_names(seen: dict[str, Any]) -> None:
    assert seen["pair"] == [["n1", "n1"], ["n2", "n2"]]


def test_a_second_cluster_takes_what_the_first_left(seen: dict[str, Any]) -> None:
    assert seen["beside"] == [["n10"] * 4]


def test_unequal_nodes_get_what_they_can_hold(seen: dict[str, Any]) -> None:
    assert seen["unequal"] == [["n10"] * 3, ["n1"] * 2, ["n2"] * 4]


@pytest.mark.parametrize("counts", ["[3, 3, 3]", "[2, 2, 2, 2]"])
def test_nodes_that_are_too_small_or_too_few_are_refused(counts: str, seen: dict[str, Any]) -> None:
    assert f"ResourceInsufficientError: bundles of each node = {counts}" in seen[f"refused {counts}"]
    assert "n1: 2, n2: 4, n10: 4" in seen[f"refused {counts}"]


def test_neighbouring_ranks_share_a_node(seen: dict[str, Any]) -> None:
    assert seen["ranks"] == [
        [node, str(index), str(local)] for index, node in enumerate(["n2", "n10"]) for local in range(4)
    ]


def test_a_lost_node_is_named(seen: dict[str, Any]) -> None:
    code, message = seen["lost"]
    assert code == 4
    assert re.match(r"\[.*\] node n10 is lost: worker process died", message), message
