"""Train a tiny language model by reinforcement learning on real Megatron-Core, without a GPU.

Creates problems and a tiny model, runs the two recipes in ``configs/quickstart`` (SFT, then GRPO) as ``megarl
train`` would, plots the reward, and evaluates the exported model with plain transformers.

Options select variants: a task with a tool (``--task calculator``), a torch backend (``--backend dtensor`` or
``fsdp1``), vLLM on the policy's devices or on its own (``--generation vllm`` or ``vllm-apart``), LoRA
(``--adapter lora``), and a hybrid of gated delta net and attention (``--family qwen3_5``).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from converters.files.atomic import write_json_atomic
from megarl.config import load_config
from megarl.config.recipes import directory
from megarl.config.sections import Config
from megarl.config.validate import validate_config
from megarl.errors import MegarlError

CONFIGS = directory() / "quickstart"
SUMMARY = "summary.json"
BACKENDS = {
    "megatron": "Megatron tensor parallel 2",
    "dtensor": "DTensor tensor parallel 2",
    "fsdp1": "FSDP1 on two ranks",
}
GENERATION: dict[str, list[str]] = {
    "policy": [],
    "apart": ["apart.yaml"],
    "vllm": ["vllm.yaml"],
    "vllm-apart": ["vllm-apart.yaml"],
}
ADAPTERS: dict[str, list[str]] = {"none": [], "lora": ["lora.yaml"]}
FAMILIES = ("qwen2", "qwen3", "qwen3_5")
"""Families of the tiny model; keys of ``megarl.quickstart.material.FAMILIES``."""
TASKS = {"arithmetic": "", "calculator": "calculator-"}
"""Task -> prefix of the file names of its two recipes."""
TRAIN_PROBLEMS, VALIDATION_PROBLEMS = 16_000, 256
CARELESS_SHARE, GUESS_SHARE = 0.6, 0.7
# Every seed is evaluated on the same problems, so that their accuracies are comparable.
VALIDATION_SEED = 1000


@dataclass(frozen=True, slots=True)
class Summary:
    """Results of one quickstart run. Accuracies use greedy decoding on the same 256 validation problems.

    Attributes:
        seed: seed of problems, model and training.
        accuracy_before: accuracy before GRPO, as logged by the run.
        accuracy_after: accuracy after GRPO, as logged by the run.
        accuracy_transformers: accuracy of the exported model, evaluated with plain transformers.
        seconds: duration of the run.
        model: directory of the exported model.
        plot: file of the reward plot.
        tool_calls: calls per conversation of the exported model; None for a task without tools.
        accuracy_without_tool: accuracy before GRPO if no tool is offered; None for a task without tools.
    """

    seed: int
    accuracy_before: float
    accuracy_after: float
    accuracy_transformers: float
    seconds: float
    model: str
    plot: str
    tool_calls: float | None = None
    accuracy_without_tool: float | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the quickstart for each seed. Return 0, or the exit code of the first error."""
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="one complete run for each seed (default: 1)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/quickstart"),
        help="directory of the runs (default: runs/quickstart)",
    )
    parser.add_argument(
        "--task",
        choices=TASKS,
        default="arithmetic",
        help="what the model learns; with calculator, to call a tool",
    )
    parser.add_argument(
        "--family", choices=FAMILIES, default="qwen2", help="family of the tiny model (default: qwen2)"
    )
    parser.add_argument(
        "--backend", choices=BACKENDS, default="megatron", help="what the policy runs on (default: megatron)"
    )
    parser.add_argument(
        "--generation",
        choices=GENERATION,
        default="policy",
        help="what generates the responses (default: policy)",
    )
    parser.add_argument(
        "--adapter", choices=ADAPTERS, default="none", help="what reinforcement trains (default: all weights)"
    )
    parser.add_argument(
        "--asynchronous",
        action="store_true",
        help="sample responses to the next problems while the policy trains on these",
    )
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        metavar=("SFT", "GRPO"),
        help="steps of fine-tuning and of GRPO (default: 250 60; of the calculator: 300 24)",
    )
    parser.add_argument(
        "overrides", nargs="*", help="overrides of the GRPO part, for example grpo.max_num_steps=20"
    )
    chosen = parser.parse_args(arguments)
    if chosen.backend == "fsdp1" and chosen.adapter != "none":
        # The configuration's own rule would name keys that the user has not written.
        parser.error(f"--adapter {chosen.adapter}: FSDP1 has no adapters; use --backend megatron or dtensor")
    if chosen.family == "qwen3_5" and (refused := _refused_with_gated_delta_nets(chosen)):
        parser.error(
            f"{refused}: not supported with gated delta nets, which --family qwen3_5 has; leave it "
            "out, or use another family"
        )
    if chosen.asynchronous:
        # Engines that sample while the policy trains need their own devices.
        chosen.generation = {"policy": "apart", "vllm": "vllm-apart"}.get(
            chosen.generation, chosen.generation
        )
    console = Console()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with ExitStack() as stack:
        return _run_all(chosen, console, stack)


def _refused_with_gated_delta_nets(chosen: argparse.Namespace) -> str | None:
    """Return the option that is not supported with gated delta nets, or None. The configuration's own rule
    would name keys that the user has not written."""
    if chosen.backend != "megatron":
        return f"--backend {chosen.backend}"
    if chosen.adapter != "none":
        return f"--adapter {chosen.adapter}"
    return f"--generation {chosen.generation}" if "vllm" in chosen.generation else None


def _run_all(chosen: argparse.Namespace, console: Console, stack: ExitStack) -> int:
    """Run all seeds on one Ray cluster, and return the exit code."""
    from megarl.run.start import start_ray

    try:
        start_ray(stack)
        # All seeds share one Ray cluster, because its start takes seconds.
        summaries = [
            run_once(seed, _directory(chosen, seed), _changes(chosen), console) for seed in chosen.seeds
        ]
    except MegarlError as error:
        console.print(f"[bold red]quickstart failed[/]: {error}", markup=True, highlight=False)
        return error.exit_code
    # An overridden reward may measure something else than exact matches.
    _report(summaries, console, shaped=any("env.reward" in change for change in chosen.overrides))
    if len(summaries) > 1:
        from megarl.observe.plots import compare_runs

        picture = chosen.out / "seeds.png"
        compare_runs([Path(summary.model).parents[1] for summary in summaries], picture)
        console.print(f"all seeds: {picture}")
    return 0


def _directory(chosen: argparse.Namespace, seed: int) -> Path:
    """Return the directory for a seed: of an unfinished run, which is resumed, or else a new one."""
    generation = (
        chosen.generation.replace("apart", "asynchronous") if chosen.asynchronous else chosen.generation
    )
    parts = [chosen.task, chosen.family, chosen.backend, generation, chosen.adapter, f"seed-{seed}"]
    # Leave out default values, so that the usual run has a short name.
    name, number = (
        "-".join(part for part in parts if part not in {"arithmetic", "qwen2", "megatron", "policy", "none"}),
        1,
    )
    while True:
        directory = chosen.out / (name if number == 1 else f"{name}.{number}")
        # A directory without a summary is new or belongs to an unfinished run, which is then resumed.
        if not (directory / SUMMARY).exists():
            return directory
        number += 1


@dataclass(frozen=True, slots=True)
class _Changes:
    """Differences of a run from the two recipes.

    Attributes:
        task, family, backend, generation, adapter: keys of ``TASKS``, ``FAMILIES``, ``BACKENDS``,
            ``GENERATION`` and ``ADAPTERS``.
        asynchronous: sample responses while the policy trains.
        sft, grpo: overrides of each recipe.
    """

    task: str
    family: str
    backend: str
    generation: str
    adapter: str
    asynchronous: bool
    sft: list[str]
    grpo: list[str]


def _changes(chosen: argparse.Namespace) -> _Changes:
    sft, grpo = (
        ([], [])
        if chosen.steps is None
        else ([f"sft.max_num_steps={chosen.steps[0]}"], [f"grpo.max_num_steps={chosen.steps[1]}"])
    )
    names = (chosen.task, chosen.family, chosen.backend, chosen.generation, chosen.adapter)
    return _Changes(*names, chosen.asynchronous, sft, [*grpo, *chosen.overrides])


def run_once(seed: int, directory: Path, changes: _Changes, console: Console) -> Summary:
    """Run one seed in ``directory``: create problems and model, train with SFT and GRPO, plot, and evaluate
    the exported model."""
    from transformers.utils import logging as hugging_face_logging

    from megarl.observe.plots import plot_run

    hugging_face_logging.disable_progress_bar()  # A tiny model's files need no progress bars.
    started = time.monotonic()
    data, model = directory / "data", directory / "model"
    demonstrations, train, validation = (
        data / "demonstrations.jsonl",
        data / "train.jsonl",
        data / "validation.jsonl",
    )
    # This file is written last, so if it exists, all others do.
    if not validation.exists():
        console.rule(f"seed {seed}: making problems and a tiny {changes.family} model in {directory}")
        data.mkdir(parents=True, exist_ok=True)
        (_make_calculator if changes.task == "calculator" else _make_arithmetic)(
            data, model, seed, changes.family
        )
    recipes = [CONFIGS / f"{TASKS[changes.task]}{part}.yaml" for part in ("sft", "grpo")]

    console.rule(f"seed {seed}: supervised fine-tuning, {BACKENDS[changes.backend]}")
    sft, grpo = directory / "sft", directory / "grpo"
    common, layers = [f"seed={seed}"], [CONFIGS / f"{changes.backend}.yaml"]
    beside = ["asynchronous.yaml"] if changes.asynchronous else []
    further = (*GENERATION[changes.generation], *beside, *ADAPTERS[changes.adapter])
    sources = [f"data.train.path={train}", f"data.validation.path={validation}"]

    def second_part(start: Path) -> Config:
        overrides = [*common, f"run_dir={grpo}", f"policy.model_name={start}", *sources, *changes.grpo]
        return load_config(recipes[1], overrides, [*layers, *(CONFIGS / layer for layer in further)])

    # Report an invalid override of the second part now, not after the first part has run.
    validate_config(second_part(model))
    overrides = [
        *common,
        f"run_dir={sft}",
        f"policy.model_name={model}",
        f"data.train.path={demonstrations}",
        *changes.sft,
    ]
    _train(load_config(recipes[0], overrides, layers))

    answering = "" if changes.generation == "policy" else f", {changes.generation} generates"
    console.rule(f"seed {seed}: GRPO, {BACKENDS[changes.backend]}{answering}")
    _train(second_part(_export(sft)))

    console.rule(f"seed {seed}: plot, and a check of the export by plain transformers")
    plots = plot_run(grpo)
    accuracies = _validation_accuracies(grpo / "metrics.jsonl")
    exported = _export(grpo)
    summary = Summary(
        seed=seed,
        accuracy_before=accuracies[0],
        accuracy_after=accuracies[-1],
        **_check(changes.task, exported, _export(sft), validation),
        seconds=time.monotonic() - started,
        model=str(exported),
        plot=str(plots[0]),
    )
    # Written last, because a run with this file counts as finished.
    write_json_atomic(directory / SUMMARY, asdict(summary))
    return summary


def _make_arithmetic(data: Path, model: Path, seed: int, family: str) -> None:
    """Write the data files of the arithmetic task, and a model."""
    from megarl.quickstart.material import make_model, write_pairs, write_problems

    make_model(model, seed, family)
    # Another seed, so that GRPO trains on other problems than SFT.
    write_problems(data / "demonstrations.jsonl", TRAIN_PROBLEMS, seed + 5000, mistake_share=CARELESS_SHARE)
    write_problems(data / "train.jsonl", TRAIN_PROBLEMS, seed)
    write_pairs(data / "pairs.jsonl", TRAIN_PROBLEMS, seed)
    write_pairs(data / "validation-pairs.jsonl", VALIDATION_PROBLEMS, VALIDATION_SEED, "validation")
    write_problems(data / "validation.jsonl", VALIDATION_PROBLEMS, VALIDATION_SEED, "validation")


def _make_calculator(data: Path, model: Path, seed: int, family: str) -> None:
    """Write the data files of the calculator task, and a model whose chat template renders tool calls."""
    from megarl.quickstart.calculator import make_calculator_model, write_conversations, write_products

    make_calculator_model(model, seed, family)
    write_conversations(data / "demonstrations.jsonl", TRAIN_PROBLEMS, seed + 5000, GUESS_SHARE)
    write_products(data / "train.jsonl", TRAIN_PROBLEMS, seed)
    write_products(data / "validation.jsonl", VALIDATION_PROBLEMS, VALIDATION_SEED, "validation")


def _check(task: str, exported: Path, before: Path, validation: Path) -> dict[str, float]:
    """Evaluate the exported model with plain transformers and, for the calculator task, also the model before
    GRPO. Return fields of ``Summary``."""
    from megarl.quickstart.material import evaluate_checkpoint

    if task == "arithmetic":
        # An answer has one or two digits, which are a token each, and an EOS token.
        return {"accuracy_transformers": evaluate_checkpoint(exported, validation, max_new_tokens=3)}
    from megarl.quickstart.calculator import evaluate_conversations

    accuracy, calls = evaluate_conversations(exported, validation)
    without, _ = evaluate_conversations(before, validation, with_tool=False)
    return {"accuracy_transformers": accuracy, "tool_calls": calls, "accuracy_without_tool": without}


def _train(config: Config) -> None:
    """Run one part. Exit if it was stopped, because the next part needs its results."""
    from megarl.observe.progress import ProgressConsole, progress_shown
    from megarl.run.run import run

    with progress_shown(ProgressConsole()):
        code = run(validate_config(config))
    if code:
        raise SystemExit(code)


def _export(run_dir: Path) -> Path:
    """Return the newest exported Hugging Face model of a run."""
    # As strings, step_60 would sort after step_100.
    return max((run_dir / "hf").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))


def _validation_accuracies(metrics: Path) -> list[float]:
    """Return the validation accuracies of a run, in the order of steps."""
    rows = list(map(json.loads, metrics.read_text().splitlines()))
    return [row["validation/accuracy"] for row in rows if row.get("validation/accuracy") is not None]


def _report(summaries: Sequence[Summary], console: Console, *, shaped: bool) -> None:
    """Print a table with one row per run.

    Args:
        summaries: results of the runs.
        console: output.
        shaped: the reward was overridden, so the run's accuracies may differ from those of plain
            transformers.
    """
    # With another reward, the validation accuracy is not the share of exact matches.
    caption = "plain transformers: the share of exact matches, independent of env.reward" if shaped else None
    table = Table(title="greedy validation accuracy over the same 256 problems", caption=caption)
    for heading in ("seed", "before GRPO", "after GRPO", "gain", "plain transformers", "seconds"):
        table.add_column(heading, justify="right")
    for summary in summaries:
        table.add_row(
            str(summary.seed),
            f"{summary.accuracy_before:.3f}",
            f"{summary.accuracy_after:.3f}",
            f"{summary.accuracy_after - summary.accuracy_before:+.3f}",
            f"{summary.accuracy_transformers:.3f}",
            f"{summary.seconds:.0f}",
        )
    console.print(table)
    for summary in summaries:
        # soft_wrap keeps a long path in one piece, so that it can be copied.
        console.print(f"reward curve: {summary.plot}", soft_wrap=True, highlight=False)
        console.print(f"Hugging Face model: {summary.model}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
