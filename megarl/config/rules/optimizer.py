"""Rules on precision, optimizers, learning-rate and weight-decay schedules, and data parallelism."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.config.policy import STATE_KEYS
from megarl.config.rules.backends import MEGATRON, backend_of
from megarl.config.rules.view import Rule, View
from megarl.errors import Violation

OPTIMIZER = f"{MEGATRON}.optimizer"
SCHEDULER = f"{MEGATRON}.scheduler"
DATA_PARALLEL = f"{MEGATRON}.distributed_data_parallel_config"

ADAMS = frozenset({"torch.optim.Adam", "torch.optim.AdamW"})
FIXED = frozenset({"amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize"})
"""Arguments of Adam and AdamW that cannot be combined with states below float32."""


def _megatron(view: View) -> None:
    view.require(backend_of(view) == "megatron")


def optimizer_follows_precision(view: View) -> Iterator[Violation]:
    """Require that ``bf16`` and ``fp16`` of Megatron's optimizer agree with ``policy.precision``."""
    _megatron(view)
    precision = view["policy.precision"]
    for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        key = f"{OPTIMIZER}.{flag}"
        if view.has(key) and view[key] != (precision == name):
            wanted = precision == name
            yield Violation(
                key,
                view[key],
                f"policy.precision is {precision}, so it must be {str(wanted).lower()}",
                "remove the line; it is derived",
            )


def pipeline_type(view: View) -> Iterator[Violation]:
    """Require that ``pipeline_dtype`` is ``policy.precision``."""
    _megatron(view)
    key, precision = f"{MEGATRON}.pipeline_dtype", view["policy.precision"]
    if view[key] != precision:
        yield Violation(
            key,
            view[key],
            f"it must be policy.precision = {precision}",
            "write ${policy.precision}, or remove the line",
        )


def milestones(view: View) -> Iterator[Violation]:
    """Require a valid list in ``policy.scheduler``, see ``milestone_faults``."""
    chosen = view["policy.scheduler"]
    view.require(backend_of(view) != "megatron" and isinstance(chosen, list))
    yield from milestone_faults(chosen)


def milestone_faults(chosen: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    """Yield the faults in a list of schedulers, ``[{name, kwargs}, ..., {milestones: [...]}]``. It ends with
    the numbers of ``train`` calls at which the second and each later scheduler takes over."""
    entries = [entry for entry in chosen if "milestones" not in entry]
    lists = [entry["milestones"] for entry in chosen if "milestones" in entry]
    if not entries or len(lists) > 1 or (lists and "milestones" not in chosen[-1]):
        bound = "a list holds one or more schedules and, at its end, one {milestones: [...]}"
        yield Violation(
            "policy.scheduler",
            list(chosen),
            bound,
            "write [{name, kwargs}, {name, kwargs}, {milestones: [50]}]",
        )
        return
    steps = lists[0] if lists else []
    numbers = isinstance(steps, list) and all(
        isinstance(step, int) and not isinstance(step, bool) for step in steps
    )
    if not numbers or len(steps) != len(entries) - 1 or not all(map(operator.lt, [0, *steps], steps)):
        bound = f"{len(entries)} schedules need {len(entries) - 1} increasing positive milestones"
        fix = "write the train() call at which each next schedule starts"
        yield Violation(f"policy.scheduler[{len(chosen) - 1}].milestones", steps, bound, fix)


def learning_rates(view: View) -> Iterator[Violation]:
    """Require that ``min_lr`` and ``lr_warmup_init`` are at most ``lr``."""
    _megatron(view)
    largest = view[f"{OPTIMIZER}.lr"]
    # Megatron-Core's scheduler asserts the same, but only in the workers, after everything has started.
    for key in (f"{OPTIMIZER}.min_lr", f"{SCHEDULER}.lr_warmup_init"):
        value = view.get(key, 0.0)
        if value > largest:
            yield Violation(
                key,
                value,
                f"it must be at most {OPTIMIZER}.lr = {largest}",
                "write no more than that",
                ({key: largest},),
            )


def learning_rate_is_used(view: View) -> Iterator[Violation]:
    """Refuse a ``policy.learning_rate`` that differs from the optimizer's learning rate, because it has no
    effect by itself."""
    backend = backend_of(view)
    key, used = (
        "policy.learning_rate",
        f"{OPTIMIZER}.lr" if backend == "megatron" else "policy.optimizer.kwargs.lr",
    )
    if view[key] != view[used]:
        bound = f"it is only read through a reference, and {used} = {view[used]} is not one"
        fix = f"write {used}: ${{policy.learning_rate}}, or remove the line"
        yield Violation(key, view[key], bound, fix, ({used: view[key]},))


def decay_of_learning_rate(view: View) -> Iterator[Violation]:
    """Require ``lr_decay_iters`` for a decaying learning rate, and a warm-up that ends before it."""
    _megatron(view)
    key = f"{SCHEDULER}.lr_decay_iters"
    steps, style, warmup = (
        view[key],
        view[f"{SCHEDULER}.lr_decay_style"],
        view[f"{SCHEDULER}.lr_warmup_iters"],
    )
    if steps is None and style != "constant":
        yield Violation(
            key,
            None,
            f"lr_decay_style {style!r} needs the number of steps it decays over",
            "write the steps of the run",
        )
    # Megatron-Core's scheduler asserts this as well.
    if steps is not None and warmup >= steps:
        key = f"{SCHEDULER}.lr_warmup_iters"
        yield Violation(
            key,
            warmup,
            f"it must be less than lr_decay_iters = {steps}",
            "write a smaller number",
            ({key: steps - 1},),
        )


def weight_decay_schedule(view: View) -> Iterator[Violation]:
    """Require that weight decay does not shrink, that it stays the same with the style ``constant``, and
    that a growing one has ``lr_decay_iters``."""
    _megatron(view)
    key = f"{SCHEDULER}.end_weight_decay"
    start, end, style = (
        view[f"{SCHEDULER}.start_weight_decay"],
        view[key],
        view[f"{SCHEDULER}.weight_decay_incr_style"],
    )
    # Megatron-Core's scheduler asserts this, and equality if the style is `constant`.
    if end < start:
        bound = f"weight decay can only grow, and start_weight_decay is {start}"
        yield Violation(key, end, bound, "write no less than that", ({key: start},))
    elif style == "constant" and start != end:
        own = view[f"{OPTIMIZER}.weight_decay"]
        bound = f"weight_decay_incr_style is constant, so it must be start_weight_decay = {start}"
        candidates = ({key: start}, {f"{SCHEDULER}.start_weight_decay": own, key: own})
        yield Violation(key, end, bound, "write the same in both", candidates)
    # The scheduler overwrites the optimizer's weight decay at each step.
    elif style == "constant" and start != view[f"{OPTIMIZER}.weight_decay"]:
        own = view[f"{OPTIMIZER}.weight_decay"]
        bound = (
            f"weight_decay_incr_style is constant, so it must be {OPTIMIZER}.weight_decay = {own}, "
            "which it would replace"
        )
        fix = "remove start_weight_decay and end_weight_decay; they are derived"
        yield Violation(
            f"{SCHEDULER}.start_weight_decay",
            start,
            bound,
            fix,
            ({f"{SCHEDULER}.start_weight_decay": own, key: own},),
        )
    steps = f"{SCHEDULER}.lr_decay_iters"
    if style != "constant" and view[steps] is None:
        yield Violation(
            steps,
            None,
            f"weight_decay_incr_style {style!r} needs the number of steps it grows over",
            "write the steps of the run",
        )


def clipping_agrees(view: View) -> Iterator[Violation]:
    """Require that ``clip_grad`` of Megatron's optimizer agrees with ``policy.max_grad_norm``."""
    _megatron(view)
    # Megatron-Core turns clipping off by 0, the other backends by null.
    clip, norm = view[f"{OPTIMIZER}.clip_grad"], view["policy.max_grad_norm"]
    if clip != (norm or 0.0):
        bound = f"it must be policy.max_grad_norm = {'null, that is 0' if norm is None else norm}"
        yield Violation(
            f"{OPTIMIZER}.clip_grad", clip, bound, "remove the line; it is derived from policy.max_grad_norm"
        )


def low_states(view: View, section: str) -> list[str]:
    """Return the dotted keys of an optimizer section that set a dtype below float32 for its state."""
    keys = [f"{section}.{name}" for name in STATE_KEYS]
    return [key for key in keys if view.get(key, "float32") != "float32"]


def states_fit_the_layout(view: View) -> Iterator[Violation]:
    """Refuse 8-bit states for tied embeddings on two pipeline stages, whose copies would drift apart. Refuse
    states below float32 with float16 gradients, which would be divided by the loss scale in float16."""
    _megatron(view)
    low = low_states(view, OPTIMIZER)
    key = f"{DATA_PARALLEL}.grad_reduce_in_fp32"
    if low and view["policy.precision"] == "float16" and not view[key]:
        yield Violation(
            key,
            False,
            f"{low[0]} is below float32: float16 gradients would be divided by the loss scale in float16",
            "set it to true",
            ({key: True},),
        )
    stages = view[f"{MEGATRON}.pipeline_model_parallel_size"]
    if view.facts.tied_embeddings and stages > 1:
        for key in low:
            if view[key] != "8bit":
                continue
            bound = (
                f"8-bit blocks of the embedding and of its copy in the last of {stages} stages "
                "differ, so the two would drift apart"
            )
            yield Violation(
                key,
                "8bit",
                bound,
                "write bfloat16 or float32, or use one pipeline stage",
                ({key: "bfloat16"},),
            )


def torch_states_are_adams(view: View) -> Iterator[Violation]:
    """Refuse states below float32 on DTensor and FSDP1 for optimizers other than Adam and AdamW, and with
    arguments that do not support them."""
    view.require(backend_of(view) != "megatron" and view["policy.optimizer"] is not None)
    section = "policy.optimizer"
    for key in low_states(view, section):
        name, arguments = view[f"{section}.name"], view[f"{section}.kwargs"]
        if name not in ADAMS:
            yield Violation(
                key,
                view[key],
                f"policy.optimizer.name is {name}, and only Adam and AdamW support it",
                "write name: torch.optim.AdamW",
            )
        fixed = sorted(FIXED.intersection(name for name, value in arguments.items() if value))
        if fixed:
            bound = (
                f"states below float32 do not support {', '.join(fixed)}, which policy.optimizer.kwargs has"
            )
            yield Violation(key, view[key], bound, "remove that, or write float32")


OPTIMIZER_RULES: tuple[Rule, ...] = (
    optimizer_follows_precision,
    pipeline_type,
    milestones,
    learning_rates,
    learning_rate_is_used,
    decay_of_learning_rate,
    weight_decay_schedule,
    clipping_agrees,
    states_fit_the_layout,
    torch_states_are_adams,
)
