#!/usr/bin/env bash
# One node of the Ray cluster of a Slurm job. launch/slurm_job.sh starts it on every node by one srun. Its arguments are what the first node
# runs once all the others are there: the number of words of a check, those words, and the command of the job. The nodes meet in
# MEGARL_ATTEMPT_DIR, a directory that all of them see:
#
#   ray_token        made by the batch script; who does not see it does not share the directory
#   head             address of Ray on the first node, once it answers
#   ready            seconds until all nodes had registered
#   stop_requested   the batch script wants the command to save and stop
#   driver.rc        exit code of the command, or 3 when nodes are missing
#   ended            every node stops its Ray
#   node-N.log       what Ray says on node N; driver.log: what the command says
set -euo pipefail

PREFLIGHT=("${@:2:$1}")
shift $((1 + $1))
NODE=$SLURM_NODEID
NAME=$SLURMD_NODENAME
DIR=$MEGARL_ATTEMPT_DIR
LOG=$DIR/node-$NODE.log
TIMEOUT_S=${MEGARL_RAY_TIMEOUT_S:-600}
# Short: the paths of Unix sockets below it may have 107 bytes.
RAY_TEMP=${MEGARL_RAY_TEMP:-/tmp}/megarl-ray-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$NODE
# Nodes that share a host must share no port.
BASE=$((MEGARL_PORT_BASE + NODE % MEGARL_NODES_PER_HOST * MEGARL_PORTS_PER_NODE))
RAY_PID=""
DRIVER_PID=""
LOST_NODE=4
MISSING_NODES=3

say() { printf 'megarl: %s: %s\n' "$NAME" "$*" >&2; }

# publish NAME TEXT: a reader of the file sees all of it.
publish() {
    printf '%s\n' "$2" >"$DIR/.$1.tmp"
    mv -- "$DIR/.$1.tmp" "$DIR/$1"
}

answers() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }

# Ray starts and ends as a child of this script, so that nothing has to be looked for by name, which would hit the neighbours' Ray too.
start_ray() {
    local address=() more
    [[ -z "${MEGARL_NODE_IP:-}" ]] || address=(--node-ip-address="$MEGARL_NODE_IP")
    read -r -a more <<<"${MEGARL_RAY_ARGS:-}"
    local cpus=${SLURM_CPUS_ON_NODE:-1}
    # To Ray, CPUs are book-keeping: one a rank.
    ((cpus >= 64)) || cpus=64
    # What a killed attempt of this number has left would make Ray refuse to start.
    rm -rf -- "$RAY_TEMP" 2>/dev/null || true
    # Others may go where Ray's own directory is, which it opens to everybody; nobody else may go into the one around it, or have made it.
    mkdir -p -- "${RAY_TEMP%/*}"
    mkdir -m 700 -- "$RAY_TEMP" || { say "$RAY_TEMP is somebody else's. Fix: set MEGARL_RAY_TEMP to a directory of your own, with a short path"; exit 2; }
    ray start "$@" --block --disable-usage-stats --node-name="$NAME" --num-cpus="$cpus" --temp-dir="$RAY_TEMP/ray" \
        --node-manager-port=$((BASE + 1)) --object-manager-port=$((BASE + 2)) --runtime-env-agent-port=$((BASE + 3)) \
        --dashboard-agent-listen-port=$((BASE + 4)) --dashboard-agent-grpc-port=$((BASE + 5)) --metrics-export-port=$((BASE + 6)) \
        --min-worker-port=$((BASE + 20)) --max-worker-port=$((BASE + MEGARL_PORTS_PER_NODE - 1)) "${address[@]}" "${more[@]}" \
        >>"$LOG" 2>&1 </dev/null &
    RAY_PID=$!
}

ray_runs() { [[ -n "$RAY_PID" ]] && kill -0 "$RAY_PID" 2>/dev/null; }

# Wait for a condition while Ray, where it has been started, lives: wait_until SECONDS COMMAND...
wait_until() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < end)) || return 1
        [[ -z "$RAY_PID" ]] || ray_runs || return 1
        sleep 0.2
    done
}

# end_child PID SECONDS: TERM, and KILL to what is still there after that time. What not even that ends is left to Slurm.
# shellcheck disable=SC2329  # leave calls it
end_child() {
    local end=$((SECONDS + $2))
    kill -TERM "$1" 2>/dev/null || return 0
    while kill -0 "$1" 2>/dev/null && ((SECONDS < end + 5)); do
        ((SECONDS < end)) || kill -KILL "$1" 2>/dev/null || true
        sleep 0.1
    done
}

# The command goes first, and is gone before this script is: where Slurm follows processes by their parents it would outlive its job, and the
# next attempt would find the run in use. All these seconds together are Slurm's KillWait, 30.
# shellcheck disable=SC2329  # the trap calls it
leave() {
    local code=$?
    trap '' TERM INT
    [[ -z "$DRIVER_PID" ]] || end_child "$DRIVER_PID" 5
    ((NODE != 0)) || publish ended "$code" || true
    [[ -z "$RAY_PID" ]] || end_child "$RAY_PID" 15
    # One that is somebody else's stays, and must not change the exit code.
    rm -rf -- "$RAY_TEMP" 2>/dev/null || true
    exit "$code"
}

# Ray holds a connection for every worker; most systems start with 1024 files. NCCL registers memory with InfiniBand devices, which counts as
# locked.
raise_limits() {
    local limit
    limit=$(ulimit -Hn)
    [[ "$limit" != unlimited ]] && ((limit <= 65535)) || limit=65535
    ulimit -n "$limit" 2>/dev/null || true
    ulimit -l unlimited 2>/dev/null || ulimit -l "$(ulimit -Hl)" 2>/dev/null || true
}

check_shared_directory() {
    wait_until "${MEGARL_SHARED_TIMEOUT_S:-60}" test -s "$DIR/ray_token" ||
        { say "does not see $DIR: it is not on a file system that all nodes share. Fix: set MEGARL_JOBS_DIR to one that is"; exit 2; }
}

head_address() {
    local ip=${MEGARL_NODE_IP:-}
    [[ -n "$ip" ]] || ip=$(getent ahostsv4 "$(hostname)" | awk '$1 !~ /^127\./ { print $1; exit }') || true
    [[ -n "$ip" ]] || ip=$(hostname -I | awk '{ print $1 }')
    printf '%s\n' "$ip"
}

show_ray_log() { tail -n 15 -- "$LOG" >&2 2>/dev/null || true; }

# The port of Ray's own server is the first of the band.
start_head() {
    local ip dashboard=(--include-dashboard=false)
    ip=$(head_address)
    ! answers "$ip" "$BASE" || { say "port $BASE is taken. Fix: set MEGARL_PORT_BASE to the first of $MEGARL_PORTS_PER_NODE free ports"; exit 1; }
    [[ "${MEGARL_RAY_DASHBOARD:-1}" != 1 ]] || dashboard=(--include-dashboard=true --dashboard-host=127.0.0.1 --dashboard-port=$((BASE + 7)))
    start_ray --head --port="$BASE" --ray-client-server-port=$((BASE + 8)) "${dashboard[@]}"
    wait_until "$TIMEOUT_S" answers "$ip" "$BASE" ||
        { show_ray_log; say "Ray did not start within $TIMEOUT_S s. Fix: see above and $LOG; another MEGARL_PORT_BASE if a port is taken"; exit 1; }
    export RAY_ADDRESS=$ip:$BASE
    publish head "$RAY_ADDRESS"
}

# Ends with 3, and the names of those that are missing, when not all nodes have come in time.
await_nodes() {
    local code=0
    python -m megarl.distributed.ray_nodes --expect "$MEGARL_NODE_NAMES" --timeout "$TIMEOUT_S" || code=$?
    ((code == 0)) && publish ready "$SECONDS" && return
    ((code == MISSING_NODES)) || say "Ray could not be asked for its nodes (exit code $code)"
    publish driver.rc "$code"
    exit "$code"
}

write_attach_script() {
    {
        printf '#!/usr/bin/env bash\n# A shell on the first node of job %s, from which programs find its Ray.\n' "$SLURM_JOB_ID"
        printf 'exec srun --jobid=%q --overlap --nodes=1 --ntasks=1 --nodelist=%q ' "$SLURM_JOB_ID" "$NAME"
        printf '%s--pty env' "${MEGARL_CONTAINER_OPTIONS:-}"
        printf ' %q' "RAY_ADDRESS=$RAY_ADDRESS" RAY_AUTH_MODE=token "RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH" "PATH=$PATH" "PYTHONPATH=${PYTHONPATH:-}"
        printf ' bash\n'
    } >"$DIR/attach.sh"
    chmod 700 -- "$DIR/attach.sh"
}

wait_for_people() {
    say "Ray is up on all nodes. Attach with: bash $DIR/attach.sh"
    say "End with: scancel $SLURM_JOB_ID, or touch $DIR/stop_requested"
    wait_until 2147483647 test -e "$DIR/stop_requested" || return "$LOST_NODE"
}

# run_to_end COMMAND...: returns its exit code; what it says goes into driver.log as well.
run_to_end() {
    local code=0
    "$@" > >(tee -a -- "$DIR/driver.log") 2>&1 </dev/null &
    DRIVER_PID=$!
    # A trap ends a wait, not the driver.
    while kill -0 "$DRIVER_PID" 2>/dev/null; do wait "$DRIVER_PID" || true; done
    wait "$DRIVER_PID" || code=$?
    DRIVER_PID=""
    return "$code"
}

# What a run would find out after minutes: GPUs that Slurm did not give, nodes that do not reach one another.
check_cluster() {
    local code=0
    ((${#PREFLIGHT[@]})) || return 0
    run_to_end "${PREFLIGHT[@]}" || code=$?
    ((code)) || return 0
    say "the nodes were checked and this job cannot run on them (exit code $code). Fix: see above; MEGARL_CHECK_NODES=0 leaves the check out"
    publish driver.rc "$code"
    exit "$code"
}

run_driver() {
    local code=0
    if (($#)); then
        run_to_end "$@" || code=$?
    else
        wait_for_people || code=$?
    fi
    # srun reports a killed neighbour in the place of this code; the file does not.
    publish driver.rc "$code"
    exit "$code"
}

# shellcheck disable=SC2329  # wait_until calls it
head_is_up_or_gone() { [[ -s "$DIR/head" || -e "$DIR/ended" ]]; }

join_head() {
    wait_until "$TIMEOUT_S" head_is_up_or_gone || { say "the first node did not come up within $TIMEOUT_S s. Fix: see $DIR/node-0.log"; exit 1; }
    # It has reported the reason.
    [[ -s "$DIR/head" ]] || exit 0
    RAY_ADDRESS=$(<"$DIR/head")
    start_ray --address="$RAY_ADDRESS"
    wait_until 2147483647 test -e "$DIR/ended" && exit 0
    show_ray_log
    say "Ray ended on this node. Fix: see above and $LOG"
    exit "$LOST_NODE"
}

trap leave EXIT
trap 'exit 143' TERM INT
raise_limits
check_shared_directory
if ((NODE == 0)); then
    start_head
    await_nodes
    write_attach_script
    check_cluster
    run_driver "$@"
else
    join_head
fi
