#!/usr/bin/env bash
# Makes or reuses the virtual environment, then runs tests. Arguments that are not named here go to pytest.
#
#   bash launch/test.sh                               the default tier: every promise once
#   bash launch/test.sh --all                         everything: the default tier, then each part
#   bash launch/test.sh --part NAME                   one part of what --all adds, at most ten minutes
#   bash launch/test.sh --parts                       the names of the parts and what is in them
#   bash launch/test.sh --only unit|dist|system|launch  the default tier of one room (with --all: everything in it)
#   bash launch/test.sh tests/unit -k sharding        a choice of pytest's own (with --all: also what the default tier leaves out)
#
#   MEGARL_TEST_PROCESSES   how many processes the test files are spread over (default: as many as cores, at most 4)
#   MEGARL_TEST_SEED        which samples of the large matrices run (default: the number of commits)
#   MEGARL_TEST_SLURM       1: install Slurm where there is none (root and apt-get), and fail where that cannot be; 0: no tests of it (default: where there is one)
#   MEGARL_TEST_MEGATRON    version of Megatron-Core for the part next-megatron (default: the newest in the index, pre-releases too)
#   MEGARL_TEST_PYTHON312   1: fail where there is no Python 3.12 for the newest Megatron-Core (default: leave its parts out)
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

# megatron-core for Python 3.12 is ahead of the newest one for 3.11; both have to work.
NEWEST_MEGATRON=0.19.2
# A build of PyTorch for CUDA brings its own; it interprets and compiles kernels without a GPU.
TRITON=3.7.1
PIP_AUDIT=2.10.1
# vLLM's Qwen3.5 imports it. The version is that of the constraints.
TORCHVISION=0.28.0
ROOMS=(dist unit system launch)

usage() {
    sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
}

# Status 0 if one of the arguments names tests.
chooses_tests() {
    local argument path
    for argument in "$@"; do
        path=${argument%%::*}
        [[ "$path" == tests || "$path" == tests/* || "$path" == */tests/* ]] && [[ -e "$path" ]] && return
    done
    return 1
}

# The directories of tests: distributed ones in one process, and at the same time the quick ones first, so that a broken thing shows early. One that
# is not named here comes last.
test_rooms() {
    local room
    for room in "${ROOMS[@]}"; do
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

# How many processes the test files are spread over; with one core nothing is gained by a second.
processes() {
    local cores
    cores=$(getconf _NPROCESSORS_ONLN)
    printf '%s\n' "${MEGARL_TEST_PROCESSES:-$((cores < 2 ? 0 : cores > 4 ? 4 : cores))}"
}

# Sets $spread_options to pytest's options for one way of spreading its tests over processes, as tests/parts.py names them.
choose_spread() {
    spread_options=(-n "$(processes)" --dist "$1" --no-loadscope-reorder)
    [[ "$1" != no ]] || spread_options=(-p no:xdist)
}

# Prints "name needs spread what" of one part, or of all.
parts() {
    "$VENV/bin/python" -m tests.parts | awk -F '\t' -v name="${1:-}" 'name == "" || $1 == name'
}

# run_part NAME PYTEST_ARGUMENTS...: status 0 where it passes, or where what it needs is not here and not asked for.
run_part() {
    local name=$1 needs spread what python="$VENV/bin/python" from=$SECONDS status=0 next=
    local -x PYTHONPATH="${PYTHONPATH:-}" MEGARL_TEST_PIP_AUDIT="" MEGARL_TEST_TORCHVISION=""
    shift
    IFS=$'\t' read -r _ needs spread what < <(parts "$name") || true
    [[ -n "$what" ]] || fail "--part $name: there is none of that name; the parts are $(parts | cut -f 1 | paste -sd ' ')"
    say "part $name: $what"
    case $needs in
        vllm) prepare_environment "$VENV" vllm "$CONSTRAINTS" && prepare_torchvision ;;
        slurm) prepare_slurm || return 0 ;;
        triton) prepare_triton ;;
        pip-audit) prepare_pip_audit ;;
        newest-megatron) prepare_newest_megatron || return 0
            python=$newest ;;
        next-megatron) prepare_next_megatron || return 0
            python=$newest ;;
    esac
    choose_spread "$spread"
    "$python" -m pytest --part "$name" "${spread_options[@]}" "$@" || status=$?
    say "part $name: $(took "$from")"
    [[ -z "$next" ]] || ((status == 0)) || say "megatron-core $next breaks what failed; $NEWEST_MEGATRON passes: --part newest-megatron"
    # a part of which arguments chose some tests has not passed as a whole
    [[ "$status" != 0 || ${#chosen[@]} -gt 0 || -n "$only" ]] || "$VENV/bin/python" -m tests.parts --passed "$name"
    # 5: a choice of pytest's own, such as -k, left nothing of it
    ((status == 5)) || return "$status"
}

# Status 1 where there is no Slurm and nobody asked for one.
prepare_slurm() {
    if [[ "${MEGARL_TEST_SLURM:-}" == 1 ]]; then
        bash launch/slurm_packages.sh || fail "MEGARL_TEST_SLURM = 1, but there is no Slurm; see above, or unset the variable"
    elif [[ "${MEGARL_TEST_SLURM:-}" == 0 ]] || ! PATH="$PATH:/usr/sbin" command -v slurmctld >/dev/null; then
        say "no Slurm here: left out (MEGARL_TEST_SLURM=1 installs it)"
        return 1
    fi
}

# Puts Triton on Python's path for the tests of this part only: with Triton in the environment, other libraries take other code paths.
prepare_triton() {
    local place="$ROOT/.venv-triton-$TRITON"
    [[ -d "$place/triton" ]] || run_step "installing Triton $TRITON (0.2 GB to fetch)" "$place.log" \
        "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --target "$place" \
        --constraint "$CONSTRAINTS" "triton==$TRITON"
    PYTHONPATH="$place${PYTHONPATH:+:$PYTHONPATH}"
}

# Puts torchvision where engines of the tests that need it find it. It is built for CUDA: with a torch for CPUs its operators do not load, and the
# file that describes their shapes fails. Models of text call none of them.
prepare_torchvision() {
    MEGARL_TEST_TORCHVISION="$ROOT/.venv-torchvision-$TORCHVISION"
    [[ -d "$MEGARL_TEST_TORCHVISION/torchvision" ]] || run_step "installing torchvision $TORCHVISION" "$MEGARL_TEST_TORCHVISION.log" \
        "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --target "$MEGARL_TEST_TORCHVISION" \
        --constraint "$CONSTRAINTS" "torchvision==$TORCHVISION"
    [[ ! -d "$MEGARL_TEST_TORCHVISION/torchvision" ]] || : >"$MEGARL_TEST_TORCHVISION/torchvision/_meta_registrations.py"
}

# Puts pip-audit where the test alone finds it: what comes with it would stand before the environment's own packages.
prepare_pip_audit() {
    MEGARL_TEST_PIP_AUDIT="$ROOT/.venv-pip-audit-$PIP_AUDIT"
    [[ -d "$MEGARL_TEST_PIP_AUDIT/pip_audit" ]] || run_step "installing pip-audit $PIP_AUDIT" "$MEGARL_TEST_PIP_AUDIT.log" \
        "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --target "$MEGARL_TEST_PIP_AUDIT" \
        --constraint "$CONSTRAINTS" "pip-audit==$PIP_AUDIT"
}

# Sets $newest to the Python of an environment with the newest Megatron-Core; status 1 where there is no Python 3.12 and nobody asked for one.
prepare_newest_megatron() {
    local venv="${1:-$ROOT/.venv-3.12}" constraints="$ROOT/.venv-3.12.constraints" python
    if ! python=$(find_python312); then
        [[ "${MEGARL_TEST_PYTHON312:-}" != 1 ]] ||
            fail "MEGARL_TEST_PYTHON312 = 1, but no python3.12 that has venv was found; install one or unset the variable"
        say "no python3.12 here: megatron-core $NEWEST_MEGATRON is left out"
        return 1
    fi
    sed -E "s/^megatron-core==.*/megatron-core==$NEWEST_MEGATRON/" "$CONSTRAINTS" >"$constraints"
    # The first environment's choice of Python is not this one's.
    MEGARL_PYTHON="" prepare_environment "$venv" test "$constraints" "$python"
    newest="$venv/bin/python"
}

# Sets $next to a version of Megatron-Core beyond the newest one that is pinned, and $newest to the Python of an environment of its own with it;
# status 1 where there is none.
prepare_next_megatron() {
    local venv="$ROOT/.venv-3.12-next" found
    if [[ -z "${MEGARL_TEST_MEGATRON:-}" ]]; then
        found=$("$VENV/bin/python" -m pip index versions --pre --python-version 3.12 --only-binary :all: megatron-core 2>/dev/null |
            sed -nE 's/^megatron-core \((.*)\)$/\1/p') || true
        if [[ -z "$found" || "$found" == "$NEWEST_MEGATRON" ]]; then
            say "the index has no Megatron-Core beyond $NEWEST_MEGATRON: left out (MEGARL_TEST_MEGATRON=VERSION takes that one)"
            return 1
        fi
    fi
    prepare_newest_megatron "$venv" || return
    # pip says that megarl does not take it, and installs it all the same
    next=${MEGARL_TEST_MEGATRON:-$found}
    run_step "installing megatron-core $next" "$venv.log" "$newest" -m pip install --disable-pip-version-check --no-input "megatron-core==$next"
}

run_all() {
    local name names failed=()
    choose_spread loadfile
    "$VENV/bin/python" -m pytest "${spread_options[@]}" "$@" || (($? == 5)) || failed+=("the default tier")
    mapfile -t names < <(parts | cut -f 1)
    for name in "${names[@]}"; do
        run_part "$name" "$@" || failed+=("$name")
    done
    ((${#failed[@]} == 0)) || fail "failed: $(printf '%s; ' "${failed[@]}")each part runs again with: bash launch/test.sh --part NAME"
    say "everything passed"
}

cd -- "$ROOT"
mode=default part='' only='' chosen=()
while (($#)); do
    case $1 in
        --all) mode=all ;;
        --parts) mode=parts ;;
        --part | --only)
            (($# > 1)) || fail "$1: a name is missing; see bash launch/test.sh --help"
            if [[ $1 == --part ]]; then mode=part part=$2; else only=$2; fi
            shift
            ;;
        -h | --help) usage && exit ;;
        *) chosen+=("$1") ;;
    esac
    shift
done
set -- "${chosen[@]}"
[[ -z "$only" || -d "tests/$only" ]] || fail "--only $only: there is no such room; the rooms are ${ROOMS[*]}"

level="test"
[[ "$*" != *vllm* ]] || level="vllm"
prepare_environment "$VENV" "$level" "$CONSTRAINTS"
everything=()
[[ "$mode" != all ]] || everything=(--all)
choose_spread loadfile
if chooses_tests "$@"; then
    [[ "$mode" == part ]] || exec "$VENV/bin/python" -m pytest "${everything[@]}" "$@"
elif [[ -n "$only" ]]; then
    set -- "tests/$only" "$@"
    [[ "$mode" == part ]] || exec "$VENV/bin/python" -m pytest "${everything[@]}" "${spread_options[@]}" "$@"
else
    mapfile -t rooms < <(test_rooms)
    set -- "${rooms[@]}" "$@"
fi
case $mode in
    parts) parts | column -t -s $'\t' ;;
    part) run_part "$part" "$@" ;;
    all) run_all "$@" ;;
    default) exec "$VENV/bin/python" -m pytest "${spread_options[@]}" "$@" ;;
esac
