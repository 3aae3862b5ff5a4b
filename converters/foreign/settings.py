"""Model settings of another trainer's checkpoint, translated to the names of Megatron-Core's config.

Names are those of ``TransformerConfig`` and ``GPTModel``, as in ``model_config.megatron_settings``, except
``activation``: the name of ``activation_func``. Megatron-Bridge's ``run_config.yaml`` is parsed as plain
YAML; nothing in it is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from converters.errors import ConversionError
from converters.files.reading import require_regular
from converters.foreign.placeholders import Placeholder

_SILU = ("silu", "swish")
ROPE_FACTOR = 8.0
"""Factor of Llama 3's rope scaling in all models that Megatron-LM builds. Its ``--rope-scaling-factor`` does
not reach the model (``gpt_config_from_args`` of 0.19.2)."""


@dataclass(frozen=True)
class ForeignSettings:
    """Settings of a model.

    Attributes:
        origin: file or state that they come from, for messages.
        values: name -> value; unset settings are missing or None.
    """

    origin: str
    values: Mapping[str, Any]


def settings_from_arguments(arguments: Mapping[str, Any], origin: str) -> ForeignSettings:
    """Translate the arguments of Megatron-LM, or of a trainer built on it such as slime.

    Raises:
        ConversionError: the arguments lack the sizes of the model.
    """
    values = {name: value for name, value in arguments.items() if name not in _ARGUMENTS_OF_THEIR_OWN}
    for name, others in RENAMED_ARGUMENTS.items():
        for other in others:
            if values.get(name) is None and arguments.get(other) is not None:
                values[name] = arguments[other]
    # Without grouped-query attention, Megatron-LM stores num_query_groups = 1.
    values["num_query_groups"] = (
        arguments.get("num_query_groups") if arguments.get("group_query_attention") else None
    )
    values["share_embeddings_and_output_weights"] = not arguments.get("untie_embeddings_and_output_weights")
    if arguments.get("disable_bias_linear") is not None and arguments.get("add_bias_linear") is None:
        values["add_bias_linear"] = not arguments["disable_bias_linear"]
    if arguments.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    values["gated_linear_unit"] = bool(arguments.get("swiglu") or arguments.get("quick_geglu"))
    chosen = [name for name in ("swiglu", "squared_relu", "quick_geglu") if arguments.get(name)]
    # Two activations at once are invalid; their joined name matches no config.
    values["activation"] = _ACTIVATIONS.get(" and ".join(chosen), " and ".join(chosen) or "gelu")
    if values.get("position_embedding_type") == "yarn" and not values.get("multi_latent_attention"):
        for name, other in YARN_ARGUMENTS.items():
            if values.get(name) is None:
                values[name] = arguments.get(other)
    return _filled(values, origin)


def with_rope_factor(settings: ForeignSettings, said: float | None, *, is_heeded: bool) -> ForeignSettings:
    """Return the settings with the factor of Llama 3's rope scaling that was used in training.

    Args:
        settings: the trainer's settings.
        said: factor given by the user, or None.
        is_heeded: the trainer uses the factor that it records. Megatron-LM does not, but a trainer built on
            it may.

    Raises:
        ConversionError: the factor is unknown, or the user's factor is not applicable or contradicts the
            trainer.
    """
    found = settings.values.get("rope_scaling_factor")
    found = ROPE_FACTOR if found is None else found
    if not settings.values.get("rope_scaling"):
        if said is not None:
            raise ConversionError(
                f"rope-scaling-factor = {said}, but {settings.origin} has no rope scaling",
                "leave --rope-scaling-factor out",
            )
        return settings
    if said is None and not is_heeded and found != ROPE_FACTOR:
        raise ConversionError(
            f"{settings.origin}: rope_scaling_factor = {found}, which Megatron-LM records but does "
            f"not use: it trains with {ROPE_FACTOR:g}",
            f"pass --rope-scaling-factor {ROPE_FACTOR:g} if Megatron-LM itself trained the model, "
            f"or --rope-scaling-factor {found:g} if its trainer passes the factor to the model",
        )
    if said is not None and said not in ((found,) if is_heeded else (found, ROPE_FACTOR)):
        raise ConversionError(
            f"rope-scaling-factor = {said}, but {settings.origin} says {found}",
            "leave --rope-scaling-factor out, or pass what was trained with",
        )
    return replace(
        settings, values={**settings.values, "rope_scaling_factor": found if said is None else said}
    )


def settings_from_provider(model: Mapping[str, Any], origin: str) -> ForeignSettings:
    """Translate the section ``model`` of Megatron-Bridge's ``run_config.yaml``: the fields of a model
    provider, or of a model config with a nested ``transformer`` section.

    Raises:
        ConversionError: the section lacks the sizes of the model.
    """
    # Some releases of Megatron-Bridge nest the fields of the transformer.
    nested = model.get("transformer")
    merged = {**model, **nested} if isinstance(nested, Mapping) else dict(model)
    values = {
        str(name): value
        for name, value in merged.items()
        if name not in ("_target_", "transformer", "builder")
    }
    values["activation"] = _function_name(values.pop("activation_func", None))
    if values.get("max_sequence_length") is None:
        values["max_sequence_length"] = values.get("seq_length")
    return _filled(values, origin)


_MIXERS, _MLPS = "*+G", "-E"
_SYMBOLS = {
    "*": "attention",
    "+": "latent attention",
    "G": "gated delta net",
    "D": "sparse attention",
    "M": "Mamba",
}
_SYMBOLS |= {"-": "MLP", "E": "experts", "/": "layers that predict further tokens"}
"""Symbols in the layer pattern of a HybridModel."""


def with_settings_of_whole_layers(settings: ForeignSettings) -> ForeignSettings:
    """Translate the settings of a HybridModel to those of a GPTModel with the same layers. Other settings are
    returned unchanged.

    Raises:
        ConversionError: the pattern is not a sequence of mixer and MLP (``view.with_whole_layers``).
    """
    values = settings.values
    name = next(filter(values.get, ("hybrid_layer_pattern", "hybrid_override_pattern")), None)
    if name is None:
        return settings
    # Bars separate pipeline stages.
    symbols = str(values[name]).replace("|", "")
    for at, symbol in enumerate(symbols):
        wanted = (_MIXERS, _MLPS)[at % 2]
        if symbol not in wanted or (at % 2 == 0 and at == len(symbols) - 1):
            expected = " or ".join(f"{one} ({_SYMBOLS[one]})" for one in wanted)
            fault = f"{expected} is expected" if symbol not in wanted else "no MLP follows it"
            found = f"layer {at} is {symbol} ({_SYMBOLS.get(symbol, 'unknown')}), where {fault}"
            raise ConversionError(
                f"{settings.origin}: {name} = {values[name]!r}: {found}",
                "convert a model in which every layer is attention followed by an MLP or experts",
            )
    own: dict[str, Any] = {
        "num_layers": len(symbols) // 2,
        "moe_layer_freq": [int(symbol == "E") for symbol in symbols[1::2]],
        "is_hybrid_model": False,
        # HybridModel has no arguments for rope scaling.
        "rope_scaling": False,
        **dict.fromkeys(("hybrid_layer_pattern", "hybrid_override_pattern", "spec")),
    }
    if "G" in symbols:
        own["linear_attention_freq"] = [int(symbol == "G") for symbol in symbols[::2]]
    return replace(settings, values={**values, **own})


# Upper bounds: larger numbers mean damage, and loops over them would take too long.
_SIZES = {"num_layers": 10_000, "hidden_size": 10**7, "num_attention_heads": 10**5}
RENAMED_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "num_moe_experts": ("num_experts",),
    "layernorm_epsilon": ("norm_epsilon",),
    "layernorm_zero_centered_gamma": ("apply_layernorm_1p",),
    "rope_scaling": ("use_rope_scaling",),
    "seq_len_interpolation_factor": ("rotary_seq_len_interpolation_factor",),
    "max_sequence_length": ("max_position_embeddings", "seq_length"),
}
_ACTIVATIONS = {"swiglu": "silu", "quick_geglu": "quick_gelu"}
# Megatron-Core's name of a YaRN setting -> Megatron-LM's argument.
YARN_ARGUMENTS = {
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
}
_ARGUMENTS_OF_THEIR_OWN = frozenset(
    {
        "activation",
        "add_position_embedding",
        "disable_bias_linear",
        "group_query_attention",
        "onnx_safe",
        "openai_gelu",
        "quick_geglu",
        "squared_relu",
        "swiglu",
        "untie_embeddings_and_output_weights",
        "use_rotary_position_embeddings",
        *itertools.chain.from_iterable(RENAMED_ARGUMENTS.values()),
    }
)


def _filled(values: dict[str, Any], origin: str) -> ForeignSettings:
    """Return the settings, with values that Megatron-Core derives from others."""
    missing = [name for name, most in _SIZES.items() if not _is_size(values.get(name), most)]
    if missing:
        raise ConversionError(
            f"{origin} does not say {', '.join(missing)} of the model",
            "pass --hf-config DIRECTORY of the model",
        )
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    followed = {
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": 4 * hidden,
    }
    for name, value in followed.items():
        if values.get(name) is None:
            values[name] = value
    if values.get("moe_ffn_hidden_size") is None:
        values["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
    values["add_qkv_bias"] = bool(values.get("add_qkv_bias") or values.get("add_bias_linear"))
    # For Megatron-Core, yarn_mscale = 1 without yarn_mscale_all_dim is the same as neither.
    if values.get("yarn_mscale") == 1 and not values.get("yarn_mscale_all_dim"):
        values["yarn_mscale"] = values["yarn_mscale_all_dim"] = None
    # YAML has no tuples, and the value is compared with a tuple.
    if isinstance(values.get("window_size"), list):
        values["window_size"] = tuple(values["window_size"])
    return ForeignSettings(origin, values)


def _is_size(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def _function_name(value: Any) -> str:
    """Return the name of a function, such as ``silu`` for all spellings of torch.nn.functional.silu. Other
    values are returned as text."""
    if isinstance(value, Mapping):
        value = value.get("_target_", value)
    if isinstance(value, Placeholder) or (isinstance(value, type) and issubclass(value, Placeholder)):
        value = value.what
    name = str(value).rpartition(".")[2]
    return "silu" if name in _SILU else name


RUN_CONFIG_FILE = "run_config.yaml"
_LARGEST = 2**24


def find_run_config(directory: Path) -> Path | None:
    """Return ``run_config.yaml`` in the directory of a checkpoint or its parent, or None."""
    return next(filter(Path.is_file, (directory / RUN_CONFIG_FILE, directory.parent / RUN_CONFIG_FILE)), None)


def read_section(path: Path, name: str) -> dict[str, Any]:
    """Return a section of ``run_config.yaml``: ``model``, or ``peft`` if adapters were trained.

    Raises:
        ConversionError: the file is damaged or too large, or lacks the section.
    """
    try:
        if require_regular(path).stat().st_size > _LARGEST:
            raise ConversionError(
                f"{path} has {path.stat().st_size} bytes, at most {_LARGEST} are read",
                "pass --hf-config DIRECTORY",
            )
        # safe_load rejects tags of Python objects, which could run code.
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    # Re-raise it: a ConversionError is a ValueError, which the next clause would report as unreadable.
    except ConversionError:
        raise
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConversionError(
            f"{path} cannot be read ({error})", "fetch it again, or pass --hf-config DIRECTORY"
        ) from error
    section = content.get(name) if isinstance(content, dict) else None
    if not isinstance(section, dict):
        raise ConversionError(f"{path} has no section {name!r}", "pass --hf-config DIRECTORY of the model")
    return section
