"""Sequence lengths like those of published runs: log-normal, truncated at the longest allowed sequence."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SPREAD = 0.8  # Deviation of the logarithm, for responses of one model to one kind of problem.


@dataclass(frozen=True, slots=True)
class Profile:
    """Mean and largest length, in tokens."""

    mean: int
    longest: int


# These are the mean and the cap of published reinforcement-learning runs: short responses, long reasoning
# with two caps, and tool use.
PROFILES = {
    "short": Profile(1060, 4096),
    "reasoning-4k": Profile(3200, 4096),
    "reasoning-8k": Profile(5700, 8192),
    "agentic": Profile(31_000, 131_072),
}


def draw_lengths(profile: Profile, count: int, seed: int) -> list[int]:
    """Return ``count`` random lengths in [1, longest] whose mean after truncation is about
    ``profile.mean``."""
    generator = random.Random(seed)
    normal = [generator.gauss(0.0, SPREAD) for _ in range(count)]
    low, high = 0.0, math.log(profile.longest) + 4 * SPREAD
    # Bisection works because the mean grows with the middle.
    for _ in range(40):
        middle = (low + high) / 2
        if sum(_cut(middle, value, profile) for value in normal) < profile.mean * count:
            low = middle
        else:
            high = middle
    return [_cut(high, value, profile) for value in normal]


def _cut(middle: float, value: float, profile: Profile) -> int:
    return max(1, min(profile.longest, round(math.exp(middle + SPREAD * value))))
