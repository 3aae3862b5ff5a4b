"""Turns: several models on the same devices, of which one at a time has its parameters there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.plugins import Role
    from megarl.models.policy.lm_policy import Policy


class Turns:
    """Whose turn it is on the devices. Where there is one model, it has them all the time, and nothing is
    moved here.

    Args:
        models: by role; those that have workers. Any of them may be on the devices.
    """

    def __init__(self, models: Mapping[Role, Policy]) -> None:
        self._models = models
        self._may_be_there = set(models)

    def take(self, role: Role) -> None:
        """Have all other models leave the devices. The one whose turn it is then comes by
        ``prepare_for_training`` and the like."""
        for other in [each for each in self._models if each in self._may_be_there and each != role]:
            self._models[other].offload_after_refit()
            self._may_be_there.remove(other)
        self._may_be_there.add(role)

    def bring(self, role: Role) -> None:
        """Have the parameters of the model of a role on the devices, to be read; a model that is alone has
        its own ways."""
        if len(self._models) > 1:
            self.take(role)
            self._models[role].prepare_for_lp_inference()
