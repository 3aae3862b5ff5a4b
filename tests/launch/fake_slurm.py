"""Stand-ins for Slurm's and Ray's commands, on PATH in front of everything: they write down their calls and
play what a test asks for.

FAKE_CALLS      file with one line for each call: program and arguments, separated by tabs
FAKE_HOSTS      names of the job's nodes
FAKE_JOB        what "scontrol show job" prints
FAKE_LEFT       what squeue prints as the time that is left
FAKE_SRUN       "dies": srun ends with 9 at once; "loses": after the cluster is up, srun ends with 137 and
                leaves its tasks dead; "waits": it stays when its tasks have ended, as for one on a node
                that is gone
FAKE_MISSING    node that never registers with Ray
FAKE_REQUEUE    exit code of "scontrol requeue"
FAKE_RAY_FAILS  node on which Ray ends at once
FAKE_NODES_CHECK  exit code of "megarl doctor --nodes"
"""

from __future__ import annotations

import sys
from pathlib import Path

RECORD = (
    'printf "%s" "{name}" >>"$FAKE_CALLS.part.$$"; printf "\\t%s" "$@" >>"$FAKE_CALLS.part.$$"; echo '
    '>>"$FAKE_CALLS.part.$$"\n'
)
RECORD += 'cat "$FAKE_CALLS.part.$$" >>"$FAKE_CALLS"; rm "$FAKE_CALLS.part.$$"\n'

SRUN = """
[ "${FAKE_SRUN:-}" != dies ] || { echo "srun: error: Unable to create step" >&2; exit 9; }
nodes=1
while :; do case "$1" in --nodes=*) nodes=${1#--nodes=}; shift ;; -*) shift ;; *) break ;; esac; done
tasks=""
for node in $(seq 0 $((nodes - 1))); do
    SLURM_NODEID=$node SLURMD_NODENAME=$(echo $FAKE_HOSTS | cut -d ' ' -f $((node + 1))) "$@" &
    tasks="$tasks $!"
done
told=""
trap 'told=1; kill -TERM $tasks' TERM
if [ "${FAKE_SRUN:-}" = loses ]; then
    until [ -e "$MEGARL_ATTEMPT_DIR/driver_started" ]; do sleep 0.05; done
    kill -KILL $tasks; echo "srun: error: Node failure on n1" >&2; exit 137
fi
code=0
for task in $tasks; do
    found=0
    wait $task || found=$?
    # A signal ends the wait, but not the task.
    [ -z "$told" ] || { told=""; wait $task; again=$?; [ $again = 127 ] || found=$again; }
    [ $found = 0 ] || code=$found
done
[ "${FAKE_SRUN:-}" != waits ] || { trap 'kill $!; exit 143' TERM; sleep 600 & wait $!; }
exit $code
"""

SCONTROL = """
case "$1 $2" in
    "show hostnames") printf '%s\\n' $FAKE_HOSTS ;;
    "show job") printf '%s\\n' "${FAKE_JOB:-JobState=RUNNING PreemptTime=None}" ;;
    requeue*) exit ${FAKE_REQUEUE:-0} ;;
esac
"""

SQUEUE = 'printf "%s\\n" "${FAKE_LEFT:-1-00:00:00}"\n'

# The head's Ray answers on its port, as the scripts wait for that; the process ends with TERM.
RAY = """
[ "${FAKE_RAY_FAILS:-}" != "$SLURMD_NODENAME" ] || { echo "ray: no more file descriptors" >&2; exit 1; }
port=""; head=no
for word in "$@"; do case "$word" in --head) head=yes ;; --port=*) port=${word#--port=} ;; esac; done
[ $head = yes ] || exec sleep 600
exec PYTHON -I -S -c 'import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True: server.accept()[0].close()' $port
"""

PYTHON_M = """
case "$*" in
    *"doctor --nodes"*)
        [ -z "${FAKE_NODES_CHECK:-}" ] ||
            { echo "failed GPUs Ray has n1: 0, n2: 0"; exit "$FAKE_NODES_CHECK"; } ;;
    *megarl.distributed.ray_nodes*)
        until [ $(grep -c ^ray "$FAKE_CALLS") -ge $(echo $FAKE_HOSTS | wc -w) ]; do sleep 0.05; done
        [ -z "${FAKE_MISSING:-}" ] ||
            { echo "megarl: 1 of 2 nodes did not join Ray within 1 s: $FAKE_MISSING." >&2; exit 3; } ;;
esac
"""

# Numbers jobs from 1, and notes what is left of the chain.
SBATCH = (
    'echo "chain:${MEGARL_CHAIN_LEFT:-none} before:$MEGARL_CHAIN_BEFORE" >>"$FAKE_CALLS"; '
    'grep -c ^sbatch "$FAKE_CALLS"\n'
)

PROGRAMS = {
    "sbatch": SBATCH,
    "srun": SRUN,
    "scontrol": SCONTROL,
    "squeue": SQUEUE,
    "ray": RAY.replace("PYTHON", sys.executable),
    "python": PYTHON_M,
}


def write_fake_slurm(directory: Path) -> None:
    """Put the stand-ins into ``directory``."""
    directory.mkdir()
    for name, body in PROGRAMS.items():
        path = directory / name
        path.write_text("#!/bin/sh\n" + RECORD.format(name=name) + body)
        path.chmod(0o755)


# The real Python, which waits for no nodes.
PASSING_PYTHON = """
case "$*" in *megarl.distributed.ray_nodes*) exit 0 ;; esac
exec PYTHON "$@"
"""


def write_fake_ray(directory: Path) -> None:
    """Put a stand-in for Ray alone into ``directory``, and a Python that does not ask it for its nodes."""
    directory.mkdir()
    for name, body in (
        ("ray", PROGRAMS["ray"]),
        ("python", PASSING_PYTHON.replace("PYTHON", sys.executable)),
    ):
        (directory / name).write_text("#!/bin/sh\n" + body)
        (directory / name).chmod(0o755)
