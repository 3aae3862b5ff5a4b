"""Read the rotary embedding settings of a Hugging Face config, and normalise them to a form with all
parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping

from converters.model_config.sizes import Config, read_number

ROPE_KINDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
}
"""Type of rotary scaling -> (required parameters, optional parameters)."""
_KEYS = {kind: needed | possible for kind, (needed, possible) in ROPE_KINDS.items()}
# Keys that only vLLM reads -> (neutral value, effect).
_OF_VLLM: dict[str, tuple[object, str]] = {
    "attn_factor": (1, "multiplies the rotary embedding by it"),
    "extrapolation_factor": (1, "mixes the frequencies by it"),
    "apply_yarn_scaling": (True, "takes the scaling of the attention from it"),
}
# Keys of unsupported types of scaling and of vision-language models.
_OF_OTHERS = frozenset(
    {
        "alpha",
        "long_factor",
        "long_mscale",
        "mrope_interleaved",
        "mrope_section",
        "short_factor",
        "short_mscale",
    }
)
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def read_rope(
    config: Config, problems: list[str], *, partly: bool = False, in_sections: bool = False
) -> tuple[float, dict[str, object] | None]:
    """Read base and scaling of the rotary embedding, from ``rope_parameters`` or the older ``rope_theta`` and
    ``rope_scaling``.

    Args:
        config: flat config.
        problems: list to which unsupported settings are appended.
        partly: the family allows the rotation of a part of each head (``rotated_fraction``).
        in_sections: frequencies may be divided among time, height and width, which are equal for text.

    Returns:
        The base (theta), and None or one of ``{"type": "linear", "factor"}``, ``{"type": "llama3", "factor",
            "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}``, ``{"type": "yarn",
            "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
            "mscale", "mscale_all_dim", "truncate"}``. ``mscale`` and ``mscale_all_dim`` are both numbers or
            both None.
    """
    parameters = _parameters(config)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        problems.append(f"rope_parameters = {parameters!r}: one setting a layer type is not supported")
        return 0.0, None
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if not isinstance(kind, str) or kind not in _KEYS:
        problems.append(f"rope type {kind!r} is not supported (known: {', '.join(sorted(_KEYS))})")
        return 0.0, None
    problems += rotary_disagreements(config)
    for key in _unread(parameters, kind):
        if (
            not (in_sections and key.startswith("mrope_"))
            and key not in _OF_VLLM
            and key in frozenset().union(_OF_OTHERS, *_KEYS.values())
        ):
            problems.append(
                f"rope parameter {key} = {parameters[key]!r} has no meaning for rope type {kind!r}"
            )
    partial = parameters.get("partial_rotary_factor")
    if not partly and partial not in (None, 1, 1.0):
        problems.append(f"partial_rotary_factor = {partial!r}: only full rotation (1.0) is supported")
    theta = _number(parameters, "rope_theta", problems)
    if kind == "default":
        return theta, None
    if kind == "yarn":
        return theta, _yarn(parameters, config, problems)
    settings: dict[str, object] = {"type": kind}
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        if key in _KEYS[kind]:
            settings[key] = _number(parameters, key, problems)
    if kind == "llama3":
        settings["original_max_position_embeddings"] = _original_length(parameters, config, problems)
    return theta, settings


def rotary_disagreements(config: Config) -> list[str]:
    """Return descriptions of rotary parameters that vLLM interprets differently from transformers."""
    parameters = _parameters(config)
    return [
        (
            f"rope parameter {key} = {parameters[key]!r}: transformers does not read it, vLLM {what}: the "
            "two "
            "would compute different models"
        )
        for key, (neutral, what) in _OF_VLLM.items()
        if parameters.get(key) is not None and parameters[key] != neutral
    ]


def unread_rope_parameters(config: Config) -> list[str]:
    """Return rotary parameters that nothing reads, with their values; ``read_rope`` ignores them."""
    parameters = _parameters(config)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if not isinstance(kind, str) or kind not in _KEYS:
        return []
    known = frozenset(_OF_VLLM).union(_OF_OTHERS, *_KEYS.values())
    return [
        f"rope_scaling.{key} = {parameters[key]!r}" for key in _unread(parameters, kind) if key not in known
    ]


def _unread(parameters: Config, kind: str) -> list[str]:
    """Return the parameters that transformers does not read for a type of scaling, except those with a
    neutral value."""
    keys = sorted(set(parameters) - _COMMON_KEYS - _KEYS[kind])
    return [
        key
        for key in keys
        if parameters[key] is not None and not (key in _OF_VLLM and parameters[key] == _OF_VLLM[key][0])
    ]


def rotated_fraction(config: Config, head_dim: int, problems: list[str]) -> float:
    """Return the leading fraction of a head that is rotated (``partial_rotary_factor``); 1 by default."""
    fraction = _parameters(config).get("partial_rotary_factor")
    if fraction is None:
        return 1.0
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        problems.append(f"partial_rotary_factor = {fraction!r}: a number above 0, up to 1, is needed")
        return 1.0
    if int(head_dim * fraction) % 2 or int(head_dim * fraction) == 0:
        problems.append(
            f"partial_rotary_factor = {fraction!r}: of {head_dim} dimensions of a head it rotates "
            f"{int(head_dim * fraction)}, "
            "which has to be an even number above 0"
        )
    return float(fraction)


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return YaRN's default factor on cosine and sine (arXiv:2309.00071, section 3.4, with DeepSeek's two
    scales)."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    # As in transformers, the scales are used only if both are given and not 0.
    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def _parameters(config: Config) -> dict[str, object]:
    """Return the rotary parameters, including the older top-level keys."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = dict(found) if isinstance(found, Mapping) else {"rope_type": found}
    # Older configs have these keys at the top level.
    for key in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(key) is None and config.get(key) is not None:
            parameters[key] = config[key]
    return parameters


def _number(parameters: Config, key: str, problems: list[str], default: object = None) -> float:
    """Return a positive number. For other values, append a problem and return NaN."""
    return read_number(
        parameters.get(key), f"rope parameter {key}", problems, default=default, instead=math.nan
    )


def _yarn(parameters: Config, config: Config, problems: list[str]) -> dict[str, object]:
    original = _original_length(parameters, config, problems)
    longest = config.get("max_position_embeddings")
    # transformers' default factor: the ratio by which the context was extended.
    stretched = longest / original if isinstance(longest, int) and original else None
    factor = _number(parameters, "factor", problems, default=stretched)
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    scales: list[float | None] = [None, None]
    if mscale and mscale_all_dim:
        scales = [_number(parameters, "mscale", problems), _number(parameters, "mscale_all_dim", problems)]
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": _number(
            parameters, "attention_factor", problems, default=yarn_attention_factor(factor, *scales)
        ),
        # transformers treats 0 as "not given".
        "beta_fast": _number({"beta_fast": parameters.get("beta_fast") or 32.0}, "beta_fast", problems),
        "beta_slow": _number({"beta_slow": parameters.get("beta_slow") or 1.0}, "beta_slow", problems),
        "mscale": scales[0],
        "mscale_all_dim": scales[1],
        "truncate": bool(parameters.get("truncate", True)),
    }


def _original_length(parameters: Config, config: Config, problems: list[str]) -> int:
    """Return the context length in tokens before scaling; by default ``max_position_embeddings``, as in
    transformers."""
    value = _number(
        parameters,
        "original_max_position_embeddings",
        problems,
        default=config.get("max_position_embeddings"),
    )
    return 0 if math.isnan(value) else int(value)
