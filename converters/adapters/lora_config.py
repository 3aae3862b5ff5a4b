"""Parse the ``adapter_config.json`` of a PEFT adapter. Settings that cannot be merged are rejected."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from converters.errors import ConversionError
from converters.model_config.sizes import is_off, read_number

# These keys concern training, the origin of the adapter, or the choice of modules, which the adapter's
# tensors show.
_INERT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        # ms-swift writes these: learning rates, and the dtype in which factors are trained.
        "lora_dtype",
        "lorap_emb_lr",
        "lorap_lr_ratio",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "unsloth_version",
        "task_type",
    }
)
_CHOICE = frozenset(
    {"target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"}
)
_READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "bias",
    }
) | {
    "modules_to_save",
    "trainable_token_indices",
}
# With other methods (pissa, olora, corda, loftq ...) training starts from changed base weights.
_UNCHANGED_BASE = ("none", "true", "false", "gaussian", "eva", "orthogonal")
_FIX = "merge it with peft, or save it in a plain LoRA form"


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Settings that determine how an adapter changes the weights.

    Attributes:
        rank, alpha: rank and alpha of modules without a matching pattern.
        rank_patterns, alpha_patterns: regular expression for the end of a module's name -> rank or alpha.
        rank_stabilized: the scaling is alpha / sqrt(rank) instead of alpha / rank.
        targets: names, or last parts of names, of modules that must have an adapter; empty if not listed.
        target_parameters: the same for parameters that are not the weight of a module, such as stacks of
            experts.
        saved_modules: names, or last parts of names, of modules that the adapter stores in full.
        token_indices: module name, or its last part -> indices of the embedding rows that the adapter stores.
        expression: regular expression for the names of modules with an adapter, if the config has one.
        beginnings: name prefix in the model, and the prefix in the patterns that it corresponds to.
    """

    rank: int
    alpha: float
    rank_patterns: Mapping[str, int]
    alpha_patterns: Mapping[str, float]
    rank_stabilized: bool
    targets: frozenset[str]
    target_parameters: frozenset[str]
    saved_modules: frozenset[str] = frozenset()
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    expression: re.Pattern[str] | None = None
    beginnings: tuple[str, str] = ("", "")

    def chooses(self, module: str) -> bool:
        """Return whether the config selects a module. PEFT ignores the factors of other modules."""
        own = self._own_name(module)
        if self._is_parameter(module):
            return True
        if self.expression is not None:
            return self.expression.fullmatch(own) is not None
        # Without a list, as for all-linear, every module with factors is accepted.
        return not self.targets or is_among(module, self.targets) or is_among(own, self.targets)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter; the first matching pattern decides, as in PEFT."""
        return self.rank_patterns.get(_pattern_of(self.rank_patterns, self._own_name(module)), self.rank)

    def scaling_of(self, module: str) -> float:
        """Return the factor on the product of a module's factors."""
        alpha = self.alpha_patterns.get(_pattern_of(self.alpha_patterns, self._own_name(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank

    def _is_parameter(self, module: str) -> bool:
        return is_among(f"{module}.weight", self.target_parameters)

    def _own_name(self, module: str) -> str:
        in_model, in_patterns = self.beginnings
        # For an adapter of a parameter, PEFT matches patterns with the parameter's name instead of the
        # module's.
        name = f"{module}.weight" if self._is_parameter(module) else module
        return in_patterns + name.removeprefix(in_model) if name.startswith(in_model) else name


def is_among(name: str, targets: frozenset[str]) -> bool:
    """Return whether a name, or the part of it after some dot, is one of the targets."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _pattern_of(patterns: Mapping[str, Any], module: str) -> str:
    return next((pattern for pattern in patterns if re.match(_at_end(pattern), module)), "")


def _at_end(pattern: str) -> str:
    # The same expression as in PEFT's ``get_pattern_key``.
    return rf"(.*\.)?({pattern})$"


def read_lora_config(path: Path, config: Mapping[str, Any]) -> LoraConfig:
    """Parse the config of an adapter.

    Args:
        path: file of the config, for error messages.
        config: contents of the file.

    Raises:
        ConversionError: the adapter is not plain LoRA; lists all unsupported settings.
    """
    problems = list(_refused(config))
    chosen, saved = config.get("target_modules"), config.get("modules_to_save") or []
    if not isinstance(saved, list):
        problems.append(f"modules_to_save = {saved!r}: a list of names of modules is needed")
        saved = []
    # PEFT treats a string other than all-linear as a regular expression for complete module names.
    is_expression = isinstance(chosen, str) and chosen != "all-linear"
    rank, ranks = read_number(config.get("r"), "r", problems), _patterns(config, "rank_pattern", problems)
    # ``read_number`` also accepts fractions, which only alpha may have.
    for name, value in {"r": rank, **ranks}.items():
        if value != int(value):
            problems.append(f"{name} = {value!r}: a rank has to be a whole number")
    found = LoraConfig(
        rank=int(rank),
        alpha=read_number(config.get("lora_alpha"), "lora_alpha", problems),
        rank_patterns={pattern: int(value) for pattern, value in ranks.items()},
        alpha_patterns=_patterns(config, "alpha_pattern", problems),
        rank_stabilized=bool(config.get("use_rslora")),
        targets=_listed(config, "target_modules"),
        target_parameters=_listed(config, "target_parameters"),
        saved_modules=frozenset(map(str, saved)),
        token_indices=_token_indices(config, problems),
        expression=_compiled("target_modules", str(chosen), problems) if is_expression else None,
    )
    if problems:
        raise ConversionError(f"{path} does not describe a LoRA adapter that can be merged", _FIX, problems)
    return found


def _refused(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type = {config.get('peft_type')!r}: only LORA is supported")
    if config.get("bias", "none") != "none":
        problems.append(f"bias = {config['bias']!r}: only 'none' is supported")
    if config.get("use_dora"):
        problems.append(
            "use_dora = true: DoRA scales whole rows of the merged weights, which is not supported"
        )
    start = config.get("init_lora_weights")
    if str(start).lower() not in _UNCHANGED_BASE:
        problems.append(
            f"init_lora_weights = {start!r}: it changed the base weights when training began, and "
            "those weights are not available"
        )
    others = sorted(set(config) - _INERT - _CHOICE - _READ - {"use_dora"})
    # New releases of peft add keys. A key that is off requests nothing.
    for key in others:
        if not is_off(config[key]):
            problems.append(f"{key} = {config[key]!r}: not supported")
    return problems


def _patterns(config: Mapping[str, Any], key: str, problems: list[str]) -> dict[str, float]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, Mapping):
        problems.append(f"{key} = {patterns!r}: an object of patterns and numbers is needed")
        return {}
    # Compile the complete expression, as PEFT does: a pattern such as ``)`` is only wrong inside it.
    if not all(_compiled(key, _at_end(pattern), problems) for pattern in patterns):
        return {}
    return {str(pattern): read_number(value, pattern, problems) for pattern, value in patterns.items()}


def _compiled(key: str, pattern: str, problems: list[str]) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except re.error as error:
        problems.append(f"{key}: {pattern!r} is no regular expression ({error})")
        return None


def _token_indices(config: Mapping[str, Any], problems: list[str]) -> dict[str, tuple[int, ...]]:
    """Return module -> token rows. A plain list is for the input embedding."""
    given = config.get("trainable_token_indices") or {}
    by_module = {"embed_tokens": given} if isinstance(given, list) else given
    if not isinstance(by_module, Mapping) or not all(
        isinstance(tokens, list) and set(map(type, tokens)) <= {int} for tokens in by_module.values()
    ):
        problems.append(
            f"trainable_token_indices = {given!r}: a list of token ids is needed, or an object of such lists"
        )
        return {}
    return {str(module): tuple(tokens) for module, tokens in by_module.items()}


def _listed(config: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the targets that a key lists. Empty if other keys or a regular expression restrict the choice
    too, because the stored tensors then show what was chosen."""
    targets = config.get(key)
    # These keys may exclude some of the listed modules, so the list alone proves nothing.
    restrictions = list(map(config.get, _CHOICE - {"target_modules", "target_parameters"}))
    if not isinstance(targets, list) or any(value not in (None, [], "") for value in restrictions):
        return frozenset()
    return frozenset(map(str, targets))
