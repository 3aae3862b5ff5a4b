"""``megarl train`` that waits inside of its second step, so that whatever happens to its job happens there.

    python -m tests.launch.gated_train CONFIG [key=value ...]

Each attempt of which the number is below ``GATED_ATTEMPTS`` waits until it is asked to stop, or until there
is a file ``open`` in its directory; a file ``gated`` there says that it does. With ``PLAIN_POLICY=1`` the
policy is the plain reference one, in this process and without Ray.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING, Any

from megarl import env
from megarl.cli import main
from megarl.run import run
from megarl.run.run import PolicyFactory
from megarl.run.stopping import STOP_FILE, this_attempt
from tests.unit.driver_runs import PolicyMaker

if TYPE_CHECKING:
    from megarl.models.policy.lm_policy import Policy

GATED_STEP = 2


def wait_at_the_gate() -> None:
    """Wait until somebody wants the run to stop, opens the gate, or ends the process."""
    directory = this_attempt().directory
    if directory is None or env.integer("SLURM_RESTART_COUNT", 0) >= env.integer("GATED_ATTEMPTS", 0):
        return
    (directory / "gated").touch()
    while not any((directory / name).exists() for name in (STOP_FILE, "open")):
        time.sleep(0.05)


def gated(make_policy: PolicyFactory) -> PolicyFactory:
    """The same policies, whose second training step waits."""

    def make(config: run.Config, *arguments: Any) -> Policy:
        policy = make_policy(config, *arguments)
        train, steps = policy.train, itertools.count(1)

        def train_behind_the_gate(*args: Any, **kwargs: Any) -> dict[str, Any]:
            if not kwargs.get("eval_mode") and next(steps) == GATED_STEP:
                wait_at_the_gate()
            return train(*args, **kwargs)

        policy.train = train_behind_the_gate  # type: ignore[method-assign]
        return policy

    return make


if __name__ == "__main__":
    if env.flag("PLAIN_POLICY"):
        run.start_ray = lambda *arguments: None
    run.start_policy = gated(PolicyMaker() if env.flag("PLAIN_POLICY") else run.start_policy)
    sys.exit(main(["train", *sys.argv[1:]]))
