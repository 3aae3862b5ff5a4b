"""Dynamic loss scaling for float16: losses are multiplied on their way backward, so that small gradients do not vanish."""

from __future__ import annotations

import math
from dataclasses import dataclass

# where torch's own scaler starts; how fast it grows and falls is torch's too
INITIAL = 2.0**16
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


@dataclass(slots=True)
class LossScale:
    """The present factor.

    Attributes:
        factor: of every loss; 1 throughout without scaling.
        dynamic: False for the wide exponents of float32 and bfloat16.
        clean_steps: steps without overflow since the factor last changed.
    """

    factor: float = 1.0
    dynamic: bool = False
    clean_steps: int = 0

    @classmethod
    def for_float16(cls) -> LossScale:
        """A factor that follows the gradients."""
        return cls(INITIAL, dynamic=True)

    def accepts(self, norm: float) -> bool:
        """Whether a step with gradients of this norm may be taken, and the factor of the next one. All ranks give the same norm."""
        if not self.dynamic:
            return True
        if not math.isfinite(norm):
            self.factor, self.clean_steps = max(1.0, self.factor * BACKOFF), 0
            return False
        self.clean_steps += 1
        if self.clean_steps == INTERVAL:
            self.factor, self.clean_steps = self.factor * GROWTH, 0
        return True
