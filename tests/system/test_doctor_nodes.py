"""``megarl doctor --nodes`` on a real Ray: ranks of one node, and of two Ray nodes side by side on this host,
add up numbers over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from megarl import env
from megarl.doctor.check import Verdict
from megarl.doctor.nodes import Shape, check_ranks
from tests.tiers import slow

ROOT = Path(__file__).parents[2]
RECIPE = "grpo-qwen2.5-7b-8gpu-megatron"


@slow
def test_ranks_of_one_node_add_up_numbers(local_ray: int) -> None:
    versions, added = check_ranks(Shape(1, 2, gpus=False))
    assert versions.verdict is Verdict.OK and "on all 2 ranks" in versions.found
    assert added.verdict is Verdict.OK and added.name == "gloo all-reduce"
    assert "2 ranks on 1 node added 4 MiB" in added.found and added.found.endswith("addresses on lo")


def doctor(*arguments: str, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the checks by name."""
    around = {
        name: value
        for name, value in env.snapshot().items()
        if not name.startswith(("RAY_", "GLOO_", "NCCL_"))
    }
    command = [sys.executable, "-m", "tests.system.checked_nodes", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=around | variables, capture_output=True, text=True, check=False
    )
    assert "{" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert told["ok"] is (done.returncode == 0)
    return done.returncode, {check["name"]: check for check in told["checks"]}


@slow
def test_ranks_of_two_nodes_add_up_numbers() -> None:
    code, checks = doctor(RECIPE, "cluster.device=cpu", "cluster.num_nodes=2", "cluster.gpus_per_node=2")
    assert code == 0, checks
    assert checks["nodes"]["found"] == "2 in Ray: n1, n2"
    assert "4 ranks on 2 nodes added 4 MiB" in checks["gloo all-reduce"]["found"]


@slow
def test_gpus_that_ray_does_not_have_fail_before_any_rank_starts() -> None:
    code, checks = doctor(RECIPE, "cluster.device=cuda", "cluster.num_nodes=4")
    assert code == 1 and set(checks) == {"nodes", "GPUs"}
    assert (
        "Ray has n1: 0, n2: 0; cluster.gpus_per_node = 8" in checks["GPUs"]["found"]
        and "cluster.num_nodes = 4" in checks["nodes"]["found"]
    )


@slow
def test_ranks_that_do_not_reach_one_another_fail_with_a_hint() -> None:
    code, checks = doctor(GLOO_SOCKET_IFNAME="nosuchnet0")
    assert code == 1
    check = checks["gloo all-reduce"]
    assert (
        check["verdict"] == "failed"
        and "2 ranks on 2 nodes" in check["found"]
        and "GLOO_SOCKET_IFNAME=" in check["fix"]
    )


def test_a_configuration_that_is_wrong_is_told_as_such() -> None:
    command = [sys.executable, "-m", "megarl.cli", "doctor", "--nodes", RECIPE, "cluster.num_nodes=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "cluster.num_nodes = 0" in done.stderr
