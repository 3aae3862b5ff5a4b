"""Rules on distillation: teachers, their sources, and the settings of each mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.config.distillation import OF_SOURCE, SECTION, TEACHER, TEACHERS, source_key, train_sources
from megarl.config.environments import fault_of_name
from megarl.config.models import POLICY
from megarl.config.rules.view import Rule, View
from megarl.config.schema import ABSENT
from megarl.errors import Violation

_LOSS = "loss_fn"
_TOPK_LOGITS_K = f"{SECTION}.topk_logits_k"
_SAMPLING = {"top_p": 1.0, "top_k": None}


def teachers_of(view: View) -> dict[str, str]:
    """Return the teachers of a run, name -> dotted path of the section. The calling rule does not apply if
    the algorithm has no teachers."""
    view.require({TEACHER, TEACHERS} <= view.algorithm.MODELS.keys())
    view.require(not view.has_faults(TEACHER) and not view.has_faults(TEACHERS))
    if view.get(TEACHER) is not None:
        return {TEACHER: TEACHER}
    named = view.get(TEACHERS)
    return {name: f"{TEACHERS}.{name}" for name in named} if isinstance(named, Mapping) else {}


def somebody_teaches(view: View) -> Iterator[Violation]:
    """Require a section ``teacher`` or ``teachers``, but not both."""
    paths, algorithm = teachers_of(view), view["algorithm"]
    if view.get(TEACHER) is not None and view.get(TEACHERS) is not None:
        yield Violation(
            TEACHERS,
            list(view[TEACHERS]),
            f"there is a section {TEACHER} too",
            f"move that under {TEACHERS}, or remove one",
        )
    elif not paths:
        bound = f"algorithm {algorithm!r} needs a model that the policy learns from"
        yield Violation(
            TEACHER,
            view.get(TEACHERS, ABSENT),
            bound,
            f"add {TEACHER}: {{model_name: ...}}, or {TEACHERS} by name",
        )
    for name, path in paths.items():
        if path != TEACHER:
            yield from fault_of_name(path, name)


def sources_have_teachers(view: View) -> Iterator[Violation]:
    """Require that ``teacher_of_source`` maps each training source to one of several teachers, and uses each
    teacher."""
    names = list(teachers_of(view))
    view.require((view.get(TEACHER) is None and bool(names)) or view.get(OF_SOURCE) is not None)
    chosen = view[OF_SOURCE]
    if view.get(TEACHER) is not None:
        yield Violation(
            OF_SOURCE,
            chosen,
            f"{TEACHER} teaches all sources, and nothing reads it",
            f"write null, or {TEACHERS} by name",
        )
        return
    if chosen is None:
        if len(names) > 1:
            yield Violation(
                OF_SOURCE,
                None,
                f"the teachers are {', '.join(names)}, and no source is mapped to one",
                "map each source to a teacher",
            )
        return
    view.require(view.has("data.train") and not view.has_faults("data.train"))
    keys = list(map(source_key, train_sources(view["data"])))
    for key in dict.fromkeys(keys):
        if key not in chosen:
            yield Violation(
                OF_SOURCE,
                chosen,
                f"the source {key!r} of data.train has no teacher",
                f"add {key}: {' or '.join(names)}",
            )
    for key, name in chosen.items():
        if key not in keys:
            bound = f"data.train has no such source; its sources are {', '.join(dict.fromkeys(keys))}"
            yield Violation(f"{OF_SOURCE}.{key}", name, bound, "remove it, or write one of these sources")
        elif name not in names:
            yield Violation(
                f"{OF_SOURCE}.{key}", name, f"the teachers are {', '.join(names)}", "write one of them"
            )
    for name in names:
        if name not in chosen.values():
            fix = f"remove it, or map a source to it in {OF_SOURCE}"
            yield Violation(f"{TEACHERS}.{name}", ABSENT, "no source of data.train has this teacher", fix)


def teachers_see_the_distribution_that_tokens_are_drawn_from(view: View) -> Iterator[Violation]:
    """Require that teacher and policy have the same temperature, and that sampling excludes no tokens,
    because an excluded token has no probability to compare."""
    paths = teachers_of(view)
    generation = f"{POLICY}.generation"
    for key, default in _SAMPLING.items():
        value = view.get(f"{generation}.{key}", default)
        if value != default:
            bound = (
                "the policy's probabilities are compared with the teacher's, and a token excluded "
                "from sampling has none"
            )
            yield Violation(
                f"{generation}.{key}", value, bound, f"write {'null' if default is None else default}"
            )
    temperature = view[f"{generation}.temperature"]
    for path in paths.values():
        own = view.get(f"{path}.generation.temperature", temperature)
        if own != temperature:
            bound = (
                f"{generation}.temperature is {temperature}, and distributions at different "
                "temperatures never match"
            )
            yield Violation(f"{path}.generation.temperature", own, bound, "remove it")
        for key in _SAMPLING:
            value, of_policy = view.get(f"{path}.generation.{key}"), view.get(f"{generation}.{key}")
            if view.has(f"{path}.generation.{key}") and value != of_policy:
                yield Violation(
                    f"{path}.generation.{key}", value, f"{generation}.{key} is {of_policy}", "remove it"
                )


def way_of_learning_has_a_loss(view: View) -> Iterator[Violation]:
    """Require the loss that ``distillation.mode`` needs, with settings that do not make all gradients 0."""
    # Called for its NotApplicableError: the rule does not apply to algorithms without teachers.
    teachers_of(view)
    view.require(not view.has_faults(SECTION))
    mode = view[f"{SECTION}.mode"]
    if mode == "topk":
        outside = f"{SECTION}.outside_topk"
        if view[_TOPK_LOGITS_K] == 1 and view[outside] == "renormalize":
            bound = (
                f"{outside} is renormalize: over one token both probabilities are 1, so loss and "
                "gradient are always 0"
            )
            yield Violation(_TOPK_LOGITS_K, 1, bound, "write 2 or more, or outside_topk: rest")
    elif not view.written(_LOSS):
        yield Violation(
            _LOSS, ABSENT, f"{SECTION}.mode is {mode}, which needs a policy-gradient loss", "add the section"
        )
    if view.get(f"{SECTION}.advantage_clip_low") == 0 and view.get(f"{SECTION}.advantage_clip_high") == 0:
        bound = "advantage_clip_high is 0 too, so all advantages would be 0"
        yield Violation(f"{SECTION}.advantage_clip_low", 0, bound, "widen one of the two")


def teacher_has_so_many_tokens(view: View) -> Iterator[Violation]:
    """Require that ``topk_logits_k`` is at most the size of the vocabulary."""
    teachers_of(view)
    view.require(view[f"{SECTION}.mode"] == "topk")
    value, size = view[_TOPK_LOGITS_K], view.facts.vocab_size
    if value > size:
        yield Violation(
            _TOPK_LOGITS_K,
            value,
            f"the vocabulary has {size} tokens",
            "write no more than that",
            ({_TOPK_LOGITS_K: size},),
        )


DISTILLATION_RULES: tuple[Rule, ...] = (
    somebody_teaches,
    sources_have_teachers,
    teachers_see_the_distribution_that_tokens_are_drawn_from,
    way_of_learning_has_a_loss,
    teacher_has_so_many_tokens,
)
