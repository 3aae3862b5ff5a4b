"""Two-sided accounting of a Megatron checkpoint: every parameter of the model is there, and every key belongs to one."""

from __future__ import annotations

from converters.check import is_excused
from converters.errors import ConversionError
from converters.logical import MegatronModel
from converters.rule import Rule
from converters.rules import all_rules

# what trainers keep beside the parameters
_IGNORED_KEYS = ("optimizer.", "chained_", "rng_state", "opt_param_scheduler", "rerun_state_machine")


def account(model: MegatronModel, excused: tuple[str, ...] = ()) -> tuple[list[Rule], tuple[str, ...]]:
    """The parameters that are there, and the excused keys that nothing asks for.

    Raises:
        ConversionError: with every key that is missing, unknown or of another shape, and not excused.
    """
    rules, asked, problems = [], set(), []
    for rule in all_rules(model.architecture):
        key = model.place(rule).key
        asked.add(key)
        if model.has(rule):
            rules.append(rule)
        elif not is_excused((key, rule.megatron_name, *rule.hf_names), excused):
            problems.append(f"missing: {key}" + (f" of {rule.megatron_name}" if key in model.checkpoint else ""))
    left_out = []
    for key in model.checkpoint:
        if key in asked or key.startswith(_IGNORED_KEYS):
            continue
        if is_excused((key,), excused):
            left_out.append(key)
        else:
            problems.append(f"unknown: {key} {list(model.checkpoint.shape(key))}")
    if problems:
        raise ConversionError(
            f"{model.checkpoint.directory} does not hold a {model.architecture.family} model as its config describes it",
            "use the config that belongs to these weights, or --allow-missing PATTERN for keys that need no counterpart",
            list(dict.fromkeys(problems)),
        )
    return rules, tuple(left_out)
