"""Balancing losses and expert loads of a mixture-of-experts model in transformers, computed for a global
batch from the definitions.

A batch has T real tokens, E experts and k experts per token. p is the softmax of a router's logits; for
sigmoid routers, the sigmoids divided by their sum (DeepSeek-V3, arXiv:2412.19437, equation 18). c[i] is the
number of tokens routed to expert i. The load-balancing loss is ``E * sum_i (c[i] / (T k)) * mean_t p[t, i]``
(Fedus et al., arXiv:2101.03961, equations 4 to 6), either over the batch or as the mean over sequences
(DeepSeek-V2, arXiv:2405.04434, section 2.2.3). The z-loss is ``mean_t logsumexp(logits[t])**2`` (Zoph et al.,
arXiv:2202.08906, equation 5). These losses are summed over layers. Padding and masked samples do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_GATES = (".mlp.gate", ".block_sparse_moe.gate", ".mlp.router")
COEFFICIENT = 0.3
Z_COEFFICIENT = 0.02


@dataclass(frozen=True, slots=True)
class Balancing:
    """Settings of the balancing losses.

    Attributes:
        kind: load-balancing loss: ``none``, ``aux`` over the global batch, or ``seq`` over each sequence.
        z: True to add the z-loss.
        frozen: True to exclude router weights from training.
        weight: factor on both losses.
    """

    kind: str = "none"
    z: bool = False
    frozen: bool = False
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Judged:
    """Balancing losses and metrics of one forward pass.

    Attributes:
        loss: sum of the balancing losses of all routers; None in a dense model.
        by_expert: [E] terms of the load-balancing loss by expert, differentiable; None if that loss is off.
            Their gradients cancel if all experts get the same number of tokens.
        metrics: metrics by name.
    """

    loss: Tensor | None = None
    by_expert: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def gates_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the router modules of a transformers model; empty for a dense model."""
    return [module for name, module in model.named_modules() if name.endswith(_GATES)]


class Routers:
    """Hooks that record the outputs of all routers of a model.

    Args:
        model: a transformers model; a dense model has no routers.
        balancing: settings of the balancing losses.
    """

    def __init__(self, model: torch.nn.Module, balancing: Balancing) -> None:
        self._balancing = balancing
        # For each router: logits, chosen experts, and True for sigmoid scores.
        self._heard: list[tuple[Tensor, Tensor, bool]] = []
        for gate in gates_of(model):
            gate.register_forward_hook(self._listen)
            if balancing.frozen:
                gate.requires_grad_(False)

    def _listen(self, gate: torch.nn.Module, given: Any, answer: tuple[Tensor, Tensor, Tensor]) -> None:
        # In transformers, exactly the sigmoid routers have a correction bias.
        self._heard.append((answer[0], answer[2], hasattr(gate, "e_score_correction_bias")))

    def forget(self) -> None:
        """Clear the recorded outputs. Call this before each forward pass."""
        self._heard.clear()

    def judged(self, data: Mapping[str, Tensor]) -> Judged:
        """Return the losses and metrics of the single forward pass over ``data`` since ``forget``."""
        if not self._heard:
            return Judged()
        rows, width = data["input_ids"].shape
        real = (torch.arange(width)[None] < data["input_lengths"][:, None]) & (data["sample_mask"] != 0)[
            :, None
        ]
        balance, loads, z_losses = [], [], []
        for logits, chosen, takes_sigmoids in self._heard:
            by_row = logits.float().view(rows, width, -1)
            # [rows, width, E]: 1 for the experts that a token is routed to.
            went_to = (
                torch.nn.functional.one_hot(chosen, by_row.shape[-1]).sum(1).view_as(by_row) * real[..., None]
            )
            scores = (
                torch.nn.functional.normalize(by_row.sigmoid(), p=1, dim=-1)
                if takes_sigmoids
                else by_row.softmax(-1)
            )
            probabilities = scores * real[..., None]
            loads.append(_relative_load(went_to))
            whole = _balance(probabilities.flatten(0, 1), went_to.flatten(0, 1))
            of_rows = torch.stack(list(map(_balance, probabilities, went_to))).sum(0)
            rows_alone = of_rows / max(float((data["sample_mask"] != 0).sum()), 1.0)
            balance.append(rows_alone if self._balancing.kind == "seq" else whole)
            z_losses.append((by_row.logsumexp(-1).square() * real).sum() / real.sum().clamp(min=1))
        metrics = {
            "moe_aux_loss": float(torch.stack(balance).detach().sum(1).mean()),
            "moe_expert_load_max": float(torch.stack(loads).max()),
            "moe_expert_load_min": float(torch.stack(loads).min()),
        }
        by_expert = (
            self._balancing.weight * COEFFICIENT * torch.stack(balance).sum(0)
            if self._balancing.kind != "none"
            else None
        )
        loss = torch.zeros(()) if by_expert is None else by_expert.sum()
        if self._balancing.z:
            metrics["moe_z_loss"] = float(torch.stack(z_losses).detach().mean())
            loss = loss + self._balancing.weight * Z_COEFFICIENT * torch.stack(z_losses).sum()
        return Judged(loss, by_expert, metrics)


def _balance(probabilities: Tensor, went_to: Tensor) -> Tensor:
    """Return the [E] terms of the load-balancing loss by expert.

    Args:
        probabilities: [t, E] routing probabilities; 0 for tokens that do not count.
        went_to: [t, E] 1 for the experts that a token is routed to; 0 for tokens that do not count.
    """
    assignments = went_to.sum().clamp(min=1)
    # A token that does not count is assigned to no expert.
    tokens = (went_to.sum(1) > 0).sum().clamp(min=1)
    share = went_to.sum(0) / assignments
    return went_to.shape[1] * share * probabilities.sum(0) / tokens


def _relative_load(went_to: Tensor) -> Tensor:
    """Return the [E] number of tokens of each expert, relative to the mean; zeros if no token counts."""
    load = went_to.flatten(0, -2).sum(0).double()
    return load / load.mean().clamp(min=1e-9)
