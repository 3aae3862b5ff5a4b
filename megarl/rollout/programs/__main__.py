"""Print why programs cannot be isolated here, or nothing if they can. ``process.fault_of_isolation`` runs
this program."""

import sys

from megarl.rollout.programs.process import fault_here

if __name__ == "__main__":
    sys.stdout.write(fault_here("".join(sys.argv[1:])) or "")
