"""Imports a Hugging Face checkpoint to where Megatron-LM's ``--load`` looks for one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import torch

from converters.foreign.arguments import RELEASE, further_flags, megatron_lm_state, write_tracker
from converters.import_plan import ImportPlan
from converters.importing import import_model
from converters.torch_dist.find import TRACKER_FILE
from converters.work import Outcome, RunOptions


def import_for_megatron_lm(
    plan: ImportPlan,
    target: Path,
    options: RunOptions = RunOptions(),  # noqa: B008  # frozen
) -> Outcome:
    """Write the checkpoint that a plan describes to ``target/release``, with the arguments of Megatron-LM.

    The notes of the outcome say which flags a run needs beside ``--load`` and ``--use-checkpoint-args``.

    Args:
        plan, options: as for :func:`converters.importing.import_model`.
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
