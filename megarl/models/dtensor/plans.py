"""Tensor-parallel plans: the sharding style of each module, from a built-in plan, the model's own plan, or a
user-defined one.

A plan's keys are module names in which ``*`` stands for one component of the name. In every plan, embedding
and output layer are sharded over the vocabulary, so that no rank holds the logits of the whole vocabulary; a
score layer is replicated, because it is small. Named styles compute on local tensors (``styles``), except
``sequence_parallel``, which is torch's. A user-defined plan may contain any ``ParallelStyle``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from megarl.config.rules.backends import HAND_WRITTEN_PLANS
from megarl.errors import ConfigError
from megarl.models.dtensor.styles import (
    ColumnLinear,
    NormOfParts,
    OutputLayer,
    RowLinear,
    ScoreLayer,
    VocabularyEmbedding,
    WholeInput,
)

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColumnLinear,
    "rowwise": RowLinear,
    "colwise_rep": lambda: ColumnLinear(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowLinear(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    # More names that occur in transformers' plans.
    "colwise_gather_output": lambda: ColumnLinear(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowLinear(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": NormOfParts,
    "embedding_rowwise": VocabularyEmbedding,
}


def translate_parallel_style(style: str) -> ParallelStyle:
    """Return the style with the given name in transformers' plans.

    Raises:
        AssertionError: ``style`` is not a string.
        ValueError: the name is unknown.
    """
    assert isinstance(style, str), f"a parallel style is named by a string, got {type(style).__name__}"
    if style not in _STYLES:
        raise ValueError(f"unknown parallel style {style!r}: expected one of {', '.join(_STYLES)}")
    return _STYLES[style]()


Plan: TypeAlias = dict[str, ParallelStyle]

_LAYER = "model.layers.*"
_FORMS = (
    "a dictionary from module names to styles, the import path of such a dictionary, or the import path of "
    "a function without arguments "
    "that returns one"
)


def choose_plan(model: Any, *, sequence_parallel: bool, custom: object = None) -> Plan:
    """Return a model's plan: ``custom`` if given, else the built-in plan, else transformers' plan.

    Args:
        model: a transformers model.
        sequence_parallel: shard activations over the sequence between the sharded layers.
        custom: user-defined plan; see ``custom_plan``.

    Raises:
        ConfigError: there is no plan for the model or none with sequence parallelism; or a custom plan names
            an unknown module, no parameter, or inconsistent styles (``_check_shared_inputs``).
    """
    name = model.config.get_text_config().model_type
    if custom is not None:
        plan = _of_scores(custom_plan(custom), model)
        strangers = [key for key in plan if not _modules_of(key, model)]
        if strangers:
            raise ConfigError(
                f"policy.dtensor_cfg.custom_parallel_plan: {type(model).__name__} has no module "
                f"{', '.join(strangers)}"
            )
        if not any(list(module.parameters()) for key in plan for module in _modules_of(key, model)):
            raise ConfigError(
                f"policy.dtensor_cfg.custom_parallel_plan = {custom!r}: it names no module with a parameter; "
                "name the linear layers to divide, or write null for the built-in plan"
            )
        _check_shared_inputs(plan)
    elif name in HAND_WRITTEN_PLANS:
        plan = _of_scores(decoder_plan(sequence_parallel=sequence_parallel), model)
    elif sequence_parallel:
        raise ConfigError(
            f"policy.dtensor_cfg.sequence_parallel = True: there is no plan with it for {name!r}; "
            "set it to false, or give custom_parallel_plan"
        )
    else:
        plan = model_plan(model)
    # Drop entries that match no module: built-in plans name norms that only some models have.
    return _divide_vocabulary({key: style for key, style in plan.items() if _modules_of(key, model)}, model)


def _of_scores(plan: Plan, model: Any) -> Plan:
    """Move the output layer's style to the score layer if the model has one instead, so that critics and
    reward models can use the policy's plan."""
    if model.get_output_embeddings() is not None or "lm_head" not in plan:
        return plan
    return {"score" if name == "lm_head" else name: style for name, style in plan.items()}


def decoder_plan(*, sequence_parallel: bool) -> Plan:
    """Return the built-in plan for the layers that Llama, Mistral, Qwen2 and Qwen3 share.

    Each attention and MLP takes full sequences, and each rank computes a partial sum of its output. Between
    them activations are replicated or, with sequence parallelism, sharded over the sequence. The input is
    gathered once for all projections that read it, so that its gradient is reduced once.
    """
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    plan: Plan = {
        "model.embed_tokens": VocabularyEmbedding(output_layouts=stream),
        f"{_LAYER}.self_attn": WholeInput(stream),
        f"{_LAYER}.self_attn.q_norm": NormOfParts(),
        f"{_LAYER}.self_attn.k_norm": NormOfParts(),
        f"{_LAYER}.self_attn.o_proj": RowLinear(output_layouts=stream),
        f"{_LAYER}.mlp": WholeInput(stream),
        f"{_LAYER}.mlp.down_proj": RowLinear(output_layouts=stream),
        "lm_head": ColumnLinear(input_layouts=stream),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"{_LAYER}.{name}"] = ColumnLinear(shared_input=True)
    if sequence_parallel:
        for name in (f"{_LAYER}.input_layernorm", f"{_LAYER}.post_attention_layernorm", "model.norm"):
            plan[name] = NormOfParts()
    return plan


def model_plan(model: Any) -> Plan:
    """Return transformers' plan for a model, as style objects.

    Raises:
        ConfigError: there is none, or it contains an unknown style.
    """
    named = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    if not named:
        raise ConfigError(
            "policy.dtensor_cfg.tensor_parallel_size: transformers has no tensor-parallel plan for "
            f"{type(model).__name__}; "
            "set it to 1, or give custom_parallel_plan"
        )
    try:
        return {name: translate_parallel_style(style) for name, style in named.items()}
    except ValueError as error:
        raise ConfigError(
            f"policy.dtensor_cfg.tensor_parallel_size: the plan of {type(model).__name__} in transformers "
            f"has an {error}; "
            "set it to 1, or give custom_parallel_plan"
        ) from error


def custom_plan(given: object) -> Plan:
    """Return a user-defined plan as a dict of style objects.

    Args:
        given: a dict from module names to styles, the import path of such a dict, or the import path of a
            function without arguments that returns one. A style is a ``ParallelStyle`` or a name known to
            ``translate_parallel_style``.

    Raises:
        ConfigError: the value is none of these.
    """
    found = _imported(given) if isinstance(given, str) else given
    if callable(found) and not isinstance(found, Mapping):
        found = found()
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"policy.dtensor_cfg.custom_parallel_plan = {given!r}: it gives a {type(found).__name__}; "
            f"expected {_FORMS}"
        )
    plan: Plan = {}
    for name, style in found.items():
        if not isinstance(style, ParallelStyle | str):
            raise ConfigError(
                f"policy.dtensor_cfg.custom_parallel_plan: {name!r} has a {type(style).__name__}; expected "
                "a ParallelStyle or its name"
            )
        plan[str(name)] = translate_parallel_style(style) if isinstance(style, str) else style
    return plan


def _imported(path: str) -> object:
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"policy.dtensor_cfg.custom_parallel_plan = {path!r}: cannot be imported ({error}); expected "
            f"{_FORMS}"
        ) from error


def _check_shared_inputs(plan: Plan) -> None:
    """Check that the gradient of each input is reduced exactly once.

    A ``WholeInput`` module reduces it for all layers inside, which must therefore be
    ``ColumnLinear(shared_input=True)``; elsewhere each layer must reduce it itself.

    Raises:
        ConfigError: the gradient would be reduced twice, or never.
    """
    for name, style in plan.items():
        owner = next(
            (key for key, other in plan.items() if isinstance(other, WholeInput) and _is_below(name, key)),
            None,
        )
        shares = isinstance(style, ColumnLinear) and style.shared_input
        disagrees = (
            shares
            if owner is None
            else isinstance(style, ColwiseParallel | PrepareModuleInput) and not shares
        )
        if disagrees:
            raise ConfigError(
                f"policy.dtensor_cfg.custom_parallel_plan: {name!r} and the modules around it do "
                "not agree on who adds up the gradient of its input; write "
                "ColumnLinear(shared_input=True) inside a module with WholeInput, and only there"
            )


def _is_below(name: str, key: str) -> bool:
    """Return whether plan entry ``name`` matches modules inside those of plan entry ``key``."""
    inner, outer = name.split("."), key.split(".")
    return len(inner) > len(outer) and all(
        "*" in (one, other) or one == other for one, other in zip(inner, outer, strict=False)
    )


def _modules_of(key: str, model: Any) -> list[Any]:
    """Return the modules that match a plan entry."""
    pattern = re.compile(re.escape(key).replace(r"\*", r"[^.]+"))
    return [module for name, module in model.named_modules() if pattern.fullmatch(name)]


def _divide_vocabulary(plan: Plan, model: Any) -> Plan:
    """Return the plan with embedding and output layer sharded over the vocabulary, and a score layer
    replicated. The activation layouts at these layers are kept."""
    output = model.get_output_embeddings()
    embedding, head = (
        _name_of(model, model.get_input_embeddings()),
        "score" if output is None else _name_of(model, output),
    )
    first, last = plan.get(embedding), plan.get(head)
    after = first.output_layouts if isinstance(first, VocabularyEmbedding | RowwiseParallel) else Replicate()
    before = last.input_layouts if isinstance(last, ColwiseParallel) else Replicate()
    return {
        **plan,
        embedding: VocabularyEmbedding(output_layouts=_single(after)),
        head: (ScoreLayer if output is None else OutputLayer)(input_layouts=_single(before)),
    }


def _single(layouts: Any) -> Placement:
    found: Placement = layouts[0] if isinstance(layouts, tuple) else layouts
    return found


def _name_of(model: Any, wanted: Any) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)
