"""Mixture of experts of a model: the settings of routing and expert sizes in its config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from converters.model_config.sizes import Config, read_number, read_size


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of a token's experts from the router's logits.

    Logits become scores. If experts are grouped, a token goes only to experts of its best groups. It goes to
    the experts with the highest scores. These scores are the experts' weights, divided by their sum if the
    mixture is normalized, and multiplied by the scaling factor.

    Attributes:
        score: softmax over all experts, or the sigmoid of each logit.
        has_correction_bias: whether a number for each expert is added to its score when groups and experts
            are chosen, but not in the weights. It is not a parameter and gets no gradient. It is float32
            whatever the dtype of the model.
        groups: number of equal, consecutive groups of experts; 1 without groups.
        groups_per_token: number of groups that a token may go to.
        best_of_group: a group is ranked by the sum of this many of its best scores.
        scaling_factor: factor on the weights.
        in_float32: whether logits are computed in float32 whatever the dtype of the model.
        has_bias: whether the logits have a bias, which is a parameter.
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
        """True if groups exclude some experts for a token."""
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
    """Return the routing of DeepSeek's mixtures and similar ones (``n_group``, ``topk_group``,
    ``routed_scaling_factor``).

    Args:
        config: flat config with the defaults of its class filled in.
        problems: problems are appended to this list.
        experts: number of experts of a layer.
        chosen: number of experts that a token goes through.
        score: see ``Routing``. Sigmoid routers have a correction bias.
        best_of_group: see ``Routing``.
        grouped: False if the config's groups are not used.
    """
    scale = read_number(config.get("routed_scaling_factor"), "routed_scaling_factor", problems)
    groups, kept = (
        (read_size(config, key, problems) for key in ("n_group", "topk_group")) if grouped else (1, 1)
    )
    if experts % groups:
        problems.append(f"n_group = {groups}: it must divide the {experts} experts")
        # Continue with values that divide, so that the following checks report only their own problems.
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
    """Routed experts instead of the MLP, in some or all layers.

    The router sends every token to the ``experts_per_token`` experts with the best scores, which are also the
    weights of the experts. A shared expert, if there is one, processes every token.

    Attributes:
        num_experts: number of experts of one layer.
        experts_per_token: number of experts that each token goes through.
        ffn_hidden_size: width of the gated MLP of one expert.
        normalized: whether the scores of the chosen experts are divided by their sum.
        sparse_layers: for each layer, whether it has experts; the others have a dense MLP. At least one layer
            has experts.
        auxiliary_loss_coefficient: weight of the load-balancing loss that transformers would train with; it
            does not affect the logits.
        shared_ffn_hidden_size: width of the gated MLP of the shared expert; 0 without one. Several shared
            experts count as one of their total width.
        shared_gate: whether the output of the shared expert is multiplied by the sigmoid of a gate of one
            logit.
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
    """Return the mixture that a config describes.

    Args:
        config: flat config with the defaults of its class filled in.
        problems: problems are appended to this list.
        width_key: config key of the width of an expert.
        normalized: see ``MixtureOfExperts``.
        sparse_layers: for each layer, whether it may have experts.
        shared_width_key: config key of the width of the shared expert; None for a family without one.
        routing: how experts are chosen.

    Returns:
        The mixture, or None if no layer has experts.
    """
    # Depending on its version, transformers writes this key of Qwen3-MoE under either name.
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
    """Return the mixture of DeepSeek's models and similar ones: experts in all but the first layers, routing
    by groups, and shared experts without a gate.

    Args:
        config: flat config with the defaults of its class filled in.
        num_layers: number of layers of the model.
        problems: problems are appended to this list.
        score, best_of_group, grouped: see ``read_deepseek_routing``.
        sparse_layers: for each layer, whether it has experts; None for all but the first
            ``first_k_dense_replace``.

    Returns:
        The mixture, or None for a model without experts.
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
    """Append a problem if a key has a value other than the only one that transformers supports."""
    value = config.get(key)
    if value is not None and value != only:
        problems.append(f"{key} = {value!r}: only {only!r} is supported; {why}")


ROUTER_KEYS = frozenset({"moe_layer_freq", "scoring_func", "topk_method"})
"""Config keys of sigmoid routers (``require_sigmoids``); transformers reads none of them, but other engines
do."""


def require_sigmoids(config: Config, problems: list[str]) -> None:
    """Append a problem for each router key that asks for anything other than sigmoids with a
    correction bias."""
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
