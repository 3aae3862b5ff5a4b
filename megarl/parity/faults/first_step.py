"""What the first step of a loss reads, known before any model is there: signals are drawn around the model's own log-probabilities, so that
differences between them do not depend on it. By it a fault says in which cases it must be seen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from megarl.parity.batches import first_step, token_batch, with_signals
from megarl.parity.case import Case
from megarl.parity.losses import bounds_of_weights

CLEARLY = 1.02
"""How far past a bound a ratio or a weight has to be for the difference to be seen in a sum over tokens."""
SEQUENCES = frozenset({"gspo", "gspo-token"})
"""Options of ratios of sequences."""
_JUDGED = 0.05
"""Size of an advantage that is seen."""


@dataclass(frozen=True)
class FirstStep:
    """What the first step of a policy gradient reads, up to rounding.

    Attributes:
        case: the case.
        counted: [B, S-1] bool, tokens that count.
        log_ratios: [B, S-1] logarithm of current by previous probability.
        log_weights: [B, S-1] logarithm of previous by generation probability.
        above: [B, S-1] current less reference log-probability.
        advantages: [B, S-1].
    """

    case: Case
    counted: torch.Tensor
    log_ratios: torch.Tensor
    log_weights: torch.Tensor
    above: torch.Tensor
    advantages: torch.Tensor

    def averaged(self, logarithms: torch.Tensor) -> torch.Tensor:
        """[B, S-1] for each token the mean over those of its sequence that count."""
        counts = self.counted.sum(1, keepdim=True).clamp(min=1)
        return ((logarithms * self.counted).sum(1, keepdim=True) / counts).expand_as(logarithms)

    def _of_level(self, logarithms: torch.Tensor) -> torch.Tensor:
        return self.averaged(logarithms) if SEQUENCES & self.case.loss_options else logarithms

    @property
    def unclamped(self) -> torch.Tensor:
        """[B, S-1] logarithms of ratios, of the level of the loss."""
        return self._of_level(self.log_ratios)

    @property
    def ratios(self) -> torch.Tensor:
        """[B, S-1] within the clamp of their logarithms."""
        clamp = self.case.loss_number("ratio-clamp")
        return torch.exp(self.unclamped if clamp is None else self.unclamped.clamp(-clamp, clamp))

    @property
    def weights(self) -> torch.Tensor:
        """[B, S-1] importance weights before they are bounded."""
        return torch.exp(self._of_level(self.log_weights))

    @property
    def judged_weights(self) -> torch.Tensor:
        """[B, S-1] what is held against the bounds of importance weights."""
        of_sequences = "seq-mask" in self.case.loss_options
        return torch.exp(self.averaged(self.log_weights)) if of_sequences else self.weights

    @property
    def judged(self) -> torch.Tensor:
        """[B, S-1] bool, tokens that count, with an advantage, and whose importance weight is not 0."""
        kept = self.counted & (self.advantages.abs() > _JUDGED)
        if {"icepop", "seq-mask"} & self.case.loss_options:
            low, high = bounds_of_weights(self.case)
            kept = kept & (self.judged_weights >= (low or 0.0)) & (self.judged_weights <= (high or torch.inf))
        return kept

    @property
    def moving(self) -> torch.Tensor:
        """[B, S-1] bool, tokens whose objective has a gradient."""
        options = self.case.loss_options
        if {"noratio", "cispo", "forced"} & options:
            return self.judged
        return self.judged & self._follows_ratio()

    @property
    def following(self) -> torch.Tensor:
        """[B, S-1] bool, tokens whose objective changes with the ratio."""
        options = self.case.loss_options
        if {"noratio", "forced"} & options:
            return torch.zeros_like(self.counted)
        return self.judged & self._follows_ratio()

    def _follows_ratio(self) -> torch.Tensor:
        (below, above), good = self.case.loss_numbers("cliprange"), self.advantages > 0
        assert below is not None and above is not None
        within = (self.ratios < 1 + above) & (self.ratios > 1 - below)
        if "cispo" not in self.case.loss_options:
            within = torch.where(good, self.ratios < 1 + above, self.ratios > 1 - below)
        if "dual" in self.case.loss_options:
            within = within & (good | (self.ratios < (self.case.loss_number("dual") or torch.inf)))
        clamp = self.case.loss_number("ratio-clamp")
        return within if clamp is None else within & (self.unclamped.abs() < clamp)

    @property
    def clipped(self) -> torch.Tensor:
        """[B, S-1] bool, tokens whose ratio is clearly past the bound that counts for their advantage; with CISPO, any bound."""
        (below, above), good = self.case.loss_numbers("cliprange"), self.advantages > 0
        assert below is not None and above is not None
        over, under = self.ratios > CLEARLY * (1 + above), self.ratios < (1 - below) / CLEARLY
        both = over | under if "cispo" in self.case.loss_options else torch.where(good, over, under)
        return self.judged & both

    @property
    def estimates(self) -> torch.Tensor:
        """[B, S-1] of the divergence, without the clamp of the estimate."""
        most, above = self.case.loss_number("kl-input-clamp"), self.above
        above = above if most is None else above.clamp(-most, most)
        if "k1" in self.case.loss_options:
            return above
        return above.square() / 2 if "k2" in self.case.loss_options else torch.exp(-above) + above - 1

    @property
    def diverging(self) -> torch.Tensor:
        """[B, S-1] bool, tokens whose divergence is in the loss and within its clamps."""
        options = self.case.loss_options
        if "kl" not in options or "in-reward" in options:
            return torch.zeros_like(self.counted)
        most, bound = self.case.loss_number("kl-input-clamp"), self.case.loss_number("kl-output-clamp")
        inside = self.counted & (self.above.abs() > 0.02)
        inside = inside if most is None else inside & (self.above.abs() < most)
        return inside if bound is None else inside & (self.estimates.abs() < bound)


@lru_cache(maxsize=8)
def first_step_of(case: Case) -> FirstStep:
    """The first step of a policy gradient."""
    current = torch.zeros(case.total_rows, case.length)
    data = first_step(case, with_signals(case, token_batch(case), current))
    previous = data.get("prev_logprobs", current[: case.global_batch])
    if "forced" in case.loss_options:
        previous = current[: case.global_batch]
    counted = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:] != 0
    apart = (-previous, previous - data["generation_logprobs"], -data["reference_policy_logprobs"], data["advantages"])
    return FirstStep(case, counted, *(values[:, 1:] for values in apart))
