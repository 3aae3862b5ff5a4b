"""Check of configuration changes when a run resumes from a checkpoint. Pure Python, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.config.backend import enabled_backend
from megarl.config.models import POLICY, as_of_policy, model_sections
from megarl.config.nested import at
from megarl.config.policy import STATE_KEYS
from megarl.config.sections import RunConfig
from megarl.errors import ConfigError, Violation

# A checkpoint's optimizer state contains the values of these sections, and loading it would overwrite
# changes.
_KEPT_BY_STATE = ("policy.optimizer", "policy.megatron_cfg.optimizer")
# Keys that define a schedule. Changes take effect, because the schedule continues from the checkpoint's step.
_SCHEDULE = (
    "policy.learning_rate",
    "policy.optimizer.kwargs.lr",
    "policy.scheduler",
    "policy.megatron_cfg.optimizer.lr",
    "policy.megatron_cfg.optimizer.min_lr",
    "policy.megatron_cfg.optimizer.weight_decay",
    "policy.megatron_cfg.scheduler",
)
# With and without the distributed optimizer, the saved state has different formats.
_DISTRIBUTED = "policy.megatron_cfg.optimizer.use_distributed_optimizer"
# Keys that affect how a step is computed, not its result: a state saved with one value loads with any other.
# ``_other_form`` checks ``_DISTRIBUTED``.
_FREE = (
    _DISTRIBUTED,
    *(
        f"policy.megatron_cfg.optimizer.{key}"
        for key in ("clip_grad", "bf16", "fp16", "params_dtype", "use_precision_aware_optimizer")
    ),
    *(f"policy.megatron_cfg.optimizer.{key}" for key in (*STATE_KEYS, "optimizer_offload_fraction")),
    *(f"policy.optimizer.{key}" for key in STATE_KEYS),
    *(f"policy.optimizer.kwargs.{key}" for key in ("foreach", "fused", "capturable", "differentiable")),
)
# Keys that must not change during a run unless accept_changes is true. The location of the data may change,
# because the data sources' fingerprint is compared.
_PROMISED = (
    "algorithm",
    "recipe",
    "seed",
    "data",
    "policy.model_name",
    "policy.merged_adapter",
    "policy.tokenizer",
    "policy.train_global_batch_size",
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "ppo.num_prompts_per_step",
    "ppo.num_generations_per_prompt",
    "distillation.num_prompts_per_step",
    "distillation.num_generations_per_prompt",
    "distillation.teacher_of_source",
)
_PLACES_OF_DATA = (
    "data.train.path",
    "data.train.name",
    "data.validation",
    "data.cache_dir",
    "data.cache_gib",
)
# If data.train is a list, the dotted keys of its sources have an index.
_PLACE_IN_LIST = re.compile(r"data\.train\.\d+\.(path|name)")


# Sections whose keys users choose freely.
_BY_A_PERSON = frozenset({"kwargs", "options", "engine_cfg", "vllm_kwargs"})


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys whose values differ between two configurations -> (old value, new value).

    A key that only one of the two has is ignored, because another version of megarl added or removed it.
    Inside ``kwargs``, ``options`` and the like, which users write, an absent key counts as None instead.
    """
    changes: dict[str, tuple[Any, Any]] = {}
    for key in before:
        if key not in now:
            continue
        old, new = _by_place(before[key], now[key])
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            # No other version of megarl adds keys here, so a missing key was removed by the user.
            if key in _BY_A_PERSON:
                absent = dict.fromkeys([*old, *new])
                old, new = {**absent, **old}, {**absent, **new}
            changes |= {f"{key}.{inner}": values for inner, values in changed_keys(old, new).items()}
        elif old != new:
            changes[key] = (old, new)
    return changes


def _by_place(old: Any, new: Any) -> tuple[Any, Any]:
    """Return two equally long lists of sections as mappings index -> section, so that single keys inside can
    be compared. Any other two values are returned unchanged."""
    are_lists = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    if are_lists and all(isinstance(each, Mapping) for each in (*old, *new)):
        places = list(map(str, range(len(old))))
        return dict(zip(places, old, strict=True)), dict(zip(places, new, strict=True))
    return old, new


def check_changes(
    before: Mapping[str, Any], now: RunConfig, checkpoint: str, accepted: bool
) -> dict[str, tuple[Any, Any]]:
    """Return the changed keys (old value, new value) of a run that resumes from a checkpoint, after checking
    that all are allowed.

    Args:
        before: configuration with which the checkpoint was written.
        now: current configuration.
        checkpoint: name of the checkpoint, for messages.
        accepted: value of ``checkpointing.accept_changes``.

    Raises:
        ConfigError: a change cannot take effect, or changes what defines the run (data, seed, schedule) and
            is not accepted.
    """
    changes, models = changed_keys(before, now), model_sections(now)
    trained = [path for path, section in models.items() if section.is_trained]
    others = [path for path in models if path not in trained]
    violations = list(_other_backend(before, now, [POLICY, *trained], checkpoint))
    # Models that are not trained have no optimizer state that could conflict.
    of_state = {key: values for key, values in changes.items() if not _is_below(key, others)}
    violations += [
        *_other_form(of_state, trained, checkpoint),
        *_without_effect(of_state, trained, checkpoint),
    ]
    if not accepted:
        violations += _broken_promises(changes, list(models), _PROMISED, checkpoint)
        violations += _broken_promises(of_state, trained, _SCHEDULE, checkpoint)
    if violations:
        raise ConfigError(violations)
    return changes


def _other_backend(
    before: Mapping[str, Any], now: RunConfig, paths: Sequence[str], checkpoint: str
) -> Iterator[Violation]:
    for path in paths:
        if at(before, path) is None:
            continue
        old, new = enabled_backend(at(before, path)), enabled_backend(at(now, path))
        if old != new:
            bound = f"{checkpoint} was written by {old}, whose checkpoints {new} does not read"
            key = "the enabled backend" if path == POLICY else f"the enabled backend of {path}"
            yield Violation(
                key, new, bound, f"continue with {old}, or export the weights and start another run from them"
            )


def _other_form(
    changes: Mapping[str, tuple[Any, Any]], models: Sequence[str], checkpoint: str
) -> Iterator[Violation]:
    for key, (old, new) in changes.items():
        if as_of_policy(key, models) == _DISTRIBUTED:
            bound = (
                f"{checkpoint} has optimizer state that was saved with {old!r}, which {new!r} does not read"
            )
            yield Violation(key, new, bound, f"write {old!r}, or start another run from exported weights")


def _without_effect(
    changes: Mapping[str, tuple[Any, Any]], models: Sequence[str], checkpoint: str
) -> Iterator[Violation]:
    for key, (old, new) in changes.items():
        of_policy = as_of_policy(key, models)
        if _is_below(of_policy, _KEPT_BY_STATE) and not _is_below(of_policy, (*_FREE, *_SCHEDULE)):
            bound = (
                f"{checkpoint} has optimizer state with {old!r}, which is kept: the change would do nothing"
            )
            yield Violation(key, new, bound, f"write {old!r}, or start another run from exported weights")


def _broken_promises(
    changes: Mapping[str, tuple[Any, Any]], models: Sequence[str], promised: Sequence[str], checkpoint: str
) -> Iterator[Violation]:
    for key, (old, new) in changes.items():
        if _is_below(as_of_policy(key, models), promised) and not (
            _is_below(key, _PLACES_OF_DATA) or _PLACE_IN_LIST.fullmatch(key)
        ):
            bound = f"{checkpoint} was trained with {old!r}"
            yield Violation(
                key,
                new,
                bound,
                f"write {old!r}, or checkpointing.accept_changes=true to continue with different settings",
            )


def _is_below(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
