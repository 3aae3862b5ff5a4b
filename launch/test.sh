#!/usr/bin/env bash
# Makes or reuses the virtual environment, then runs the tests. Arguments go to pytest; ones that name tests choose them:
#
#   bash launch/test.sh                             the whole suite, and beside it again on Python 3.12 what another Megatron-Core could change
#   bash launch/test.sh tests/unit -k sharding      a choice, on the first environment only
#
#   MEGARL_TEST_SLOW        1: also the combinations and the kills that are left out otherwise (about twice the time)
#   MEGARL_TEST_SLURM       0: no tests on a real Slurm; 1: install it where there is none (root and apt-get), and fail where that cannot be
#                           (default: where there is one)
#   MEGARL_TEST_PYTHON312   0: never the second run; 1: fail where there is no Python 3.12 (default: where there is one)
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

# megatron-core for Python 3.12 is ahead of the newest one for 3.11; both have to work.
NEWEST_MEGATRON=0.19.2
SECOND_LOG="$ROOT/.venv-3.12.log"

# Status 0 if one of the arguments names tests.
chooses_tests() {
    local argument path
    for argument in "$@"; do
        path=${argument%%::*}
        [[ "$path" == tests || "$path" == tests/* || "$path" == */tests/* ]] && [[ -e "$path" ]] && return
    done
    return 1
}

# The directories of tests, quick ones first, so that a broken thing shows early; one that is not named here comes last.
test_rooms() {
    local room
    for room in unit dist system launch; do
        [[ ! -d "tests/$room" ]] || printf 'tests/%s\n' "$room"
    done
    for room in tests/*/; do
        room=${room%/}
        [[ "$room" =~ ^tests/(unit|dist|system|launch|__.*)$ ]] || printf '%s\n' "$room"
    done
}

find_python312() {
    local candidate
    for candidate in python3.12 "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.12*/bin/python3.12; do
        if [[ "$(python_version "$candidate")" == 3.12.* ]]; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

run_on_python312() {
    local python=$1 venv="$ROOT/.venv-3.12" constraints="$ROOT/.venv-3.12.constraints"
    sed -E "s/^megatron-core==.*/megatron-core==$NEWEST_MEGATRON/" "$CONSTRAINTS" >"$constraints"
    # The first environment's choice of Python is not this one's.
    MEGARL_PYTHON="" prepare_environment "$venv" test "$constraints" "$python"
    "$venv/bin/python" -m pytest --newest-megatron tests/dist tests/unit
}

# Starts the second run beside the first: whole programs, most of the first one's time, leave half of the processor idle.
start_on_python312() {
    say "beside it Megatron and converters on Python 3.12 with megatron-core $NEWEST_MEGATRON (an environment of up to 6 GB;" \
        "MEGARL_TEST_PYTHON312=0: not); its output follows at the end, until then it is in $SECOND_LOG"
    # a process group of its own, by which all of it can be ended
    set -m
    {
        renice -n 10 "$BASHPID" >/dev/null || true
        run_on_python312 "$1"
    } </dev/null >"$SECOND_LOG" 2>&1 &
    set +m
    second=$!
    trap 'kill -- "-$second" 2>/dev/null || true' EXIT
}

finish_on_python312() {
    local watcher status=0
    say "the first run is done; the second:"
    watch_log "$$" "$SECOND_LOG" &
    watcher=$!
    wait "$second" || status=$?
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    trap - EXIT
    cat -- "$SECOND_LOG"
    return "$status"
}

cd -- "$ROOT"
prepare_environment "$VENV" vllm "$CONSTRAINTS"
if chooses_tests "$@"; then
    exec "$VENV/bin/python" -m pytest "$@"
fi
[[ "${MEGARL_TEST_SLURM:-}" != 1 ]] || bash launch/slurm_packages.sh || fail "MEGARL_TEST_SLURM = 1, but there is no Slurm; see above, or unset the variable"
second=
if [[ "${MEGARL_TEST_PYTHON312:-}" == 0 ]]; then
    :
elif python312=$(find_python312); then
    start_on_python312 "$python312"
elif [[ "${MEGARL_TEST_PYTHON312:-}" == 1 ]]; then
    fail "MEGARL_TEST_PYTHON312 = 1, but no python3.12 that has venv was found; install one or unset the variable"
else
    say "no python3.12 here: the second run, with megatron-core $NEWEST_MEGATRON, is left out"
fi

mapfile -t rooms < <(test_rooms)
"$VENV/bin/python" -m pytest "${rooms[@]}" "$@"
[[ -z "$second" ]] || finish_on_python312
