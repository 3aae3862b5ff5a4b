"""Rules on low-rank adapters (``policy.peft``, ``policy.merged_adapter``)."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.adapters import is_named, unmatched
from megarl.config.backend import scores
from megarl.config.parameters import has_own_rules
from megarl.config.rules.backends import DTENSOR, MEGATRON, backend_of
from megarl.config.rules.view import Rule, View
from megarl.errors import Violation

PEFT = "policy.peft"


def _require_adapters(view: View) -> None:
    view.require(bool(view.get(f"{PEFT}.enabled", False)))


def adapters_fit_the_backend(view: View) -> Iterator[Violation]:
    """Refuse adapters on FSDP1, which flattens a layer's weights into one tensor, with a custom DTensor
    plan, and with Transformer Engine's layers."""
    _require_adapters(view)
    backend = backend_of(view)
    if backend == "fsdp1":
        bound = (
            "FSDP1 flattens all weights of a layer into one tensor, so an adapter cannot be trained by itself"
        )
        yield Violation(
            f"{PEFT}.enabled", True, bound, f"set {DTENSOR}.enabled or {MEGATRON}.enabled to true"
        )
    plan, engine = f"{DTENSOR}.custom_parallel_plan", f"{MEGATRON}.transformer_engine"
    if backend == "dtensor" and view.get(plan) is not None:
        yield Violation(
            plan,
            view[plan],
            f"{PEFT}.enabled is true, and a custom plan does not shard adapters",
            "write null",
        )
    if backend == "megatron" and view.get(engine) is True:
        bound = f"{PEFT}.enabled is true, and Transformer Engine's layers do not give what an adapter reads"
        yield Violation(engine, True, bound, "write auto or false, for the portable layers")


def stacks_of_experts_can_have_adapters(view: View) -> Iterator[Violation]:
    """Refuse ``target_parameters`` with dropout, which PEFT does not support there, and for a model without
    experts."""
    _require_adapters(view)
    key = f"{PEFT}.target_parameters"
    view.require(bool(view[key]))
    if view[f"{PEFT}.dropout"]:
        bound = "PEFT has no dropout for adapters of stacked experts"
        yield Violation(
            f"{PEFT}.dropout",
            view[f"{PEFT}.dropout"],
            bound,
            "write 0, or name the experts' layers in target_modules",
        )
    if not view.facts.num_experts:
        yield Violation(key, view[key], "the model has no experts", "write an empty list")


def patterns_match_the_model(view: View) -> Iterator[Violation]:
    """Require that each pattern of ``target_modules`` and ``exclude_modules`` matches a weight of the model,
    because a misspelt one would have no effect. Whether a matched layer can have an adapter is checked by the
    workers."""
    _require_adapters(view)
    view.require(has_own_rules(view.facts))
    for key in ("target_modules", "exclude_modules"):
        # With target_parameters, exclude_modules may name expert stacks, which ``unmatched`` does not know.
        if key == "exclude_modules" and view[f"{PEFT}.target_parameters"]:
            continue
        patterns = view[f"{PEFT}.{key}"]
        for pattern in unmatched(patterns, view.facts):
            # A tied output layer and a score head are not in the model's files, so ``unmatched`` reports
            # them. Excluding them is harmless, and workers refuse them as targets.
            if any(is_named(name, (pattern,)) for name in ("lm_head", "score")):
                continue
            # Exclusion globs such as "*.experts.*" are written for several models, and need not match in
            # each.
            if key == "exclude_modules" and "*" in pattern:
                continue
            fix = "write names such as q_proj"
            if pattern == "all-linear":
                fix = "write an empty list for all linear layers"
            yield Violation(f"{PEFT}.{key}", patterns, f"{pattern!r} names no layer of the model", fix)


def adapters_have_the_type_of_the_model(view: View) -> Iterator[Violation]:
    """Require that ``lora_dtype`` is ``policy.precision`` or null."""
    _require_adapters(view)
    key = f"{PEFT}.lora_dtype"
    if view[key] not in (None, view["policy.precision"]):
        bound = f"adapters compute in policy.precision, {view['policy.precision']}"
        yield Violation(key, view[key], bound, "write null; the optimizer keeps float32 copies anyway")


def only_trained_models_have_adapters(view: View) -> Iterator[Violation]:
    """Refuse adapters for a model that is not trained, whose weights can only have an adapter merged into
    them."""
    _require_adapters(view)
    # ``model_view`` removes the algorithm for models that are not trained.
    if view.get("algorithm") is None:
        bound, fix = (
            "this model is not trained",
            "remove the section"
            if scores(view["policy"])
            else f"remove the section, or give {PEFT.rpartition('.')[0]}.merged_adapter to merge an adapter "
            "into its weights",
        )
        yield Violation(f"{PEFT}.enabled", True, bound, fix)


def merged_adapter_is_the_only_one(view: View) -> Iterator[Violation]:
    """Refuse ``merged_adapter`` together with trained adapters, which apply to the unmerged weights, and for
    a reward model."""
    key = "policy.merged_adapter"
    view.require(view.get(key) is not None)
    if view.get(f"{PEFT}.enabled", False):
        bound = f"{PEFT}.enabled is true, and its adapters apply to the unmerged weights in the model's files"
        yield Violation(
            key, view[key], bound, f"write null, and {PEFT}.adapter_path to continue from this adapter"
        )
    if scores(view["policy"]):
        yield Violation(
            key,
            view[key],
            "a scoring model takes no adapter in this version",
            "merge it with peft, and write null",
        )


ADAPTER_RULES: tuple[Rule, ...] = (
    adapters_fit_the_backend,
    stacks_of_experts_can_have_adapters,
    patterns_match_the_model,
    adapters_have_the_type_of_the_model,
    merged_adapter_is_the_only_one,
)
