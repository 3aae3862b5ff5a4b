"""Time-sharing of devices between several models, of which one at a time has its parameters on the devices.
Unrelated to the turns of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.plugins import Role
    from megarl.models.policy.lm_policy import Policy


class Turns:
    """Time-sharing of the devices between the models of a run. With a single model nothing is ever moved.

    Args:
        models: models with workers, by role. Each of them may be on the devices at first.
    """

    def __init__(self, models: Mapping[Role, Policy]) -> None:
        self._models = models
        # After the start each model may still be loaded, so the first `take` offloads all others.
        self._may_be_there = set(models)

    def take(self, role: Role) -> None:
        """Offload all other models. The model of ``role`` loads itself in ``prepare_for_training`` and
        similar methods."""
        for other, model in self._models.items():
            if other in self._may_be_there and other != role:
                model.offload_after_refit()
                self._may_be_there.remove(other)
        self._may_be_there.add(role)

    def bring(self, role: Role) -> None:
        """Load a role's parameters onto the devices for reading. No-op if it is the only model."""
        if len(self._models) > 1:
            self.take(role)
            self._models[role].prepare_for_lp_inference()
