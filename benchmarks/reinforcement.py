"""The quickstart's second part, again and again from the same model: what pictures of several runs are drawn from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def reinforced(
    work: Path, name: str, layers: Sequence[str], changes: Sequence[str], recipe: str = "grpo.yaml", exports: bool = False
) -> list[dict[str, Any]]:
    """Metrics, step by step, of one run in ``work/name``.

    Args:
        work: directory of the runs, of their data and of the model that all of them start from.
        name: of the run.
        layers: configurations of the quickstart to lay over its own.
        changes: of single keys.
        recipe: the quickstart's configuration of an algorithm.
        exports: whether the run leaves its model in ``work/name/hf``.
    """
    from megarl.algorithms.run import run
    from megarl.config import load_config
    from megarl.quickstart.__main__ import CONFIGS

    taught, pairs = taught_model(work), recipe in {"dpo.yaml", "rm.yaml"}
    train, validation = ("pairs", "validation-pairs") if pairs else ("train", "validation")
    sources = [
        f"policy.model_name={taught}",
        f"data.train.path={work / train}.jsonl",
        f"data.validation.path={work / validation}.jsonl",
    ]
    kept = [] if exports else ["checkpointing.enabled=false"]
    run(load_config(CONFIGS / recipe, [f"run_dir={work / name}", *sources, *kept, *changes], [CONFIGS / layer for layer in layers]))
    return rows_of(work / name)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's log."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def exported(run_dir: Path) -> Path:
    """The model that a run left at its last step."""
    return max((run_dir / "hf").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))


def taught_model(work: Path) -> Path:
    """The quickstart's model after its supervised part, made on the first call beside the data of the second part."""
    from megarl.algorithms.run import run
    from megarl.config import load_config
    from megarl.quickstart.__main__ import CARELESS_SHARE, CONFIGS, TRAIN_PROBLEMS, VALIDATION_PROBLEMS, VALIDATION_SEED
    from megarl.quickstart.material import make_model, write_pairs, write_problems

    model = work / "sft" / "hf" / "step_250"
    if not model.exists():
        work.mkdir(parents=True, exist_ok=True)
        make_model(work / "model", 1)
        write_problems(work / "demonstrations.jsonl", TRAIN_PROBLEMS, 5001, mistake_share=CARELESS_SHARE)
        write_problems(work / "train.jsonl", TRAIN_PROBLEMS, 1)
        write_problems(work / "validation.jsonl", VALIDATION_PROBLEMS, VALIDATION_SEED, "validation")
        write_pairs(work / "pairs.jsonl", TRAIN_PROBLEMS, 1)
        write_pairs(work / "validation-pairs.jsonl", VALIDATION_PROBLEMS, VALIDATION_SEED, "validation")
        changes = [f"run_dir={work / 'sft'}", f"policy.model_name={work / 'model'}", f"data.train.path={work / 'demonstrations.jsonl'}"]
        run(load_config(CONFIGS / "sft.yaml", changes))
    return model
