# The batch side of every Slurm job of megarl: one srun over all nodes, signals, exit codes, requeues. To be sourced by the .sbatch files,
# which say what runs; launch/README.md explains what a user sees and sets.
# shellcheck shell=bash

SLURM_JOB_ID="${SLURM_JOB_ID:-}"
# This job in the words of Slurm's commands: the number of one task of an array is also that of the array, and would requeue all of its tasks.
JOB_NAME="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}"
JOB_NAME="${JOB_NAME:-$SLURM_JOB_ID}"
RESTARTS="${SLURM_RESTART_COUNT:-0}"
NODES="${SLURM_JOB_NUM_NODES:-1}"
NODES_PER_HOST="${MEGARL_NODES_PER_HOST:-1}"
MAX_REQUEUES="${MEGARL_MAX_REQUEUES:-20}"
# Has to agree with the lines "#SBATCH --signal=B:USR1@300".
export MEGARL_STOP_NOTICE_S="${MEGARL_STOP_NOTICE_S:-300}"
PORTS_PER_NODE=1000
FIRST_PORT=10000
STOPPING=0
PREEMPTED=0
NEEDS_CHECKPOINT=1
# The configuration of a run, with its overrides, that the nodes are checked for; without one all that Ray has of them has to compute together.
CHECKED_RUN=()
# The command of that check: it runs once Ray is up on all nodes, and has to end with 0 before the job's own command begins.
PREFLIGHT=()
# A rank with a GPU has no use for more threads than this: they only copy, tokenize and read files.
MOST_THREADS=16

say() { printf 'megarl: %s\n' "$*" >&2; }

# fail CODE TEXT...
fail() {
    local code=$1
    shift
    say "$*"
    exit "$code"
}

# The first of a band of ports that is this job's own, below those which the kernel hands out by itself.
port_base() {
    local ephemeral width=$((PORTS_PER_NODE * NODES_PER_HOST)) bands
    read -r ephemeral _ </proc/sys/net/ipv4/ip_local_port_range
    bands=$(((ephemeral - FIRST_PORT) / width))
    ((bands > 0)) || fail 2 "ip_local_port_range starts at $ephemeral: no $width ports between $FIRST_PORT and it. Fix: set MEGARL_PORT_BASE"
    printf '%d\n' $((FIRST_PORT + ${SLURM_JOB_ID:-0} % bands * width))
}

# Seconds until the time limit; nothing where there is none. Older Slurms do not put it into the environment.
seconds_left() {
    local left days=0 hours=0 minutes seconds
    if [[ -n "${SLURM_JOB_END_TIME:-}" ]]; then
        printf '%d\n' $((SLURM_JOB_END_TIME - $(date +%s)))
        return
    fi
    left=$(squeue -h -j "$JOB_NAME" -o %L 2>/dev/null) || return 0
    [[ "$left" =~ ^(([0-9]+)-)?(([0-9]+):)?([0-9]+):([0-9]+)$ ]] || return 0
    days=${BASH_REMATCH[2]:-0} hours=${BASH_REMATCH[4]:-0} minutes=${BASH_REMATCH[5]} seconds=${BASH_REMATCH[6]}
    printf '%d\n' $((((10#$days * 24 + 10#$hours) * 60 + 10#$minutes) * 60 + 10#$seconds))
}

# What Slurm says of this job under the name KEY=.
job_property() {
    scontrol show job "$JOB_NAME" 2>/dev/null | tr ' ' '\n' | sed -n "s/^$1=//p" | head -n 1
}

# A job that a task of an array has submitted inherits the array's variables, and must not requeue that task.
forget_array_of_another() {
    [[ "$JOB_NAME" == "$SLURM_JOB_ID" || "$(job_property JobId)" =~ ^("$SLURM_JOB_ID")?$ ]] || JOB_NAME=$SLURM_JOB_ID
}

is_preempted() { [[ "$(job_property PreemptTime)" == [0-9]* ]]; }

# Everything this start of the job leaves: logs, markers, the token of its Ray. One directory an attempt, so that a requeue overwrites nothing.
make_attempt_directory() {
    JOB_DIR="${MEGARL_JOBS_DIR:-${SLURM_SUBMIT_DIR:-$PWD}/runs/slurm}/${SLURM_JOB_ID:-JOB}"
    export MEGARL_ATTEMPT_DIR="$JOB_DIR/attempt_$RESTARTS"
    ((DRY_RUN)) && return
    [[ ! -e "$MEGARL_ATTEMPT_DIR" ]] || mv -- "$MEGARL_ATTEMPT_DIR" "$MEGARL_ATTEMPT_DIR.before-$(date +%s)"
    mkdir -p -- "$MEGARL_ATTEMPT_DIR" || fail 2 "$MEGARL_ATTEMPT_DIR cannot be made. Fix: set MEGARL_JOBS_DIR to a directory that all nodes share"
    chmod 700 -- "$MEGARL_ATTEMPT_DIR"
    (umask 077 && od -An -tx1 -N32 /dev/urandom | tr -d ' \n' >"$MEGARL_ATTEMPT_DIR/ray_token")
}

container_options() {
    local image=${MEGARL_CONTAINER_IMAGE:-}
    local mounts
    [[ -n "$image" ]] || return 0
    [[ "$image" != /* || -e "$image" ]] || fail 2 "MEGARL_CONTAINER_IMAGE = $image does not exist on $(hostname). Fix: correct the path, or import the image"
    mounts="$MEGARL_ROOT:$MEGARL_ROOT,$PWD:$PWD,$JOB_DIR:$JOB_DIR${MEGARL_CONTAINER_MOUNTS:+,$MEGARL_CONTAINER_MOUNTS}"
    local options=(--container-image="$image" --no-container-mount-home --container-workdir="$PWD" --container-mounts="$mounts")
    SRUN+=("${options[@]}")
    # A shell that attaches later wants the same container: Python and Ray are in it.
    MEGARL_CONTAINER_OPTIONS=$(printf '%q ' "${options[@]}")
    export MEGARL_CONTAINER_OPTIONS
    check_model_cache "$mounts"
}

# check_model_cache MOUNTS: a container sees no home directory, and so nothing that was fetched into ~/.cache/huggingface.
check_model_cache() {
    local mount
    if [[ -n "${HF_HOME:-}" ]]; then
        while IFS=: read -r _ mount _; do
            [[ "$HF_HOME/" != "${mount%/}/"* ]] || return 0
        done < <(tr , "\n" <<<"$1")
    fi
    say "HF_HOME = ${HF_HOME:-} is not on a directory that the container sees: models and data sets would be fetched again by every job, or be missing" \
        "found. Fix: export HF_HOME=DIRECTORY on a disk that all nodes share, and MEGARL_CONTAINER_MOUNTS=DIRECTORY:DIRECTORY"
}

# CPUs of the smallest node of the job, out of what Slurm writes as 72(x2),36; nothing where it does not say.
cpus_of_nodes() {
    tr , "\n" <<<"${SLURM_JOB_CPUS_PER_NODE:-${SLURM_CPUS_ON_NODE:-}}" | sed -E "s/\(x[0-9]+\)//" | sort -n | head -n 1
}

# GPUs of the job on this node, which is its first.
gpus_of_node() {
    local gpus=${SLURM_GPUS_ON_NODE:-}
    [[ "$gpus" =~ ^[0-9]+$ ]] || gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c "^GPU ") || true
    printf "%d\n" "${gpus:-0}"
}

# OpenMP threads per rank: its share of the cores if it has a GPU; one on a CPU, where the ranks themselves fill the cores.
threads_of_rank() {
    local gpus cpus threads=1
    gpus=$(gpus_of_node) cpus=$(cpus_of_nodes)
    ((gpus == 0 || ${cpus:-0} == 0)) || threads=$((cpus / gpus))
    ((threads <= MOST_THREADS)) || threads=$MOST_THREADS
    printf "%d\n" $((threads > 1 ? threads : 1))
}

# --overlap: also inside of salloc or another step, where srun would wait indefinitely for nodes that its own job holds.
build_srun() {
    local extra cpus
    SRUN=(srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --overlap --mpi=none --kill-on-bad-exit=0 --wait=0 --export=ALL)
    # All processes of a node are in its one task: it has to have all CPUs, and be bound to none, also where a site binds tasks to cores.
    cpus=$(cpus_of_nodes)
    [[ -z "$cpus" ]] || SRUN+=(--cpus-per-task="$cpus")
    # The limits of the host of the submission, of locked memory above all, are not those that a compute node needs.
    SRUN+=(--cpu-bind=none --propagate=NONE)
    container_options
    read -r -a extra <<<"${MEGARL_SRUN_ARGS:-}"
    SRUN+=("${extra[@]}")
}

show_plan() {
    say "attempt      $RESTARTS, files in $MEGARL_ATTEMPT_DIR"
    say "nodes        $NODES"
    say "python       $(command -v python || echo "of the container")"
    say "ports        ${MEGARL_PORT_BASE:-none}"
    say "srun         $(printf '%q ' "${SRUN[@]}")"
    ((${#PREFLIGHT[@]} == 0)) || say "check        $(printf "%q " "${PREFLIGHT[@]}")"
    say "command      $(printf '%q ' "$@")"
}

on_stop_signal() {
    STOPPING=1
    ! is_preempted || PREEMPTED=1
    say "USR1 from Slurm ($( ((PREEMPTED)) && echo preempted || echo "time limit")): asking the driver to save and stop"
    touch -- "$MEGARL_ATTEMPT_DIR/stop_requested"
    [[ "${STOP_BY_SIGNAL:-0}" == 0 ]] || kill -TERM "$SRUN_PID" 2>/dev/null || true
}

# The steps get the same signal from Slurm, and KILL a little later. The state is COMPLETING by now, whatever the cause; only the reason tells
# the time limit from the rest. A job that somebody cancelled could be requeued too, and must not be; after a preemption or the loss of a
# node Slurm requeues by itself.
on_termination() {
    trap '' TERM
    local reason
    reason=$(job_property Reason)
    if [[ "$reason" == TimeLimit ]] && ((${MEGARL_CHAIN_LEFT:-0} > 0)); then
        fail 143 "the time limit came before the driver could stop, and with it Slurm cancels the rest of the chain. Fix: submit it again, with" \
            "more notice (--signal=B:USR1@SECONDS with MEGARL_STOP_NOTICE_S): the run goes on from its last checkpoint"
    fi
    [[ "$reason" != TimeLimit ]] || go_on_later "the time limit came before the driver could stop"
    say "TERM from Slurm (reason: ${reason:-unknown}): a run goes on from its last checkpoint when it is started again"
    exit 143
}

# Put the job back into the queue, unless that leads nowhere. Slurm ends this script as soon as it has done so.
go_on_later() {
    if ((NEEDS_CHECKPOINT && !PREEMPTED)) && [[ ! -s "$MEGARL_ATTEMPT_DIR/last_checkpoint" ]]; then
        fail 1 "$1, but this attempt wrote no checkpoint: started again it would get no further. Fix: a longer --time, a smaller" \
            "checkpointing.save_period, or more notice (--signal=B:USR1@SECONDS with MEGARL_STOP_NOTICE_S); see $MEGARL_ATTEMPT_DIR"
    fi
    ((RESTARTS < MAX_REQUEUES)) || fail 1 "$1, and the job was requeued $RESTARTS times already. Fix: raise MEGARL_MAX_REQUEUES, or submit it again"
    if ((!PREEMPTED && ${MEGARL_CHAIN_LEFT:-0} > 0)); then
        say "$1: the next job of the chain goes on"
        exit 0
    fi
    say "$1: requeueing job $JOB_NAME (attempt $((RESTARTS + 1)) follows)"
    scontrol requeue "$JOB_NAME" || fail 75 "scontrol requeue failed. Fix: submit the job again; it goes on from its last checkpoint"
    exit 75
}

# What happened, as the last lines of the job's log, and its exit code.
conclude() {
    local code
    if [[ -s "$MEGARL_ATTEMPT_DIR/driver.rc" ]]; then
        code=$(<"$MEGARL_ATTEMPT_DIR/driver.rc")
    elif [[ -e "$MEGARL_ATTEMPT_DIR/ready" ]]; then
        say "srun ended with $SRUN_CODE and the driver left no exit code: its node was lost"
        code=4
    else
        tail -n 20 -- "$MEGARL_ATTEMPT_DIR"/node-*.log 2>/dev/null >&2 || true
        ((SRUN_CODE)) || SRUN_CODE=1
        fail "$SRUN_CODE" "srun ended with $SRUN_CODE before Ray was up on $NODES nodes. Fix: see above and $MEGARL_ATTEMPT_DIR"
    fi
    case "$code" in
        0) say "done" ;;
        75) go_on_later "the run was stopped and saved" ;;
        4) go_on_later "a worker or a node was lost" ;;
        *) say "the driver ended with $code; its messages are above and in $MEGARL_ATTEMPT_DIR/driver.log" ;;
    esac
    exit "$code"
}

# Once the driver has ended, srun still waits for the tasks of a node that is gone, for as long as Slurm believes in the node (SlurmdTimeout,
# five minutes where nothing is configured).
end_srun_after_driver() {
    local left=${MEGARL_LEAVE_TIMEOUT_S:-60}
    while ((left > 0)); do
        sleep 1
        { kill -0 "$$" && kill -0 "$SRUN_PID"; } 2>/dev/null || return 0
        [[ ! -s "$MEGARL_ATTEMPT_DIR/driver.rc" ]] || left=$((left - 1))
    done
    say "srun does not end, and the driver has: ending it"
    kill -TERM "$SRUN_PID" 2>/dev/null || true
    sleep 20
    kill -KILL "$SRUN_PID" 2>/dev/null || true
}

# bash runs a trap only between commands and lets it end a wait: srun stays in the background and is waited for again.
supervise() {
    local watcher
    trap on_stop_signal USR1
    trap on_termination TERM
    "${SRUN[@]}" "$@" </dev/null &
    SRUN_PID=$!
    end_srun_after_driver &
    watcher=$!
    while kill -0 "$SRUN_PID" 2>/dev/null; do
        wait "$SRUN_PID" || true
    done
    SRUN_CODE=0
    wait "$SRUN_PID" || SRUN_CODE=$?
    trap '' USR1
    kill "$watcher" 2>/dev/null || true
}

warn_of_short_limit() {
    local left
    left=$(seconds_left)
    [[ -n "$left" ]] || return 0
    ((left > 2 * MEGARL_STOP_NOTICE_S)) ||
        say "the time limit leaves $left s, and the last $MEGARL_STOP_NOTICE_S s of them are for stopping: a run that cannot save in the rest gets nowhere"
}

# prepare [--dry-run]: sets DRY_RUN; afterwards the caller drops that argument.
prepare_job() {
    DRY_RUN=0
    [[ "${1:-}" != --dry-run ]] || DRY_RUN=1
    ((DRY_RUN)) || [[ -n "$SLURM_JOB_ID" ]] || fail 2 "this is a Slurm job. Fix: sbatch launch/NAME.sbatch ..., or look first: bash launch/NAME.sbatch --dry-run ..."
    export MEGARL_ROOT
    ((DRY_RUN)) || forget_array_of_another
    make_attempt_directory
    build_srun
}

# run_ray_job [--dry-run] [COMMAND...]: COMMAND runs on the first node, with Ray on all of them; without one, Ray waits for people.
run_ray_job() {
    prepare_job "$@"
    ((!DRY_RUN)) || shift
    [[ "${MEGARL_CHECK_NODES:-1}" == 0 ]] || PREFLIGHT=(python -m megarl.cli doctor --nodes "${CHECKED_RUN[@]}")
    export MEGARL_NODES_PER_HOST="$NODES_PER_HOST" MEGARL_PORTS_PER_NODE="$PORTS_PER_NODE"
    export MEGARL_PORT_BASE="${MEGARL_PORT_BASE:-$(port_base)}"
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$MEGARL_ATTEMPT_DIR/ray_token" RAY_USAGE_STATS_ENABLED=0
    show_plan "$@"
    ((!DRY_RUN)) || return 0
    local names
    mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    ((${#names[@]} == NODES)) || fail 2 "scontrol names ${#names[@]} nodes in $SLURM_JOB_NODELIST, the job has $NODES. Fix: tell the administrator"
    MEGARL_NODE_NAMES=$(IFS=,; printf '%s' "${names[*]}")
    export MEGARL_NODE_NAMES
    warn_of_short_limit
    supervise bash "$MEGARL_ROOT/launch/ray_node.sh" "${#PREFLIGHT[@]}" "${PREFLIGHT[@]}" "$@"
    conclude
}

# run_plain_job [--dry-run] COMMAND...: COMMAND alone on one node. It can go on from any moment at which it is ended.
run_plain_job() {
    NODES=1 NEEDS_CHECKPOINT=0 STOP_BY_SIGNAL=1
    prepare_job "$@"
    ((!DRY_RUN)) || shift
    show_plan "$@"
    ((!DRY_RUN)) || return 0
    supervise "$@"
    # What was done in spite of the signal need not be done again.
    ((!STOPPING || SRUN_CODE == 0)) || SRUN_CODE=75
    printf '%s\n' "$SRUN_CODE" >"$MEGARL_ATTEMPT_DIR/driver.rc"
    conclude
}

# The environment that launch/gpu_environment.sh or launch/environment.sh makes, where there is one; inside of a container, or with modules,
# the Python on PATH.
use_environment() {
    local threads venv=${MEGARL_VENV:-$MEGARL_ROOT/.venv-gpu}
    [[ -n "${MEGARL_VENV:-}" || -d "$venv" ]] || venv=$MEGARL_ROOT/.venv
    if [[ -x "$venv/bin/python" && (-z "${MEGARL_CONTAINER_IMAGE:-}" || -n "${MEGARL_VENV:-}") ]]; then
        export PATH="$venv/bin:$PATH"
    elif [[ -z "${MEGARL_CONTAINER_IMAGE:-}" ]]; then
        [[ -z "${MEGARL_VENV:-}" ]] || fail 2 "MEGARL_VENV = $MEGARL_VENV has no bin/python. Fix: name an environment that $(hostname) sees, or unset it"
        command -v python >/dev/null ||
            fail 2 "$MEGARL_ROOT has neither .venv-gpu nor .venv, and PATH has no python. Fix: bash launch/gpu_environment.sh, or set MEGARL_VENV"
    fi
    threads=$(threads_of_rank)
    export PYTHONPATH="$MEGARL_ROOT${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
    export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
}
