"""Programs that a model wrote, run against tests: the reward ``code``.

``forms`` parses tests and extracts the program, ``verdict`` scores it, ``process`` runs a program under a
supervisor, ``sandbox`` isolates it, ``inside`` runs the program there and answers the requests of
``conversation``, and ``statements`` and ``evaluation`` evaluate asserts outside.
"""

from megarl.rollout.programs.process import Limits, isolation, notice_of_user
from megarl.rollout.programs.verdict import fault_of_tests, judge

__all__ = ["Limits", "fault_of_tests", "isolation", "judge", "notice_of_user"]
