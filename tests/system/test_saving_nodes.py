"""Runs over two nodes of Ray whose checkpoints wait in the memory of both while training goes on: the same
bytes on the disk, and whoever dies leaves nothing in memory, and no checkpoint that is not whole. The nodes
are on this host, so that their places in memory differ."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl import env
from megarl.checkpoint.background import memory_of
from megarl.checkpoint.manifest import MANIFEST_NAME, verify
from megarl.checkpoint.restricted import METADATA_FILE, read_plain_index
from megarl.checkpoint.staged_file import description_name
from megarl.observe.launches import WORKERS, read_launches
from megarl.run.stopping import STOPPED
from tests.node_writers import await_end, writers
from tests.system.test_resume import check_same
from tests.system.whole_runs import LONGEST_WAIT_S, ROOT, Material, read_rows, write_config
from tests.tiers import slow

# six launches over two nodes
pytestmark = [slow, pytest.mark.timeout(1800)]
PROGRAM = [sys.executable, "-m", "tests.system.saving_nodes"]
ON_TWO_NODES = [
    "cluster.num_nodes=2",
    "cluster.gpus_per_node=1",
    "++cluster.device=cpu",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
]
STEPS_OF_RUN = ["step_1", "step_2", "step_3", "step_4"]


def variables(**changed: str) -> dict[str, str]:
    kept = {name: value for name, value in env.snapshot().items() if not name.startswith("RAY_")}
    return {**kept, "OMP_NUM_THREADS": "1", **changed}


class Nodes:
    """The cluster that the runs are on, one after the other."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*PROGRAM, "cluster"], cwd=ROOT, env=variables(), stdin=pipe, stdout=pipe, text=True
        )
        self.address = self._answer("address").split()[1]

    def tell(self, what: str) -> None:
        """Add or remove a node."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        self._answer("done")

    def _answer(self, begin: str) -> str:
        assert self.process.stdout is not None
        found = next((line for line in self.process.stdout if line.startswith(begin)), None)
        assert found is not None, "the cluster is gone"
        return found

    def train(self, mode: str, config: Path, run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
        """Begin a run whose checkpoints wait in memory."""
        arguments = [mode, str(config), str(run_dir), *ON_TWO_NODES, *overrides]
        with run_dir.with_name(f"{run_dir.name}.log").open("a") as log:
            return subprocess.Popen(
                [*PROGRAM, "train", *arguments],
                cwd=ROOT,
                env=variables(RAY_ADDRESS=self.address),
                stdout=log,
                stderr=subprocess.STDOUT,
            )


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    cluster = Nodes()
    yield cluster
    assert cluster.process.stdin is not None
    cluster.process.stdin.close()
    assert cluster.process.wait(LONGEST_WAIT_S) == 0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, material: Material) -> Path:
    checkpointing = {"save_period": 1, "keep_top_k": None, "async_save": True}
    return write_config(
        tmp_path_factory.mktemp("nodes") / "run.yaml", "sft", material, checkpointing=checkpointing
    )


@pytest.fixture(scope="module")
def whole(nodes: Nodes, config: Path) -> Path:
    """A run that nobody disturbs and that waits for each checkpoint."""
    run_dir = config.with_name("whole")
    assert (
        nodes.train("plain", config, run_dir, "checkpointing.async_save=false").wait(LONGEST_WAIT_S) == 0
    ), said_by(run_dir)
    assert checkpoints(run_dir) == STEPS_OF_RUN and not places(run_dir)
    return run_dir


def said_by(run_dir: Path) -> str:
    return run_dir.with_name(f"{run_dir.name}.log").read_text()


def places(run_dir: Path) -> list[dict[str, Any]]:
    """What lay on which node, by checkpoint."""
    path = run_dir.with_name(f"{run_dir.name}.places")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def checkpoints(run_dir: Path) -> list[str]:
    """Names of all that is there of checkpoints; whatever bears the name of one is whole."""
    found = sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir())
    assert all(verify(run_dir / "checkpoints" / name) == [] for name in found if name.startswith("step_"))
    return found


def check_bytes(one: Path, other: Path) -> None:
    """Two checkpoints are the same, but for what says how they were written; in the index that is a path and
    a random number."""
    own = {MANIFEST_NAME, "config.yaml", METADATA_FILE}
    here, there = (
        {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        for root in (one, other)
    )
    assert here.keys() == there.keys() and len(here) > 15
    for name, path in here.items():
        if path.name not in own:
            assert path.read_bytes() == there[name].read_bytes(), name
        elif path.name == METADATA_FILE:
            indices = [read_plain_index(root / Path(name).parent) for root in (one, other)]
            assert (
                indices[0].state_dict_metadata == indices[1].state_dict_metadata
                and indices[0].storage_data == indices[1].storage_data
            )


def check_nothing_in_memory(run_dir: Path) -> None:
    own = memory_of(run_dir / "checkpoints")
    left = [path for path in own.parent.iterdir() if path.name.startswith(own.name)]
    assert left == [] and writers(run_dir / "checkpoints") == []


def await_lines(run: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    """Until so many checkpoints have been in memory."""
    wait = threading.Event()
    for _ in range(int(LONGEST_WAIT_S / 0.05)):
        if len(places(run_dir)) >= count:
            return
        assert run.poll() is None, said_by(run_dir)[-5000:]
        wait.wait(0.05)
    raise AssertionError(said_by(run_dir)[-5000:])


def test_each_node_writes_its_own_files_and_they_are_those_of_a_save_that_is_waited_for(
    nodes: Nodes, config: Path, whole: Path, tmp_path: Path
) -> None:
    assert nodes.train("plain", config, tmp_path / "run").wait(LONGEST_WAIT_S) == 0, said_by(
        tmp_path / "run"
    )[-5000:]
    told = places(tmp_path / "run")
    assert [each["checkpoint"] for each in told] == ["tmp_step_1", "tmp_step_2", "tmp_step_3"], (
        "the last one is waited for anyway"
    )
    for each in told:
        files = each["files"]
        assert files.keys() == {"n1", "n2"} and not set(files["n1"]) & set(files["n2"])
        for part in ("weights", "optimizer"):
            shards = {
                node: [name for name in names if name.startswith(f"policy/{part}/__")]
                for node, names in files.items()
            }
            described = {
                node: [description_name(f"policy/{part}/__{rank}_0.distcp")]
                for rank, node in enumerate(("n1", "n2"))
            }
            assert shards == described
        assert (
            "policy/weights/.metadata" in files["n1"]
            and "policy/optimizer/rng_00001.safetensors" in files["n2"]
        )
    assert checkpoints(tmp_path / "run") == STEPS_OF_RUN
    for name in STEPS_OF_RUN:
        check_bytes(tmp_path / "run" / "checkpoints" / name, whole / "checkpoints" / name)
    check_same(tmp_path / "run", whole)
    check_nothing_in_memory(tmp_path / "run")


def test_a_node_whose_writer_dies_is_a_save_that_failed(
    nodes: Nodes, config: Path, whole: Path, tmp_path: Path
) -> None:
    """Afterwards that node has no room in memory, so that the next save is waited for on both."""
    run_dir = tmp_path / "run"
    assert nodes.train("kill", config, run_dir).wait(LONGEST_WAIT_S) == 0, said_by(run_dir)[-5000:]
    assert checkpoints(run_dir) == ["step_1", "step_3", "step_4"]
    assert [each["checkpoint"] for each in places(run_dir)] == ["tmp_step_1", "tmp_step_2"]
    check_bytes(run_dir / "checkpoints" / "step_3", whole / "checkpoints" / "step_3")
    killed = places(run_dir)[1]["other"]
    assert f"tmp_step_2 could not be written by node {killed}: its writer process was killed" in said_by(
        run_dir
    )
    assert "the checkpoint of step 2 could not be written" in said_by(
        run_dir
    ) and "step_1 is the newest one" in said_by(run_dir)
    check_same(run_dir, whole)
    check_nothing_in_memory(run_dir)


def test_killed_while_both_nodes_write_it_leaves_nothing_and_goes_on(
    nodes: Nodes, config: Path, whole: Path, tmp_path: Path
) -> None:
    """From a checkpoint that both have written before. Then it is asked to stop while both write, and goes on
    once more."""
    run_dir = tmp_path / "run"
    run = nodes.train("die", config, run_dir)
    await_lines(run, run_dir, 2)
    run.wait(LONGEST_WAIT_S)
    stopped = [psutil.Process(process) for process in places(run_dir)[1]["writers"].values()]
    assert len(stopped) == 2
    for writer in stopped:
        writer.resume()
        await_end(writer)
    check_nothing_in_memory(run_dir)
    assert checkpoints(run_dir) == ["step_1", "tmp_step_2"]
    assert nodes.train("stop", config, run_dir).wait(LONGEST_WAIT_S) == STOPPED, said_by(run_dir)[-5000:]
    assert "resumed after step 1" in said_by(run_dir) and checkpoints(run_dir) == STEPS_OF_RUN[:3], (
        "what was in flight is waited for"
    )
    assert nodes.train("plain", config, run_dir).wait(LONGEST_WAIT_S) == 0, said_by(run_dir)[-5000:]
    assert "resumed after step 3" in said_by(run_dir) and checkpoints(run_dir) == STEPS_OF_RUN
    check_same(run_dir, whole)
    check_nothing_in_memory(run_dir)


def test_a_node_that_is_lost_while_its_writer_is_at_work(
    nodes: Nodes, config: Path, whole: Path, tmp_path: Path
) -> None:
    """The workers are built anew on another node, from the checkpoint before."""
    run_dir = tmp_path / "run"
    run = nodes.train("hold", config, run_dir, "++cluster.max_restarts=1")
    await_lines(run, run_dir, 2)
    told = places(run_dir)[1]
    nodes.tell(f"remove {told['other']}")
    writer = psutil.Process(told["writers"][told["other"]])
    writer.resume()
    await_end(writer)
    nodes.tell("add n3")
    assert run.wait(LONGEST_WAIT_S) == 0, said_by(run_dir)[-5000:]
    said = said_by(run_dir)
    assert (
        f"tmp_step_2 could not be written by node {told['other']}: " in said
        and "the checkpoint of step 2 could not be written" in said
    )
    [restart] = read_launches(run_dir)[0].restarts
    assert restart.what == WORKERS and f"node {told['other']} is lost" in restart.reason and restart.step == 1
    assert {name for each in places(run_dir)[2:] for name in each["files"]} == {"n1", "n2", "n3"} - {
        told["other"]
    }
    assert read_rows(run_dir)[-1]["step"] == len(STEPS_OF_RUN) and checkpoints(run_dir) == STEPS_OF_RUN
    check_same(run_dir, whole)
    check_nothing_in_memory(run_dir)
