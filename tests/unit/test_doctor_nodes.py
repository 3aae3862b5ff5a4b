"""The doctor on a cluster: what it concludes from Ray's nodes, and from what the ranks on them say.

Real nodes: ``tests/system/test_doctor_nodes.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megarl.cli import parse
from megarl.distributed.node_choice import RayNode
from megarl.doctor.check import Verdict
from megarl.doctor.nodes import (
    Shape,
    compare,
    interface_hint,
    interface_towards,
    judge_gpus,
    judge_nodes,
    judge_sums,
    shape_of,
)
from megarl.errors import ClusterError


def nodes(*gpus: int) -> list[RayNode]:
    return [
        RayNode(f"n{index + 1}", str(index), {"CPU": 64.0, **({"GPU": float(count)} if count else {})})
        for index, count in enumerate(gpus)
    ]


def run_on(num_nodes: int, gpus_per_node: int, device: str = "cuda") -> dict[str, Any]:
    return {
        "cluster": {"num_nodes": num_nodes, "gpus_per_node": gpus_per_node, "device": device},
        "policy": {"generation": None},
    }


@pytest.mark.parametrize(
    ("there", "config", "verdict", "says"),
    [
        (nodes(0, 0), run_on(2, 8), "failed", "Ray has n1: 0, n2: 0; cluster.gpus_per_node = 8"),
        (nodes(8, 4), run_on(2, 8), "failed", "Ray has n1: 8, n2: 4"),
        (nodes(8, 4), run_on(1, 8), "ok", "n1: 8, n2: 4; the run uses 8 per node"),
        (nodes(8, 8), run_on(2, 8, "auto"), "ok", "uses 8"),
        (nodes(8, 4), run_on(2, 8, "auto"), "failed", "n2: 4"),
        (nodes(0, 0), run_on(2, 8, "auto"), "warning", "Ray has none on any node, and cluster.device = auto"),
        (nodes(0, 0), run_on(2, 8, "cpu"), "ok", "uses none"),
        (nodes(8), None, "ok", "n1: 8"),
        (nodes(0), None, "ok", "none; ranks use CPUs"),
    ],
)
def test_gpus_are_held_against_the_run(
    there: list[RayNode], config: Mapping[str, Any] | None, verdict: str, says: str
) -> None:
    check = judge_gpus(there, config)
    assert check.verdict.value == verdict and says in check.found
    assert ("sbatch --gpus-per-node=8" in check.fix) is (verdict != "ok")


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_nodes_are_held_against_the_run(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert judge_nodes(nodes(8, 8), run_on(2, 8)).verdict is Verdict.OK
    check = judge_nodes(nodes(8, 8), run_on(3, 8))
    assert (
        check.verdict is Verdict.FAILED
        and "2 in Ray: n1, n2; cluster.num_nodes = 3" in check.found
        and "sbatch --nodes=3" in check.fix
        and ("set RAY_ADDRESS" in check.fix) is (address is None)
    )


@pytest.mark.parametrize(
    ("there", "shape"),
    [
        (nodes(8, 8), Shape(2, 8, True)),
        (nodes(8, 4), Shape(2, 4, True)),
        (nodes(0, 0), Shape(2, 1, False)),
        (nodes(0), Shape(1, 2, False)),
        (nodes(1), Shape(1, 1, True)),
    ],
)
def test_all_ranks_that_the_nodes_have_compute_together(there: list[RayNode], shape: Shape) -> None:
    assert shape_of(there, None) == shape


def test_all_ranks_of_a_run_compute_together() -> None:
    assert shape_of(nodes(8, 8, 8), run_on(2, 4)) == Shape(2, 4, True)
    assert shape_of(nodes(8, 8), run_on(2, 8, "auto")) == Shape(2, 8, True)
    assert shape_of(nodes(8, 8), run_on(2, 4, "cpu")) == Shape(2, 4, False)


def fact(host: str, interface: str, **versions: str) -> dict[str, Any]:
    return {
        "host": host,
        "interface": interface,
        "versions": {"python": "3.12.4", "torch": "2.13.0", **versions},
    }


def test_nodes_with_other_versions_are_named() -> None:
    [check] = compare([fact("n1", "ib0"), fact("n2", "ib0")])
    assert check.verdict is Verdict.OK and check.name == "versions"
    [check] = compare(
        [fact("n1", "ib0"), fact("n2", "ib0", torch="2.15.0"), fact("n2", "ib0", torch="2.15.0")]
    )
    assert check.verdict is Verdict.FAILED and check.name == "torch"
    assert check.found == "nodes differ: 2.13.0 on n1; 2.15.0 on n2" and "MEGARL_VENV" in check.fix


class Ranks:
    """A worker group whose ranks answer with the seconds of a sum, and whether it was right; or fail."""

    def __init__(self, *answers: tuple[float, bool], error: str = "") -> None:
        self._answers, self._error = answers, error

    def run_all_workers_single_data(self, method: str, numbers: int) -> int:
        assert method == "add"
        return numbers

    def get_all_worker_results(self, numbers: int) -> Sequence[tuple[float, bool]]:
        if self._error:
            raise ClusterError(self._error)
        return self._answers


def test_sums_are_judged() -> None:
    facts = [fact("n1", "eth0"), fact("n1", "eth0"), fact("n2", "eth0"), fact("n2", "ib0")]
    shape = Shape(2, 2, gpus=False)
    right = judge_sums(Ranks((0.002, True), (0.001, True), (0.004, True), (0.001, True)), shape, facts)
    # 4 MiB, each byte 1.5 times over a link, in the 4 ms of the slowest
    assert (
        right.verdict is Verdict.OK
        and "4 ranks on 2 nodes added 4 MiB in 4.0 ms, 1.57 GB/s a rank; addresses on eth0, ib0"
        in right.found
    )
    wrong = judge_sums(Ranks((0.001, True), (0.001, False), (0.001, True), (0.001, False)), shape, facts)
    assert (
        wrong.verdict is Verdict.FAILED
        and wrong.found == "wrong sums on ranks 1, 3 of 4"
        and "GLOO_SOCKET_IFNAME=eth0,ib0" in wrong.fix
    )
    failed = judge_sums(Ranks(error="\nrank 3: connection refused\nmore"), Shape(2, 2, gpus=True), facts)
    assert failed.verdict is Verdict.FAILED and failed.name == "nccl all-reduce"
    assert (
        failed.found == "4 ranks on 2 nodes: rank 3: connection refused"
        and "NCCL_SOCKET_IFNAME=eth0,ib0" in failed.fix
    )


def test_interfaces_are_hinted_at() -> None:
    hint = interface_hint("nccl", [fact("n1", "ib0"), fact("n2", "ib0")])
    assert (
        "export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0" in hint
        and "NCCL_DEBUG=INFO" in hint
        and "differ" not in hint
    )
    hint = interface_hint("gloo", [fact("n1", "eno1"), fact("n2", "ib0")])
    assert (
        "GLOO_SOCKET_IFNAME=eno1,ib0" in hint
        and "hosts differ: eno1 on n1; ib0 on n2" in hint
        and "NCCL_DEBUG" not in hint
    )


def test_the_loopback_interface_leads_to_itself() -> None:
    assert interface_towards("127.0.0.1") == "lo"


def test_the_command_line() -> None:
    arguments = parse(["doctor", "--nodes", "recipe", "a.b=1", "--with", "base/vllm", "c=2", "--json"])
    assert (
        arguments.nodes
        and arguments.config == "recipe"
        and arguments.overrides == ["a.b=1", "c=2"]
        and arguments.layers == ["base/vllm"]
    )
    assert parse(["doctor", "--nodes"]).config is None
    with pytest.raises(SystemExit):
        parse(["doctor", "recipe"])
    assert [name for name, _ in parse(["doctor", "--nodes", "recipe", "--unknown"]).strangers] == [
        "--unknown"
    ]
