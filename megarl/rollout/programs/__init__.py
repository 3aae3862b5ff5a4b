"""The reward ``code``: runs programs that a model wrote against tests, in a sandbox.

Modules: ``forms`` parses tests and extracts the program; ``verdict`` scores it; ``process`` runs a program
under a supervisor; ``sandbox`` isolates it; ``inside`` hosts the program in the sandbox and answers the
requests of ``conversation``; ``statements`` and ``evaluation`` evaluate asserts outside of the sandbox.
"""

from megarl.rollout.programs.process import Limits, isolation, notice_of_user
from megarl.rollout.programs.verdict import fault_of_tests, judge

__all__ = ["Limits", "fault_of_tests", "isolation", "judge", "notice_of_user"]
