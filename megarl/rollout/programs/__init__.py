"""Programs that a model wrote, run against tests: the reward ``code``.

``forms`` reads tests and finds the program, ``verdict`` decides, ``process`` runs a program under a
supervisor, ``sandbox`` shuts it in, ``inside`` runs the program there and answers ``conversation``,
``statements`` and ``evaluation`` evaluate asserts outside.
"""

from megarl.rollout.programs.process import Limits, isolation, notice_of_user
from megarl.rollout.programs.verdict import fault_of_tests, judge

__all__ = ["Limits", "fault_of_tests", "isolation", "judge", "notice_of_user"]
