"""The quickstart's reinforcement, again and again from the same model: what pictures of several runs are drawn from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def reinforced(work: Path, name: str, layers: Sequence[str], changes: Sequence[str]) -> list[dict[str, Any]]:
    """Metrics, step by step, of one run in ``work/name``.

    Args:
        work: directory of the runs and of the model that all of them start from.
        name: of the run.
        layers: configurations of the quickstart to lay over its own.
        changes: of single keys.
    """
    from megarl.algorithms.run import run
    from megarl.config import load_config
    from megarl.quickstart.__main__ import CONFIGS

    taught = _taught(work)
    sources = [
        f"policy.model_name={taught}",
        f"data.train.path={work / 'train.jsonl'}",
        f"data.validation.path={work / 'validation.jsonl'}",
    ]
    own = [f"run_dir={work / name}", *sources, "checkpointing.enabled=false"]
    run(load_config(CONFIGS / "grpo.yaml", [*own, *changes], [CONFIGS / layer for layer in layers]))
    return [json.loads(line) for line in (work / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _taught(work: Path) -> Path:
    """The quickstart's model after its supervised part, made on the first call."""
    from megarl.algorithms.run import run
    from megarl.config import load_config
    from megarl.quickstart.__main__ import CARELESS_SHARE, CONFIGS, TRAIN_PROBLEMS, VALIDATION_PROBLEMS, VALIDATION_SEED
    from megarl.quickstart.material import make_model, write_problems

    exported = work / "sft" / "hf" / "step_250"
    if not exported.exists():
        work.mkdir(parents=True, exist_ok=True)
        make_model(work / "model", 1)
        write_problems(work / "demonstrations.jsonl", TRAIN_PROBLEMS, 5001, mistake_share=CARELESS_SHARE)
        write_problems(work / "train.jsonl", TRAIN_PROBLEMS, 1)
        write_problems(work / "validation.jsonl", VALIDATION_PROBLEMS, VALIDATION_SEED, "validation")
        changes = [f"run_dir={work / 'sft'}", f"policy.model_name={work / 'model'}", f"data.train.path={work / 'demonstrations.jsonl'}"]
        run(load_config(CONFIGS / "sft.yaml", changes))
    return exported
