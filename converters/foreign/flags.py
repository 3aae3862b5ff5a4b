"""The flags of the command line for foreign Megatron checkpoints, and imports to where Megatron-LM's ``--load`` looks."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from pathlib import Path

import torch

from converters.checkpoint.work import ConversionResult, RunOptions
from converters.foreign.arguments import RELEASE, further_flags, megatron_lm_state, write_tracker
from converters.foreign.options import MASTER_WEIGHTS, MODEL_WEIGHTS, OpeningOptions
from converters.importing import ImportPlan, import_model
from converters.torch_dist.index import TRACKER_FILE

MEGARL, MEGATRON_LM = "megarl", "megatron-lm"


def add_opening_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags to a command that reads Megatron checkpoints."""
    group = command.add_argument_group("what a Megatron checkpoint does not say itself")
    group.add_argument("--hf-config", type=Path, metavar="DIR", help="config and tokenizer of a checkpoint that has none with it")
    group.add_argument("--tokenizer", type=Path, metavar="DIR", help="tokenizer for a config made of the trainer's settings")
    group.add_argument("--vocab-size", type=int, metavar="N", help="rows of the embedding without padding, for such a config")
    group.add_argument(
        "--eos-token-id", type=read_token_ids, metavar="N[,N]", help="ends of a text, for such a config: numbers, or the word none"
    )
    group.add_argument(
        "--ignore-setting", action="append", default=[], metavar="NAME", help="setting of the trainer that is harmless; several times"
    )
    group.add_argument(
        "--rope-scaling-factor",
        type=float,
        metavar="X",
        help="factor of Llama 3's rope scaling that a model of Megatron-LM was trained with: its own trainer takes 8 whatever it is told",
    )
    group.add_argument(
        "--source-weights",
        choices=[MODEL_WEIGHTS, MASTER_WEIGHTS],
        default=MODEL_WEIGHTS,
        help="master: the float32 weights of the optimizer (default: the model's own)",
    )


def add_layout_flag(command: argparse.ArgumentParser) -> None:
    """Add the flag that says for whom a checkpoint is written."""
    command.add_argument(
        "--layout",
        choices=[MEGARL, MEGATRON_LM],
        default=MEGARL,
        help="megatron-lm: release/ with arguments, and the file that names it, as --load of Megatron-LM wants them",
    )


def opening_options(arguments: argparse.Namespace) -> OpeningOptions:
    """The options that the flags say."""
    return OpeningOptions(
        hf_directory=arguments.hf_config,
        tokenizer=arguments.tokenizer,
        vocab_size=arguments.vocab_size,
        eos_token_ids=arguments.eos_token_id,
        ignored_settings=tuple(arguments.ignore_setting),
        rope_scaling_factor=arguments.rope_scaling_factor,
        weights=arguments.source_weights,
    )


def read_token_ids(text: str) -> tuple[int, ...]:
    """``2``, ``151643,151645`` or ``none``.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    if text == "none":
        return ()
    numbers = text.split(",")
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is no token id; write for example 2 or 151643,151645, or none")
    return tuple(map(int, numbers))


def import_for_megatron_lm(
    plan: ImportPlan,
    target: Path,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
) -> ConversionResult:
    """Write the checkpoint that a plan describes to ``target/release``, with the arguments of Megatron-LM.

    The notes of the outcome say which flags a run needs beside ``--load`` and ``--use-checkpoint-args``.

    Args:
        plan, options: as for ``import_model``.
        target: directory to make, or one that holds such a checkpoint.

    Raises:
        ConversionError: as there; also where a training run keeps its checkpoints in ``target``, or Megatron-LM has no such model.
    """
    state = megatron_lm_state(plan.architecture, plan.padded_vocab, _main_dtype(plan))
    # first, so that a run that was killed behind it goes on where it ended: what it names is not there yet
    write_tracker(target)
    try:
        outcome = import_model(plan, target / RELEASE, options, common_state=state)
    except Exception:
        if not (target / RELEASE).exists():
            (target / TRACKER_FILE).unlink(missing_ok=True)
        raise
    flags = further_flags(state)
    return dataclasses.replace(outcome, target=target, notes=outcome.notes | ({"further_flags": flags} if flags else {}))


def _main_dtype(plan: ImportPlan) -> torch.dtype:
    """The dtype that most bytes have."""
    sizes: Counter[torch.dtype] = Counter()
    for rule in plan.rules:
        sizes[plan.dtype(rule)] += plan.size(rule)
    return max(sizes, key=lambda dtype: sizes[dtype])
