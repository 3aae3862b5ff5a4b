#!/usr/bin/env bash
# Installs the Slurm of the Debian packages, for the tests that run one on the loopback interface. Status 1, and why, where that cannot be.
set -euo pipefail
PATH="$PATH:/usr/sbin"

say() { printf 'megarl: %s\n' "$*" >&2; }

refuse() {
    say "$*"
    exit 1
}

missing=()
for command in slurmctld slurmd sbatch; do
    command -v "$command" >/dev/null || missing+=("$command")
done
((${#missing[@]})) || exit 0
command -v apt-get >/dev/null || refuse "${missing[*]} not found and no apt-get here. Fix: install slurmctld, slurmd and Slurm's commands"
((EUID == 0)) || refuse "${missing[*]} not found and this is not root. Fix: sudo bash launch/slurm_packages.sh"
log=$(mktemp)
say "installing slurmctld, slurmd and slurm-client"
export DEBIAN_FRONTEND=noninteractive
# The lists of a fresh machine are empty or old.
if ! { apt-get update && apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client; } >"$log" 2>&1 </dev/null; then
    tail -n 5 -- "$log" >&2
    refuse "apt-get failed; the whole log: $log"
fi
rm -f -- "$log"
