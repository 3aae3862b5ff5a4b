"""The mixture of experts of a model: what its config says about routing and about the size of an expert."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from converters.routing import Routing, read_deepseek_routing


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts in place of the MLP, in some layers or in all.

    The router sends every token to the ``experts_per_token`` experts that it gives the best scores, and weighs the experts by them. Where
    there is a shared expert, every token goes through it as well.

    Attributes:
        num_experts: experts of one layer.
        experts_per_token: experts that each token goes through.
        ffn_hidden_size: width of the gated MLP of one expert.
        normalized: the scores of the chosen experts are divided by their sum.
        sparse_layers: for each layer, whether it has experts; the others have a dense MLP. At least one has.
        auxiliary_loss_coefficient: weight of the load-balancing loss in the training that transformers would do; not part of the logits.
        shared_ffn_hidden_size: width of the gated MLP of the shared expert; 0 without one. Several shared experts are one of their width
            together.
        shared_gate: the output of the shared expert is weighed by the sigmoid of a gate of one logit.
        routing: how experts are chosen.
    """

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    normalized: bool
    sparse_layers: tuple[bool, ...]
    auxiliary_loss_coefficient: float
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = True
    routing: Routing = field(default_factory=Routing)


def read_mixture(
    config: Mapping[str, object],
    problems: list[str],
    *,
    width_key: str,
    normalized: bool,
    sparse_layers: tuple[bool, ...],
    shared_width_key: str | None = None,
    routing: Routing = Routing(),  # noqa: B008  # frozen
) -> MixtureOfExperts | None:
    """The mixture that a config describes.

    Args:
        config: flat, with the defaults of its class filled in.
        problems: what is wrong is appended here.
        width_key: config key of the width of an expert.
        normalized: see :class:`MixtureOfExperts`.
        sparse_layers: for each layer, whether it may have experts.
        shared_width_key: config key of the width of the shared expert; None for a family without one.
        routing: how experts are chosen.

    Returns:
        None for a model without experts: no layer has them, or there are none.
    """
    # transformers writes this key of Qwen3-MoE under either name, according to its version.
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    if not any(sparse_layers) or config.get(key) == 0:
        return None
    experts = _whole(config, key, problems)
    chosen = _whole(config, "num_experts_per_tok", problems)
    if chosen > experts:
        problems.append(f"num_experts_per_tok = {chosen}: there are only {experts} experts ({key})")
    return MixtureOfExperts(
        num_experts=experts,
        experts_per_token=chosen,
        ffn_hidden_size=_whole(config, width_key, problems),
        normalized=normalized,
        sparse_layers=sparse_layers,
        auxiliary_loss_coefficient=_coefficient(config, problems),
        shared_ffn_hidden_size=_whole(config, shared_width_key, problems) if shared_width_key is not None else 0,
        routing=routing,
    )


def read_deepseek_mixture(
    config: Mapping[str, object],
    num_layers: int,
    problems: list[str],
    *,
    score: Literal["softmax", "sigmoid"] = "sigmoid",
    best_of_group: int = 2,
    grouped: bool = True,
) -> MixtureOfExperts | None:
    """The mixture of DeepSeek's models and of those that follow them: in all but the first layers, routing by groups, and shared experts
    without a gate.

    Args:
        config: flat, with the defaults of its class filled in.
        num_layers: of the model.
        problems: what is wrong is appended here.
        score, best_of_group, grouped: see :func:`converters.routing.read_deepseek_routing`.

    Returns:
        None for a model without experts.
    """
    sparse_layers = _read_dense_first(config, num_layers, problems)
    if not any(sparse_layers):
        return None
    experts, chosen = _whole(config, "n_routed_experts", problems), _whole(config, "num_experts_per_tok", problems)
    width, shared = _whole(config, "moe_intermediate_size", problems), config.get("n_shared_experts")
    if isinstance(shared, bool) or not isinstance(shared, (int, type(None))) or (shared or 0) < 0:
        problems.append(f"n_shared_experts = {shared!r}: a whole number of at least 0 is needed")
        shared = 0
    return MixtureOfExperts(
        num_experts=experts,
        experts_per_token=chosen,
        ffn_hidden_size=width,
        normalized=bool(config.get("norm_topk_prob")),
        sparse_layers=sparse_layers,
        auxiliary_loss_coefficient=0.0,
        shared_ffn_hidden_size=width * (shared or 0),
        shared_gate=False,
        routing=read_deepseek_routing(
            config, problems, experts=experts, chosen=chosen, score=score, best_of_group=best_of_group, grouped=grouped
        ),
    )


def _read_dense_first(config: Mapping[str, object], num_layers: int, problems: list[str]) -> tuple[bool, ...]:
    """For each layer, whether it has experts: all but the first ``first_k_dense_replace``."""
    dense = config.get("first_k_dense_replace")
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        problems.append(f"first_k_dense_replace = {dense!r}: a whole number of at least 0 is needed")
        dense = 0
    return tuple(layer >= dense for layer in range(num_layers))


def _whole(config: Mapping[str, object], key: str, problems: list[str]) -> int:
    value = config.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    problems.append(f"{key} = {value!r}: a positive whole number is needed")
    return 1


def _coefficient(config: Mapping[str, object], problems: list[str]) -> float:
    value = config.get("router_aux_loss_coef")
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        problems.append(f"router_aux_loss_coef = {value!r}: a number of at least 0 is needed")
        return 0.0
    return float(value)
