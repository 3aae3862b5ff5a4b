"""Tensor-parallel plans: the style of each module of a model, from a built-in plan, the model's own, or a
user-defined one.

Keys of a plan are module names, in which ``*`` stands for any single part of a name. With every plan,
embedding and output layer are divided by vocabulary, so that no rank ever holds logits of the whole
vocabulary; every rank holds a score layer in full, because it is small. Named styles compute on local tensors
(``styles``), except ``sequence_parallel``, which is torch's. A user-defined plan may have any
``ParallelStyle`` of torch.
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
    # Further names that transformers' own plans use.
    "colwise_gather_output": lambda: ColumnLinear(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowLinear(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": NormOfParts,
    "embedding_rowwise": VocabularyEmbedding,
}


def translate_parallel_style(style: str) -> ParallelStyle:
    """Return the style that a plan of transformers names.

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
    """Return the plan of a model: ``custom`` if given, else the built-in plan, else the model's own.

    Args:
        model: a transformers model.
        sequence_parallel: divide activations between the divided layers over the sequence.
        custom: user-defined plan; see ``custom_plan``.

    Raises:
        ConfigError: there is no plan, or none with sequence parallelism; or a custom plan names unknown
            modules, or no parameter.
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
    # Drop entries that match no module, because a plan of ours names norms that not every model has.
    return _divide_vocabulary({key: style for key, style in plan.items() if _modules_of(key, model)}, model)


def _of_scores(plan: Plan, model: Any) -> Plan:
    """Return the plan with the output layer's style moved to the score layer if the model has one instead.
    Critics and reward models thus use the policy's plan."""
    if model.get_output_embeddings() is not None or "lm_head" not in plan:
        return plan
    return {"score" if name == "lm_head" else name: style for name, style in plan.items()}


def decoder_plan(*, sequence_parallel: bool) -> Plan:
    """Return the plan for the layers that Llama, Mistral, Qwen2 and Qwen3 share.

    Each attention and MLP takes whole sequences and returns partial sums on every rank. Between them, every
    rank holds all activations or, with sequence parallelism, a part of the sequence. Their input is gathered
    once for all projections that read it, so that its gradient is reduced once.
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
    """Return the plan that transformers defines for a model, as style objects.

    Raises:
        ConfigError: there is none, or it has a style that is unknown here.
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
    """Return a user-defined plan from a dictionary, from the import path of one, or from that of a function
    without arguments that returns one. Styles are torch's objects or the names of
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
    """Raise ConfigError if a layer reduces its input's gradient although a module around it does so for all
    its layers, which would reduce it twice; or if a layer relies on such a module and there is none."""
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
    """Return whether the modules of the plan's entry ``name`` are inside modules of its entry ``key``."""
    inner, outer = name.split("."), key.split(".")
    return len(inner) > len(outer) and all(
        "*" in (one, other) or one == other for one, other in zip(inner, outer, strict=False)
    )


def _modules_of(key: str, model: Any) -> list[Any]:
    """Return the modules that a plan's entry names."""
    pattern = re.compile(re.escape(key).replace(r"\*", r"[^.]+"))
    return [module for name, module in model.named_modules() if pattern.fullmatch(name)]


def _divide_vocabulary(plan: Plan, model: Any) -> Plan:
    """Return the plan with embedding and output layer divided by vocabulary, and with a score layer in full
    on every rank. The layout of the activations next to these layers is kept."""
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
