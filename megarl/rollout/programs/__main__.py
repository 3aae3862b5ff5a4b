"""Print why programs cannot be isolated on this machine, or nothing if they can. Run by
``process.fault_of_isolation``."""

import sys

from megarl.rollout.programs.process import fault_here

if __name__ == "__main__":
    sys.stdout.write(fault_here("".join(sys.argv[1:])) or "")
