"""Implementation of ``megarl eval``: run the validation of a configuration on a model, without training."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from rich.console import Console
from rich.table import Table

from converters.files.atomic import write_bytes_durably
from megarl import __version__
from megarl.algorithms.algorithm import ACTOR
from megarl.checkpoint.manager import CONFIG_NAME, faults_of_checkpoint, read_info
from megarl.checkpoint.manifest import read_signing_key
from megarl.config.algorithms import generates, own_section
from megarl.config.backend import generation_of
from megarl.config.report import layout_table, output_console, validation_table
from megarl.config.rules.parallel import layout_of
from megarl.config.rules.view import View
from megarl.config.sections import RunConfig
from megarl.config.validation_sets import SetPlan, set_plans
from megarl.distributed.deadlines import validating
from megarl.errors import CheckpointError, ConfigError, StorageError, UnusableCheckpointError, Violation
from megarl.observe.progress import phase
from megarl.observe.timing import PhaseTimer
from megarl.redaction import redacted, redacted_text
from megarl.run.earlier_launch import keep_template_date
from megarl.run.inputs import read_validation
from megarl.run.preflight import fault_of_directory, findings, print_findings, require_this_machine
from megarl.run.resume import ResumePoint
from megarl.run.run import PolicyFactory
from megarl.run.start import engine_of, start_engines, start_policy, start_ray

if TYPE_CHECKING:
    from megarl.rollout.collector import Collector
    from megarl.rollout.evaluation import ValidatedSet, ValidationSet

DIRECTORY = "evaluations"
"""Default directory of the result files, inside the run directory."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        validated: scored samples of each validation set.
        seconds: duration of sampling and scoring.
    """

    validated: tuple[ValidatedSet, ...]
    seconds: float


def check_evaluation(config: RunConfig) -> None:
    """Check that a configuration can be evaluated.

    Raises:
        ConfigError: the algorithm does not generate responses, or there are no validation data.
    """
    if not generates(config):
        bound = "megarl eval samples responses and scores them, which this algorithm does not"
        raise ConfigError(
            [
                Violation(
                    "algorithm",
                    config["algorithm"],
                    bound,
                    "give the configuration of a GRPO run with the same model",
                )
            ]
        )
    if not config["data"]["validation"]:
        raise ConfigError(
            [Violation("data.validation", None, "there is nothing to evaluate on", "give data.validation")]
        )


def weights_to_evaluate(checkpoint: Path | None, signing_key_file: str | None = None) -> ResumePoint:
    """Return the source of the weights: a checkpoint of a run, or with None the configured model.

    Names and sizes of the checkpoint's files are compared with its manifest. Hashes are not verified, because
    that would read the optimizer state, most of the bytes, only for the check. If a signing key is
    configured, all hashes are verified.

    Args:
        checkpoint: checkpoint directory ``step_N``.
        signing_key_file: ``checkpointing.signing_key_file``.

    Raises:
        ConfigError: the directory is not a checkpoint, or the signing key is invalid.
        UnusableCheckpointError: the checkpoint is damaged.
        StorageError: the storage failed; the checkpoint may be intact.
    """
    if checkpoint is None:
        return ResumePoint()
    try:
        step = int(read_info(checkpoint)["step"])
    # A StorageError is a CheckpointError, but a path that cannot be read now may well be a checkpoint.
    except StorageError:
        raise
    except (CheckpointError, KeyError, TypeError, ValueError):
        near = sorted(
            (*checkpoint.glob("step_*"), *checkpoint.glob("checkpoints/step_*")),
            # Sort shorter names first, so that step_9 comes before step_10.
            key=lambda path: (len(path.name), path.name),
        )
        fix = (
            f"give one of {', '.join(map(str, near))}"
            if near
            else "give the directory step_N of a run's checkpoints"
        )
        bound = (
            "it is not a checkpoint: it has no training_info.json with a step"
            if checkpoint.is_dir()
            else "there is no such directory"
        )
        raise ConfigError([Violation("--checkpoint", str(checkpoint), bound, fix)]) from None
    key = read_signing_key(signing_key_file)
    problems = faults_of_checkpoint(checkpoint, hashes=key is not None, key=key)
    if problems:
        raise UnusableCheckpointError(
            f"checkpoint {checkpoint} is damaged: {'; '.join(problems[:5])}. Fix: evaluate another one"
        )
    return ResumePoint(step, None, checkpoint.absolute())


def evaluate(config: RunConfig, weights: ResumePoint, make_policy: PolicyFactory | None = None) -> Evaluation:
    """Sample and score responses on all validation sets, exactly as a validation of a run with these weights
    does.

    The policy has no optimizer and no reference policy, and the training data are not read.

    Args:
        config: configuration of a run, accepted by ``check_evaluation``.
        weights: result of ``weights_to_evaluate``.
        make_policy: builds the policy; None builds a real one on Ray.

    Raises:
        MegarlError: the data, the model, the checkpoint or a worker failed.
        ConversionError: the model cannot be converted.
    """
    if make_policy is None:
        require_this_machine(config, trains=False)
    with ExitStack() as stack:
        if make_policy is None:
            start_ray(stack, config["deadlines"]["init_s"], config["deadlines"]["least_s"])
        # Use the date that the run's prompts contain, so that the result equals the run's own validation.
        if weights.checkpoint is not None:
            keep_template_date(config, [weights.checkpoint / CONFIG_NAME])
        tokenizer, environment, dataset = read_validation(
            config, stack, of_checkpoint=weights.checkpoint is not None
        )
        # The algorithm generates responses, because check_evaluation has refused all others.
        assert environment is not None
        make = make_policy or functools.partial(start_policy, trains=False)
        policy = make(config, tokenizer, weights, stack, ACTOR)
        refit = start_engines(config, policy, stack)

        from megarl.rollout.collector import Collector
        from megarl.rollout.evaluation import validation_sets

        collector = Collector.of_run(
            config, own_section(config), policy, tokenizer, environment, PhaseTimer(), refit
        )
        size = own_section(config).get("val_batch_size")
        begun = time.monotonic()
        with validating():
            validated = tuple(_answered(collector, each, size) for each in validation_sets(config, dataset))
        return Evaluation(validated, time.monotonic() - begun)


def _answered(collector: Collector, of_set: ValidationSet, size: int | None) -> ValidatedSet:
    from megarl.rollout.evaluation import answer_set

    with phase(f"{of_set.plan.name} answered") as shown:
        validated = answer_set(collector, of_set, size)
        shown.detail = f"{len(validated.accuracies):,} samples"
    return validated


class EvaluatedWeights(TypedDict):
    """The weights that were evaluated; a local model is identified by its absolute path."""

    model: str
    adapter: str | None
    checkpoint: str | None
    step: int | None


class EvaluationResult(EvaluatedWeights):
    """Content of a result file: ``metrics`` has the names and exact values that a run would log, ``sets`` the
    sampling settings and metrics of each validation set."""

    megarl: str
    engine: str
    seconds: float
    metrics: Mapping[str, float]
    sets: Mapping[str, Mapping[str, Any]]


def result_of(evaluation: Evaluation, config: RunConfig, weights: ResumePoint) -> EvaluationResult:
    """Return the result as JSON values."""
    from megarl.rollout.evaluation import metrics_of_set, validation_metrics

    metrics = validation_metrics(evaluation.validated)
    return {
        "megarl": __version__,
        **_weights_of(config, weights),
        "engine": generation_of(config["policy"])["backend"],
        "seconds": evaluation.seconds,
        "metrics": {f"validation/{name}": value for name, value in metrics.items()},
        "sets": {
            each.plan.name: {
                **_sampling_of(each.plan),
                "not_scored": int(each.accuracies.isnan().sum()),
                **metrics_of_set(each),
            }
            for each in evaluation.validated
        },
    }


def _weights_of(config: RunConfig, weights: ResumePoint) -> EvaluatedWeights:
    model = config["policy"]["model_name"]
    return {
        # ``result_path`` compares this path with earlier results, which may come from another working
        # directory.
        "model": str(Path(model).absolute()) if Path(model).is_dir() else model,
        "adapter": config["policy"]["merged_adapter"],
        "checkpoint": None if weights.checkpoint is None else str(weights.checkpoint),
        "step": None if weights.checkpoint is None else weights.step,
    }


def _sampling_of(plan: SetPlan) -> dict[str, object]:
    """Return the settings with which a validation set was sampled."""
    return {
        "answers_a_prompt": plan.generations,
        **{name: getattr(plan, name) for name in ("temperature", "top_p", "top_k", "max_prompts")},
    }


def result_path(config: RunConfig, weights: ResumePoint) -> Path:
    """Return the default file for a result: ``evaluations/step_40.json`` in the run directory, or the model's
    name instead of ``step_40``.

    A result of the same weights, sets and sampling settings is replaced. If the file contains another result,
    a number is appended: ``step_40-2.json``.
    """
    named = config["policy"]["merged_adapter"] or config["policy"]["model_name"]
    name = f"step_{weights.step}" if weights.checkpoint is not None else Path(named).name
    directory = Path(config["run_dir"]) / DIRECTORY
    evaluated = _weights_of(config, weights)
    sampling = {plan.name: _sampling_of(plan) for plan in set_plans(config)}
    paths = itertools.chain(
        [directory / f"{name}.json"], (directory / f"{name}-{number}.json" for number in itertools.count(2))
    )
    return next(path for path in paths if not path.exists() or _is_result_of(path, evaluated, sampling))


def _is_result_of(
    path: Path, evaluated: EvaluatedWeights, sampling: Mapping[str, Mapping[str, object]]
) -> bool:
    """Return whether a file contains a result with these weights, sets and sampling settings."""
    try:
        found = json.loads(path.read_bytes())
        same_weights = all(found.get(key) == value for key, value in evaluated.items())
        sets = {}
        for name, figures in found["sets"].items():
            sets[name] = {key: figures[key] for key in sampling[name]}
    # A file that is not in this format is not ours to replace.
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return False
    return same_weights and sets == sampling


def result_table(result: EvaluationResult) -> Table:
    """Return a table with one row of metrics for each validation set."""
    table = Table(
        title=f"{result['checkpoint'] or result['adapter'] or result['model']}: {result['seconds']:.1f} s"
    )
    for heading in (
        "set",
        "answers",
        "unscored",
        "k",
        "mean@k",
        "± 95 %",
        "pass@k",
        "majority@k",
        "truncated",
        "tokens",
    ):
        table.add_column(
            heading, justify="left" if heading == "set" else "right", overflow="fold", min_width=len(heading)
        )
    for name, found in result["sets"].items():
        k = found["answers_a_prompt"]
        figures = (f"mean@{k}", f"mean@{k}_ci95", f"pass@{k}", f"majority@{k}", "truncated")
        shown = (f"{found[figure]:.4f}" if figure in found else "" for figure in figures)
        counts = (f"{found['samples']:,}", f"{found['not_scored']:,}", str(k))
        table.add_row(name, *counts, *shown, f"{found['generation_length']:.1f}")
    return table


def run(config: RunConfig, checkpoint: Path | None, out: Path | None, *, dry_run: bool) -> int:
    """Evaluate, print a table, and write the result as JSON. Return the exit code.

    Args:
        config: checked configuration of a run.
        checkpoint: checkpoint with the weights; None for the configured model.
        out: result file; None for a file in the run directory.
        dry_run: only check what needs no data, and print what would be evaluated.

    Raises:
        MegarlError, ConversionError: as in ``evaluate``, ``check_evaluation`` and ``weights_to_evaluate``.
    """
    check_evaluation(config)
    weights = weights_to_evaluate(checkpoint, config["checkpointing"]["signing_key_file"])
    path = out or result_path(config, weights)
    console = output_console()
    if dry_run:
        _describe(config, weights, path, console)
        return 0
    _require_writable(path, "run_dir" if out is None else "--json")
    result = redacted(result_of(evaluate(config, weights), config, weights))
    # Print before writing, so that the evaluation is not lost if the write fails.
    console.print(result_table(result))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_durably(path, json.dumps(result, indent=1).encode())
    console.print(f"written to {path}", markup=False, soft_wrap=True)
    return 0


def _require_writable(path: Path, key: str) -> None:
    """Check that the result file can be written, before time is spent on the evaluation.

    Raises:
        ConfigError: it cannot be written.
    """
    fault = ("it is a directory", "give a file") if path.is_dir() else fault_of_directory(path.parent)
    if fault:
        raise ConfigError([Violation(key, str(path), *fault)])


def _describe(config: RunConfig, weights: ResumePoint, path: Path, console: Console) -> None:
    """Check the model's files, and print which weights would be evaluated on which sets."""
    from megarl.run.model_check import check_model_on_disk

    check_model_on_disk(config["policy"])
    kind = engine_of(config)
    console.print(layout_table(layout_of(View(config))))
    seen = redacted(config)
    console.print(validation_table(seen))
    facts = {
        "model": seen["policy"]["model_name"],
        "weights": "of the model" if weights.checkpoint is None else f"of {weights.checkpoint}",
        **(
            {}
            if config["policy"]["merged_adapter"] is None
            else {"adapter": seen["policy"]["merged_adapter"]}
        ),
        "generates": "the policy itself" if kind is None else kind.title,
        "result": path,
    }
    for name, fact in facts.items():
        console.print(redacted_text(f"{name}: {fact}"), markup=False, soft_wrap=True)
    print_findings(findings(config, trains=False), console)
