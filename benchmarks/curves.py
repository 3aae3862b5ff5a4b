"""Run the quickstart's second part in many ways, with several seeds, and write figures and plots.

The command is ``python -m benchmarks.curves`` with one of these experiments:

* ``algorithms``: every algorithm with every seed. The first seed also runs in each other layout, and the
  differences of its curves are reported.
* ``backends``: GRPO on the three backends, each of which generates its own responses. Once two backends
  sample a different token, everything after it differs.
* ``asynchrony``: GRPO on responses that are k steps old and sampled during training, or up to k steps old if
  the groups that complete first are trained first. Both also run without a bound on the weight of old
  responses, and without a correction for their age.
* ``generation``: GRPO with responses of the policy, and of vLLM colocated and on other devices. Two engines
  use different random numbers, so their responses, and the results of training, agree only in distribution.

All runs start from the same model, which was trained on a careless pupil's solutions. Finished runs in
``--work`` are not run again.
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

ACCURACY = "validation/accuracy"
LOSS, NORM, REWARD, ENTROPY = "train/loss", "train/grad_norm", "train/reward", "train/approx_entropy"
MISMATCH = (
    "train/mismatch_mean",
    "train/mismatch_max",
    "train/mismatch_share_above_0.05",
    "train/token_mult_prob_error",
)
COMPARED = (REWARD, LOSS, NORM, ENTROPY, "train/generation_length", ACCURACY)
SEVERAL_UPDATES = ("policy.train_global_batch_size=64", "policy.learning_rate=5.0e-4")
"""Four updates per step, so that the policy moves away from the one that sampled, and clipping the ratios has
an effect."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the quickstart's second part.

    Attributes:
        recipe: the quickstart's configuration.
        layers: files that are merged over it.
        changes: changes of single keys.
        measures: metrics whose curves are kept.
        exports: whether its model is exported for later use.
        greedy: whether plain transformers evaluates the greedy responses of its model, before and after
            training.
        models: by configuration key, the way whose model of the first seed is used there.
        against: another way, whose first seed's curves are compared with these.
    """

    recipe: str = "grpo.yaml"
    layers: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    measures: tuple[str, ...] = (ACCURACY,)
    exports: bool = False
    greedy: bool = False
    models: Mapping[str, str] = field(default_factory=dict)
    against: str | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs whose curves belong in one picture.

    Attributes:
        ways: the ways, by name.
        pictures: by the suffix of the file name, a title and the panels; each panel maps ways to their
            measures.
        steps: steps of each run.
        seeds: seeds of each way.
        layouts: files merged over a recipe, and changes of keys, that replace Megatron's tensor parallel 2.
    """

    ways: Mapping[str, Way]
    pictures: Mapping[str, tuple[str, Mapping[str, Mapping[str, str]]]]
    steps: int = 60
    seeds: tuple[int, ...] = (1, 2, 3)
    layouts: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)


SAMPLED = {
    "GRPO": Way(
        changes=(*SEVERAL_UPDATES, "grpo.normalize_rewards=true", "grpo.use_leave_one_out_baseline=false"),
        exports=True,
    ),
    "GSPO": Way(layers=("../base/gspo.yaml",), changes=SEVERAL_UPDATES),
    "CISPO": Way(layers=("../base/cispo.yaml",), changes=SEVERAL_UPDATES),
    "Dr.GRPO": Way(layers=("../base/dr-grpo.yaml",), changes=SEVERAL_UPDATES),
    "RLOO": Way(layers=("../base/rloo.yaml",), changes=SEVERAL_UPDATES),
    "REINFORCE++": Way(layers=("../base/reinforce-plus-plus.yaml",), changes=SEVERAL_UPDATES),
    "DAPO": Way(layers=("../base/dapo.yaml",), changes=SEVERAL_UPDATES),
    "PPO": Way("ppo.yaml", changes=SEVERAL_UPDATES),
}
OTHERS = {
    "DPO": Way("dpo.yaml", measures=(ACCURACY, "validation/rewards_margin_mean"), exports=True, greedy=True),
    "reward model": Way("rm.yaml", measures=(ACCURACY, "validation/margin")),
    "distillation": Way(
        "distillation.yaml",
        measures=("train/sampled_reverse_kl", ACCURACY),
        models={"teacher.model_name": "GRPO"},
    ),
}
PACKED = (
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "+policy.sequence_packing={enabled: true, train_mb_tokens: 512, logprob_mb_tokens: 512}",
)
BACKENDS = {
    "Megatron": Way(measures=COMPARED),
    "DTensor": Way(layers=("dtensor.yaml",), measures=COMPARED, against="Megatron"),
    "FSDP1": Way(layers=("fsdp1.yaml",), measures=COMPARED, against="Megatron"),
}
ENGINES = {
    "Megatron": Way(measures=(ACCURACY, REWARD, *MISMATCH)),
    "vLLM": Way(layers=("vllm.yaml",), measures=(ACCURACY, REWARD, *MISMATCH)),
    "vLLM, apart": Way(layers=("vllm-apart.yaml",), measures=(ACCURACY, REWARD, *MISMATCH)),
}
AGES = (ACCURACY, REWARD, "train/effective_sample_share")
BESIDE = ("apart.yaml", "asynchronous.yaml")
AGE = "grpo.async_grpo.max_trajectory_age_steps"
# ``ratio_clip_min`` of 1 leaves no lower bound. ``ratio_clip_c`` has to be a number, because a rule refuses
# stale responses without one; 1e9 bounds nothing.
UNBOUNDED = (
    *(
        "grpo.async_grpo.recompute_logprobs=false",
        "loss_fn.truncated_importance_sampling_type=null",
        "loss_fn.truncated_importance_sampling_ratio=null",
    ),
    *("loss_fn.ratio_clip_min=1.0", "loss_fn.ratio_clip_max=1.0e9", "loss_fn.ratio_clip_c=1.0e9"),
)
# A cap below the weights of nearly all tokens gives them one weight, so that nothing corrects for their age.
# The bound of the gradient's norm is as small as the gradients, whose scale Adam does not see.
UNCORRECTED = ("loss_fn.truncated_importance_sampling_ratio=0.001", "policy.max_grad_norm=0.001")
KS = (1, 2, 4, 8)


def _in_order(age: int, *changes: str, measures: tuple[str, ...] = AGES) -> Way:
    return Way(layers=BESIDE, changes=(f"{AGE}={age}", *changes), measures=measures)


def _ready_first(age: int, *changes: str, measures: tuple[str, ...] = AGES) -> Way:
    # Sample as many batches ahead as the age allows: with only one, the batch that is complete first is
    # seldom older than one step.
    schedule = (
        "grpo.async_grpo.schedule=ready_first",
        f"grpo.async_grpo.lookahead_steps={age}",
    )
    return _in_order(age, *schedule, *changes, measures=measures)


IN_ORDER = {
    # The ways of both panels come first, so that each has the same colour in both.
    **{f"k = {age}": _in_order(age) for age in KS},
    # With k = 0 nothing is sampled ahead, and without a bound nothing is recomputed, so neither has an
    # effective share.
    "k = 0": Way(layers=("apart.yaml",), measures=AGES[:2]),
    "k = 8, no bound": _in_order(8, *UNBOUNDED, measures=AGES[:2]),
    "k = 8, no correction": _in_order(8, *UNCORRECTED),
}
READY_FIRST = {
    **{f"ready first, k = {age}": _ready_first(age) for age in KS},
    "ready first, k = 8, no bound": _ready_first(8, *UNBOUNDED, measures=AGES[:2]),
    "ready first, k = 8, no correction": _ready_first(8, *UNCORRECTED),
}
ASYNCHRONY = {**IN_ORDER, **READY_FIRST}
EXPERIMENTS: Mapping[str, Experiment] = {
    "asynchrony": Experiment(
        ASYNCHRONY,
        {
            "": (
                "GRPO on answers that are k steps old",
                {
                    "greedy validation accuracy": dict.fromkeys(IN_ORDER, ACCURACY),
                    "effective sample share": {f"k = {age}": AGES[2] for age in KS},
                },
            ),
            "-ready-first": (
                "GRPO on the groups that are complete first, up to k steps old",
                {
                    "greedy validation accuracy": dict.fromkeys(READY_FIRST, ACCURACY),
                    "effective sample share": {f"ready first, k = {age}": AGES[2] for age in KS},
                },
            ),
        },
    ),
    "algorithms": Experiment(
        {**SAMPLED, **OTHERS},
        {
            "": (
                "The quickstart's second part by its algorithms",
                {"greedy validation accuracy": dict.fromkeys(SAMPLED, ACCURACY)},
            ),
            "-others": (
                "By their own measures",
                {f"{name}:\n{way.measures[0]}": {name: way.measures[0]} for name, way in OTHERS.items()},
            ),
        },
        layouts={
            "DTensor, tensor parallel 2": (("dtensor.yaml",), ()),
            "Megatron, data parallel 2, packed": ((), PACKED),
        },
    ),
    "backends": Experiment(
        BACKENDS,
        {
            "": (
                "GRPO on three backends",
                {measure: dict.fromkeys(BACKENDS, measure) for measure in (LOSS, NORM, REWARD)},
            )
        },
        steps=20,
        seeds=(1,),
    ),
    "generation": Experiment(
        ENGINES,
        {
            "": (
                "GRPO with three engines",
                {measure: dict.fromkeys(ENGINES, measure) for measure in (ACCURACY, REWARD, MISMATCH[1])},
            )
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, write figures and plots to ``--out``, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument(
        "--only", nargs="+", metavar="WAY", help="these ways alone, by the names in the figures"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="one run of each way for each seed (default 1 2 3; backends: 1)"
    )
    parser.add_argument("--steps", type=int, help="of each run (default 60; backends: 20)")
    parser.add_argument("--work", type=Path, help="directory of the runs (default runs/EXPERIMENT)")
    parser.add_argument(
        "--out",
        type=Path,
        help="figures FILE.json and pictures FILE*.png (default benchmarks/results/EXPERIMENT)",
    )
    chosen = parser.parse_args(arguments)
    from megarl.run.start import start_ray

    experiment = EXPERIMENTS[chosen.experiment]
    if unknown := set(chosen.only or ()) - experiment.ways.keys():
        parser.error(
            f"--only: no such way: {', '.join(sorted(unknown))}. Fix: choose from "
            f"{', '.join(experiment.ways)}"
        )
    out = chosen.out or Path("benchmarks/results") / chosen.experiment
    steps = chosen.steps or experiment.steps
    runs = Runs(
        experiment, chosen.work or Path("runs") / chosen.experiment, chosen.seeds or experiment.seeds, steps
    )
    result: dict[str, Any] = {
        "commit": environment.commit(),
        "environment": environment.describe(),
        "steps": steps,
        "ways": {},
    }
    with ExitStack() as stack:
        start_ray(stack)
        for name in chosen.only or experiment.ways:
            result["ways"][name] = runs.figures_of(name)
            out.parent.mkdir(parents=True, exist_ok=True)
            # Write the file after each way, so that a stop keeps the figures of the ways before.
            out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            sys.stdout.write(
                f"{name:14} {json.dumps(result['ways'][name]['mean'])} "
                f"{json.dumps(result['ways'][name]['differences'])}\n"
            )
    for suffix, (title, panels) in experiment.pictures.items():
        _draw(out.with_name(f"{out.name}{suffix}.png"), title, panels, result["ways"])
    return 0


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of an experiment in a directory, executed when their figures are requested.

    Attributes:
        experiment: the ways and layouts.
        work: directory of the runs, their data and the model that all of them start from.
        seeds: seeds of each way; the first one is compared in other layouts.
        steps: steps of each run.
    """

    experiment: Experiment
    work: Path
    seeds: Sequence[int]
    steps: int

    def figures_of(self, name: str) -> dict[str, Any]:
        """Return the means over the seeds, the curves, and the differences of the first seed's curves in
        other layouts and from another way, ready for JSON."""
        way = self.experiment.ways[name]
        curves = {seed: _curves(self._rows(name, seed), way) for seed in self.seeds}
        values = {measure: [each[measure][1] for each in curves.values()] for measure in way.measures}
        mean = {
            "first": {
                measure: statistics.mean(of_seed[0] for of_seed in of_seeds)
                for measure, of_seeds in values.items()
            },
            "last": {
                measure: statistics.mean(of_seed[-1] for of_seed in of_seeds)
                for measure, of_seeds in values.items()
            },
            "largest": {measure: max(map(max, of_seeds)) for measure, of_seeds in values.items()},
        }
        others = {layout: self._rows(name, self.seeds[0], layout) for layout in self.experiment.layouts}
        if way.against:
            others[way.against] = self._rows(way.against, self.seeds[0])
        own = self._rows(name, self.seeds[0])
        result = {
            "mean": mean,
            "seeds": curves,
            "differences": {other: differences(own, rows) for other, rows in others.items()},
        }
        if way.greedy:
            result["greedy_accuracy_by_transformers"] = self._greedy(
                [self.work / _run_name(name, seed) for seed in self.seeds]
            )
        return result

    def _rows(self, name: str, seed: int, layout: str | None = None) -> list[dict[str, Any]]:
        """Return the log of a run; run it first unless it is finished."""
        way, run_dir = self.experiment.ways[name], self.work / _run_name(name, seed, layout)
        if (
            (run_dir / "metrics.jsonl").exists()
            and (rows := rows_of(run_dir))
            and rows[-1]["step"] == self.steps
        ):
            return rows
        from megarl.config import load_config
        from megarl.quickstart.__main__ import CONFIGS
        from megarl.run.run import run

        train, validation = (
            ("pairs", "validation-pairs")
            if way.recipe in {"dpo.yaml", "rm.yaml"}
            else ("train", "validation")
        )
        files, of_layout = self.experiment.layouts[layout] if layout else ((), ())
        changes = [
            f"run_dir={run_dir}",
            f"policy.model_name={taught_model(self.work)}",
            f"data.train.path={self.work / train}.jsonl",
            f"data.validation.path={self.work / validation}.jsonl",
            *([] if way.exports else ["checkpointing.enabled=false"]),
            *way.changes,
            *of_layout,
            f"seed={seed}",
            f"{Path(way.recipe).stem}.max_num_steps={self.steps}",
            *(f"{key}={self._model_of(other)}" for key, other in way.models.items()),
        ]
        run(load_config(CONFIGS / way.recipe, changes, [CONFIGS / layer for layer in (*way.layers, *files)]))
        return rows_of(run_dir)

    def _model_of(self, name: str) -> Path:
        self._rows(name, 1)
        return exported(self.work / _run_name(name, 1))

    def _greedy(self, run_dirs: Sequence[Path]) -> dict[str, Any]:
        """Return the exact match of greedy responses by plain transformers, for the initial model and for the
        export of each run."""
        from megarl.quickstart.material import evaluate_checkpoint

        problems = self.work / "validation.jsonl"
        after = [evaluate_checkpoint(exported(run_dir), problems, max_new_tokens=3) for run_dir in run_dirs]
        return {
            "before": evaluate_checkpoint(taught_model(self.work), problems, max_new_tokens=3),
            "after": after,
        }


def _run_name(name: str, seed: int, layout: str | None = None) -> str:
    words = [name, *([layout] if layout else []), f"seed {seed}"]
    return "-".join(words).lower().replace(", ", "-").replace(" ", "-")


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's log."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def exported(run_dir: Path) -> Path:
    """Return the path of the model that a run exported at its last step."""
    return max((run_dir / "hf").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))


def taught_model(work: Path) -> Path:
    """Return the quickstart's model after its supervised part. The first call trains it and writes the data
    of the second part."""
    from megarl.config import load_config
    from megarl.quickstart.__main__ import (
        CARELESS_SHARE,
        CONFIGS,
        TRAIN_PROBLEMS,
        VALIDATION_PROBLEMS,
        VALIDATION_SEED,
    )
    from megarl.quickstart.material import make_model, write_pairs, write_problems
    from megarl.run.run import run

    # The quickstart's sft.yaml has 250 steps.
    model = work / "sft" / "hf" / "step_250"
    if not model.exists():
        work.mkdir(parents=True, exist_ok=True)
        make_model(work / "model", 1)
        # Write these files as the quickstart does with seed 1: the demonstrations have another seed, so that
        # GRPO's problems differ from theirs.
        write_problems(work / "demonstrations.jsonl", TRAIN_PROBLEMS, 5001, mistake_share=CARELESS_SHARE)
        write_problems(work / "train.jsonl", TRAIN_PROBLEMS, 1)
        write_problems(work / "validation.jsonl", VALIDATION_PROBLEMS, VALIDATION_SEED, "validation")
        write_pairs(work / "pairs.jsonl", TRAIN_PROBLEMS, 1)
        write_pairs(work / "validation-pairs.jsonl", VALIDATION_PROBLEMS, VALIDATION_SEED, "validation")
        changes = [
            f"run_dir={work / 'sft'}",
            f"policy.model_name={work / 'model'}",
            f"data.train.path={work / 'demonstrations.jsonl'}",
        ]
        run(load_config(CONFIGS / "sft.yaml", changes))
    return model


def _curves(rows: Sequence[Mapping[str, Any]], way: Way) -> dict[str, tuple[list[int], list[float]]]:
    """Return the steps and values of each measure at the steps where it was logged."""
    found = {}
    for measure in way.measures:
        at = [row for row in rows if row.get(measure) is not None]
        found[measure] = ([row["step"] for row in at], [float(row[measure]) for row in at])
    return found


def differences(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the differences between the curves of two runs with the same seed.

    If a random number is within rounding of the bound between two tokens, the runs sample different tokens,
    and everything after that differs. So the largest difference of each metric, relative to its largest
    value, is taken over the steps before the first one with different samples.
    """
    both = list(zip(ours, theirs, strict=True))
    apart = min(
        (one["step"] for one, other in both if not _same_samples(one, other)), default=ours[-1]["step"] + 1
    )
    largest = {}
    for metric in COMPARED:
        pairs = [
            (one[metric], other[metric])
            for one, other in both
            if one["step"] < apart and one.get(metric) is not None
        ]
        if pairs:
            # A metric may be 0 at every step.
            largest[metric] = max(abs(one - other) for one, other in pairs) / (
                max(abs(one) for one, _ in pairs) or 1.0
            )
    return {
        "steps_with_equal_samples": apart - 1,
        "largest_difference": largest,
        "last": [rows[-1].get(ACCURACY) for rows in (ours, theirs)],
    }


def _same_samples(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two steps seem to have the same samples. Rewards, numbers of tokens, and token means of
    log-probabilities or of the distance from the teacher must agree; a single different token among some 600
    changes them by more than rounding does."""
    if any(one.get(metric) != other.get(metric) for metric in (REWARD, "train/num_tokens")):
        return False
    means = [metric for metric in (ENTROPY, "train/sampled_reverse_kl") if one.get(metric) is not None]
    return all(abs(one[metric] - other[metric]) < 3e-5 for metric in means)


def _draw(path: Path, title: str, panels: Mapping[str, Mapping[str, str]], ways: Mapping[str, Any]) -> None:
    """Plot a line for each way in a panel, with mean and range over its seeds; ways that were not run are
    left out."""
    from megarl.observe.drawing import cycled_colours, finish_axes, stacked_panels

    present = {
        label: {name: measure for name, measure in lines.items() if name in ways}
        for label, lines in panels.items()
    }
    present = {label: lines for label, lines in present.items() if lines}
    if not present:
        return
    figure, all_axes = stacked_panels(title, len(present))
    for axes, (label, lines) in zip(all_axes, present.items(), strict=True):
        for place, (colour, (name, measure)) in enumerate(
            zip(cycled_colours(len(lines)), lines.items(), strict=True)
        ):
            curves = [each[measure] for each in ways[name]["seeds"].values()]
            steps, values = curves[0][0], list(zip(*(curve[1] for curve in curves), strict=True))
            axes.fill_between(
                steps,
                [min(each) for each in values],
                [max(each) for each in values],
                color=colour,
                alpha=0.12,
                linewidth=0,
            )
            # Some of a few curves may be equal: broad lines are then visible below narrow ones.
            width = 2 + 2.5 * (len(lines) - 1 - place) if len(lines) < 4 else 2
            axes.plot(
                steps, [statistics.mean(each) for each in values], color=colour, linewidth=width, label=name
            )
        finish_axes(axes, label.replace("_", " "), legend=len(lines) > 1, last=axes is all_axes[-1])
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
