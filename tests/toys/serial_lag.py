"""Training on old answers, one thing after another: what asynchronous training has to be equal to, and with
delays, what must not matter.

``SERIAL_LAG`` in the environment is k. Nothing of the code that samples beside training is used: the weights
of every step are kept as checkpoints, and before a step is sampled those of k steps ago are loaded and sent
to the engines.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from megarl.algorithms.distillation import Distillation
from megarl.algorithms.grpo import GRPO
from megarl.algorithms.ppo import PPO
from megarl.algorithms.sampled import Sampled


class Lag(Sampled):
    """The batch of step n is sampled with the weights behind step n - 1 - k."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.kept = Path(tempfile.mkdtemp(dir=parts.config["run_dir"]))
        self.lag = int(os.environ["SERIAL_LAG"])

    def take(self, step: int) -> Any:
        # another model may have had its devices
        self.policy.prepare_for_training()
        now = self.kept / f"{step - 1}"
        self.policy.save_checkpoint(now / "weights", now / "optimizer")
        old = max(step - 1 - self.lag, 0)
        self._load(self.kept / f"{old}" / "weights")
        self._version = old
        sampled = self._sample_step(step)
        self._load(now / "weights", now / "optimizer")
        return sampled

    def _load(self, *paths: Path) -> None:
        self.policy.load_checkpoint(*paths)
        assert self.refit is not None
        self.refit.stale = True


class SerialLag(Lag, GRPO):
    """GRPO so."""


class SerialLagPPO(Lag, PPO):
    """PPO so."""


class SerialLagDistillation(Lag, Distillation):
    """Distillation so."""


class ValidatesInTurn(GRPO):
    """GRPO whose training waits for each validation, since it has a validation of its own."""

    def validate(self) -> dict[str, float]:
        return super().validate()


class Delayed(GRPO):
    """GRPO whose sampling and training each take as long as they like; ``DELAY_SEED`` in the environment says
    how long."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.draw = random.Random(int(os.environ["DELAY_SEED"]))

    def collect(self, *args: Any) -> Any:
        time.sleep(self.draw.uniform(0, 0.4))
        found = super().collect(*args)
        time.sleep(self.draw.uniform(0, 0.4))
        return found

    def train(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.draw.uniform(0, 0.4))
        return super().train(*args, **kwargs)
