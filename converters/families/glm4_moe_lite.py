"""GLM-4.7-Flash: DeepSeek-V3 with ``mlp_layer_types``, which lists the layers with experts."""

from __future__ import annotations

from dataclasses import replace

from converters.families import deepseek_v3
from converters.model_config.mixture import MixtureOfExperts, read_deepseek_mixture, require, require_sigmoids
from converters.model_config.sizes import Config

_KINDS = ("dense", "sparse")


def _read_mixture(config: Config, num_layers: int, problems: list[str]) -> MixtureOfExperts | None:
    require_sigmoids(config, problems)
    kinds = config.get("mlp_layer_types")
    if kinds is None:  # transformers fills it in like this.
        kinds = ["dense", *["sparse"] * (num_layers - 1)]
    if (
        not isinstance(kinds, (list, tuple))
        or len(kinds) != num_layers
        or any(kind not in _KINDS for kind in kinds)
    ):
        problems.append(
            f"mlp_layer_types = {kinds!r}: dense or sparse is needed for each of the {num_layers} layers"
        )
        return None
    sparse = tuple(kind == "sparse" for kind in kinds)
    dense_first = sparse.index(True) if any(sparse) else num_layers
    require(
        config, "first_k_dense_replace", dense_first, "transformers reads mlp_layer_types instead", problems
    )
    return read_deepseek_mixture(config, num_layers, problems, sparse_layers=sparse)


FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="glm4_moe_lite",
    architecture_class="Glm4MoeLiteForCausalLM",
    config_keys=deepseek_v3.FAMILY.config_keys | {"mlp_layer_types"},
    read_mixture=_read_mixture,
    defaults={"n_group": 1, "n_shared_experts": 1, "topk_group": 1},
)
