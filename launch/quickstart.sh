#!/usr/bin/env bash
# From a fresh clone to a trained model: makes or reuses the virtual environment, then runs megarl's quick start.
# Arguments go to the quick start: bash launch/quickstart.sh --help
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
level=run
for argument in "$@"; do
    # --generation vllm or vllm-apart
    [[ "$argument" != *vllm* ]] || level=vllm
done
prepare_environment "$VENV" "$level" "$CONSTRAINTS"
exec "$VENV/bin/python" -m megarl.quickstart "$@"
