"""Recognition of keys and options of other trainers and of earlier versions, to report their replacement."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from megarl.config.algorithms import ALGORITHMS, KEY, run_type, sections_of
from megarl.config.guesses import nearest
from megarl.config.load import parse_hydra_overrides
from megarl.config.models import as_of_policy, model_sections
from megarl.config.nested import at
from megarl.config.schema import ABSENT, check_section, known_paths
from megarl.config.tables import FOREIGN_KEYS
from megarl.errors import Violation

SECTIONS = {
    "verl": (
        "actor_rollout_ref",
        "algorithm",
        "trainer",
        "custom_reward_function",
        "ray_kwargs",
        "ray_init",
        "reward_manager",
    ),
    "torchtitan": (
        *sorted({key.partition(".")[0] for key in FOREIGN_KEYS["torchtitan"]} - {"debug"}),
        "compile",
        "quantize",
        "experimental",
    ),
}
"""Trainer -> its top-level sections that megarl does not have. Any key in them is reported as that
trainer's, even if ``FOREIGN_KEYS`` does not list it."""
_MEGATRON = "policy.megatron_cfg"
_OPTIMIZER = f"{_MEGATRON}.optimizer"
# Key of the Megatron backend -> key of DTensor or FSDP1 with the same meaning. ``FOREIGN_KEYS`` names only
# the former.
_ON_TORCH = {
    f"{_OPTIMIZER}.lr": "policy.optimizer.kwargs.lr",
    f"{_OPTIMIZER}.weight_decay": "policy.optimizer.kwargs.weight_decay",
    f"{_OPTIMIZER}.adam_eps": "policy.optimizer.kwargs.eps",
    f"{_MEGATRON}.tensor_model_parallel_size": "policy.dtensor_cfg.tensor_parallel_size",
    f"{_MEGATRON}.context_parallel_size": "policy.dtensor_cfg.context_parallel_size",
    f"{_MEGATRON}.activation_checkpointing": "policy.dtensor_cfg.activation_checkpointing",
}
_ENTRIES = {key: (trainer, text) for trainer, table in FOREIGN_KEYS.items() for key, text in table.items()}
# Dotted paths of sections that contain keys of other trainers, so their keys are checked one by one.
_ABOVE = {key[: dot.start()] for key in _ENTRIES for dot in re.finditer(r"\.", key)}
# Options before words that megarl takes without one.
_NEEDLESS = re.compile(r"-[cfo]|--(cfg|config|config-(file|name|path)|file|opts?|overrides?|recipe|set)")
# Matches an entry of ``FOREIGN_KEYS`` that is a key, not a sentence of advice.
_IS_KEY = re.compile(r"[\w.{}]+")


def without_foreign_keys(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Violation]]:
    """Return a configuration without the keys of other trainers, and a violation for each of these keys.
    Unknown keys stay in the configuration."""
    found: list[Violation] = []
    config = _with_one_peft_section(config)
    known = frozenset(known_paths(run_type(config.get(KEY))))

    def kept_of(section: Mapping[str, Any], above: str = "") -> dict[str, Any]:
        kept = {}
        for name, value in section.items():
            path = f"{above}{name}"
            fault = None if path in known else foreign_fault(path, value, config)
            if isinstance(value, Mapping) and value and (path not in _ENTRIES or path in _ABOVE):
                inner = kept_of(value, f"{path}.")
                if inner or (path in known and path != KEY):
                    kept[name] = inner
            elif fault is not None:
                found.append(fault)
            else:
                kept[name] = value
        return kept

    return kept_of(config), found


# Backend section -> name of NeMo-RL's adapter section inside it.
_PEFT_SECTIONS = {"megatron_cfg": "peft", "dtensor_cfg": "lora_cfg"}


def _with_one_peft_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration in which the NeMo-RL adapter section of the enabled backend is moved to
    ``policy.peft``, unless that exists. Adapter sections of disabled backends are dropped."""
    policy = config.get("policy")
    if not isinstance(policy, Mapping):
        return config
    moved = dict(policy)
    for backend, name in _PEFT_SECTIONS.items():
        section = policy.get(backend)
        if not isinstance(section, Mapping) or not isinstance(section.get(name), Mapping):
            continue
        if section.get("enabled") is True:
            # If policy.peft exists too, keep NeMo-RL's section, which is then reported as an unknown key.
            if "peft" in policy:
                continue
            moved["peft"] = _as_peft(section[name])
        moved[backend] = {key: value for key, value in section.items() if key != name}
    return {**config, "policy": moved}


def _as_peft(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a NeMo-RL adapter section as a ``policy.peft`` section: the keys of its DTensor backend are
    renamed to those of its Megatron backend."""
    found = {"lora_A_init_method" if key == "lora_A_init" else key: value for key, value in section.items()}
    if found.pop("match_all_linear", None):
        found["target_modules"] = []
    return found


def foreign_fault(path: str, value: object, config: Mapping[str, Any]) -> Violation | None:
    """Return the violation for a key of another trainer, with its replacement as the fix; None for any other
    key.

    Args:
        path: dotted key that megarl does not have.
        value: value of the key.
        config: the run's configuration as far as it is known; some replacements depend on its algorithm and
            backend.
    """
    # The section of a critic or teacher has the keys of policy, so the same foreign keys are replaced there.
    entry = _ENTRIES.get(path) or _ENTRIES.get(as_of_policy(path, model_sections(config)))
    if entry is not None:
        trainer, text = entry
        return Violation(path, value, f"{trainer} has this key, megarl has not", _fix(text, value, config))
    for trainer, sections in SECTIONS.items():
        if path.partition(".")[0] in sections:
            word = path.rpartition(".")[2].split("_")[-1]
            fix = f"remove it; megarl keys {word} looks for a counterpart"
            return Violation(path, value, f"{trainer} has this section, megarl has not", fix)
    return None


def _fix(text: str, value: object, config: Mapping[str, Any]) -> str:
    algorithm = config.get(KEY)
    section = algorithm if isinstance(algorithm, str) and algorithm in ALGORITHMS else "grpo"
    text = text.replace("{algorithm}", section)
    if _IS_KEY.fullmatch(text):
        text = f"write {text}={{value}}"
    # The optimizers of this configuration refer to policy.learning_rate, so that is the key to change.
    if at(config, "policy.learning_rate") is not None:
        text = text.replace(f"write {_OPTIMIZER}.lr=", "write policy.learning_rate=")
    if at(config, "policy.megatron_cfg.enabled") is False or at(config, "policy.optimizer") is not None:
        for megatron, torch in _ON_TORCH.items():
            text = re.sub(rf"{re.escape(megatron)}\b", torch, text)
    return text.replace("{value}", _as_word(value))


def _as_word(value: object) -> str:
    """Return a value as it would be written after ``key=`` on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[tuple[str, object]]]:
    """Split command-line overrides into those for megarl, and (key, value) pairs for keys of other
    trainers."""
    own, foreign = [], []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.lstrip("+").strip()
        if equals and key in _ENTRIES:
            foreign.append((key, _value(text)))
        else:
            own.append(override)
    return own, foreign


def override_faults(overrides: Sequence[str]) -> list[Violation]:
    """Return the violations in overrides that do not depend on the configuration to which they apply: keys
    of other trainers, unknown keys and wrong types.

    Raises:
        OverridesError: an override cannot be parsed.
    """
    # Skip overrides that remove keys, because the configuration that has them is unknown here.
    added = [override for override in overrides if not override.startswith("~")]
    written = OmegaConf.to_container(parse_hydra_overrides(OmegaConf.create(), added), resolve=False)
    config, found = without_foreign_keys(cast(dict[str, Any], written))
    return [
        *found,
        # Ignore missing keys, because the configuration may have them.
        *(fault for fault in check_section(config, run_type(config.get(KEY))) if fault.value is not ABSENT),
    ]


def _value(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def option_faults(
    options: Iterable[tuple[str, object]], config: Mapping[str, Any], own: Sequence[str]
) -> Iterator[Violation]:
    """Yield a violation for each command-line option that the command does not have, with the option or key
    to write instead.

    Args:
        options: (option, value) pairs; the value is ``True`` for an option without one.
        config: the run's configuration as far as it is known.
        own: options of the command.
    """
    known = known_paths(run_type(config.get(KEY)))
    section = next(iter(sections_of(config.get(KEY))), "")
    for option, value in options:
        if _NEEDLESS.fullmatch(option.replace("_", "-")):
            yield Violation(
                option, value, "CONFIG and key=value are words without options", f"remove {option}"
            )
            continue
        path = option.lstrip("-").replace("-", "_")
        similar = next(
            (each for each in own if each.strip("-").replace("-", "") == path.replace("_", "")), None
        )
        fault = None if path in known else foreign_fault(path, value, config)
        # A single letter says too little.
        is_letter = len(path) == 1
        theirs = (key for key in _ENTRIES if key.rpartition(".")[2][:1] == path[:1])
        near = path if path in known else None if is_letter else nearest(path, (*known, *theirs), section)
        if fault is not None:
            bound = fault.bound.replace("this key", "this option") if option.startswith("-") else fault.bound
            yield Violation(option, value, bound, fault.fix)
        elif similar is not None:
            yield Violation(option, value, "there is no such option", f"write {similar}")
        elif near in known:
            bound = "settings of a run are words of the form key=value, without dashes"
            # An option without a value may stand for a key whose value is not a flag.
            not_a_flag = override_faults([f"{near}=true"]) if value is True else []
            fix = _fix(str(near), "..." if not_a_flag else value, config)
            fix = fix if near == path else fix.replace("write", "did you mean", 1)
            yield Violation(option, value, bound, ": ".join([fix, *(fault.fix for fault in not_a_flag)]))
        elif near is not None:
            trainer, text = _ENTRIES[near]
            yield Violation(
                option, value, f"there is no such option; {trainer} has {near}", _fix(text, value, config)
            )
        else:
            word = path.rpartition(".")[2].rpartition("_")[2]
            close = difflib.get_close_matches(f"--{path}", own, n=1)
            fix = f"megarl keys {'WORD' if is_letter else word} looks for a key, which is set by key=value"
            fix = f"did you mean {close[0]}?" if close else fix
            yield Violation(option, value, "there is no such option", fix)
