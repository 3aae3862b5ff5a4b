"""Programs that a model wrote, run against tests: the reward ``code``.

``forms`` reads tests and finds the program, ``verdict`` decides, ``process`` runs a program under a
supervisor and ``sandbox`` shuts it in, ``inside`` runs the program there and answers ``conversation``,
``statements`` and ``evaluation`` evaluate asserts outside.
"""

from megarl.rollout.programs.process import Limits, fault_of_isolation, notice_of_user
from megarl.rollout.programs.verdict import CheckedReferences, fault_of_tests, judge

__all__ = ["CheckedReferences", "Limits", "fault_of_isolation", "fault_of_tests", "judge", "notice_of_user"]
