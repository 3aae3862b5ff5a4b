"""Token counts and balancing losses of a model's mixture-of-experts routers during one global batch.

Losses are normalised over the whole global batch, so contributions of tokens and ranks simply add up, as in
the engine's losses. Let T be the number of real tokens in the global batch, E the number of experts, k the
number of experts per token, p[t, i] the softmax over all of a router's logits, and c[i] the number of tokens
routed to expert i. (For sigmoid routers p is the sigmoid scores divided by their sum; DeepSeek-V3,
arXiv:2412.19437, equations 17 to 20.)

* ``aux_loss``: ``E * sum_i f[i] * P[i]`` with ``f[i] = c[i] / (T * k)`` and ``P[i] = sum_t p[t, i] / T``
  (Fedus et al., Switch Transformers, arXiv:2101.03961, equations 4 to 6, there with k = 1). It is 1 when all
  experts have the same load. ``f`` carries no gradient, so a token contributes ``E / T * sum_i f[i] * p[t,
  i]``. The contributions add up over any split of the batch if ``f`` is computed over the whole batch. A pass
  without gradients therefore counts ``f`` before the first backward pass.
* ``seq_aux_loss``: the same loss for each sequence alone, averaged over the sequences (DeepSeek-V2,
  arXiv:2405.04434, section 2.2.3). A sequence is in one micro-batch, so no counting pass is needed; ranks
  that split sequences sum their counts.
* z-loss: the mean over the tokens of the squared log-sum-exp of the logits (Zoph et al., ST-MoE,
  arXiv:2202.08906, equation 5).

Each layer's loss is multiplied by its coefficient and added to the model's loss. Real tokens are those within
``input_lengths`` in rows whose ``sample_mask`` is not 0: padding and dropped samples count nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

BalancingType = Literal["none", "aux_loss", "seq_aux_loss"]


@dataclass(frozen=True, slots=True)
class BalanceSettings:
    """Load-balancing settings of a model's routers.

    Attributes:
        kind: the load-balancing loss.
        coefficient: factor of each layer's load-balancing loss in the model's loss.
        z_coefficient: factor of each layer's z-loss.
        score: function that maps router logits to scores.
        experts, chosen: number of experts per layer, and of experts per token.
        sparse_layers: for each layer of the model, True if it has experts.
    """

    kind: BalancingType
    coefficient: float
    z_coefficient: float
    experts: int
    chosen: int
    sparse_layers: tuple[bool, ...]
    score: Literal["softmax", "sigmoid"] = "softmax"

    @property
    def counts_ahead(self) -> bool:
        """True if a pass without gradients must count expert loads before the first backward pass."""
        return self.kind == "aux_loss" and self.coefficient > 0


@dataclass(frozen=True, slots=True)
class ExpertTokenCounts:
    """Sizes of the batch over which expert load is balanced.

    Attributes:
        tokens, sequences: numbers of real tokens and sequences in the global batch, over all data-parallel
            ranks.
        rows: largest number of rows of any micro-batch on this rank; row indices that routers receive are
            smaller.
    """

    tokens: float
    sequences: float
    rows: int


class RoutingRecord:
    """Expert counts of one global batch. Routers report their choices to it and get their losses back.

    It is open during a global batch and closed between batches.

    Args:
        settings: selects the losses.
        shared: group of ranks that split the same sequences (tensor and context parallel).
        device: device of the counts.
    """

    def __init__(self, settings: BalanceSettings, shared: dist.ProcessGroup, device: torch.device) -> None:
        self.settings = settings
        self._shared = shared if dist.get_world_size(shared) > 1 else None
        layers, experts = len(settings.sparse_layers), settings.experts
        # float64 represents every count exactly, and sums probabilities with negligible rounding.
        new: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self._load, self._mass = torch.zeros(layers, experts, **new), torch.zeros(layers, experts, **new)
        self._added, self._z = torch.zeros(layers, **new), torch.zeros(layers, **new)
        self._shares: torch.Tensor | None = None
        self._token_counts: ExpertTokenCounts | None = None
        self._counting = False

    @property
    def is_open(self) -> bool:
        """True while routers must report. Under activation checkpointing the first forward pass has no
        gradients and does not count; the recomputation does."""
        return self._token_counts is not None and (self._counting or torch.is_grad_enabled())

    def open(self, token_counts: ExpertTokenCounts) -> None:
        """Begin a global batch and reset the counts."""
        self._token_counts = token_counts
        self._shares = None
        self._clear()

    def close(self) -> None:
        """End the global batch; the counts remain for ``metrics``."""
        self._token_counts = None

    def count_ahead(self, counting: bool) -> None:
        """Begin (True) or end (False) the counting pass. Its end sums the counts over all ranks: collective
        over the world."""
        self._counting = counting
        if not counting:
            # Sum over the world: a rank counts its own layers and tokens, and has zeros for the rest.
            dist.all_reduce(self._load)
            self._shares = self._load / self._load.sum(1, keepdim=True).clamp(min=1)
        self._clear()

    def report(
        self, layer: int, logits: torch.Tensor, went_to: torch.Tensor, sequences: torch.Tensor
    ) -> torch.Tensor | None:
        """Count one router's choices for a micro-batch and return its losses.

        Args:
            layer: index of the layer in the whole model, from 0.
            logits: [t, E] for this rank's tokens.
            went_to: [t, E] bool, the experts that each token is routed to.
            sequences: [t] int64, each token's row in the micro-batch; -1 for tokens that do not count.

        Returns:
            The differentiable sum of the losses times their coefficients; None if there is none.
        """
        assert self._token_counts is not None
        real = sequences >= 0
        # Padding passes through experts too, but must not count as load.
        went_to = went_to & real[:, None]
        self._load[layer] += went_to.sum(0)
        if self._counting:
            return None
        probabilities = self._probabilities(logits) * real[:, None]
        self._mass[layer] += probabilities.detach().sum(0)
        losses = []
        for weight, loss in (
            (self.settings.coefficient, self._balancing(layer, probabilities, went_to, sequences)),
            (self.settings.z_coefficient, self._z_loss(layer, logits, real)),
        ):
            if loss is not None:
                losses.append(weight * loss)
        return torch.stack(losses).sum() if losses else None

    def _probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.settings.score == "softmax":
            return wide.softmax(-1)
        scores = wide.sigmoid()
        # Add the router's own small constant, because the sigmoids of very small logits may all be 0.
        return scores / (scores.sum(-1, keepdim=True) + 1e-20)

    def _balancing(
        self, layer: int, probabilities: torch.Tensor, went_to: torch.Tensor, sequences: torch.Tensor
    ) -> torch.Tensor | None:
        settings, token_counts = self.settings, self._token_counts
        assert token_counts is not None
        if settings.kind == "none" or settings.coefficient == 0:
            return None
        if settings.kind == "aux_loss":
            assert self._shares is not None, "count_ahead() has to come before"
            # Shares are constants of the whole batch, so the loss is linear in the tokens and adds up over
            # any split of them.
            shares = self._shares[layer].to(probabilities.dtype)
            return (probabilities.sum(0) * shares).sum() * (settings.experts / max(token_counts.tokens, 1))
        loss = self._sequence_loss(probabilities, went_to, sequences, token_counts)
        self._added[layer] += loss.detach()
        return loss

    def _sequence_loss(
        self,
        probabilities: torch.Tensor,
        went_to: torch.Tensor,
        sequences: torch.Tensor,
        token_counts: ExpertTokenCounts,
    ) -> torch.Tensor:
        """Return this rank's contribution to the mean balancing loss over sequences. Expert counts are summed
        over the ranks that split a sequence."""
        experts, rows = self.settings.experts, token_counts.rows
        load = went_to.new_zeros(rows + 1, experts, dtype=probabilities.dtype)
        # An additional last row collects padding and dropped samples.
        load.index_add_(0, sequences.where(sequences >= 0, rows), went_to.to(load.dtype))
        if self._shared is not None:
            # Counts have no gradient, so a collective outside autograd is correct.
            dist.all_reduce(load, group=self._shared)
        assignments = load[:rows].sum(1, keepdim=True).clamp(min=1)
        tokens = assignments / self.settings.chosen
        # Each weight is f / T of its sequence, where assignments = T k; the sum over tokens below completes
        # P.
        weights = load[:rows] / (assignments * tokens)
        return (probabilities * weights[sequences.clamp(min=0)]).sum() * (
            experts / max(token_counts.sequences, 1)
        )

    def _z_loss(self, layer: int, logits: torch.Tensor, real: torch.Tensor) -> torch.Tensor | None:
        if self.settings.z_coefficient == 0:
            return None
        assert self._token_counts is not None
        size = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)
        loss = (size.square() * real).sum() / max(self._token_counts.tokens, 1)
        self._z[layer] += loss.detach()
        return loss

    def _clear(self) -> None:
        for counts in (self._load, self._mass, self._added, self._z):
            counts.zero_()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the latest global batch, equal on all ranks. Collective over the world.

        Returns:
            ``moe_aux_loss``: mean over layers of the load-balancing loss without its coefficient
            (``aux_loss`` if none is trained). ``moe_expert_load_max`` and ``moe_expert_load_min``: largest
            and smallest load of an expert in any layer, relative to the layer's mean. ``moe_z_loss``: only if
            the z-loss is trained.
        """
        # One collective reduces all counts, in float64.
        figures = torch.cat([self._load, self._mass, self._added[:, None], self._z[:, None]], dim=1)
        dist.all_reduce(figures)
        # A rank has zeros for other ranks' layers, so the sum over the world covers the whole model.
        figures = figures[torch.tensor(self.settings.sparse_layers, device=figures.device)]
        experts = self.settings.experts
        load, mass, added, z = figures.split([experts, experts, 1, 1], dim=1)
        # Clamp the mean: after a batch without real tokens all loads are 0.
        relative = load / load.mean(1, keepdim=True).clamp(min=1 / experts)
        share, probability = relative / experts, mass / mass.sum(1, keepdim=True).clamp(min=1e-300)
        balance = added if self.settings.kind == "seq_aux_loss" else experts * (share * probability).sum(1)
        figure = {
            "moe_aux_loss": float(balance.mean()),
            "moe_expert_load_max": float(relative.max()),
            "moe_expert_load_min": float(relative.min()),
        }
        return figure | ({"moe_z_loss": float(z.mean())} if self.settings.z_coefficient else {})
