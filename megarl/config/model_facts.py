"""The numbers of a model that the rules and the memory estimate need, read from its ``config.json`` without transformers.

For the models of the recipes they are at hand, so that a dry run can size them before anything is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from converters.families import FAMILIES
from converters.families.base import PLAIN, Family, Features, read_windows
from converters.model_config.latent_attention import LatentAttention
from converters.model_config.mixture import MixtureOfExperts
from converters.model_config.sizes import SIZE_NEEDED
from megarl.config.backend import scores
from megarl.config.known_models import KNOWN_MODELS
from megarl.errors import ConfigError, Violation

KEY = "policy.model_name"
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
# families that the torch backends alone run
_NORMALISED_HEADS = frozenset({"gemma3_text", "gemma3"})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model.

    Attributes:
        model_type: name of the architecture.
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of a head.
        ffn_hidden_size: width of the gated MLP of dense layers.
        vocab_size: rows of the embedding, unpadded.
        tied: the output layer is the embedding.
        max_position: longest sequence the model was made for; None when it does not say.
        features: which of its layers' tensors that a family may leave out there are.
        mixture: its experts; None for a dense model.
        latent: widths of latent attention; None for ordinary attention.
        windows: for each layer, how many tokens a token sees, itself among them; None for all before it. Empty where no layer has one.
        scores: a linear layer with one output is in the place of its output layer.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tied: bool
    max_position: int | None = None
    features: Features = PLAIN
    mixture: MixtureOfExperts | None = None
    latent: LatentAttention | None = None
    windows: tuple[int | None, ...] = ()
    scores: bool = False

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has them; 0 for a dense model."""
        return 0 if self.mixture is None else self.mixture.num_experts

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer of that index has experts instead of a dense MLP."""
        return self.mixture is not None and self.mixture.sparse_layers[layer]

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has a dense MLP."""
        return self.mixture is None or not all(self.mixture.sparse_layers)


def read_model_facts(model_name: str) -> ModelFacts | None:
    """The facts of a model on this disk (a directory, or a Hugging Face id whose ``config.json`` has been downloaded before), or of one
    whose sizes are known.

    Returns:
        None for another id, which is no fault; the network is never asked.

    Raises:
        ConfigError: ``model_name`` is a path without a usable model.
    """
    path = Path(model_name).expanduser()
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise ConfigError(
                [Violation(KEY, model_name, "the directory holds no config.json", "give a directory of a Hugging Face model")]
            )
        return _facts_of_file(file, model_name)
    if looks_like_path(model_name):
        kind = "is a file" if path.exists() else "does not exist"
        raise ConfigError([Violation(KEY, model_name, f"this directory {kind}", "give a directory of a Hugging Face model, or its id")])
    cached = _cached_config(model_name)
    if cached is not None:
        return _facts_of_file(cached, model_name)
    return facts_of(KNOWN_MODELS[model_name]) if model_name in KNOWN_MODELS else None


def facts_of_policy(policy: Mapping[str, Any]) -> ModelFacts | None:
    """The facts of the model that a checked ``policy`` section describes; as ``read_model_facts`` otherwise."""
    facts = read_model_facts(policy["model_name"])
    return None if facts is None else replace(facts, scores=scores(policy))


def published_config(model_name: str) -> dict[str, Any] | None:
    """The known content of ``config.json`` of a model that is not on this disk itself; None for one that is, or that is not known.

    Raises:
        ConfigError: ``model_name`` is no Hugging Face id.
    """
    if Path(model_name).expanduser().is_dir() or looks_like_path(model_name) or _cached_config(model_name) is not None:
        return None
    return KNOWN_MODELS.get(model_name)


def config_file(model_name: str) -> Path | None:
    """The ``config.json`` of a model on this disk; None where there is none. Errors as of ``published_config``."""
    directory = Path(model_name).expanduser()
    if not directory.is_dir():
        return None if looks_like_path(model_name) else _cached_config(model_name)
    path = directory / "config.json"
    return path if path.is_file() else None


def looks_like_path(model_name: str) -> bool:
    """Whether a name cannot be a Hugging Face id (``name`` or ``owner/name``)."""
    return model_name.startswith(("/", ".", "~")) or model_name.endswith("/") or model_name.count("/") > 1


def _cached_config(model_name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model_name, "config.json")
    except HFValidationError:
        raise ConfigError(
            [Violation(KEY, model_name, "this is no Hugging Face id", "write owner/name, or the path of a directory")]
        ) from None
    return Path(cached) if isinstance(cached, str) else None


def _facts_of_file(file: Path, model_name: str) -> ModelFacts:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return facts_of(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{file} lacks the key {error}" if isinstance(error, KeyError) else f"{file} cannot be used: {error}"
        raise ConfigError([Violation(KEY, model_name, problem, "give a directory of a Hugging Face language model")]) from error


def facts_of(content: dict[str, Any]) -> ModelFacts:
    """The facts in the content of a ``config.json``, as the model's family in ``converters`` reads them.

    Raises:
        KeyError: a size is missing.
        ValueError: one is no number of at least 1.
    """
    text = content.get("text_config") or content
    for key in _SIZES:
        if text.get(key) is not None and int(text[key]) < 1:
            raise ValueError(f"{key} = {text[key]}, at least 1 is needed")
    heads, num_layers = int(text["num_attention_heads"]), int(text["num_hidden_layers"])
    model_type = str(text.get("model_type") or content["model_type"])
    features, mixture, latent = _read_family(text, model_type, num_layers)
    return ModelFacts(
        model_type=model_type,
        num_layers=num_layers,
        hidden_size=int(text["hidden_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or int(text["hidden_size"]) // heads),
        ffn_hidden_size=int(text["intermediate_size"]),
        vocab_size=int(text["vocab_size"]),
        tied=bool(text.get("tie_word_embeddings", content.get("tie_word_embeddings", False))),
        max_position=_max_position(text),
        features=features,
        mixture=mixture,
        latent=latent,
        windows=_windows(text, FAMILIES.get(model_type), num_layers),
    )


def _read_family(
    text: dict[str, Any], model_type: str, num_layers: int
) -> tuple[Features, MixtureOfExperts | None, LatentAttention | None]:
    family = FAMILIES.get(model_type)
    if family is None:
        return *_read_unknown_family(text, model_type, num_layers), None
    problems: list[str] = []
    config = {**family.defaults, **text}
    mixture, latent = family.read_mixture(config, num_layers, problems), family.read_latent_attention(config, problems)
    # what else there is to say is about Megatron-Core, which another backend need not care about
    sizes = [problem for problem in problems if problem.endswith(SIZE_NEEDED)]
    if sizes:
        raise ValueError("; ".join(sizes))
    return family.read_features(config), mixture, latent


def _windows(text: dict[str, Any], family: Family | None, num_layers: int) -> tuple[int | None, ...]:
    """Of a family that ``converters`` does not know, what ``layer_types`` says."""
    if family is None:
        found = read_windows(text, num_layers, uniform=False, by_layer=bool(text.get("layer_types")))
    else:
        config = {**family.defaults, **text}
        by_layer = "layer_types" in family.config_keys
        found = read_windows(config, num_layers, uniform=family.has_uniform_window, by_layer=by_layer)
    return found if any(found) else ()


def _read_unknown_family(text: dict[str, Any], model_type: str, num_layers: int) -> tuple[Features, MixtureOfExperts | None]:
    """By the keys that most families use; experts in every layer, which no backend runs."""
    biased = bool(text.get("attention_bias"))
    norms = model_type in _NORMALISED_HEADS or bool(text.get("use_qk_norm"))
    features = Features(qkv_bias=biased, attention_output_bias=biased, mlp_bias=bool(text.get("mlp_bias")), qk_norm=norms)
    experts = next((int(text[key]) for key in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(key)), 0)
    if not experts:
        return features, None
    return features, MixtureOfExperts(
        num_experts=experts,
        experts_per_token=int(text.get("num_experts_per_tok") or 1),
        ffn_hidden_size=int(text.get("moe_intermediate_size") or text["intermediate_size"]),
        normalized=True,
        sparse_layers=(True,) * num_layers,
        auxiliary_loss_coefficient=0.0,
    )


def _max_position(text: dict[str, Any]) -> int | None:
    """Longest sequence: the model's own bound, or what its rope scaling stretches it to."""
    own = text.get("max_position_embeddings")
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    bounds = [int(own)] if own else []
    if factor and original:
        bounds.append(int(float(factor) * int(original)))
    return max(bounds, default=None)
