"""A real Slurm of this host's packages: a controller and two nodes on the loopback interface, and two
partitions of which one preempts."""

from __future__ import annotations

import contextlib
import getpass
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import psutil

from megarl import env
from megarl.distributed.virtual_cluster import free_port

NODES = ("n1", "n2")
# Below those of the jobs' Rays, see launch/slurm_job.sh, and far below those that the kernel hands out.
_PORTS = range(7000, 10_000)
LONGEST_WAIT_S = 600.0
_PATH = f"{env.text('PATH', '')}:/usr/sbin:/sbin"

CONFIGURATION = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
FirstJobId={first_job}
ReturnToService=2
SlurmdTimeout={node_timeout_s}
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=2 RealMemory=1000
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no Slurm here; empty when there can."""
    absent = [
        name
        for name in ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")
        if not shutil.which(name, path=_PATH)
    ]
    return f"no {', '.join(absent)} here; launch/slurm_packages.sh installs them" if absent else ""


class LoopbackSlurm:
    """The daemons, and the commands that talk to them."""

    def __init__(self, directory: Path, variables: dict[str, str], node_timeout_s: int) -> None:
        """Args:
        directory: for everything that the daemons write.
        variables: of the processes' environment, and so of the jobs'.
        node_timeout_s: silence after which a node counts as down.
        """
        self.directory = directory
        self.variables = {**variables, "PATH": _PATH, "SLURM_CONF": str(directory / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        ports = dict(zip(("controller", *NODES), _free_ports(3), strict=True))
        # Jobs of another such Slurm on this host get other directories and, for the most part, other ports.
        names = {
            "host": socket.gethostname(),
            "user": getpass.getuser(),
            "first_job": random.SystemRandom().randint(1, 50_000),
        }
        text = CONFIGURATION.format(directory=directory, node_timeout_s=node_timeout_s, **names, **ports)
        (directory / "state").mkdir(parents=True)
        (directory / "slurm.conf").write_text(text)
        try:
            self._start("slurmctld", ["slurmctld", "-c", "-D"], directory)
            for node in NODES:
                self.start_node(node)
            self.await_free_nodes()
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, command: list[str], directory: Path) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                [str(shutil.which(command[0], path=_PATH)), *command[1:], "-f", self.variables["SLURM_CONF"]],
                env=self.variables,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        directory = self.directory / node
        directory.mkdir(exist_ok=True)
        self._start(node, ["slurmd", "-D", "-N", node], directory)

    def kill_node(self, node: str) -> None:
        """End everything of a node at once: its daemon, whatever runs there, and what would report its
        end."""
        self._kill_daemon(node)
        self._kill_tasks((node,))

    def _kill_daemon(self, name: str) -> None:
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def _kill_tasks(self, nodes: Sequence[str]) -> None:
        """End the processes of jobs on some nodes, after the daemons that Slurm has put above them."""
        tasks, above = [], []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # The title of such a daemon overwrites its environment.
                if process.name() == "slurmstepd":
                    if process.cwd() in [str(self.directory / node) for node in nodes]:
                        above.append(process)
                    continue
                environment = process.environ()
                if (
                    environment.get("SLURM_CONF") == self.variables["SLURM_CONF"]
                    and environment.get("SLURMD_NODENAME") in nodes
                ):
                    tasks.append(process)
        for process in [*above, *tasks]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def say(self, *command: str) -> str:
        """What a command of Slurm answers; empty where it fails."""
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    def submit(self, *arguments: str) -> str:
        """``sbatch ARGUMENTS``; the number of the job."""
        command = ["sbatch", "--parsable", *arguments]
        return subprocess.run(
            command, env=self.variables, capture_output=True, text=True, check=True
        ).stdout.strip()

    def property(self, job: str, key: str) -> str:
        """What Slurm says of a job, for example its ``JobState``."""
        words = self.say("scontrol", "show", "job", job).split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{key}=")), "")

    def await_state(self, job: str, state: str) -> None:
        """Wait until a job is, for example, ``COMPLETED``; fail at once when it has ended otherwise."""
        self.wait_until(lambda: self._state(job, state) == state, f"job {job} is {state}", job)

    def await_requeue(self, job: str, restarts: int) -> None:
        """Wait until a job is back in the queue for its start number ``restarts``, counted from 0; fail at
        once when it has ended."""
        self.wait_until(
            lambda: self._state(job) == "PENDING" and self.property(job, "Restarts") == str(restarts),
            f"job {job} is requeued",
            job,
        )

    def await_moment(self, job: str, happened: Callable[[], bool], what: str) -> None:
        """Wait for something that a job does; fail at once when it has ended."""
        self.wait_until(lambda: bool(self._state(job)) and happened(), what, job)

    def _state(self, job: str, end: str = "") -> str:
        """State of a job that may still go on, or has ended in ``end``."""
        state = self.property(job, "JobState")
        assert state in (end, "PENDING", "RUNNING", "SIGNALING", "COMPLETING"), (
            f"job {job} is {state}{self._log(job)}"
        )
        return state

    def await_free_nodes(self) -> None:
        """Wait until the nodes are idle and the controller has nothing more to tell them.

        A node that comes back is told to end the job it was lost with. Where that job runs again by then,
        Slurm 22.05 takes the answer for the end of the new start on that node, and the job's srun waits for
        ever ("Requested nodes are busy").
        """

        def free() -> bool:
            idle = self.say("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(NODES))
            agents = dict(
                line.split(":", 1) for line in self.say("sdiag").splitlines() if line.startswith("Agent ")
            )
            return idle and all(int(agents.get(name, 1)) == 0 for name in ("Agent queue size", "Agent count"))

        self.wait_until(free, "all nodes are free")

    def start_again(self, job: str) -> None:
        """Let a requeued job start as soon as it safely can, not in the two minutes for which Slurm holds it
        back.

        A node takes the credential of a new start only when that is newer, in whole seconds of the
        controller's clock, than the end of the start before; it refuses any other ("already killed, do not
        launch batch job"), and the job has FAILED. So Slurm waits for as long as a credential is valid:
        ``AuthInfo=cred_expire``, which also is the time in which a loaded machine has to launch a step, and
        so stays what it is here. The nodes have nothing more to end once they are free; in the second after
        that, the credential is newer.
        """
        self.await_free_nodes()
        safe = datetime.fromtimestamp(int(time.time()) + 1).isoformat()

        def started() -> bool:
            if self.property(job, "JobState") == "PENDING":
                self.say("scontrol", "update", f"JobId={job}", f"StartTime={safe}")
            return self.property(job, "JobState") != "PENDING"

        self.wait_until(started, f"job {job} runs again", job)

    def _log(self, job: str) -> str:
        path = Path(self.property(job, "StdOut"))
        return f"\n--- {path}\n{path.read_text(errors='replace')[-4000:]}" if path.is_file() else ""

    def wait_until(self, happened: Callable[[], bool], what: str, job: str = "") -> None:
        """Wait for something; fail with the logs of the daemons, and of a job, when it does not come, or a
        daemon has ended by itself."""
        end = time.monotonic() + LONGEST_WAIT_S
        while not happened():
            if time.monotonic() > end or any(daemon.poll() is not None for daemon in self.daemons.values()):
                logs = "".join(
                    f"\n--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
                    for path in self.directory.glob("*.log")
                )
                raise AssertionError(
                    f"never came: {what}\n{self.say('scontrol', 'show', 'job')}{logs}{self._log(job)}"
                )
            time.sleep(0.2)

    def close(self) -> None:
        """End the daemons, and what jobs have left running."""
        for name in list(self.daemons):
            self._kill_daemon(name)
        self._kill_tasks(NODES)


def _free_ports(number: int) -> list[int]:
    found: set[int] = set()
    while len(found) < number:
        found.add(free_port("", _PORTS))
    return list(found)
