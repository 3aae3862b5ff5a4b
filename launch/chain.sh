#!/usr/bin/env bash
# Submits one job several times, each to start when the one before has been stopped by its time limit, or is done: for runs that are longer
# than a partition allows and sites that do not let jobs requeue themselves. Each goes on from the last checkpoint; one that fails ends the
# chain, and when the run is done the rest have nothing to do.
#
#   bash launch/chain.sh 5 --nodes=8 --time=24:00:00 launch/train.sbatch CONFIG [key=value ...]
set -euo pipefail
if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ || $# -lt 2 ]]; then
    printf 'megarl: usage: bash launch/chain.sh NUMBER_OF_JOBS [options of sbatch] launch/train.sbatch CONFIG [key=value ...]\n' >&2
    exit 2
fi
command -v sbatch >/dev/null || {
    printf 'megarl: there is no sbatch on PATH. Fix: run this on a login node of the cluster\n' >&2
    exit 2
}
# Of an array whose task runs this script: the jobs would inherit them.
unset SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID
count=$1 previous="" before="" after=()
shift
for ((left = count - 1; left >= 0; left--)); do
    # The jobs before tell a run with resume=never which checkpoints are its own.
    previous=$(MEGARL_CHAIN_LEFT=$left MEGARL_CHAIN_BEFORE=$before sbatch --parsable "${after[@]}" "$@")
    previous=${previous%%;*}
    before+="$previous "
    after=(--dependency="afterok:$previous" --kill-on-invalid-dep=yes)
    printf 'job %s: %d of %d\n' "$previous" $((count - left)) "$count"
done
