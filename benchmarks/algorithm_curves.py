"""``python -m benchmarks.algorithm_curves``: the quickstart's second part by every algorithm, with several seeds and in other layouts.

All runs start from the same model, which has learned from a careless pupil. Those that sample answers are drawn over one another by their
greedy accuracy; preference, reward model and distillation by their own measures. The first seed runs once more in each other layout, and
what its curves then differ by is said. Runs that are finished in ``--work`` are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.reinforcement import exported, reinforced, rows_of, taught_model

STEPS = 60
ACCURACY = "validation/accuracy"
SEVERAL_UPDATES = ("policy.train_global_batch_size=64", "policy.learning_rate=5.0e-4")
"""Four updates a step, so that the policy moves away from the one that has sampled, and clipped ratios mean something."""


@dataclass(frozen=True, slots=True)
class Way:
    """Way: one algorithm.

    Attributes:
        recipe: the quickstart's configuration.
        layers: files that are laid over it.
        changes: of single keys.
        measures: metrics that it is judged by, the first one in the picture.
        exports: whether its model is wanted afterwards.
        models: what another way has left with the first seed, by the key that it is named under.
    """

    recipe: str = "grpo.yaml"
    layers: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    measures: tuple[str, ...] = (ACCURACY,)
    exports: bool = False
    models: Mapping[str, str] = field(default_factory=dict)


SAMPLED: Mapping[str, Way] = {
    "GRPO": Way(changes=(*SEVERAL_UPDATES, "grpo.normalize_rewards=true", "grpo.use_leave_one_out_baseline=false"), exports=True),
    "GSPO": Way(layers=("../base/gspo.yaml",), changes=SEVERAL_UPDATES),
    "CISPO": Way(layers=("../base/cispo.yaml",), changes=SEVERAL_UPDATES),
    "Dr.GRPO": Way(layers=("../base/dr-grpo.yaml",), changes=SEVERAL_UPDATES),
    "RLOO": Way(layers=("../base/rloo.yaml",), changes=SEVERAL_UPDATES),
    "REINFORCE++": Way(layers=("../base/reinforce-plus-plus.yaml",), changes=SEVERAL_UPDATES),
    "DAPO": Way(layers=("../base/dapo.yaml",), changes=SEVERAL_UPDATES),
    "PPO": Way("ppo.yaml", changes=SEVERAL_UPDATES),
}
OTHERS: Mapping[str, Way] = {
    "DPO": Way("dpo.yaml", measures=(ACCURACY, "validation/rewards_margin_mean"), exports=True),
    "reward model": Way("rm.yaml", measures=(ACCURACY, "validation/margin")),
    "distillation": Way("distillation.yaml", measures=("train/sampled_reverse_kl", ACCURACY), models={"teacher.model_name": "GRPO"}),
}
WAYS: Mapping[str, Way] = {**SAMPLED, **OTHERS}
PACKED = (
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "+policy.sequence_packing={enabled: true, train_mb_tokens: 512, logprob_mb_tokens: 512}",
)
LAYOUTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "DTensor, tensor parallel 2": (("dtensor.yaml",), ()),
    "Megatron, data parallel 2, packed": ((), PACKED),
}
"""Files that are laid over a recipe, and changes of keys, in the place of Megatron's tensor parallel 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; figures and pictures lie where ``--out`` says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithm_curves", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(WAYS), help="these algorithms alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one run of each for each seed (default 1 2 3)")
    parser.add_argument("--work", type=Path, default=Path("runs/algorithms"), help="directory of the runs (default runs/algorithms)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/algorithms"), help="FILE.json, FILE.png and FILE-others.png")
    chosen = parser.parse_args(arguments)
    from megarl.algorithms.start import start_ray

    ways = {name: way for name, way in WAYS.items() if not chosen.only or name in chosen.only}
    with ExitStack() as stack:
        start_ray(stack)
        result: dict[str, Any] = {"commit": environment.commit(), "environment": environment.describe(), "steps": STEPS, "algorithms": {}}
        for name, way in ways.items():
            result["algorithms"][name] = _of_algorithm(name, way, chosen.work, chosen.seeds)
            _write(chosen.out.with_suffix(".json"), result)
    _write_pictures(result["algorithms"], chosen.out)
    for name, of_way in result["algorithms"].items():
        sys.stdout.write(f"{name:14} {json.dumps(of_way['mean'])} {json.dumps(of_way['layouts'])}\n")
    return 0


def _of_algorithm(name: str, way: Way, work: Path, seeds: Sequence[int]) -> dict[str, Any]:
    curves = {seed: _curves(_rows(name, way, work, seed), way) for seed in seeds}
    first, last = (
        {measure: statistics.mean(each[measure][1][end] for each in curves.values()) for measure in way.measures} for end in (0, -1)
    )
    result: dict[str, Any] = {"mean": {"first": first, "last": last}, "seeds": curves, "layouts": {}}
    for layout in LAYOUTS:
        result["layouts"][layout] = differences(_rows(name, way, work, seeds[0]), _rows(name, way, work, seeds[0], layout))
    if name == "DPO":
        result["greedy_accuracy_by_transformers"] = _greedy(work, [work / _run_name(name, seed) for seed in seeds])
    return result


def _run_name(name: str, seed: int, layout: str | None = None) -> str:
    words = [name, *([layout] if layout else []), f"seed {seed}"]
    return "-".join(words).lower().replace(", ", "-").replace(" ", "-")


def _rows(name: str, way: Way, work: Path, seed: int, layout: str | None = None) -> list[dict[str, Any]]:
    """The log of a run, which is run unless it is there."""
    run_dir = work / _run_name(name, seed, layout)
    if (run_dir / "metrics.jsonl").exists() and (rows := rows_of(run_dir)) and rows[-1]["step"] == STEPS:
        return rows
    files, changes = LAYOUTS[layout] if layout else ((), ())
    own = [f"seed={seed}", f"{Path(way.recipe).stem}.max_num_steps={STEPS}"]
    own += [f"{key}={_model_of(other, work)}" for key, other in way.models.items()]
    return reinforced(work, run_dir.name, [*way.layers, *files], [*way.changes, *changes, *own], way.recipe, way.exports)


def _model_of(name: str, work: Path) -> Path:
    _rows(name, WAYS[name], work, 1)
    return exported(work / _run_name(name, 1))


def _curves(rows: Sequence[Mapping[str, Any]], way: Way) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of each measure, where it was logged."""
    found = {}
    for measure in way.measures:
        at = [row for row in rows if row.get(measure) is not None]
        found[measure] = ([row["step"] for row in at], [row[measure] for row in at])
    return found


COMPARED = ("train/reward", "train/loss", "train/grad_norm", ACCURACY)


def differences(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the curves of two layouts differ by.

    A token whose random number lies within rounding of the bound between two tokens is drawn otherwise, and with it all that follows. So
    the largest difference of a metric, by its largest value, is that over the steps before the first one with another sample.
    """
    both = list(zip(ours, theirs, strict=True))
    apart = min((one["step"] for one, other in both if not _same_samples(one, other)), default=STEPS + 1)
    largest = {}
    for metric in COMPARED:
        pairs = [(one[metric], other[metric]) for one, other in both if one["step"] < apart and one.get(metric) is not None]
        if pairs:
            largest[metric] = max(abs(one - other) for one, other in pairs) / (max(abs(one) for one, _ in pairs) or 1.0)
    return {
        "steps_with_equal_samples": apart - 1,
        "largest_difference": largest,
        "last": [rows[-1].get(ACCURACY) for rows in (ours, theirs)],
    }


def _same_samples(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two steps show no sign of another token: rewards, numbers of tokens, and means over tokens of their log-probability, or of
    how far it is from the teacher's, which one of some 600 moves by more than rounding does."""
    if any(one.get(metric) != other.get(metric) for metric in ("train/reward", "train/num_tokens")):
        return False
    means = [metric for metric in ("train/approx_entropy", "train/sampled_reverse_kl") if one.get(metric) is not None]
    return all(abs(one[metric] - other[metric]) < 3e-5 for metric in means)


def _greedy(work: Path, runs: Sequence[Path]) -> dict[str, Any]:
    """Exact match of the greedy answers of the model before and of what each run exported, by plain transformers."""
    from megarl.quickstart.material import evaluate_checkpoint

    problems = work / "validation.jsonl"
    after = [evaluate_checkpoint(exported(run_dir), problems, max_new_tokens=3) for run_dir in runs]
    return {"before": evaluate_checkpoint(taught_model(work), problems, max_new_tokens=3), "after": after}


def _write(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _write_pictures(results: Mapping[str, Any], out: Path) -> None:
    """The accuracy of what samples, mean and range over seeds; and the others, a panel each."""
    from megarl.observe.drawing import COLOURS, finish_axes, one_panel, stacked_panels

    sampled = {name: of_way for name, of_way in results.items() if name in SAMPLED}
    if sampled:
        figure, axes = one_panel(f"The quickstart's second part by {len(sampled)} algorithms")
        for place, (name, of_way) in enumerate(sampled.items()):
            _draw(axes, of_way, ACCURACY, COLOURS[place % len(COLOURS)], name)
        finish_axes(axes, "greedy validation accuracy", legend=True)
        figure.savefig(out.with_suffix(".png"))
    others = {name: of_way for name, of_way in results.items() if name in OTHERS}
    if others:
        figure, panels = stacked_panels("By their own measures", len(others))
        for axes, (name, of_way) in zip(panels, others.items(), strict=True):
            measure = OTHERS[name].measures[0]
            _draw(axes, of_way, measure, COLOURS[0], name)
            finish_axes(axes, f"{name}:\n{measure.split('/')[1].replace('_', ' ')}", last=axes is panels[-1])
        figure.savefig(out.with_name(f"{out.name}-others.png"))


def _draw(axes: Any, of_way: Mapping[str, Any], measure: str, colour: str, name: str) -> None:
    curves = [each[measure] for each in of_way["seeds"].values()]
    steps, values = curves[0][0], list(zip(*(curve[1] for curve in curves), strict=True))
    axes.fill_between(steps, [min(each) for each in values], [max(each) for each in values], color=colour, alpha=0.12, linewidth=0)
    axes.plot(steps, [statistics.mean(each) for each in values], color=colour, linewidth=2, label=f"{name} ({len(curves)} seeds)")


if __name__ == "__main__":
    sys.exit(main())
