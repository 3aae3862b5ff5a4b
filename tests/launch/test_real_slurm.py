"""Jobs on a real Slurm of two nodes on this host: whatever happens to one, it ends with the weights of an
undisturbed run, bit for bit.

The quickstart's job runs on real Ray and Megatron, over both nodes. The job to which everything happens in
turn starts five times, and has a stand-in for Ray, which has no part in that, and a plain policy; each of
these things happens to the quickstart's job as well. All of it runs in ``--all`` only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from megarl import env
from tests.launch.fake_slurm import write_fake_ray
from tests.launch.loopback_slurm import LoopbackSlurm, missing
from tests.system.whole_runs import STEPS, Launch, Launches, make_material, read_rows, write_config
from tests.tiers import slow
from tests.unit.driver_runs import make_config
from tests.unit.tiny_model import make_tiny_model

WANTED = env.flag("MEGARL_TEST_SLURM", not missing())
pytestmark = [
    slow,
    pytest.mark.skipif(not WANTED, reason=missing() or "MEGARL_TEST_SLURM=0: no tests on a real Slurm"),
    pytest.mark.timeout(1500),
]

ROOT = Path(__file__).parents[2]
GATED = (str(ROOT / "launch" / "ray.sbatch"), "python", "-m", "tests.launch.gated_train")
TRAIN = (str(ROOT / "launch" / "train.sbatch"),)
# One rank a node, or both on this host without a Slurm: the same groups of ranks.
LAYOUT = ["policy.megatron_cfg.tensor_model_parallel_size=1"]
ONE_RANK_A_NODE = ["cluster.gpus_per_node=1", "cluster.num_nodes=2"]
MANY_STEPS = 8


def started_slurm(directory: Path, node_timeout_s: int) -> Iterator[LoopbackSlurm]:
    assert not missing(), missing()
    variables = {
        name: value
        for name, value in env.snapshot().items()
        if not name.startswith(("RAY_", "SLURM_", "SBATCH_", "MEGARL_"))
    }
    variables |= {
        "MEGARL_ROOT": str(ROOT),
        "MEGARL_VENV": sys.prefix,
        "MEGARL_NODES_PER_HOST": "2",
        "MEGARL_RAY_DASHBOARD": "0",
        "MEGARL_RAY_ARGS": "--object-store-memory=80000000",
        # Ray gives its workers a low priority of their own (15): beside anything else on this host they would
        # starve.
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
    }
    with closing(LoopbackSlurm(directory, variables, node_timeout_s)) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackSlurm]:
    """A Slurm that gives a silent node up after seconds."""
    yield from started_slurm(tmp_path_factory.mktemp("slurm"), 10)


@pytest.fixture(scope="module")
def patient_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackSlurm]:
    """A Slurm that waits for a silent node as long as it does where nothing is configured: others notice a
    loss before it."""
    yield from started_slurm(tmp_path_factory.mktemp("patient"), 300)


@pytest.fixture(scope="module")
def without_ray(slurm: LoopbackSlurm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which a job takes a stand-in for Ray, which starts at once, and on which no nodes can be
    checked."""
    commands = tmp_path_factory.mktemp("commands") / "bin"
    write_fake_ray(commands)
    return {
        "PATH": f"{commands}:{slurm.variables['PATH']}",
        "MEGARL_VENV": str(commands.parent),
        "MEGARL_NODE_IP": "127.0.0.1",
        "MEGARL_CHECK_NODES": "0",
    }


@dataclass(frozen=True, slots=True)
class Job:
    """A job of which the run is in ``directory/run``, its log in ``directory/log``, and what its attempts
    leave in ``directory/jobs``."""

    slurm: LoopbackSlurm
    directory: Path
    number: str

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def attempt(self, number: int) -> Path:
        return self.directory / "jobs" / self.number / f"attempt_{number}"

    def await_gate(self, attempt: int) -> None:
        """Wait until an attempt is in its second step."""
        self.slurm.await_moment(
            self.number, (self.attempt(attempt) / "gated").exists, f"attempt {attempt} is in its second step"
        )
        assert self.slurm.property(self.number, "NumNodes") == "2"
        assert (self.attempt(attempt) / "ready").exists()

    def finish(self) -> None:
        """Wait until it has completed."""
        self.slurm.await_state(self.number, "COMPLETED")
        assert self.slurm.property(self.number, "ExitCode") == "0:0"


def submit(slurm: LoopbackSlurm, directory: Path, *command: str, **variables: str) -> Job:
    """``sbatch COMMAND run_dir=DIRECTORY/run``, on both nodes."""
    slurm.await_free_nodes()
    exported = ",".join(
        [
            "--export=ALL",
            f"MEGARL_JOBS_DIR={directory / 'jobs'}",
            *(f"{name}={value}" for name, value in variables.items()),
        ]
    )
    options = ["--nodes=2", f"--output={directory / 'log'}", f"--chdir={ROOT}", "--time=60", exported]
    return Job(slurm, directory, slurm.submit(*options, *command, f"run_dir={directory / 'run'}"))


def exceed_the_time_limit(job: Job, attempt: int) -> None:
    # As if the job had run for nearly an hour: four to five minutes are left, and the notice is due.
    hours, minutes, _ = map(int, job.slurm.property(job.number, "RunTime").split(":"))
    job.slurm.say("scontrol", "update", f"JobId={job.number}", f"TimeLimit={60 * hours + minutes + 5}")
    job.slurm.await_requeue(job.number, attempt + 1)
    job.slurm.say("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    assert "USR1 from Slurm (time limit)" in job.log
    assert (job.attempt(attempt) / "driver.rc").read_text() == "75\n"


def preempt(job: Job, attempt: int) -> None:
    above = job.slurm.submit(
        "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    job.slurm.await_state(above, "COMPLETED")
    job.slurm.await_requeue(job.number, attempt + 1)
    assert "USR1 from Slurm (preempted)" in job.log
    assert (job.attempt(attempt) / "driver.rc").read_text() == "75\n"


def kill_a_node_and_let_slurm_notice(job: Job, attempt: int) -> None:
    job.slurm.kill_node("n2")
    job.slurm.await_requeue(job.number, attempt + 1)
    job.slurm.start_node("n2")
    assert "DUE TO NODE FAILURE" in job.log


def kill_a_node_and_let_ray_notice(job: Job, attempt: int) -> None:
    job.slurm.kill_node("n2")
    (job.attempt(attempt) / "open").touch()
    job.slurm.await_moment(
        job.number,
        lambda: "a worker or a node was lost: requeueing" in job.log,
        "the driver notices the loss",
    )
    job.slurm.start_node("n2")
    job.slurm.await_requeue(job.number, attempt + 1)
    assert (job.attempt(attempt) / "driver.rc").read_text() == "4\n"
    assert "node n2 is lost" in job.log


def cancel(job: Job) -> None:
    restarts = job.slurm.property(job.number, "Restarts")
    job.slurm.say("scancel", job.number)
    job.slurm.wait_until(
        lambda: job.slurm.property(job.number, "JobState") not in ("RUNNING", "COMPLETING"),
        "the job has ended",
        job.number,
    )
    assert [job.slurm.property(job.number, key) for key in ("JobState", "Restarts")] == [
        "CANCELLED",
        restarts,
    ]
    assert not (job.run_dir / "hf").exists()


def weights(run_dir: Path, steps: int) -> bytes:
    return (run_dir / "hf" / f"step_{steps}" / "model.safetensors").read_bytes()


def test_a_job_to_which_everything_happens(
    slurm: LoopbackSlurm, without_ray: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"{left}+{left}=", "answer": str(2 * left)}) for left in range(7))
    )
    model = make_tiny_model(tmp_path / "model", 5)
    config = make_config("sft", tmp_path / "calm", model, str(path), max_num_steps=MANY_STEPS, val_period=0)
    config["checkpointing"]["save_period"] = 3
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    calm_command = [sys.executable, "-m", "tests.launch.gated_train", str(tmp_path / "run.yaml")]
    calm = subprocess.Popen(
        calm_command, cwd=ROOT, env={**env.snapshot(), "PLAIN_POLICY": "1", "OMP_NUM_THREADS": "1"}
    )
    command = [*GATED, str(tmp_path / "run.yaml")]

    job = submit(slurm, tmp_path, *command, PLAIN_POLICY="1", GATED_ATTEMPTS="4", **without_ray)
    for attempt, happen in enumerate([exceed_the_time_limit, preempt, kill_a_node_and_let_slurm_notice]):
        job.await_gate(attempt)
        happen(job, attempt)
        slurm.start_again(job.number)
    job.await_gate(3)
    # Asked to stop, the first and the second attempt saved after the step they were in; what the others had
    # done is lost.
    assert sorted(each.name for each in (job.run_dir / "checkpoints").glob("step_*")) == [
        "step_2",
        "step_3",
        "step_4",
    ]
    cancel(job)
    submit(slurm, tmp_path, *command, PLAIN_POLICY="1", **without_ray).finish()
    assert calm.wait() == 0
    assert weights(job.run_dir, MANY_STEPS) == weights(tmp_path / "calm", MANY_STEPS)


def test_the_exit_code_of_the_driver_is_that_of_the_job(
    slurm: LoopbackSlurm, without_ray: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("nonsense: 1\n")
    job = submit(slurm, tmp_path, *TRAIN, str(tmp_path / "run.yaml"), **without_ray)
    slurm.await_state(job.number, "FAILED")
    assert slurm.property(job.number, "ExitCode") == "2:0", job.log
    assert "nonsense" in job.log


@dataclass(frozen=True, slots=True)
class Quickstart:
    """The quickstart's second part in few, small steps, and one undisturbed run of it without Slurm."""

    config: Path
    calm: Launch

    def check(self, run_dir: Path) -> None:
        """Fail unless a run ended with the weights of the undisturbed one."""
        assert self.calm.finish() == 0, self.calm.output()[-4000:]
        assert any(row.get("train/grad_norm") for row in read_rows(self.calm.run_dir)), (
            "nothing was learned, so that nothing could differ"
        )
        assert weights(run_dir, STEPS) == weights(self.calm.run_dir, STEPS)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quickstart]:
    directory = tmp_path_factory.mktemp("quickstart")
    config = write_config(directory / "grpo.yaml", "grpo", make_material(directory))
    launches = Launches()
    yield Quickstart(config, launches.start(config, directory / "calm", LAYOUT))
    launches.close()


def test_the_quickstart_over_two_nodes(slurm: LoopbackSlurm, quickstart: Quickstart, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, *TRAIN, str(quickstart.config), *LAYOUT, ONE_RANK_A_NODE[0])
    job.finish()
    # the nodes were checked before the run
    assert "2 ranks on 2 nodes added" in job.log and "megarl can work on the cluster" in job.log
    assert yaml.safe_load((job.run_dir / "config.yaml").read_text())["cluster"]["num_nodes"] == 2
    quickstart.check(job.run_dir)


@pytest.mark.parametrize(
    "happen",
    [exceed_the_time_limit, preempt, kill_a_node_and_let_slurm_notice],
    ids=lambda each: each.__name__,
)
def test_the_quickstart_goes_on(
    slurm: LoopbackSlurm, quickstart: Quickstart, tmp_path: Path, happen: Callable[[Job, int], None]
) -> None:
    check_that_it_goes_on(slurm, quickstart, tmp_path, happen)


def test_the_quickstart_goes_on_after_ray_has_noticed_a_loss(
    patient_slurm: LoopbackSlurm, quickstart: Quickstart, tmp_path: Path
) -> None:
    # the other node has a core for each rank: without this, all workers would be built anew there
    once = ["cluster.max_restarts=0"]
    check_that_it_goes_on(
        patient_slurm, quickstart, tmp_path, kill_a_node_and_let_ray_notice, once, MEGARL_LEAVE_TIMEOUT_S="5"
    )


def check_that_it_goes_on(
    slurm: LoopbackSlurm,
    quickstart: Quickstart,
    directory: Path,
    happen: Callable[[Job, int], None],
    changes: Sequence[str] = (),
    **variables: str,
) -> None:
    command = [*GATED, str(quickstart.config), *LAYOUT, *ONE_RANK_A_NODE, *changes]
    job = submit(slurm, directory, *command, GATED_ATTEMPTS="1", **variables)
    job.await_gate(0)
    happen(job, 0)
    slurm.start_again(job.number)
    job.finish()
    quickstart.check(job.run_dir)


def test_the_quickstart_goes_on_after_cancelling(
    slurm: LoopbackSlurm, quickstart: Quickstart, tmp_path: Path
) -> None:
    command = [*GATED, str(quickstart.config), *LAYOUT, *ONE_RANK_A_NODE]
    job = submit(slurm, tmp_path, *command, GATED_ATTEMPTS="1")
    job.await_gate(0)
    assert "2 ranks on 2 nodes added" in job.log, "the nodes were not checked before the command"
    cancel(job)
    submit(slurm, tmp_path, *command).finish()
    quickstart.check(job.run_dir)
