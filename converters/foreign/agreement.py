"""Check that a trainer's settings and a Hugging Face config describe the same function.

The config is translated to Megatron-Core's settings, as for training, and compared value by value. Settings
that the config does not determine must have a neutral value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from converters.errors import ConversionError
from converters.foreign.known_settings import DEFAULTS, NEUTRAL, NEUTRAL_OF_MIXTURES, is_suspicious
from converters.foreign.settings import ForeignSettings
from converters.model_config.architecture import Architecture
from converters.model_config.megatron_settings import megatron_settings
from converters.model_config.sizes import is_off

GATE_OF_GPT_OSS = "quick_gelu"
"""Megatron-Core's activation function for a clamped gate."""
# Only relevant for training, or checked elsewhere.
_NOT_COMPARED = {
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "max_sequence_length",
    "moe_aux_loss_coeff",
    "moe_router_bias_update_rate",
    "vocab_size",
}
# Fields of Megatron-Bridge's providers that belong neither to TransformerConfig nor to the function.
_PROVIDER = frozenset(
    {
        "generation_config",
        "hf_model_id",
        "make_vocab_size_divisible_by",
        "seq_length",
        "should_pad_vocab",
        "parallel_output",
    }
)


def check_agreement(
    settings: ForeignSettings, architecture: Architecture, ignored: Collection[str] = ()
) -> None:
    """Check that a config and a trainer's settings belong together.

    Args:
        settings: the trainer's settings.
        architecture: architecture that the config describes.
        ignored: names of settings to ignore.

    Raises:
        ConversionError: lists settings that differ, and unknown settings that may affect the function.
    """
    known = _PROVIDER | set(ignored)
    problems = [*_differences(settings, architecture, ignored)]
    # Settings of YaRN are compared above if the config uses YaRN, and have no meaning otherwise.
    for name, value in sorted(settings.values.items()):
        is_unknown = name not in known and not name.startswith(("yarn_", "_"))
        if is_unknown and is_suspicious(name) and not is_off(value):
            problems.append(f"{name} = {value!r}: unknown setting, which may change the forward pass")
    if problems:
        raise ConversionError(
            f"{settings.origin} and the Hugging Face config ({architecture.family}) describe different "
            "models",
            (
                "pass --hf-config DIRECTORY of the model that was trained, or --ignore-setting NAME for "
                "what is "
                "known to be harmless"
            ),
            problems,
        )


def _differences(
    settings: ForeignSettings, architecture: Architecture, ignored: Collection[str]
) -> Iterator[str]:
    wanted = megatron_settings(architecture)
    activation = GATE_OF_GPT_OSS if architecture.gate_limit is not None else architecture.activation
    expected = {**wanted.transformer, **wanted.model, **wanted.attributes, "activation": activation}
    expected["mtp_num_layers"] = architecture.prediction_layers or None
    for reason, own in (
        ("llama3", wanted.llama3),
        ("routing", wanted.routing),
        ("latent_norm_epsilon", wanted.latent_norm_epsilon),
    ):
        if own is not None and reason not in ignored:
            yield f"{reason}: the config asks for {own}, which Megatron-Core cannot compute"
    if architecture.mixture is not None and all(architecture.mixture.sparse_layers):
        expected.pop("ffn_hidden_size")  # No layer has a dense MLP.
    if architecture.latent_attention is not None:
        # Latent attention defines the widths of query, key and value itself.
        expected.pop("kv_channels")
        # The tensors show whether there are norms of the latents. Trainers may add these norms by layer specs
        # alone, without the setting.
        expected.pop("qk_layernorm")
    # For None, Megatron-Core's default applies.
    values = DEFAULTS | {name: value for name, value in settings.values.items() if value is not None}
    for name in sorted(set(expected) - _NOT_COMPARED - set(ignored)):
        if not _same(name, values.get(name), expected[name], architecture.num_layers):
            yield f"{name} = {values.get(name)!r}, by the config {expected[name]!r}"
    neutral = NEUTRAL | ({} if architecture.mixture is None else NEUTRAL_OF_MIXTURES)
    if architecture.mixture is None and "num_moe_experts" not in ignored and values.get("num_moe_experts"):
        yield f"num_moe_experts = {values['num_moe_experts']!r}, by the config there are none"
    for name in sorted(set(neutral) - set(expected) - set(ignored)):
        if values.get(name) is not None and values[name] not in neutral[name]:
            yield f"{name} = {values[name]!r}: the config has no such setting"


def _same(name: str, found: Any, wanted: Any, layers: int) -> bool:
    if name == "moe_layer_freq":
        return _pattern(found, layers) == _pattern(wanted, layers)
    # An integer N means no window in every N-th layer, counted from 1.
    if name == "window_attn_skip_freq" and isinstance(found, int) and found > 0:
        found = [int(number % found != 0) for number in range(1, layers + 1)]
    if isinstance(wanted, list | tuple):
        return isinstance(found, list | tuple) and list(found) == list(wanted)
    if isinstance(wanted, bool) or wanted is None:
        # False, None and 0 all disable a feature.
        return found == wanted or (not wanted and not found)
    return found == wanted


def _pattern(value: Any, layers: int) -> list[int] | None:
    """Return 1 for each layer with experts and 0 for the others; None if the value is invalid."""
    if isinstance(value, list | tuple):
        return [int(bool(one)) for one in value]
    if isinstance(value, int) and value > 0:
        # Megatron-Core counts from 0, so the first layer has experts.
        return [int(layer % value == 0) for layer in range(layers)]
    return None


def sparse_layers(settings: ForeignSettings) -> list[bool]:
    """Return for each layer whether it has experts.

    Raises:
        ConversionError: the settings have an unknown format.
    """
    layers = settings.values["num_layers"]
    value = settings.values.get("moe_layer_freq", 1)
    pattern = _pattern(1 if value is None else value, layers)
    if pattern is None or len(pattern) != layers:
        raise ConversionError(
            f"{settings.origin}: moe_layer_freq = {value!r} is no pattern of {layers} layers",
            "pass --hf-config DIRECTORY",
        )
    return list(map(bool, pattern))
