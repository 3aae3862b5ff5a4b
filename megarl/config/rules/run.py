"""Rules on the algorithm, its data and what a run leaves behind."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

from megarl.config.rules.backends import MEGATRON, backend_of
from megarl.config.rules.parallel import training_shape
from megarl.config.rules.view import Rule, View
from megarl.config.schema import ABSENT
from megarl.errors import Violation

POLICY_WORKERS = "lm_policy"
"""What the policy's worker group is called."""
SECTIONS = {"grpo": ("grpo", "loss_fn", "env"), "sft": ("sft",)}


def sections_of_algorithm(view: View) -> Iterator[Violation]:
    """The sections that the algorithm needs are there."""
    algorithm = view["algorithm"]
    for section in SECTIONS[algorithm]:
        if not view.written(section):
            yield Violation(section, ABSENT, f"algorithm {algorithm!r} needs this section", "add it")
    if algorithm == "grpo" and view.has("policy") and view.get("policy.generation") is None and not _faulty(view, "policy.generation"):
        yield Violation("policy.generation", None, "algorithm 'grpo' generates answers and needs this section", "add it")


def _faulty(view: View, path: str) -> bool:
    return view.written(path) and not view.has(path)


def megatron_trains(view: View) -> Iterator[Violation]:
    """A policy that an algorithm trains has an optimizer."""
    view.require(view["algorithm"] in SECTIONS and backend_of(view) == "megatron")
    key = f"{MEGATRON}.optimizer"
    if not view.written(key):
        yield Violation(key, ABSENT, "the policy is trained and needs an optimizer", "add the section, with at least lr")


def one_source(view: View) -> Iterator[Violation]:
    """Records come from a file or from a named data set."""
    for section in ("data.train", "data.validation"):
        if not isinstance(view.get(section), dict):
            continue
        path, name = view.written(f"{section}.path"), view.written(f"{section}.name")
        if path == name:
            bound = "path and name are both given" if path else "neither path nor name is given"
            yield Violation(section, view[section], bound, "give path for a file of JSON lines, or name for a data set")
        elif path:
            for key in ("subset", "split"):
                if view.get(f"{section}.{key}") is not None:
                    fix = "remove it, or give name instead of path"
                    yield Violation(f"{section}.{key}", view[f"{section}.{key}"], "a file has no such parts", fix)


def prompt_template_has_place(view: View) -> Iterator[Violation]:
    """The template says where the prompt goes, and nothing else is to be filled in."""
    key = "data.prompt_template"
    template = view[key]
    view.require(template is not None)
    if "{prompt}" not in template:
        yield Violation(key, template, "it must contain {prompt}, the place of the prompt", "add {prompt}")


def validation_has_data(view: View) -> Iterator[Violation]:
    """A run that validates has data to validate on."""
    algorithm = view["algorithm"]
    view.require(view.has("data") and view["data.validation"] is None)
    asked = [key for key in ("val_period", "val_at_start", "val_at_end") if view.get(f"{algorithm}.{key}", 0)]
    if asked:
        key = f"{algorithm}.{asked[0]}"
        yield Violation(key, view[key], "there is no data.validation", "give data.validation, or turn validation off")


def single_turn(view: View) -> Iterator[Violation]:
    """Conversations have one turn."""
    key = "grpo.max_rollout_turns"
    if view[key] != 1:
        yield Violation(key, view[key], "the environments here answer once, so it must be 1", "write 1")


def wandb_is_named(view: View) -> Iterator[Violation]:
    """Weights & Biases needs to know the project."""
    view.require(view["logger.wandb_enabled"])
    if view.get("logger.wandb") is None and not _faulty(view, "logger.wandb"):
        yield Violation(
            "logger.wandb", view.get("logger.wandb", ABSENT), "wandb_enabled is true and needs it", "add wandb: {project: <name>}"
        )


def profiled_steps(view: View) -> Iterator[Violation]:
    """The profiled steps are steps of the run, and something records them."""
    key, steps = "profiler.steps", view["profiler.steps"]
    recorders = {name: view[name] for name in ("profiler.torch_ranks", "profiler.nsys_workers") if view[name]}
    if steps is None:
        for name, value in recorders.items():
            yield Violation(name, value, "profiler.steps says of no step that it is recorded", "write profiler.steps: [3, 5]")
        return
    last = view[f"{view['algorithm']}.max_num_steps"]
    if len(steps) != 2 or not 1 <= steps[0] < steps[1]:
        yield Violation(key, steps, "[first, stop] is wanted, with 1 <= first < stop", "write [3, 5] for steps 3 and 4")
    elif steps[0] > last:
        yield Violation(key, steps, f"the run has {last} steps", f"begin at {last} at the latest")
    elif not recorders:
        yield Violation(key, steps, "no profiler records them", "give profiler.torch_ranks, or profiler.nsys_workers")


def profiled_workers(view: View) -> Iterator[Violation]:
    """The ranks and workers that record are there."""
    ranks, patterns = view["profiler.torch_ranks"], view["profiler.nsys_workers"]
    nodes, per_node = training_shape(view)
    outside = [rank for rank in ranks if not 0 <= rank < nodes * per_node]
    if outside:
        yield Violation("profiler.torch_ranks", ranks, f"ranks of the policy lie in [0, {nodes * per_node})", f"leave out {outside}")
    matches = [pattern.strip() for pattern in (patterns or "").split(",") if fnmatch.fnmatch(POLICY_WORKERS, pattern.strip())]
    if patterns is not None and not matches:
        bound = f"it matches no worker that is profiled: those of the policy are called {POLICY_WORKERS}"
        yield Violation("profiler.nsys_workers", patterns, bound, 'write "*policy*"')


RUN_RULES: tuple[Rule, ...] = (
    sections_of_algorithm,
    megatron_trains,
    one_source,
    prompt_template_has_place,
    validation_has_data,
    single_turn,
    wandb_is_named,
    profiled_steps,
    profiled_workers,
)
