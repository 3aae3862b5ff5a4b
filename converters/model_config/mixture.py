"""Mixture of experts: routing and dimensions in a model's config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from converters.model_config.sizes import Config, read_number, read_size


@dataclass(frozen=True, slots=True)
class Routing:
    """Selection of a token's experts by the router.

    Logits become scores. With groups, only experts of the token's best groups are candidates. The experts
    with the highest scores are selected; the scores are their weights, normalised to sum 1 if the mixture is,
    times the scaling factor.

    Attributes:
        score: softmax over all experts, or sigmoid of each logit.
        has_correction_bias: a value per expert is added to the scores for the selection, but not in the
            weights. It is not a parameter, has no gradient, and is always float32.
        groups: number of equal groups of consecutive experts; 1 without groups.
        groups_per_token: number of groups that a token may use.
        best_of_group: a group is ranked by the sum of this number of its best scores.
        scaling_factor: factor on the weights.
        in_float32: logits are computed in float32 for any model dtype.
        has_bias: logits have a bias, which is a parameter.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    has_correction_bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 1
    scaling_factor: float = 1.0
    in_float32: bool = False
    has_bias: bool = False

    @property
    def is_grouped(self) -> bool:
        """True if groups exclude some experts."""
        return self.groups_per_token < self.groups


def read_deepseek_routing(
    config: Config,
    problems: list[str],
    *,
    experts: int,
    chosen: int,
    score: Literal["softmax", "sigmoid"],
    best_of_group: int,
    grouped: bool = True,
) -> Routing:
    """Read the routing of DeepSeek and similar models (``n_group``, ``topk_group``,
    ``routed_scaling_factor``).

    Args:
        config: flat config with the class's defaults.
        problems: list to which problems are appended.
        experts: number of experts per layer.
        chosen: number of experts per token.
        score: see ``Routing``. Sigmoid routers have a correction bias.
        best_of_group: see ``Routing``.
        grouped: use the config's groups.
    """
    scale = read_number(config.get("routed_scaling_factor"), "routed_scaling_factor", problems)
    groups, kept = (
        (read_size(config, key, problems) for key in ("n_group", "topk_group")) if grouped else (1, 1)
    )
    if experts % groups:
        problems.append(f"n_group = {groups}: it must divide the {experts} experts")
        # Continue with valid values, so that later checks report only their own problems.
        groups = kept = 1
    if kept > groups:
        problems.append(f"topk_group = {kept}: there are only {groups} groups (n_group)")
    size = experts // groups
    if best_of_group > size and kept <= groups:
        problems.append(
            f"n_group = {groups}: groups of {size} experts are smaller than the {best_of_group} scores that "
            "rank a group"
        )
    if chosen > kept * size:
        problems.append(
            f"num_experts_per_tok = {chosen}: {kept} groups (topk_group) have only {kept * size} experts"
        )
    sigmoid = score == "sigmoid"
    return Routing(score, sigmoid, groups, kept, best_of_group, scale, in_float32=True)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts that replace the MLP in some or all layers. A shared expert, if there is one, processes
    every token.

    Attributes:
        num_experts: number of experts per layer.
        experts_per_token: number of experts that process a token.
        ffn_hidden_size: width of an expert's gated MLP.
        normalized: the weights of a token's experts are normalised to sum 1.
        sparse_layers: for each layer, whether it has experts; the others have a dense MLP. At least one is
            True.
        auxiliary_loss_coefficient: weight of the load-balancing loss that transformers would train with; no
            effect on the logits.
        shared_ffn_hidden_size: width of the shared expert's gated MLP; 0 without one. Several shared experts
            count as one with their total width.
        shared_gate: the shared expert's output is multiplied by the sigmoid of a gate with one logit.
        routing: how experts are selected.
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

    @property
    def has_shared_gate(self) -> bool:
        """True if there is a shared expert with a gate."""
        return self.shared_gate and self.shared_ffn_hidden_size > 0


def read_mixture(
    config: Config,
    problems: list[str],
    *,
    width_key: str,
    normalized: bool,
    sparse_layers: tuple[bool, ...],
    shared_width_key: str | None = None,
    routing: Routing = Routing(),  # shared by all calls, but frozen
) -> MixtureOfExperts | None:
    """Read a mixture of experts.

    Args:
        config: flat config with the class's defaults.
        problems: list to which problems are appended.
        width_key: config key of an expert's width.
        normalized: see ``MixtureOfExperts``.
        sparse_layers: for each layer, whether it may have experts.
        shared_width_key: config key of the shared expert's width; None without one.
        routing: how experts are selected.

    Returns:
        The mixture; None if no layer has experts.
    """
    # For Qwen3-MoE, transformers uses either name, depending on its version.
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    if not any(sparse_layers) or config.get(key) == 0:
        return None
    experts = read_size(config, key, problems)
    chosen = read_size(config, "num_experts_per_tok", problems)
    if chosen > experts:
        problems.append(f"num_experts_per_tok = {chosen}: there are only {experts} experts ({key})")
    return MixtureOfExperts(
        num_experts=experts,
        experts_per_token=chosen,
        ffn_hidden_size=read_size(config, width_key, problems),
        normalized=normalized,
        sparse_layers=sparse_layers,
        auxiliary_loss_coefficient=read_number(
            config.get("router_aux_loss_coef"),
            "router_aux_loss_coef",
            problems,
            default=0.0,
            instead=0.0,
            may_be_zero=True,
        ),
        shared_ffn_hidden_size=read_size(config, shared_width_key, problems)
        if shared_width_key is not None
        else 0,
        routing=routing,
    )


def read_deepseek_mixture(
    config: Config,
    num_layers: int,
    problems: list[str],
    *,
    score: Literal["softmax", "sigmoid"] = "sigmoid",
    best_of_group: int = 2,
    grouped: bool = True,
    sparse_layers: tuple[bool, ...] | None = None,
) -> MixtureOfExperts | None:
    """Read the mixture of experts of DeepSeek and similar models: dense first layers, group-limited routing,
    and shared experts without a gate.

    Args:
        config: flat config with the class's defaults.
        num_layers: number of layers.
        problems: list to which problems are appended.
        score, best_of_group, grouped: see ``read_deepseek_routing``.
        sparse_layers: for each layer, whether it has experts; None for all but the first
            ``first_k_dense_replace``.

    Returns:
        The mixture; None if no layer has experts.
    """
    if sparse_layers is None:
        dense = read_size(config, "first_k_dense_replace", problems, least=0)
        sparse_layers = tuple(layer >= dense for layer in range(num_layers))
    if not any(sparse_layers):
        return None
    experts, chosen = (
        read_size(config, "n_routed_experts", problems),
        read_size(config, "num_experts_per_tok", problems),
    )
    width = read_size(config, "moe_intermediate_size", problems)
    shared = (
        0
        if config.get("n_shared_experts") is None
        else read_size(config, "n_shared_experts", problems, least=0)
    )
    return MixtureOfExperts(
        num_experts=experts,
        experts_per_token=chosen,
        ffn_hidden_size=width,
        normalized=bool(config.get("norm_topk_prob")),
        sparse_layers=sparse_layers,
        # aux_loss_alpha belongs to DeepSeek's own training; transformers does not compute such a loss.
        auxiliary_loss_coefficient=0.0,
        shared_ffn_hidden_size=width * shared,
        shared_gate=False,
        routing=read_deepseek_routing(
            config,
            problems,
            experts=experts,
            chosen=chosen,
            score=score,
            best_of_group=best_of_group,
            grouped=grouped,
        ),
    )


def require(config: Config, key: str, only: object, why: str, problems: list[str]) -> None:
    """Append a problem if a key has another value than the only one that transformers supports."""
    value = config.get(key)
    if value is not None and value != only:
        problems.append(f"{key} = {value!r}: only {only!r} is supported; {why}")


ROUTER_KEYS = frozenset({"moe_layer_freq", "scoring_func", "topk_method"})
"""Config keys of sigmoid routers (``require_sigmoids``); read by other engines, but not by transformers."""


def require_sigmoids(config: Config, problems: list[str]) -> None:
    """Append a problem for each router key that requests anything but sigmoid scores with a correction
    bias."""
    require(
        config, "scoring_func", "sigmoid", "transformers computes no other score for this family", problems
    )
    require(
        config,
        "topk_method",
        "noaux_tc",
        "transformers chooses experts in no other way for this family",
        problems,
    )
    require(
        config, "moe_layer_freq", 1, "transformers gives every layer after the first ones experts", problems
    )
