"""Time-sharing of devices by several models, of which only one at a time has its parameters there. It has
nothing
to do with the turns of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.plugins import Role
    from megarl.models.policy.lm_policy import Policy


class Turns:
    """Time-sharing of the devices by the models of a run. A single model keeps them, and nothing is moved
    here.

    Args:
        models: by role; those that have workers. Any of them may be on the devices.
    """

    def __init__(self, models: Mapping[Role, Policy]) -> None:
        self._models = models
        self._may_be_there = set(models)

    def take(self, role: Role) -> None:
        """Offload all other models. The model of ``role`` is loaded by its own ``prepare_for_training`` or a
        similar method."""
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
