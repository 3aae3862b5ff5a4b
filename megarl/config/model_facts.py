"""Sizes of a model for rules and memory estimates, read from its ``config.json`` without transformers.

The configs of popular models are shipped (``KNOWN_MODELS``), so a dry run needs no download for them.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from converters.families import FAMILIES
from converters.families.base import Family, read_windows
from converters.families.usual import USUAL
from converters.model_config.architecture import ModelFacts
from converters.model_config.heads import ScoreHead
from converters.model_config.sizes import SIZE_NEEDED
from megarl.config.backend import scores
from megarl.config.policy import PolicyConfig
from megarl.config.tables import KNOWN_MODELS
from megarl.errors import ConfigError, Violation

KEY = "policy.model_name"
# Keys of config.json that must be at least 1, because estimates divide by them.
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def read_model_facts(model_name: str) -> ModelFacts | None:
    """Return the sizes of a model: of a directory, of a Hugging Face id in the local cache, or of a shipped
    known model.

    The network is never accessed. For any other id the sizes are unknown, and the result is None.

    Raises:
        ConfigError: ``model_name`` is a path without a usable model, or the ``config.json`` cannot be used.
    """
    path = Path(model_name).expanduser()
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise ConfigError(
                [
                    Violation(
                        KEY,
                        model_name,
                        "the directory holds no config.json",
                        _another_model(path, model_name),
                    )
                ]
            )
        return _facts_of_file(file, model_name)
    if looks_like_path(model_name) or path.is_file():
        kind = "is a file" if path.exists() else "does not exist"
        raise ConfigError(
            [
                Violation(
                    KEY,
                    model_name,
                    f"this directory {kind}",
                    _another_model(path, model_name),
                )
            ]
        )
    cached = _cached_config(model_name)
    if cached is not None:
        return _facts_of_file(cached, model_name)
    return facts_of(KNOWN_MODELS[model_name]) if model_name in KNOWN_MODELS else None


def facts_of_policy(policy: PolicyConfig) -> ModelFacts | None:
    """Return the sizes of the model of a checked ``policy`` section, including the score head of a reward
    model; None if they are unknown.

    Raises:
        ConfigError: ``model_name`` is a path without a usable model, or the ``config.json`` cannot be used.
    """
    facts = read_model_facts(policy["model_name"])
    if facts is None or not scores(policy):
        return facts
    return dataclasses.replace(facts, head=ScoreHead(labels=1, bias=False), tied_embeddings=False)


def published_config(model_name: str) -> dict[str, Any] | None:
    """Return the shipped ``config.json`` of a known model that is not on this disk; None if the model is on
    this disk or unknown.

    Raises:
        ConfigError: ``model_name`` is neither a path nor a Hugging Face id.
    """
    if (
        Path(model_name).expanduser().is_dir()
        or looks_like_path(model_name)
        or _cached_config(model_name) is not None
    ):
        return None
    return KNOWN_MODELS.get(model_name)


def config_file(model_name: str) -> Path | None:
    """Return the path of a model's ``config.json`` on this disk (directory or Hugging Face cache), or None.

    Raises:
        ConfigError: ``model_name`` is neither a path nor a Hugging Face id.
    """
    directory = Path(model_name).expanduser()
    if not directory.is_dir():
        return None if looks_like_path(model_name) else _cached_config(model_name)
    path = directory / "config.json"
    return path if path.is_file() else None


def _another_model(path: Path, model_name: str) -> str:
    """Return the fix for a path that is not a model: the model next to it, in it (the newest export of a
    run), or at an address of the hub."""
    place = path.parent if path.is_file() else path
    near = [file.parent for pattern in ("", "*/", "hf/*/") for file in place.glob(f"{pattern}config.json")]
    address, _, name = model_name.partition("huggingface.co/")
    if near:
        return f"write {max(near, key=lambda found: found.stat().st_mtime)}"
    if name and address in {"https://", "http://", ""}:
        return f"write {'/'.join(name.split('/')[:2])}"
    return "give a directory of a Hugging Face model, or its id"


def looks_like_path(model_name: str) -> bool:
    """Return whether a model name must be a path, because it has not the form of a Hugging Face id (``name``
    or ``owner/name``)."""
    return model_name.startswith(("/", ".", "~")) or model_name.endswith("/") or model_name.count("/") > 1


def _cached_config(model_name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model_name, "config.json")
    except HFValidationError:
        raise ConfigError(
            [
                Violation(
                    KEY,
                    model_name,
                    "this is not a Hugging Face id",
                    "write owner/name, or the path of a directory",
                )
            ]
        ) from None
    return Path(cached) if isinstance(cached, str) else None


def _facts_of_file(file: Path, model_name: str) -> ModelFacts:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return facts_of(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = (
            f"{file} lacks the key {error}"
            if isinstance(error, KeyError)
            else f"{file} cannot be used: {error}"
        )
        raise ConfigError(
            [Violation(KEY, model_name, problem, "give a directory of a Hugging Face language model")]
        ) from error


def facts_of(content: dict[str, Any]) -> ModelFacts:
    """Return the sizes in the content of a ``config.json``, as read by the model's family in ``converters``.

    Raises:
        KeyError: a size is missing.
        ValueError: a size is not a number of at least 1, or a kind of layer is unknown.
    """
    # Multimodal models keep the sizes of their language model in the section text_config.
    text = content.get("text_config") or content
    for key in _SIZES:
        if text.get(key) is not None and int(text[key]) < 1:
            raise ValueError(f"{key} = {text[key]}, at least 1 is needed")
    heads, num_layers = int(text["num_attention_heads"]), int(text["num_hidden_layers"])
    whole = FAMILIES.get(str(content.get("model_type")))
    model_type = (
        whole.model_type if whole and whole.sees else str(text.get("model_type") or content["model_type"])
    )
    # Read an unknown family like the usual ones, because DTensor and FSDP1 may support it.
    family = FAMILIES.get(model_type, USUAL)
    config = {**family.defaults, **text, "model_type": model_type}
    problems: list[str] = []
    mixture, latent = (
        family.read_mixture(config, num_layers, problems),
        family.read_latent_attention(config, problems),
    )
    gated_delta = family.read_gated_delta(config, num_layers, problems)
    # Raise only these problems. The others concern Megatron-Core, which other backends do not use. Layers of
    # unknown kinds would be counted as attention layers.
    sizes = [
        problem for problem in problems if problem.endswith(SIZE_NEEDED) or problem.startswith("layer_types")
    ]
    if sizes:
        raise ValueError("; ".join(sizes))
    windows = _windows(config, family, num_layers)
    # The config of a model without dense layers may lack their width.
    width = "intermediate_size" if "intermediate_size" in text or mixture is None else "moe_intermediate_size"
    return ModelFacts(
        family=model_type,
        num_layers=num_layers,
        hidden_size=int(text["hidden_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(text.get("num_key_value_heads") or heads),
        # For latent attention, transformers writes qk_rope_head_dim as head_dim into the config.
        head_dim=latent.qk_rope_head_dim
        if latent
        else int(text.get("head_dim") or int(text["hidden_size"]) // heads),
        ffn_hidden_size=int(text[width]),
        vocab_size=int(text["vocab_size"]),
        tied_embeddings=bool(content.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        max_position=_max_position(text),
        **dataclasses.asdict(family.read_features(config)),
        sliding_window=next((window for window in windows if window is not None), None),
        window_layers=tuple(window is not None for window in windows)
        if any(windows) and not all(windows)
        else None,
        mixture=mixture,
        latent_attention=latent,
        gated_delta=gated_delta,
        zero_centered_norms=family.zero_centered_norms,
    )


def _windows(config: dict[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer in tokens, None for full attention. In families unknown to
    ``converters``, layers differ only if the config has ``layer_types``."""
    by_layer = bool(config.get("layer_types")) if family is USUAL else "layer_types" in family.config_keys
    return read_windows(config, num_layers, uniform=family.has_uniform_window, by_layer=by_layer)


def _max_position(text: dict[str, Any]) -> int | None:
    """Return the maximum sequence length in tokens: ``max_position_embeddings``, or the length after rope
    scaling if that is longer; None if the config gives neither."""
    own = text.get("max_position_embeddings")
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    bounds = [int(own)] if own else []
    if factor and original:
        bounds.append(int(float(factor) * int(original)))
    return max(bounds, default=None)
