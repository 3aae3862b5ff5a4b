"""Report of ``megarl train --dry-run``: resolved configuration, rank layout, batch sizes and memory plan."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import NoReturn

import yaml
from rich.console import Console
from rich.table import Table

from converters.model_config.architecture import ModelFacts
from megarl.config.algorithms import generates, rows_of_record
from megarl.config.arithmetic import BatchPlan
from megarl.config.backend import generation_of
from megarl.config.layout import Layout
from megarl.config.memory import RankMemory
from megarl.config.memory_run import (
    Moment,
    checkpoint_bytes,
    checkpoint_bytes_beside,
    checkpoints_kept,
    device_gib,
    disk_bytes,
    host_memory,
)
from megarl.config.plan import (
    batch_plan,
    engine_memory_of,
    ledger,
    memory_of_models,
    memory_of_run,
    size_text,
)
from megarl.config.rules.parallel import engines_shape, layout_of, training_shape
from megarl.config.rules.view import View
from megarl.config.sections import RunConfig
from megarl.config.validation_sets import set_plans, validation_sources
from megarl.redaction import redacted

WIDTH = 100
# More ranks than this are abbreviated, because large runs have thousands.
RANKS_SHOWN = 32
# Attribute of ``RankMemory`` -> its label in the table.
_TERMS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "plus: logits, output layer",
    "recomputed": "or plus: a recomputed layer",
    "scoring": "at another time: a log-probability pass",
    "generation_cache": "at another time: generation cache",
}


class _Output(Console):
    def on_broken_pipe(self) -> NoReturn:
        # By default rich exits with code 1. Raise instead, so that ``quiet_without_reader`` gives all
        # commands the same exit code.
        raise BrokenPipeError


def output_console(*, highlight: bool = False) -> Console:
    """Return a console for standard output, as wide as the terminal, or ``WIDTH`` columns if it is not a
    terminal."""
    return _Output(highlight=highlight, width=None if sys.stdout.isatty() else WIDTH)


def print_report(config: RunConfig, facts: ModelFacts | None, console: Console) -> None:
    """Print the complete dry-run report.

    Args:
        config: a checked run with its defaults.
        facts: sizes of the policy's model; None if unknown, which leaves out the memory tables.
        console: console to print to, at least 100 columns wide.
    """
    layout = layout_of(View(config))
    console.rule("configuration")
    # Redact before the console wraps lines, because half of a secret would not be recognised.
    shown = redacted(config)
    console.print(yaml.safe_dump(shown, sort_keys=False, width=WIDTH - 4), markup=False, highlight=False)
    console.print(layout_table(layout))
    answers_to = "prompts" if generates(config) else "pairs" if rows_of_record(config) > 1 else None
    console.print(batch_table(batch_plan(config, layout), answers_to))
    if generates(config) and validation_sources(config):
        console.print(validation_table(shown))
    if facts is None:
        console.print(
            f"No memory estimate: the config.json of {shown['policy']['model_name']} is not on this disk.",
            markup=False,
        )
        return
    ranks, beside = memory_of_run(config)[1], memory_of_models(config)
    console.print(memory_table(ranks))
    for path, of_model in beside.items():
        console.print(memory_table(of_model, path))
    console.print(surroundings_table(config, facts, ranks, beside))
    moments = ledger(config, facts, ranks)
    if moments:
        shares = generation_of(config["policy"])["colocated"]["enabled"]
        console.print(ledger_table(moments, device_gib(config["cluster"]), shares=shares))


def layout_table(layout: Layout) -> Table:
    """Return a table of the ranks: index on each parallel axis, node, and rank on the node. With more than
    ``RANKS_SHOWN`` ranks, only the first and last ones are listed."""
    sizes = (
        f"pipeline {layout.pipeline} x data {layout.data} x context {layout.context} x tensor {layout.tensor}"
    )
    table = Table(title=f"{layout.world_size} ranks: {sizes}")
    for heading in ("rank", "pipeline", "data", "context", "tensor", "node", "rank on node"):
        table.add_column(heading, justify="right")
    for rank in _shown(layout.world_size):
        if rank is None:
            table.add_row(*["..."] * 7)
            continue
        place = layout.coordinates(rank)
        numbers = (
            place.rank,
            place.pipeline,
            place.data,
            place.context,
            place.tensor,
            place.node,
            place.local_rank,
        )
        table.add_row(*map(str, numbers))
    return table


def _shown(ranks: int) -> Iterable[int | None]:
    if ranks <= RANKS_SHOWN:
        return range(ranks)
    half = RANKS_SHOWN // 2
    return [*range(half), None, *range(ranks - half, ranks)]


def batch_table(plan: BatchPlan, answers_to: str | None) -> Table:
    """Return a table of the batch sizes of one step, with the arithmetic behind each.

    Args:
        plan: batch sizes of the step.
        answers_to: noun for records with several responses or answers (``prompts``, ``pairs``); None if each
            record is one sample.
    """
    table = Table(title="batches of a step", show_header=False)
    table.add_column("quantity")
    table.add_column("arithmetic")
    table.add_column("value", justify="right")
    if answers_to is not None:
        table.add_row(
            "samples", f"{plan.prompts} {answers_to} x {plan.generations} responses", f"{plan.samples:,}"
        )
    table.add_row(
        "global batches",
        f"{plan.samples} samples / {plan.global_batch_size} a global batch",
        f"{plan.global_batches:,}",
    )
    table.add_row(
        "samples a rank",
        f"{plan.global_batch_size} / {plan.data_parallel} data-parallel ranks",
        f"{plan.samples_per_rank:,}",
    )
    if plan.token_budget:
        table.add_row(
            "micro-batches a rank",
            "formed from the lengths of the samples, at most",
            f"{plan.micro_batches:,}",
        )
        table.add_row("tokens a micro-batch", "the budget, padding included", f"{plan.token_budget:,}")
    else:
        table.add_row(
            "micro-batches a rank",
            f"{plan.samples_per_rank} samples / {plan.micro_batch_size}",
            f"{plan.micro_batches:,}",
        )
        tokens = f"{plan.micro_batch_size} x {plan.sequence_length} tokens at most"
        table.add_row("tokens a micro-batch", tokens, f"{plan.tokens_per_micro_batch:,}")
    table.add_row(
        "tokens a step",
        f"{plan.samples} x {plan.sequence_length} tokens at most",
        f"{plan.tokens_per_step:,}",
    )
    return table


def validation_table(config: RunConfig) -> Table:
    """Return a table with one row per validation set: sources, prompts, responses per prompt and sampling.
    The run must be checked, and its algorithm must generate responses."""
    table = Table(title="validation")
    for heading in ("set", "sources", "prompts", "responses a prompt", "sampling"):
        table.add_column(
            heading,
            justify="right" if heading in {"prompts", "responses a prompt"} else "left",
            overflow="fold",
        )
    sources = validation_sources(config)
    for plan in set_plans(config):
        names = [str(sources[place].get("path") or sources[place].get("name")) for place in plan.places]
        prompts = "all" if plan.max_prompts is None else f"at most {plan.max_prompts:,}"
        table.add_row(plan.name, ", ".join(names), prompts, f"{plan.generations:,}", plan.drawn)
    return table


def memory_table(rows: list[RankMemory], model: str | None = None) -> Table:
    """Return a table of the memory of a rank, one column per pipeline stage. With more than four stages, it
    shows the first two and the last one.

    Args:
        rows: memory of one rank of each stage.
        model: dotted path of the model's section, for the title; None for the policy.
    """
    # The first stage has the embedding, the last one the output layer. The stages in between differ little.
    shown = rows if len(rows) <= 4 else [rows[0], rows[1], rows[-1]]
    whose = "" if model is None else f"{model}: "
    table = Table(title=f"{whose}estimated memory of a rank, by pipeline stage (parameters are exact)")
    table.add_column("")
    for row in shown:
        table.add_column(f"stage {row.stage}", justify="right")
    table.add_row("layers", *(str(row.layers) for row in shown))
    table.add_row("parameters", *(f"{row.parameters:,}" for row in shown))
    for name, words in _TERMS.items():
        table.add_row(words, *(size_text(getattr(row, name)) for row in shown))
    table.add_section()
    table.add_row("peak", *(size_text(row.peak) for row in shown))
    if model is None:
        # Models other than the policy have no reference.
        table.add_row("reference policy, host memory", *(size_text(row.reference_weights) for row in shown))
    if any(row.host_optimizer for row in shown):
        table.add_row("optimizer, host memory", *(size_text(row.host_optimizer) for row in shown))
    return table


def surroundings_table(
    config: RunConfig, facts: ModelFacts, ranks: list[RankMemory], beside: Mapping[str, list[RankMemory]]
) -> Table:
    """Return a table of the run's memory outside the training devices: engine, host memory of a node, and
    disk."""
    table = Table(title="engine, host memory and disk (estimated)", show_header=False)
    table.add_column("quantity")
    table.add_column("value", justify="right")
    checkpointing = config["checkpointing"]
    engine = engine_memory_of(config, facts)
    if engine is not None:
        nodes, per_node = engines_shape(View(config))
        table.add_row("engines x devices of each", f"{nodes * per_node // engine.ranks} x {engine.ranks}")
        table.add_row("engine's weights, a device", size_text(engine.weights))
        table.add_row(f"engine's share of a device, {engine.share}", size_text(engine.budget))
        table.add_row("tokens that fit in the engine's KV cache", f"{engine.cached_tokens:,}")
    table.add_row(
        f"host memory of a node of {config['cluster']['gpus_per_node']} ranks",
        size_text(host_memory(config, ranks, beside, engine)),
    )
    if checkpointing["enabled"]:
        size = checkpoint_bytes(config["policy"], facts) + checkpoint_bytes_beside(config)
        table.add_row("a checkpoint", size_text(size))
        if checkpointing["async_save"]:
            # The ranks write equal shares, as the optimizer's states, by far the most of it, are sharded.
            share = size // training_shape(View(config))[0]
            table.add_row("its part of a node, held in /dev/shm (async_save)", size_text(share))
        kept = f"{checkpoints_kept(config)} checkpoints at once" + (
            ", exported model" if checkpointing["export_hf"] else ""
        )
        table.add_row(f"disk: {kept}", size_text(disk_bytes(config, facts)))
    return table


def ledger_table(moments: list[Moment], device_gib: float, *, shares: bool = True) -> Table:
    """Return a table of device memory at each moment of a run: policy, engine, transfer buffers, sum and
    free memory.

    Args:
        moments: result of ``megarl.config.plan.ledger``.
        device_gib: memory of a device in GiB.
        shares: policy and engine are on the same device; otherwise a row describes a training device or an
            engine's device.
    """
    which = "a device that policy and engine share" if shares else "a device of training, or of an engine"
    table = Table(title=f"{which}, {device_gib:g} GiB (estimated)")
    for heading in ("moment", "policy", "engine", "transfer", "together", "free"):
        table.add_column(heading, justify="left" if heading == "moment" else "right")
    for moment in moments:
        free = int(device_gib * 2**30) - moment.total
        left = size_text(free) if free >= 0 else f"lacks {size_text(-free)}"
        table.add_row(
            moment.name, *map(size_text, (moment.policy, moment.engine, moment.transfer, moment.total)), left
        )
    return table
