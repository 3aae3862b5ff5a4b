"""Parse a Hugging Face config to an ``Architecture``, as its family defines it. Configs that Megatron-Core
cannot represent are rejected."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from converters.errors import ConversionError
from converters.families import FAMILIES, family_of
from converters.families.base import Family, read_nothing
from converters.families.hf_config import config_class_name
from converters.families.plain import filled_config
from converters.files.reading import check_depth
from converters.model_config.architecture import Architecture
from converters.model_config.foreign_keys import refusal_of_key, shown
from converters.model_config.heads import read_head
from converters.model_config.inert_keys import INERT_KEYS
from converters.model_config.prediction_layers import read_mtp_layers, read_prediction_layers
from converters.model_config.rope import read_rope, rotated_fraction, unread_rope_parameters
from converters.model_config.sizes import SIZE_NEEDED, is_off, read_number

_DTYPES = frozenset(
    {
        "auto",
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "double",
        "float",
        "half",
    }
)
_INTERNALS = frozenset({"attribute_map", "sub_configs"})


def check_raw(options: Mapping[str, Any], config_class: type) -> None:
    """Reject options that transformers' config class would accept and fail on later, including keys that
    would overwrite its methods.

    Args:
        options: contents of the file.
        config_class: config class for these options.

    Raises:
        ConversionError: lists all keys that are not settings, and all values of a wrong type.
    """
    problems = []
    for key in sorted(map(str, options)):
        if key in _INTERNALS or callable(getattr(config_class, key, None)):
            problems.append(f"{key}: no setting, but a part of transformers' {config_class.__name__}")
    problems += dtype_problems(options)
    quantization = options.get("quantization_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        problems.append(f"quantization_config = {quantization!r}: an object is needed")
    if problems:
        raise ConversionError(
            f"config.json is not a valid {config_class.__name__}", "correct config.json", problems
        )


def dtype_problems(config: Mapping[str, Any]) -> list[str]:
    """Return the problems with a config's dtypes. Loading a model fails with an unknown dtype name."""
    problems = []
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if value is not None and str(value).removeprefix("torch.") not in _DTYPES:
            problems.append(f"{key} = {value!r}: the name of a dtype is needed, such as bfloat16")
    return problems


_DIMENSIONS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position": "max_position_embeddings",
}
# An upper bound that stops loops over a damaged number. converters/check.py compares it with the stored
# tensors.
_LARGEST = {"num_layers": 2**16}
_LARGEST_DIMENSION = 2**31 - 1
# A value of an unexpected type can raise any of these, here and in the families. transformers has its own
# checks.
_ODD_VALUE = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
_ROPE_KEYS = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"})
_CONSUMED_KEYS = (
    frozenset(_DIMENSIONS.values())
    | _ROPE_KEYS
    | {
        "model_type",
        "architectures",
        "tie_word_embeddings",
        "rms_norm_eps",
        "hidden_act",
        "initializer_range",
    }
)
_DROPOUTS = ("attention_dropout", "residual_dropout")


def read_architecture(hf_config: Any, ignore_config_keys: Collection[str] = ()) -> Architecture:
    """Parse a config to the architecture of its model.

    Every key of the config is parsed, known to have no effect, not read by transformers (``config_notes``
    lists these), or rejected. A silently ignored key could change the forward pass, so the trained model
    would differ from the described one.

    Args:
        hf_config: transformers config, or the contents of ``config.json``.
        ignore_config_keys: further keys to ignore.

    Raises:
        ConversionError: lists all reasons why the model is not supported.
    """
    if isinstance(hf_config, Mapping):
        check_depth(hf_config, "config.json")
    try:
        config, config_class = _completed(hf_config)
        return _read(config, frozenset(ignore_config_keys), config_class)
    # Re-raise it: a ConversionError is a ValueError, which the next clause would report as a value of the
    # wrong kind.
    except ConversionError:
        raise
    except _ODD_VALUE as error:
        raise ConversionError(
            f"config.json has a value of the wrong kind ({type(error).__name__}: {error})",
            "correct config.json",
        ) from error


def read_plain(content: Mapping[str, Any]) -> Architecture | None:
    """Parse a plain ``config.json`` to an architecture, without importing transformers.

    Returns:
        The same result as ``read_architecture``. None if the config is not plain or is invalid; call
            ``read_architecture`` then, which reports the problems.
    """
    try:
        config = filled_config(content)
        if config is None or any(
            map(config.get, _DROPOUTS)
        ):  # A dropout must be reported to the user (``config_notes``).
            return None
        return _read(config, frozenset(), None)
    except (ConversionError, *_ODD_VALUE):
        return None


def config_notes(hf_config: Any, ignore_config_keys: Collection[str] = ()) -> list[str]:
    """Return notes for the user about an accepted config: ignored keys, and dropout that is not used.
    Arguments as in ``read_architecture``."""
    config, config_class = _completed(hf_config)
    ignored = frozenset(ignore_config_keys)
    family = family_of(config.get("model_type"), config.get("architectures"))
    foreign = _foreign_keys(config, family, ignored)
    unread = [f"{key} = {shown(config[key])}" for key in foreign if refusal_of_key(key, config_class) is None]
    unread += unread_rope_parameters(config)
    notes = (
        [(f"{', '.join(unread)}: ignored, transformers does not read {'it' if len(unread) == 1 else 'them'}")]
        if unread
        else []
    )
    asked = [f"{key} = {shown(config[key])}" for key in sorted(ignored & set(config))]
    notes += [f"{', '.join(asked)}: ignored as requested"] if asked else []
    for key in filter(config.get, _DROPOUTS):
        notes.append(f"{key} = {config[key]!r}: training uses 0")
    return notes


def _read(config: Mapping[str, Any], ignored: frozenset[str], config_class: type | None) -> Architecture:
    family = family_of(config.get("model_type"), config.get("architectures"))
    # Collect all problems, so that one attempt shows everything to correct.
    problems = _refused_keys(config, family, ignored, config_class)
    head = read_head(config, family.architecture_class, problems)
    dimensions = _dimensions(config, problems)
    rope_theta, rope_scaling = read_rope(
        config, problems, partly=family.rotates_partly, in_sections=family.rotates_in_sections
    )
    gate_limit = family.read_gate_limit(config, problems)
    window, window_layers = _windows(config, family, dimensions["num_layers"], problems)
    architecture = Architecture(
        family=family.model_type,
        tied_embeddings=head is None and bool(config.get("tie_word_embeddings")),
        **{**dimensions, **asdict(family.read_features(config))},
        norm_epsilon=read_number(config.get("rms_norm_eps"), "rms_norm_eps", problems, instead=math.nan),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        activation=str(config.get("hidden_act")) if gate_limit is None else "clamped_swiglu",
        initializer_range=read_number(
            config.get("initializer_range"), "initializer_range", problems, instead=math.nan
        ),
        sliding_window=window,
        mixture=family.read_mixture(config, dimensions["num_layers"], problems),
        rotary_fraction=rotated_fraction(config, dimensions["head_dim"], problems)
        if family.rotates_partly
        else 1.0,
        window_layers=window_layers,
        gate_limit=gate_limit,
        latent_attention=family.read_latent_attention(config, problems),
        gated_delta=family.read_gated_delta(config, dimensions["num_layers"], problems),
        zero_centered_norms=family.zero_centered_norms,
        prediction_layers=_prediction_layers(config, family, problems),
        vision=family.read_vision(config, problems),
        head=head,
    )
    if problems:
        raise ConversionError(
            f"this {family.model_type} config cannot be carried over to Megatron-Core",
            "correct wrong values in config.json; take other keys out if the model does not depend on them, "
            "or name them with --ignore-config-key (policy.megatron_cfg.ignore_config_keys in training; for "
            "a family of your own, its config_keys); or use a backend that runs the transformers model",
            problems,
        )
    return architecture


def _prediction_layers(config: Mapping[str, Any], family: Family, problems: list[str]) -> int:
    if family.predicts_in_mtp:
        return read_mtp_layers(config, problems)
    return read_prediction_layers(config, problems) if family.may_predict_further else 0


def unread_keys(config: Mapping[str, Any], family: Family) -> list[str]:
    """Return keys that a config sets and the family lists in ``config_keys``, but that no reader has read.
    Such keys should have no effect.

    Args:
        config: result of ``with_defaults``.
        family: family with ``config_keys``.
    """
    recording = _Recording(config)
    _read(recording, frozenset(), None)
    return sorted(key for key in family.config_keys - recording.read if not is_off(config.get(key)))


class _Recording(dict[str, Any]):
    """A config that records which keys are read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def with_defaults(hf_config: Any) -> dict[str, Any]:
    """Return a config as a flat dictionary, with the defaults of its transformers class.

    Args:
        hf_config: as in ``read_architecture``.

    Raises:
        ConversionError: the family is not supported, or the config is invalid.
    """
    return _completed(hf_config)[0]


def _completed(hf_config: Any) -> tuple[dict[str, Any], type | None]:
    """Return the result of ``with_defaults``, and the transformers config class. The class is None for a
    family that transformers does not know, whose config must be complete."""
    family: Family | None = None
    if isinstance(hf_config, Mapping):
        from huggingface_hub.errors import StrictDataclassError
        from transformers import CONFIG_MAPPING, AutoConfig

        family = family_of(hf_config.get("model_type"), hf_config.get("architectures"))
        # Copy the options: config classes of transformers keep and change what they are given, but the
        # caller's config has to stay as its file has it.
        options = copy.deepcopy({key: value for key, value in hf_config.items() if key != "model_type"})
        like = config_class_name(family)
        if like is None:
            return dict(hf_config), None
        check_raw(options, CONFIG_MAPPING[like])
        if family.sees:
            _check_sections(options, CONFIG_MAPPING[like])
        try:
            hf_config = AutoConfig.for_model(like, **options)
            # Some invalid values fail only here.
            hf_config.to_dict()
        # transformers' code may raise any error on a value that it does not expect.
        except (*_ODD_VALUE, StrictDataclassError) as error:
            raise ConversionError(
                f"config.json is not a valid {family.model_type} config ({error})", "correct config.json"
            ) from error
    elif not hasattr(hf_config, "to_dict"):
        raise ConversionError(
            f"{type(hf_config).__name__} is not a model config",
            "pass a transformers config or a parsed config.json",
        )
    else:
        family = FAMILIES.get(getattr(hf_config, "model_type", ""))
    text = hf_config.text_config if family is not None and family.sees else hf_config
    config = copy.deepcopy(dict(text.to_dict()))
    # Some attributes exist only on the object in some versions of transformers (head_dim set after
    # construction, older rope keys).
    for key in ("head_dim", "rope_theta", "rope_scaling", "rope_parameters", "num_labels"):
        if config.get(key) is None and getattr(text, key, None) is not None:
            config[key] = getattr(text, key)
    if text is not hf_config:
        config = _flattened(copy.deepcopy(dict(hf_config.to_dict())), config)
    # With ``config_like``, the config has the model_type of another family.
    return config | ({} if family is None else {"model_type": family.model_type}), type(hf_config)


# Keys that a vision-language model's class reads outside of the text section.
_OF_THE_WHOLE = frozenset({"architectures", "dtype", "model_type", "tie_word_embeddings", "torch_dtype"})


def _flattened(whole: dict[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a vision-language model's text: the text section, supplemented by values of the
    whole model."""
    del whole["text_config"]
    return whole | {
        key: value for key, value in text.items() if whole.get(key) is None or key not in _OF_THE_WHOLE
    }


def _check_sections(options: Mapping[str, Any], config_class: Any) -> None:
    """Run ``check_raw`` on the sections of a vision-language config. Both must exist, because transformers
    would fill in those of a large model."""
    for key, section_class in config_class.sub_configs.items():
        section = options.get(key)
        if not isinstance(section, Mapping):
            raise ConversionError(f"{key} = {section!r}: an object is needed", "correct config.json")
        check_raw(section, section_class)


def _refused_keys(
    config: Mapping[str, Any], family: Family, ignored: frozenset[str], config_class: type | None
) -> list[str]:
    """Return the problems with keys that must have a fixed value, and with keys that transformers reads but
    the family does not."""
    problems = dtype_problems(config)
    if config.get("hidden_act") != "silu":
        problems.append(f"hidden_act = {config.get('hidden_act')!r}: only 'silu' is supported")
    for key in _DROPOUTS:
        if not _is_rate(config.get(key)):
            problems.append(f"{key} = {config[key]!r}: a number from 0 to 1 is needed")
    if config.get("is_causal") is False:
        problems.append(
            "is_causal = False: transformers then lets tokens attend to later ones; only causal "
            "attention is supported"
        )
    known = {"full_attention", *(["linear_attention"] if family.read_gated_delta is not read_nothing else [])}
    windows = (
        [kind for kind in config.get("layer_types") or () if kind not in known]
        if "layer_types" in family.config_keys
        else []
    )
    if windows and not family.has_layer_windows:
        problems.append(
            f"layer_types has {len(windows)} layers of {windows[0]!r}: only full attention is supported "
            "(use_sliding_window)"
        )
    if config.get("quantization_config"):
        fix = remedy_for_quantized(config["quantization_config"])
        problems.append(f"quantization_config: the weights are quantised; {fix}")
    for key in _foreign_keys(config, family, ignored):
        reason = refusal_of_key(key, config_class)
        if reason is not None:
            problems.append(f"{key} = {shown(config[key])}: {reason}")
    return problems


def remedy_for_quantized(config: Any) -> str:
    """Return what the user can do with a model that has this ``quantization_config``."""
    given = config if isinstance(config, Mapping) else {}
    method = given.get("quant_method")
    if method == "mxfp4" or (method == "fp8" and given.get("weight_block_size")):
        return "megarl convert import MODEL TMP, then export TMP OUT, dequantises them: give OUT"
    # transformers can dequantize this method, but not GPTQ and AWQ.
    if method == "bitsandbytes":
        return (
            "dequantise them with transformers: AutoModelForCausalLM.from_pretrained(MODEL).dequantize()"
            ".save_pretrained(OUT), copy the tokenizer there, and give OUT"
        )
    return "give the model that was quantised, which its card names"


def _foreign_keys(config: Mapping[str, Any], family: Family, ignored: frozenset[str]) -> list[str]:
    """Return the keys that are set, but known neither for all families nor for this one."""
    known = _CONSUMED_KEYS | INERT_KEYS | family.config_keys | ignored | {"quantization_config", *_DROPOUTS}
    return [key for key in sorted(set(config) - known) if not is_off(config[key])]


def _is_rate(value: object) -> bool:
    """Return whether a value is a valid dropout rate; None means no dropout."""
    return value is None or (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
    )


def _dimensions(config: Mapping[str, Any], problems: list[str]) -> dict[str, int]:
    """Return all dimensions, after checking that they are consistent."""
    filled = dict(config)
    if filled.get("intermediate_size") is None and "moe_intermediate_size" in filled:
        # A model without dense layers need not give this size.
        filled["intermediate_size"] = filled["moe_intermediate_size"]
    # As in transformers: as many key-value heads as query heads.
    if filled.get("num_key_value_heads") is None:
        filled["num_key_value_heads"] = filled.get("num_attention_heads")
    heads, hidden = filled.get("num_attention_heads"), filled.get("hidden_size")
    if filled.get("head_dim") is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        if hidden % heads:
            problems.append(
                f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and there is "
                "no head_dim"
            )
        filled["head_dim"] = hidden // heads
    dimensions: dict[str, int] = {}
    for name, key in _DIMENSIONS.items():
        value, largest = filled.get(key), _LARGEST.get(name, _LARGEST_DIMENSION)
        # Continue with 1 after a problem, so that all problems are reported at once.
        dimensions[name] = 1
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{key} = {value!r}: {SIZE_NEEDED}")
        elif value > largest:
            problems.append(f"{key} = {value}: at most {largest} is supported")
        else:
            dimensions[name] = value
    if dimensions["num_attention_heads"] % dimensions["num_key_value_heads"]:
        problems.append(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = "
            f"{dimensions['num_key_value_heads']}"
        )
    if dimensions["head_dim"] % 2:
        problems.append(f"head_dim = {dimensions['head_dim']}: rotary embedding needs an even number")
    return dimensions


def _windows(
    config: Mapping[str, Any], family: Family, num_layers: int, problems: list[str]
) -> tuple[int | None, tuple[bool, ...] | None]:
    """Return the window in tokens, and for each layer whether it has the window (None: all layers). Both are
    None if no layer has a window."""
    window = config.get("sliding_window") if family.has_uniform_window or family.has_layer_windows else None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        problems.append(f"sliding_window = {window!r}: a positive whole number or null is needed")
        window = None
    if not family.has_layer_windows:
        return window, None
    kinds = list(config.get("layer_types") or ())
    # transformers fills in layer_types, so a wrong length means that it contradicts num_hidden_layers.
    if len(kinds) != num_layers or set(kinds) - {"sliding_attention", "full_attention"}:
        problems.append(
            f"layer_types = {kinds!r}: sliding_attention or full_attention is needed for each of the "
            f"{num_layers} layers"
        )
        return None, None
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    if any(sliding) and window is None:
        problems.append(
            "sliding_window = None: layer_types has layers of 'sliding_attention', which need one"
        )
    return (window, sliding) if any(sliding) else (None, None)
