#!/usr/bin/env bash
# Makes the environment for NVIDIA GPUs, of the versions in constraints-gpu.txt: torch first, then Transformer Engine, whose part for torch is
# compiled here against that torch, then vLLM and megarl; in the end megarl doctor says whether they fit together. Started again it only
# looks, or goes on where it stopped.
#
#   bash launch/gpu_environment.sh                 into .venv-gpu
#   bash launch/gpu_environment.sh --dry-run       shows the steps and what is missing for them; changes nothing
#   bash launch/gpu_environment.sh --without te    leaves Transformer Engine out (no compiler is needed); --without vllm leaves vLLM out
#   bash launch/gpu_environment.sh --no-driver     on a machine without a GPU, for others with one: a login node, an image
#
#   MEGARL_VENV     where the environment is (default: .venv-gpu at the root of the repository)
#   MEGARL_PYTHON   the Python to make it from, 3.12 (default: python3.12)
#   MAX_JOBS        processes that compile at once, each with some 3 GB of memory (default: half of the cores)
#   CUDA_HOME       where the CUDA toolkit is (default: that of nvcc on PATH, else /usr/local/cuda)
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
VENV="${MEGARL_VENV:-$ROOT/.venv-gpu}"
[[ "$VENV" == /* ]] || VENV="$PWD/$VENV"
CONSTRAINTS="$ROOT/constraints-gpu.txt"
OLDEST_PYTHON=3.12
PYTHON=${MEGARL_PYTHON:-python$OLDEST_PYTHON}
DRY_RUN=0
DRIVER=1
LEFT_OUT=()

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; }

# Status 0 unless --without NAME was given.
wanted() {
    local name
    for name in "${LEFT_OUT[@]}"; do [[ "$name" != "$1" ]] || return 1; done
}

# The line NAME==VERSION of a package.
pinned() {
    grep -E "^$1==" "$CONSTRAINTS" || fail "$CONSTRAINTS has no version of $1. Fix: git checkout constraints-gpu.txt"
}

# Major version of the CUDA that the pinned torch is built for: its NCCL has it in its name.
cuda_major() { sed -nE 's/^nvidia-nccl-cu([0-9]+)==.*/\1/p' "$CONSTRAINTS"; }

# Prints what is wrong with the Python that the environment is made from.
python_obstacle() {
    local version
    if ! version=$(python_version "$PYTHON"); then
        echo "$PYTHON is no Python that has venv. Fix: install Python $OLDEST_PYTHON (Debian, Ubuntu: python$OLDEST_PYTHON and python$OLDEST_PYTHON-venv) or set MEGARL_PYTHON"
    elif [[ "$version" != "$OLDEST_PYTHON".* ]]; then
        echo "$PYTHON is $version: constraints-gpu.txt is for Python $OLDEST_PYTHON. Fix: set MEGARL_PYTHON to one of that version"
    fi
}

# Where the CUDA toolkit is; nothing where there is none.
cuda_home() {
    local nvcc
    if [[ -n "${CUDA_HOME:-}" ]]; then
        nvcc=$CUDA_HOME/bin/nvcc
    else
        nvcc=$(command -v nvcc) || nvcc=/usr/local/cuda/bin/nvcc
    fi
    [[ ! -x "$nvcc" ]] || dirname -- "$(dirname -- "$(readlink -f -- "$nvcc")")"
}

# Prints what keeps the steps from working, a line each.
obstacles() {
    local cuda home release driver oldest
    python_obstacle
    cuda=$(cuda_major)
    if ((DRIVER)); then
        oldest=$((cuda >= 13 ? 580 : 525))
        driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=
        if [[ ! "$driver" =~ ^[0-9]+\. ]]; then
            echo "no NVIDIA driver answers (nvidia-smi). Fix: run this on a machine with a GPU, or with --no-driver for such a machine"
        elif ((${driver%%.*} < oldest)); then
            echo "the NVIDIA driver is $driver, CUDA $cuda wants $oldest or newer. Fix: update the driver"
        fi
    fi
    wanted te || return 0
    command -v g++ >/dev/null || echo "no g++, which compiles Transformer Engine. Fix: apt-get install g++, or --without te"
    home=$(cuda_home)
    if [[ -z "$home" ]]; then
        echo "no nvcc: the headers of the CUDA $cuda toolkit are needed to compile Transformer Engine. Fix: install it, set CUDA_HOME, or --without te"
        return 0
    fi
    release=$("$home/bin/nvcc" --version | sed -nE 's/.*release ([0-9]+)\..*/\1/p')
    [[ "$release" == "$cuda" ]] ||
        echo "the CUDA toolkit in $home is of version ${release:-unknown}, torch is built for $cuda. Fix: set CUDA_HOME to one of version $cuda"
}

# Sets $extras to those of megarl that are installed.
choose_extras() {
    extras=plot
    ! wanted vllm || extras+=,vllm
}

# Headers of cuDNN and NCCL come with torch's own packages and nowhere else.
compile_environment() {
    local site
    site=$("$VENV/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    export CUDA_HOME MAX_JOBS NVTE_FRAMEWORK=pytorch CUDNN_PATH="$site/nvidia/cudnn"
    export CPATH="$site/nvidia/cudnn/include:$site/nvidia/nccl/include${CPATH:+:$CPATH}"
    CUDA_HOME=$(cuda_home)
    MAX_JOBS=${MAX_JOBS:-$((($(getconf _NPROCESSORS_ONLN) + 1) / 2))}
}

# show_or_run TITLE COMMAND...
step=0
show_or_run() {
    local title=$1
    shift
    step=$((step + 1))
    if ((DRY_RUN)); then
        printf '%d. %s\n   %s\n' "$step" "$title" "$(printf '%q ' "$@")"
    else
        run_step "[$step/$STEPS] $title" "$VENV/install.log" "$@"
    fi
}

install_all() {
    local pip=("$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --constraint "$CONSTRAINTS") torch engine
    ((DRY_RUN)) || : >"$VENV/install.log"
    torch=$(pinned torch)
    # Alone and first: what is compiled has to see it, and all else has to agree with it. The others are what builds need.
    show_or_run "$torch, built for CUDA $(cuda_major) (about 3 GB)" "${pip[@]}" "$torch" setuptools ninja packaging
    if wanted te; then
        engine=$(pinned transformer-engine)
        ((DRY_RUN)) || compile_environment
        # Isolated, pip would compile it against the newest torch, which this one is not; its core is a wheel, by default that of CUDA 12.
        show_or_run "Transformer Engine, compiled for it (some ten minutes)" "${pip[@]}" --no-build-isolation \
            "transformer-engine-cu$(cuda_major)==${engine#*==}" "transformer-engine[pytorch]==${engine#*==}"
    fi
    choose_extras
    # Before it was called megarl-trainer, its own name on the package index was megarl.
    ((DRY_RUN)) || "$VENV/bin/python" -m pip uninstall --yes megarl >>"$VENV/install.log" 2>&1 || true
    show_or_run "megarl and the rest: $extras (about 3 GB)" "${pip[@]}" --no-build-isolation --editable "${ROOT}[$extras]"
}

# The doctor's code is that of this script. Without a GPU a part of it cannot be tried; it says which.
check_all() {
    local doctor=("$VENV/bin/python" -m megarl.cli doctor)
    ! wanted te || doctor+=(--transformer-engine)
    if ((DRY_RUN)); then
        printf '%d. %s\n   %s\n' "$((step + 1))" "whether it all fits together" "$(printf '%q ' "${doctor[@]}")"
        return
    fi
    say "[$STEPS/$STEPS] megarl doctor:"
    (cd / && "${doctor[@]}") || fail "the environment in $VENV does not work here; see what failed, with its fix, above"
}

while (($#)); do
    case $1 in
        --dry-run) DRY_RUN=1 ;;
        --no-driver) DRIVER=0 ;;
        --without)
            [[ "${2:-}" == te || "${2:-}" == vllm ]] || fail "--without ${2:-}: te or vllm is wanted"
            LEFT_OUT+=("$2")
            shift
            ;;
        -h | --help) usage && exit ;;
        *) fail "$1 is not known; see bash launch/gpu_environment.sh --help" ;;
    esac
    shift
done

[[ -f "$CONSTRAINTS" ]] || fail "$CONSTRAINTS is missing. Fix: git checkout constraints-gpu.txt"
level=gpu$(printf -- '-without-%s' "${LEFT_OUT[@]}" | sed 's/-without-$//')
STEPS=$((4 + $(wanted te && echo 1 || echo 0)))
if ((!DRY_RUN)) && is_ready "$VENV" "$level" "$CONSTRAINTS"; then
    check_all
    say "ready: $VENV"
    exit
fi
found=$(obstacles)
if ((DRY_RUN)); then
    echo "environment: $VENV"
    show_or_run "an environment of Python $OLDEST_PYTHON" "$PYTHON" -m venv "$VENV"
    install_all
    check_all
    [[ -z "$found" ]] || printf 'missing for it here:\n   %s\n' "${found//$'\n'/$'\n   '}"
    exit
fi
[[ -z "$found" ]] || fail "$found"
mkdir -p -- "$(dirname -- "$VENV")"
(
    if command -v flock >/dev/null; then
        flock --nonblock 9 || { say "waiting for another script that prepares $VENV" && flock 9; }
    fi
    refuse_environment_of_another "$VENV"
    MEGARL_PYTHON=$PYTHON make_venv "$VENV" "$PYTHON"
    printf '%s' "$ROOT" >"$VENV/.checkout"
    step=1
    rm -f -- "$VENV"/.ready-*
    install_all
    fingerprint "$VENV" "$CONSTRAINTS" >"$VENV/.ready-$level"
) 9>"$VENV.lock"
check_all
say "ready: $VENV; use it by: source $VENV/bin/activate"
