"""Whole programs that lose an engine or a worker, and go on within the launch: the same log and the same
weights, bit for bit.

Real Megatron on tensor parallel 2 over Ray; processes are killed, or stopped, by signals.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megarl import env
from megarl.errors import DeadlineError
from megarl.observe.launches import ENGINES, FINISHED, WORKERS, read_launches
from megarl.watch.run_state import read_run_state
from megarl.watch.status import as_plain
from tests.faults.trial import SEAM
from tests.faults.workers import ranks_of
from tests.system.test_resume import check_same, something_to_lose
from tests.system.whole_runs import ROOT, STEPS, Launch, Launches, Material, read_rows, write_config
from tests.tiers import slow
from tests.toys.engine_actor import FAULTS

# Several launches in one test: on a machine that does much else they take longer than the limit of other
# tests.
pytestmark = [slow, pytest.mark.timeout(1800)]
ENGINE = ROOT / "tests" / "toys" / "engine_actor.py"
WITHOUT_VALIDATION = [
    "data.validation=null",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.metric_name=null",
]
ON_TOY_ENGINE = [
    f"policy.generation.backend={ENGINE}:KIND",
    "++policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}",
    "cluster.gpus_per_node=3",
    *WITHOUT_VALIDATION,
]
SHORT_DEADLINES = ["++deadlines.step_s=25", "++deadlines.save_s=25"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, material: Material, launches: Launches) -> Path:
    """A run that nobody disturbed; the policy itself generates."""
    directory = tmp_path_factory.mktemp("whole")
    launch = launches.start(write_config(directory / "run.yaml", "grpo", material), directory / "run")
    assert launch.finish() == 0, launch.output()[-5000:]
    something_to_lose(launch.run_dir)
    return launch.run_dir


@pytest.fixture(scope="module")
def whole_on_engine(tmp_path_factory: pytest.TempPathFactory, material: Material, launches: Launches) -> Path:
    """A run that nobody disturbed; an engine generates."""
    directory = tmp_path_factory.mktemp("whole")
    launch = launches.start(
        write_config(directory / "run.yaml", "grpo", material), directory / "run", ON_TOY_ENGINE
    )
    assert launch.finish() == 0, launch.output()[-5000:]
    something_to_lose(launch.run_dir)
    return launch.run_dir


def workers(launch: Launch) -> list[int]:
    """Process ids of the workers of the policy."""
    return sorted(pid for pid, name in launch.processes().items() if "WorkerShell" in name)


def lose_worker(launch: Launch, happened: Callable[[], bool], number: int) -> int:
    """Send one of the workers a signal at a moment; they are gone soon, or stand still. Returns its rank."""
    launch.await_moment(happened)
    found = ranks_of(launch)
    assert len(found) == 2 and sorted(found) == workers(launch), found
    rank = random.Random(len(launch.output())).randrange(2)
    os.kill(found[rank], number)
    return rank


DEATH = re.compile(
    r"WorkerLostError: \[pp0 dp0 cp0 tp(?P<rank>\d) \S+\] "
    r"worker process died during (?P<phase>\w[\w ()]*), step (?P<step>\d+), of lm_policy"
)


def status_of(run_dir: Path) -> dict[str, object]:
    """What ``megarl status --json`` says."""
    command = [sys.executable, "-m", "megarl.cli", "status", str(run_dir), "--json"]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(
    "faults",
    [
        {"generate.2": ""},
        {"receive.3": ""},
        {"generate.1": "", "receive.4": "", "generate.4": ""},
        {"generate.3": "stop"},
    ],
    ids=["answering", "refit", "three times", "stands still"],
)
def test_a_lost_engine_is_replaced(
    faults: dict[str, str],
    whole_on_engine: Path,
    material: Material,
    launches: Launches,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "faults").mkdir()
    for name, how in faults.items():
        (tmp_path / "faults" / name).write_text(how)
    monkeypatch.setenv(FAULTS, str(tmp_path / "faults"))
    launch = launches.start(
        write_config(tmp_path / "run.yaml", "grpo", material), tmp_path / "run", ON_TOY_ENGINE
    )
    before: list[int] = []
    launch.await_moment(lambda: bool(read_rows(tmp_path / "run")))
    before = workers(launch)
    assert launch.finish() == 0, launch.output()[-5000:]
    assert not list((tmp_path / "faults").iterdir()), "a fault did not happen"
    check_same(tmp_path / "run", whole_on_engine)
    assert len(before) == 2
    [recorded] = read_launches(tmp_path / "run")
    assert [restart.what for restart in recorded.restarts] == [ENGINES] * len(
        faults
    ) and recorded.outcome == FINISHED
    assert read_rows(tmp_path / "run")[-1]["performance/engine_restarts"] == len(faults)
    told = status_of(tmp_path / "run")
    assert (told["engine_restarts"], told["worker_restarts"], told["restarts"]) == (len(faults), 0, 0)
    # workers are built once: a second time would be told
    assert launch.output().count(f"{STEPS} steps") == 1


def test_an_engine_that_is_lost_again_and_again_ends_the_run(
    material: Material, launches: Launches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faults").mkdir()
    for number in range(2, 9):
        (tmp_path / "faults" / f"generate.{number}").touch()
    monkeypatch.setenv(FAULTS, str(tmp_path / "faults"))
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    launch = launches.start(config, tmp_path / "run", [*ON_TOY_ENGINE, "++cluster.max_engine_restarts=1"])
    assert launch.finish() == 1, launch.output()[-5000:]
    assert "the toy engine failed" in launch.output()
    assert as_plain(read_run_state(tmp_path / "run"))["engine_restarts"] == 1
    assert sorted(path.name for path in (tmp_path / "faults").iterdir()) == [
        f"generate.{number}" for number in range(4, 9)
    ]


@pytest.mark.parametrize("moment", ["start of a step", "within a save", "two of three"])
def test_a_killed_worker_costs_a_restart_within_the_launch(
    moment: str, whole: Path, material: Material, launches: Launches, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", "grpo", material, save_period=2)
    launch = launches.start(config, run_dir, ["++cluster.max_restarts=3"])
    kills: dict[str, list[Callable[[], bool]]] = {
        "start of a step": [launch.logged(2)],
        "within a save": [launch.writing(2)],
        "two of three": [launch.logged(1), launch.logged(3)],
    }
    ranks = []
    for number, happened in enumerate(kills[moment], 1):
        ranks.append(lose_worker(launch, happened, signal.SIGKILL))
        launch.await_moment(lambda number=number: launch.output().count(f"{STEPS} steps") == number + 1)
    pid = launch.process.pid
    assert launch.finish() == 0, launch.output()[-5000:]
    check_same(run_dir, whole)
    [recorded] = read_launches(run_dir)
    assert recorded.process == pid and recorded.outcome == FINISHED
    assert [restart.what for restart in recorded.restarts] == [WORKERS] * len(kills[moment])
    steps = {"start of a step": [{2, 0}], "within a save": [{0, 2}], "two of three": [{0}, {2}]}[moment]
    assert all(restart.step in allowed for restart, allowed in zip(recorded.restarts, steps, strict=True)), (
        recorded.restarts
    )
    deaths = [DEATH.match(restart.reason) for restart in recorded.restarts]
    assert all(deaths), recorded.restarts
    assert [int(death["rank"]) for death in deaths if death] == ranks
    # the step that was logged, which goes on with its save, or one soon after: the kill may have come a
    # little later
    logged = {"start of a step": [2], "within a save": [2], "two of three": [1, 3]}[moment]
    assert all(
        first <= int(death["step"]) <= first + 2 for first, death in zip(logged, deaths, strict=True) if death
    ), recorded.restarts
    if moment == "within a save":
        assert all(death["phase"] == "save" for death in deaths if death and death["step"] == "2"), (
            recorded.restarts
        )
    told = status_of(run_dir)
    assert (told["engine_restarts"], told["worker_restarts"], told["restarts"]) == (0, len(kills[moment]), 0)
    assert read_rows(run_dir)[-1]["performance/worker_restarts"] == len(kills[moment])
    assert {path.name for path in (run_dir / "checkpoints").glob("*step_*")} == {"step_2", "step_4"}


def test_a_worker_that_stands_still_is_replaced(
    whole: Path, material: Material, launches: Launches, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    launch = launches.start(config, run_dir, ["++cluster.max_restarts=1", *SHORT_DEADLINES])
    lose_worker(launch, launch.committed(2), signal.SIGSTOP)
    assert launch.finish() == 0, launch.output()[-5000:]
    check_same(run_dir, whole)
    [restart] = read_launches(run_dir)[0].restarts
    assert (
        restart.what == WORKERS
        and restart.step is not None
        and restart.step >= 2
        and restart.reason.startswith("DeadlineError")
    )


def test_a_rank_that_waits_for_ever_in_the_first_step_ends_the_launch(
    material: Material, launches: Launches, tmp_path: Path
) -> None:
    """In a loop of Python in a layer, with nothing measured, and every deadline far away. The other rank
    waits in a collective."""
    run_dir, orders = tmp_path / "run", tmp_path / "orders"
    orders.mkdir()
    (orders / "stuck-1").touch()
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    changed = {"MEGARL_TEST_FAULTS": str(orders), "PYTHONPATH": os.pathsep.join([str(SEAM), str(ROOT)])}
    launch = launches.start(config, run_dir, ["++cluster.max_restarts=0", "++deadlines.least_s=16"], changed)
    assert launch.finish() == DeadlineError.exit_code == 4, launch.output()[-5000:]
    [recorded] = read_launches(run_dir)
    said = (
        r"DeadlineError: train, step 1, of lm_policy: 2 of 2 workers do not answer and make no progress for "
        r"at least 12 s: "
    )
    assert re.match(said, recorded.outcome or ""), recorded.outcome
    assert re.search(r"In no collective, while 1 others wait in one: \[pp0 dp0 cp0 tp1 ", launch.output())
    assert "in spoil" in launch.output(), "the stack of the rank that waits"
    assert not any(orders.iterdir()) and not recorded.restarts


def test_in_the_end_the_launcher_starts_it_again(
    whole: Path, material: Material, launches: Launches, tmp_path: Path
) -> None:
    """Exit code 4, as without restarts; the next launch goes on."""
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    launch = launches.start(config, run_dir, ["++cluster.max_restarts=1"])
    lose_worker(launch, launch.committed(1), signal.SIGKILL)
    launch.await_moment(lambda: launch.output().count(f"{STEPS} steps") == 2)
    lose_worker(launch, lambda: len(workers(launch)) == 2, signal.SIGKILL)
    assert launch.finish() == 4, launch.output()[-5000:]
    last = launches.start(config, run_dir)
    assert last.finish() == 0, last.output()[-5000:]
    check_same(run_dir, whole)
    assert [len(each.restarts) for each in read_launches(run_dir)] == [1, 0]


def test_nothing_of_lost_workers_is_left(material: Material, launches: Launches, tmp_path: Path) -> None:
    """Processes, and shared memory, of those that were lost with one that was killed, while the run goes
    on."""
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    launch = launches.start(config, tmp_path / "run", ["++cluster.max_restarts=1"])
    launch.await_moment(launch.committed(1))
    before = [psutil.Process(pid) for pid in workers(launch)]
    files = set(Path("/dev/shm").iterdir())
    before[0].kill()
    launch.await_moment(lambda: launch.output().count(f"{STEPS} steps") == 2)
    assert psutil.wait_procs(before, timeout=30)[1] == []
    assert launch.finish() == 0, launch.output()[-5000:]
    assert {
        path for path in set(Path("/dev/shm").iterdir()) - files if path.owner() == Path("/proc/self").owner()
    } == set()


@pytest.mark.parametrize("apart", [False, True], ids=["training", "an engine apart"])
def test_a_lost_node_is_replaced_by_one_that_joins(apart: bool, material: Material, tmp_path: Path) -> None:
    """Two nodes of Ray on this host, a rank on each, or a rank on one and an engine on the other. What takes
    the lost one's place comes later, and is waited for."""
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    variables = {name: value for name, value in env.snapshot().items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "tests.system.lost_nodes", str(config), str(tmp_path)]
    if apart:
        kind, resources = f"{ENGINE}:PLACED", "{enabled: false, resources: {num_nodes: 1, gpus_per_node: 1}}"
        command += [
            f"policy.generation.backend={kind}",
            f"++policy.generation.colocated={resources}",
            *WITHOUT_VALIDATION,
        ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    told = re.search(r"codes \[0, 0\] without (n[12]): \['head', 'n[12]', 'n3'\]", done.stdout)
    assert told, done.stdout[-3000:] + done.stderr[-5000:]
    assert "waiting at most 1800 s for devices" in done.stderr
    check_same(tmp_path / "run", tmp_path / "whole")
    # Ray may learn of the end of the engine before that of its node
    *engines, restart = read_launches(tmp_path / "run")[0].restarts
    assert all(each.what == ENGINES for each in engines) and (apart or not engines)
    assert restart.what == WORKERS and f"node {told[1]} is lost" in restart.reason


UNSHARE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
"""Begins a command whose /dev/shm has one MiB."""


@pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0,
    reason="mounts are not allowed",
)
def test_a_full_shared_memory_is_named_and_the_run_goes_on(
    whole: Path, material: Material, tmp_path: Path
) -> None:
    """Ray's object store goes elsewhere, and says so; the rest needs none."""
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    variables = {name: value for name, value in env.snapshot().items() if not name.startswith("RAY_")}
    command = [
        *UNSHARE,
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        str(config),
        f"run_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "/dev/shm has only 1048576 bytes available" in done.stdout + done.stderr
    check_same(tmp_path / "run", whole)
