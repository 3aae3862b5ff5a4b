"""How a router chooses experts where Megatron-Core's own cannot: without dividing sigmoids by their sum, or with groups ranked otherwise
than by as many scores as experts are chosen there on average (DeepSeek-V2: by the best one, arXiv:2405.04434, section 2.2.2)."""

from __future__ import annotations

import torch

from converters.model_config.mixture import Routing


def choose(
    logits: torch.Tensor, chosen: int, routing: Routing, *, normalized: bool, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the experts that each token goes to, and which they are.

    Args:
        logits: [t, E].
        chosen: experts of a token.
        routing: how they are chosen.
        normalized: the scores of the chosen experts are divided by their sum.
        correction_bias: [E] float32; None for none.

    Returns:
        [t, E] of the logits' dtype, 0 for experts that the token does not go to, differentiable; [t, E] bool.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.softmax(-1) if routing.score == "softmax" else wide.sigmoid()
    ranks = scores.detach() if correction_bias is None else scores.detach() + correction_bias
    if routing.is_grouped:
        ranks = _of_best_groups(ranks, routing)
    experts = ranks.topk(chosen, dim=-1).indices
    weights = scores.gather(1, experts)
    if normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = (weights * routing.scaling_factor).to(logits.dtype)
    went_to = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
    return torch.zeros_like(logits).scatter(1, experts, weights), went_to


def _of_best_groups(ranks: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[t, E] with minus infinity for experts outside the best groups of a token."""
    by_group = ranks.unflatten(1, (routing.groups, -1))
    best = by_group.topk(routing.best_of_group, dim=-1).values.sum(-1).topk(routing.groups_per_token, dim=-1).indices
    kept = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=ranks.device).scatter(1, best, True)
    return by_group.masked_fill(~kept[..., None], float("-inf")).flatten(1)
