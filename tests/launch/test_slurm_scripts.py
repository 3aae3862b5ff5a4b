"""The Slurm scripts, with stand-ins for Slurm and Ray: what they start, what signals and exit codes lead to,
and what they say."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.launch.fake_slurm import write_fake_slurm
from tests.tiers import sampled, slow

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "launch").glob("*.sbatch"))
# A driver says that it runs, does something, and ends.
DRIVER = 'touch "$MEGARL_ATTEMPT_DIR/driver_started"; '
SAVES = 'echo 7 >"$MEGARL_ATTEMPT_DIR/last_checkpoint"; '
UNTIL_STOPPED = 'until [ -e "$MEGARL_ATTEMPT_DIR/stop_requested" ]; do sleep 0.05; done; '
LONGEST_WAIT_S = 60


@dataclass
class Job:
    """A job script that runs in this test's process group, as far as it knows as job 4711 on two nodes."""

    directory: Path
    variables: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, driver: str | None, script: str = "ray.sbatch", **variables: str
    ) -> subprocess.Popen[str]:
        command = [
            "bash",
            str(ROOT / "launch" / script),
            *(["bash", "-c", driver] if driver is not None else []),
        ]
        with (self.directory / "log").open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=self.directory,
                env={**self.variables, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )
        self.started.append(process)
        return process

    def run(self, driver: str | None, script: str = "ray.sbatch", **variables: str) -> int:
        return self.start(driver, script, **variables).wait(LONGEST_WAIT_S)

    def ran(
        self, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A script to its end."""
        return subprocess.run(
            command,
            cwd=self.directory,
            env=variables or self.variables,
            capture_output=True,
            text=True,
            timeout=LONGEST_WAIT_S,
            check=False,
        )

    def signalled(
        self, number: signal.Signals, driver: str | None, script: str = "ray.sbatch", **variables: str
    ) -> int:
        """Exit code of a job that gets a signal when its driver runs."""
        process = self.start(driver, script, **variables)
        self.await_file("driver_started")
        process.send_signal(number)
        return process.wait(LONGEST_WAIT_S)

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def attempt(self, number: int = 0) -> Path:
        return self.directory / "runs" / "slurm" / "4711" / f"attempt_{number}"

    def calls(self, program: str) -> list[list[str]]:
        file = Path(self.variables["FAKE_CALLS"])
        lines = [line.split("\t") for line in file.read_text().splitlines()] if file.exists() else []
        return [words[1:] for words in lines if words[0] == program]

    def requeues(self) -> list[list[str]]:
        return [words for words in self.calls("scontrol") if words[0] == "requeue"]

    def await_file(self, name: str) -> None:
        end = time.monotonic() + LONGEST_WAIT_S
        while not (self.attempt() / name).exists():
            assert time.monotonic() < end and self.started[-1].poll() is None, self.log
            time.sleep(0.02)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    write_fake_slurm(tmp_path / "bin")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    made = Job(
        tmp_path,
        {
            "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "FAKE_CALLS": str(tmp_path / "calls"),
            "FAKE_HOSTS": "n1 n2",
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_CPUS_ON_NODE": "2",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "MEGARL_NODES_PER_HOST": "2",
            "MEGARL_PORT_BASE": str(port),
            "MEGARL_NODE_IP": "127.0.0.1",
            "MEGARL_RAY_TIMEOUT_S": "20",
            "MEGARL_RAY_TEMP": str(tmp_path),
            "MEGARL_VENV": str(tmp_path),
        },
    )
    yield made
    for process in made.started:
        process.kill()
        process.wait()
    # Slurm would end what a killed task leaves on a node
    for left in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if left.cwd() == str(tmp_path):
                left.kill()


def test_the_driver_runs_on_the_first_of_all_nodes_and_its_code_is_the_job_s(job: Job) -> None:
    assert job.run(DRIVER + 'echo "on $SLURMD_NODENAME with $RAY_ADDRESS and $1"; exit 42') == 42, job.log
    assert f"on n1 with 127.0.0.1:{job.variables['MEGARL_PORT_BASE']} and" in job.log
    assert "the driver ended with 42" in job.log.splitlines()[-1]
    assert (job.attempt() / "driver.rc").read_text() == "42\n"
    assert "on n1" in (job.attempt() / "driver.log").read_text()
    [srun] = job.calls("srun")
    assert {"--nodes=2", "--ntasks=2", "--overlap"} <= set(srun)
    assert not job.requeues()
    assert not list(job.directory.glob("megarl-ray-*")), "a node has left Ray's files behind"


@slow
def test_every_port_of_every_node_is_its_own(job: Job) -> None:
    assert job.run(DRIVER + "exit 0") == 0, job.log
    taken: list[int] = []
    for words in job.calls("ray"):
        ports = {name: int(value) for name, value in re.findall(r"--([a-z-]*port)=(\d+)", " ".join(words))}
        lowest, highest = ports.pop("min-worker-port"), ports.pop("max-worker-port")
        taken += [*ports.values(), *range(lowest, highest + 1)]
    assert len(job.calls("ray")) == 2
    assert len(taken) == len(set(taken))
    assert len(taken) >= 1900


def test_the_token_is_needed_and_private_and_nowhere_else(job: Job) -> None:
    assert job.run(DRIVER + 'test "$RAY_AUTH_MODE" = token && cat "$RAY_AUTH_TOKEN_PATH"') == 0, job.log
    token = (job.attempt() / "ray_token").read_text()
    assert re.fullmatch(r"[0-9a-f]{64}", token)
    assert (job.attempt() / "ray_token").stat().st_mode & 0o77 == 0
    assert job.attempt().stat().st_mode & 0o77 == 0
    assert token not in (job.directory / "calls").read_text()
    heads = [words for words in job.calls("ray") if "--head" in words]
    assert ["--dashboard-host=127.0.0.1" in words for words in heads] == [True]


@slow
def test_a_directory_of_somebody_else_in_the_place_of_ray_s_is_refused(job: Job) -> None:
    """Its name can be guessed. A stand-in for rm fails, as it does for everybody else than root."""
    path = job.directory / "megarl-ray-4711-0-0"
    path.mkdir()
    (path / "planted").touch()
    (job.directory / "bin" / "rm").write_text(
        '#!/bin/sh\ncase "$*" in *megarl-ray-*-0) exit 1 ;; esac\nexec /bin/rm "$@"\n'
    )
    (job.directory / "bin" / "rm").chmod(0o755)
    assert job.run(DRIVER) == 2, job.log
    assert f"{path} is somebody else's. Fix: set MEGARL_RAY_TEMP to a directory of your own" in job.log
    assert (
        (path / "planted").exists()
        and not job.calls("ray")
        and not (job.attempt() / "driver_started").exists()
    )


@slow
def test_srun_that_dies_at_once_ends_the_job(job: Job) -> None:
    assert job.run(DRIVER, FAKE_SRUN="dies") == 9
    assert "srun ended with 9 before Ray was up on 2 nodes" in job.log.splitlines()[-1]
    assert not job.requeues()


def test_a_node_that_never_registers_is_named(job: Job) -> None:
    assert job.run(DRIVER, FAKE_MISSING="n2") == 3
    assert "did not join Ray within 1 s: n2" in job.log
    assert not (job.attempt() / "driver_started").exists()
    assert not job.requeues()


@slow
def test_a_head_whose_ray_does_not_start(job: Job) -> None:
    assert job.run(DRIVER, FAKE_RAY_FAILS="n1", MEGARL_RAY_TIMEOUT_S="600") == 1
    assert "no more file descriptors" in job.log and "Ray did not start" in job.log


@slow
def test_a_port_that_is_taken(job: Job) -> None:
    with socket.create_server(("127.0.0.1", int(job.variables["MEGARL_PORT_BASE"]))):
        # The other node does not wait for so long.
        assert job.run(DRIVER, MEGARL_RAY_TIMEOUT_S="600") == 1
    assert f"port {job.variables['MEGARL_PORT_BASE']} is taken. Fix: set MEGARL_PORT_BASE" in job.log


@slow
def test_a_directory_that_is_not_shared(job: Job) -> None:
    """Played by a token that is gone before the nodes look for it."""
    srun = job.directory / "bin" / "srun"
    srun.write_text(srun.read_text().replace("nodes=1", 'nodes=1; rm "$MEGARL_ATTEMPT_DIR/ray_token"', 1))
    (job.directory / "bin" / "sleep").write_text("#!/bin/sh\n")
    assert job.run(DRIVER, MEGARL_SHARED_TIMEOUT_S="1") == 2
    assert "not on a file system that all nodes share. Fix: set MEGARL_JOBS_DIR" in job.log


def test_notice_of_the_time_limit_saves_and_requeues(job: Job) -> None:
    assert job.signalled(signal.SIGUSR1, DRIVER + UNTIL_STOPPED + SAVES + "exit 75") == 75, job.log
    assert job.requeues() == [["requeue", "4711"]]
    assert "USR1 from Slurm (time limit)" in job.log
    assert "requeueing job 4711 (attempt 1 follows)" in job.log.splitlines()[-1]


@slow
def test_a_stop_without_a_checkpoint_is_not_tried_again(job: Job) -> None:
    assert job.signalled(signal.SIGUSR1, DRIVER + UNTIL_STOPPED + "exit 75") == 1, job.log
    assert not job.requeues()
    assert (
        "this attempt wrote no checkpoint" in job.log.splitlines()[-1]
        and "--time" in job.log.splitlines()[-1]
    )


@slow
def test_preemption_requeues_also_without_a_checkpoint(job: Job) -> None:
    assert (
        job.signalled(
            signal.SIGUSR1,
            DRIVER + UNTIL_STOPPED + "exit 75",
            FAKE_JOB="JobState=RUNNING PreemptTime=2026-08-01T10:00:00",
        )
        == 75
    ), job.log
    assert job.requeues() == [["requeue", "4711"]]
    assert "USR1 from Slurm (preempted)" in job.log


def test_a_lost_worker_requeues_from_the_checkpoint(job: Job) -> None:
    assert job.run(DRIVER + SAVES + "exit 4") == 75
    assert job.requeues() == [["requeue", "4711"]]
    assert job.run(DRIVER + "exit 4", SLURM_RESTART_COUNT="1") == 1
    assert job.requeues() == [["requeue", "4711"]], "no checkpoint since: it would go on like that for ever"
    assert job.attempt(0).is_dir() and job.attempt(1).is_dir()


@slow
def test_the_loss_of_the_first_node_requeues_too(job: Job) -> None:
    assert job.run(SAVES + DRIVER + "sleep 20", FAKE_SRUN="loses") == 75
    assert "its node was lost" in job.log
    assert job.requeues() == [["requeue", "4711"]]


@slow
def test_srun_that_waits_for_a_node_that_is_gone_is_ended_after_the_driver(job: Job) -> None:
    assert job.run(DRIVER + SAVES + "exit 4", FAKE_SRUN="waits", MEGARL_LEAVE_TIMEOUT_S="1") == 75
    assert job.requeues() == [["requeue", "4711"]]
    assert "a worker or a node was lost: requeueing" in job.log


def test_a_task_of_an_array_requeues_itself_alone(job: Job) -> None:
    """The number of one of the tasks is that of the array: by it Slurm would requeue all of them."""
    task = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}
    assert job.run(DRIVER + SAVES + "exit 4", **task) == 75
    assert job.requeues() == [["requeue", "4711_3"]]
    shown = [words for words in job.calls("scontrol") if words[:2] == ["show", "job"]]
    assert all(words[2:] == ["4711_3"] for words in shown)


def test_a_job_that_a_task_of_an_array_submitted_requeues_itself(job: Job) -> None:
    """It has inherited the variables of the task."""
    task = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3", "FAKE_JOB": "JobId=4712 ArrayTaskId=3"}
    assert job.run(DRIVER + SAVES + "exit 4", SLURM_JOB_ID="4800", **task) == 75
    assert job.requeues() == [["requeue", "4800"]]


@slow
def test_there_is_a_last_requeue(job: Job) -> None:
    assert job.run(DRIVER + SAVES + "exit 75", SLURM_RESTART_COUNT="3", MEGARL_MAX_REQUEUES="3") == 1
    assert not job.requeues()
    assert "requeued 3 times already" in job.log.splitlines()[-1]


@slow
def test_a_requeue_that_slurm_refuses(job: Job) -> None:
    assert job.run(DRIVER + SAVES + "exit 75", FAKE_REQUEUE="1") == 75
    assert "submit the job again" in job.log.splitlines()[-1]


def test_a_chained_job_leaves_the_rest_to_the_next(job: Job) -> None:
    assert job.run(DRIVER + SAVES + "exit 75", MEGARL_CHAIN_LEFT="1") == 0
    assert not job.requeues()
    assert job.run(DRIVER + "exit 2", MEGARL_CHAIN_LEFT="1") == 2


@sampled(1)
@pytest.mark.parametrize("after_notice", [False, True])
def test_cancelling_is_143_and_never_requeued(job: Job, after_notice: bool) -> None:
    # What Slurm 22.05 says of a cancelled job while it ends it.
    process = job.start(
        DRIVER + SAVES + "sleep 20", FAKE_JOB="JobState=COMPLETING Reason=None PreemptTime=None"
    )
    job.await_file("last_checkpoint")
    if after_notice:
        process.send_signal(signal.SIGUSR1)
        job.await_file("stop_requested")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONGEST_WAIT_S) == 143
    assert not job.requeues()
    assert "TERM from Slurm (reason: None)" in job.log


@slow
def test_a_driver_that_does_not_listen_is_gone_before_its_node_is(job: Job) -> None:
    process = job.start(
        'trap "" TERM; echo $$ $PPID >"$MEGARL_ATTEMPT_DIR/processes"; '
        + DRIVER
        + "while :; do sleep 0.1; done"
    )
    job.await_file("driver_started")
    driver, node = (int(number) for number in (job.attempt() / "processes").read_text().split())
    os.kill(node, signal.SIGTERM)
    assert process.wait(LONGEST_WAIT_S) == 1
    assert "driver left no exit code" in job.log
    assert not psutil.pid_exists(driver)


@slow
def test_a_time_limit_that_comes_before_the_driver_stops_requeues(job: Job) -> None:
    assert (
        job.signalled(
            signal.SIGTERM,
            SAVES + DRIVER + "sleep 20",
            FAKE_JOB="JobState=COMPLETING Reason=TimeLimit PreemptTime=None",
        )
        == 75
    ), job.log
    assert job.requeues() == [["requeue", "4711"]]
    assert "the time limit came before the driver could stop" in job.log


@slow
def test_a_time_limit_that_ends_a_chain_is_said(job: Job) -> None:
    """Slurm counts the job as failed, whatever its script returns."""
    limit = "JobState=COMPLETING Reason=TimeLimit PreemptTime=None"
    asked = SAVES + DRIVER + "sleep 20"
    assert job.signalled(signal.SIGTERM, asked, FAKE_JOB=limit, MEGARL_CHAIN_LEFT="2") == 143, job.log
    assert not job.requeues() and "Slurm cancels the rest of the chain. Fix: submit it again" in job.log


@slow
def test_an_attempt_keeps_the_files_of_one_of_the_same_number(job: Job) -> None:
    assert job.run(DRIVER + "echo first") == 0
    assert job.run(DRIVER + "echo second") == 0
    [before] = job.attempt().parent.glob("attempt_0.before-*")
    assert (before / "driver.log").read_text() == "first\n"
    assert (job.attempt() / "driver.log").read_text() == "second\n"


@sampled(1)
@pytest.mark.parametrize("image", [None, "my image.sqsh"])
def test_without_a_command_ray_waits_and_says_how_to_attach(job: Job, image: str | None) -> None:
    path = None if image is None else job.directory / image
    if path is not None:
        path.touch()
    process = job.start(None, **({} if path is None else {"MEGARL_CONTAINER_IMAGE": str(path)}))
    job.await_file("attach.sh")
    attach = shlex.split((job.attempt() / "attach.sh").read_text().splitlines()[-1])
    assert {"--jobid=4711", "--overlap", "--nodelist=n1"} <= set(attach)
    of_container = [word for word in attach if word.startswith("--container-image")]
    assert of_container == ([] if path is None else [f"--container-image={path}"])
    assert any(word.startswith("RAY_AUTH_TOKEN_PATH=") for word in attach)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(LONGEST_WAIT_S) == 0, job.log
    assert f"bash {job.attempt()}/attach.sh" in job.log


@sampled(1)
@pytest.mark.parametrize(
    ("left", "warns"),
    [
        ("9:59", True),
        ("10:01", False),
        ("2:00:00", False),
        ("1-00:00:00", False),
        ("UNLIMITED", False),
        ("0:30", True),
    ],
)
def test_a_short_time_limit_is_told(job: Job, left: str, warns: bool) -> None:
    assert job.run(DRIVER + "exit 0", FAKE_LEFT=left) == 0
    assert ("a run that cannot save in the rest gets nowhere" in job.log) is warns


@slow
def test_a_container_is_optional(job: Job) -> None:
    image = job.directory / "megarl.sqsh"
    assert job.run(DRIVER, MEGARL_CONTAINER_IMAGE=str(image)) == 2
    assert f"MEGARL_CONTAINER_IMAGE = {image} does not exist" in job.log and not job.calls("srun")
    image.touch()
    assert (
        job.run(DRIVER + "exit 0", MEGARL_CONTAINER_IMAGE=str(image), MEGARL_CONTAINER_MOUNTS="/data:/data")
        == 0
    )
    [srun] = job.calls("srun")
    assert f"--container-image={image}" in srun
    [mounts] = [word for word in srun if word.startswith("--container-mounts=")]
    assert f"{ROOT}:{ROOT}" in mounts and mounts.endswith(",/data:/data")


def test_training_gets_its_configuration_and_the_number_of_nodes(job: Job) -> None:
    config = job.directory / "run.yaml"
    config.touch()
    done = job.ran(
        [
            "bash",
            str(ROOT / "launch" / "train.sbatch"),
            "run.yaml",
            "grpo.max_num_steps=3",
            "cluster.num_nodes=1",
            "--stop-at",
            "+3:45",
        ]
    )
    assert done.returncode == 0, done.stderr
    arguments = ["run.yaml", "cluster.num_nodes=2", "grpo.max_num_steps=3", "cluster.num_nodes=1"]
    calls = [words for words in job.calls("python") if words[1] == "megarl.cli"]
    assert calls == [
        ["-m", "megarl.cli", "doctor", "--nodes", *arguments],
        ["-m", "megarl.cli", "train", *arguments, "--stop-at", "+3:45"],
    ]


def submit_training(job: Job, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (job.directory / "run.yaml").touch()
    return job.ran(
        ["bash", str(ROOT / "launch" / "train.sbatch"), "run.yaml", *arguments],
        {**job.variables, **variables},
    )


@sampled(1)
@pytest.mark.parametrize("code", ["1", "2"])
def test_nodes_that_cannot_run_it_end_the_job_before_it_starts(job: Job, code: str) -> None:
    done = submit_training(job, "a key=two words", FAKE_NODES_CHECK=code)
    assert done.returncode == int(code)
    assert (
        "Ray has n1: 0, n2: 0" in done.stdout + done.stderr
        and "Ray has n1: 0" in (job.attempt() / "driver.log").read_text()
    )
    assert "MEGARL_CHECK_NODES=0 leaves the check out" in done.stderr
    # the words of the check are those of the run, spaces and all
    assert [
        "-m",
        "megarl.cli",
        "doctor",
        "--nodes",
        "run.yaml",
        "cluster.num_nodes=2",
        "a key=two words",
    ] in job.calls("python")
    assert not any("train" in words for words in job.calls("python")) and not job.requeues()


@sampled(1)
@pytest.mark.parametrize(
    ("script", "arguments"),
    [("ray.sbatch", ["python", "my.py"]), ("ray.sbatch", []), ("bench.sbatch", ["run"])],
)
def test_other_jobs_ask_whether_all_that_ray_has_computes_together(
    job: Job, script: str, arguments: list[str]
) -> None:
    """Nobody said what they need. Without a command a shell would be of no use on nodes that do not reach one
    another."""
    command = ["bash", str(ROOT / "launch" / script), *arguments]
    asked = job.ran(command, {**job.variables, "FAKE_NODES_CHECK": "1"})
    assert asked.returncode == 1 and "MEGARL_CHECK_NODES=0 leaves the check out" in asked.stderr, asked.stderr
    ran = [words for words in job.calls("python") if "ray_nodes" not in " ".join(words)]
    assert ran == [["-m", "megarl.cli", "doctor", "--nodes"]]


@slow
def test_the_check_of_the_nodes_can_be_left_out(job: Job) -> None:
    assert submit_training(job, FAKE_NODES_CHECK="1", MEGARL_CHECK_NODES="0").returncode == 0
    assert any("train" in words for words in job.calls("python")) and not any(
        "doctor" in words for words in job.calls("python")
    )


@sampled(1)
@pytest.mark.parametrize(("slurm_says", "cpus"), [("72(x2)", "72"), ("128,64(x3)", "64"), ("8", "8")])
def test_the_one_task_of_a_node_has_all_cpus_and_is_bound_to_none(
    job: Job, slurm_says: str, cpus: str
) -> None:
    assert job.run(DRIVER + "exit 0", SLURM_JOB_CPUS_PER_NODE=slurm_says) == 0, job.log
    [srun] = job.calls("srun")
    assert {f"--cpus-per-task={cpus}", "--cpu-bind=none", "--propagate=NONE"} <= set(srun)


@slow
def test_without_slurm_s_word_no_number_of_cpus_is_asked_for(job: Job) -> None:
    del job.variables["SLURM_CPUS_ON_NODE"]
    assert job.run(DRIVER + "exit 0") == 0, job.log
    assert not any(word.startswith("--cpus-per-task") for word in job.calls("srun")[0])


@sampled(1)
@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, "1"),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_CPUS_PER_NODE": "96(x2)"}, "12"),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_CPUS_PER_NODE": "224(x2)"}, "16"),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}, "1"),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_CPUS_PER_NODE": "96(x2)", "OMP_NUM_THREADS": "3"}, "3"),
        ({"FAKE_GPUS": "4", "SLURM_JOB_CPUS_PER_NODE": "32(x2)"}, "8"),
    ],
    ids=["no GPU", "share", "most", "least", "given", "driver"],
)
def test_threads_of_a_rank(job: Job, variables: dict[str, str], threads: str) -> None:
    """One on a CPU, where the ranks fill the cores; beside a GPU its share of them. Where Slurm does not
    count GPUs the driver does."""
    if "FAKE_GPUS" in variables:
        smi = job.directory / "bin" / "nvidia-smi"
        smi.write_text(
            '#!/bin/sh\nfor gpu in $(seq $FAKE_GPUS); do echo "GPU $gpu: NVIDIA H100 (UUID: GPU-$gpu)"; '
            "done\n"
        )
        smi.chmod(0o755)
    assert job.run(DRIVER + 'echo "threads $OMP_NUM_THREADS"', **variables) == 0, job.log
    assert f"threads {threads}\n" in job.log


@slow
def test_a_node_takes_all_the_locked_memory_that_it_may(job: Job) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert job.run(DRIVER + "ulimit -l; ulimit -Hl") == 0, job.log
    got, most = (job.attempt() / "driver.log").read_text().splitlines()[-2:]
    assert got == most, f"soft {soft}, hard {hard} before"


@sampled(1)
@pytest.mark.parametrize(
    ("home", "mounts", "warns"),
    [
        ("", "", True),
        ("/data/hf", "", True),
        ("/data/hf", "/data:/data", False),
        ("/data/hf", "/x:/dat", True),
        ("/data/hf", "/x:/data/hf:ro", False),
    ],
)
def test_models_that_a_container_would_not_see_are_told(
    job: Job, home: str, mounts: str, warns: bool
) -> None:
    image = job.directory / "megarl.sqsh"
    image.touch()
    assert (
        job.run(
            DRIVER + "exit 0", MEGARL_CONTAINER_IMAGE=str(image), HF_HOME=home, MEGARL_CONTAINER_MOUNTS=mounts
        )
        == 0
    ), job.log
    assert (f"HF_HOME = {home} is not on a directory that the container sees" in job.log) is warns


def test_the_environment_for_gpus_is_taken_where_there_is_one(job: Job) -> None:
    clone = job.directory / "clone"
    shutil.copytree(ROOT / "launch", clone / "launch")
    for name in (".venv", ".venv-gpu"):
        (clone / name / "bin").mkdir(parents=True)
        for program in ("python", "ray"):
            (clone / name / "bin" / program).symlink_to(job.directory / "bin" / program)
    del job.variables["MEGARL_VENV"]

    def environment() -> str:
        command = [
            "bash",
            str(clone / "launch" / "ray.sbatch"),
            "bash",
            "-c",
            'command -v python; touch "$MEGARL_ATTEMPT_DIR/driver_started"',
        ]
        done = job.ran(command)
        return Path(done.stdout.splitlines()[-1]).parents[1].name

    assert environment() == ".venv-gpu"
    shutil.rmtree(clone / ".venv-gpu")
    assert environment() == ".venv"


@sampled(1)
@pytest.mark.parametrize("name", ["grpo-qwen2.5-7b-8gpu-megatron", "grpo-qwen2.5-7b-8gpu-megatron.yaml"])
def test_training_takes_the_name_of_a_recipe(job: Job, name: str) -> None:
    done = job.ran(["bash", str(ROOT / "launch" / "train.sbatch"), name])
    assert done.returncode == 0, done.stderr
    assert ["-m", "megarl.cli", "train", name, "cluster.num_nodes=2"] in job.calls("python")


@sampled(1)
@pytest.mark.parametrize(
    ("arguments", "says"), [([], "no configuration"), (["no.yaml"], "configuration no.yaml does not exist")]
)
def test_training_without_a_configuration_is_refused(job: Job, arguments: list[str], says: str) -> None:
    done = job.ran(["bash", str(ROOT / "launch" / "train.sbatch"), *arguments])
    assert done.returncode == 2 and says in done.stderr and "Fix" in done.stderr
    assert not job.calls("srun")


def test_a_conversion_is_ended_and_goes_on_later(job: Job) -> None:
    converter = job.directory / "bin" / "python"
    converter.write_text(f"#!/bin/sh\n{DRIVER} {UNTIL_STOPPED} sleep 20\n")
    assert job.signalled(signal.SIGUSR1, None, "convert.sbatch") == 75, job.log
    assert job.requeues() == [["requeue", "4711"]]
    [srun] = job.calls("srun")
    assert "--nodes=1" in srun and not job.calls("ray")


@slow
def test_a_conversion_that_ends_after_the_signal_is_not_repeated(job: Job) -> None:
    converter = job.directory / "bin" / "python"
    converter.write_text(f"#!/bin/sh\ntrap 'exit 0' TERM\n{DRIVER} {UNTIL_STOPPED} sleep 1\n")
    assert job.signalled(signal.SIGUSR1, None, "convert.sbatch") == 0, job.log
    assert not job.requeues()


@sampled(1)
@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_a_dry_run_starts_nothing_and_shows_what_it_would(job: Job, script: Path) -> None:
    (job.directory / "run.yaml").touch()
    command = [
        "bash",
        str(script),
        "--dry-run",
        *(["run.yaml"] if script.name == "train.sbatch" else ["a", "b c"]),
    ]
    outside = {name: value for name, value in job.variables.items() if not name.startswith("SLURM_")}
    done = job.ran(command, outside)
    assert done.returncode == 0, done.stderr
    assert "srun --nodes=1" in done.stderr and not job.calls("srun") and not (job.directory / "runs").exists()


@pytest.mark.parametrize(("override", "nodes"), [("seed=1", 4), ("cluster.num_nodes=8", 8)])
def test_a_dry_run_shows_the_nodes_of_the_configuration(job: Job, override: str, nodes: int) -> None:
    (job.directory / "run.yaml").write_text("cluster: {num_nodes: 4}")
    python = job.directory / "bin" / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != - ] || exec {sys.executable} "$@"\n')
    outside = {name: value for name, value in job.variables.items() if not name.startswith("SLURM_")}
    command = ["bash", str(ROOT / "launch" / "train.sbatch"), "run.yaml", override, "--dry-run"]
    done = job.ran(command, outside)
    assert done.returncode == 0 and f"srun --nodes={nodes} --ntasks={nodes}" in done.stderr, done.stderr
    assert "cluster.num_nodes=1" not in done.stderr and f"python       {python}\n" in done.stderr
    inside = job.ran(command)
    assert "srun --nodes=2 --ntasks=2" in inside.stderr, "a job has the nodes that it has"
    told = "the configuration has cluster.num_nodes=4, the job has 2: the run takes those."
    assert (told in inside.stderr) is (nodes == 4), inside.stderr


@sampled(1)
@pytest.mark.parametrize(("place", "code"), [("MEGARL_VENV", 2), ("MEGARL_CONTAINER_IMAGE", 0)])
def test_an_environment_without_python_is_refused(job: Job, place: str, code: int) -> None:
    """A container may have it where the host has not."""
    none = {"MEGARL_VENV": str(job.directory / "none"), place: "none"}
    done = job.ran(["bash", str(ROOT / "launch" / "ray.sbatch"), "--dry-run", "a"], {**job.variables, **none})
    assert done.returncode == code and ("MEGARL_VENV = none has no bin/python" in done.stderr) is (code == 2)


@sampled(1)
@pytest.mark.parametrize(
    ("word", "code", "says"),
    [("--nodes=8", 2, "sbatch --nodes=8 launch/train.sbatch"), ("--help", 0, "sbatch --nodes=8 launch/")],
)
def test_an_option_in_the_wrong_place_says_what_to_write(job: Job, word: str, code: int, says: str) -> None:
    done = submit_training(job, word)
    assert done.returncode == code and says in done.stdout + done.stderr and not job.calls("srun")


def test_benchmarks_run_once_with_ray_on_all_nodes_and_a_fallen_ratio_is_the_job_s_code(job: Job) -> None:
    python = job.directory / "bin" / "python"
    driver = (
        'touch "$MEGARL_ATTEMPT_DIR/driver_started"; echo "ran $* on $SLURMD_NODENAME with '
        '$RAY_ADDRESS"; exit 1'
    )
    python.write_text(
        '#!/bin/bash\n[[ "$*" != *ray_nodes* && "$*" != *doctor* ]] || exit 0  # all nodes are there, and '
        f"compute together\n{driver}\n"
    )
    python.chmod(0o755)
    arguments = ["run", "recipe.step", "--model", "configs/a recipe.yaml", "--device", "cuda"]
    done = job.ran(["bash", str(ROOT / "launch" / "bench.sbatch"), *arguments])
    assert done.returncode == 1, done.stdout + done.stderr
    said = f"ran -m benchmarks {' '.join(arguments)} on n1 with 127.0.0.1:{job.variables['MEGARL_PORT_BASE']}"
    assert (done.stdout + done.stderr).count(said) == 1
    [srun] = job.calls("srun")
    assert {"--nodes=2", "--ntasks=2"} <= set(srun)


@sampled(1)
@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_outside_of_slurm_nothing_starts(job: Job, script: Path) -> None:
    (job.directory / "run.yaml").touch()
    outside = {name: value for name, value in job.variables.items() if not name.startswith("SLURM_")}
    done = job.ran(["bash", str(script), "run.yaml"], outside)
    assert done.returncode == 2 and "Fix: sbatch launch/" in done.stderr


@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_the_lines_for_sbatch(script: Path) -> None:
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script.read_text(), re.MULTILINE))
    assert len(options) == script.read_text().count("#SBATCH ")
    assert (
        options["signal"] == "B:USR1@300"
        and options["open-mode"] == "append"
        and options["ntasks-per-node"] == "1"
    )
    assert ("requeue" in options) is (script.name != "bench.sbatch")
    assert "no-kill" not in options


@slow
def test_every_job_has_its_own_band_of_ports(job: Job) -> None:
    def base(number: int) -> int:
        variables = {**job.variables, "SLURM_JOB_ID": str(number), "MEGARL_PORT_BASE": ""}
        command = ["bash", str(ROOT / "launch" / "ray.sbatch"), "--dry-run", "true"]
        said = job.ran(command, variables).stderr
        return int(re.search(r"ports +(\d+)", said)[1])  # type: ignore[index]

    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    bases = [base(number) for number in range(4711, 4719)]
    assert len(set(bases)) == 8
    assert all(first >= 10000 and first + 2000 <= ephemeral for first in bases)


def test_a_chain_waits_for_the_job_before_and_knows_what_is_left(job: Job) -> None:
    done = job.ran(
        ["bash", str(ROOT / "launch" / "chain.sh"), "3", "--time=5", "launch/train.sbatch", "a b.yaml"]
    )
    assert done.stdout.splitlines() == ["job 1: 1 of 3", "job 2: 2 of 3", "job 3: 3 of 3"], done.stderr
    asked = ["--time=5", "launch/train.sbatch", "a b.yaml"]
    after = [[f"--dependency=afterok:{number}", "--kill-on-invalid-dep=yes"] for number in (1, 2)]
    assert job.calls("sbatch") == [
        ["--parsable", *asked],
        *(["--parsable", *options, *asked] for options in after),
    ]
    told = re.findall(r"chain:(\d) before:(.*)", (job.directory / "calls").read_text())
    assert told == [("2", ""), ("1", "1 "), ("0", "1 2 ")]


def test_a_chain_where_slurm_is_not_installed(job: Job) -> None:
    # The machine that tests run on may have a Slurm of its own.
    job.variables["PATH"] = "/none"
    done = job.ran(["/bin/bash", str(ROOT / "launch" / "chain.sh"), "2", "launch/train.sbatch", "run.yaml"])
    assert done.returncode == 2 and "no sbatch on PATH. Fix: " in done.stderr


@pytest.mark.parametrize("arguments", [[], ["0", "a.sbatch"], ["launch/train.sbatch"]])
def test_a_chain_of_nothing_is_refused(job: Job, arguments: list[str]) -> None:
    done = job.ran(["bash", str(ROOT / "launch" / "chain.sh"), *arguments])
    assert done.returncode == 2 and "usage" in done.stderr and not job.calls("sbatch")
