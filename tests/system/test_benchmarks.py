"""Whole cases of the benchmarks, at their small sizes: their numerics hold, and every ratio is there; the
recipe's on two nodes of Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.runner import run_case
from megarl import env
from tests.tiers import slow

# each starts processes and takes up to a minute or two
pytestmark = slow

ROOT = Path(__file__).parents[2]
RATIOS = {
    "train.step": {"step", "step_cpu", "fsdp2_step", "fsdp2_step_cpu"},
    "logprobs": {"logprobs", "logprobs_cpu"},
    "data.start": {"first_start_cpu", "second_start_cpu"},
    "scaling.ranks": {"core_seconds_to_one_rank", "core_seconds_to_fsdp2"},
    "ckpt.save": {"save", "save_cpu"},
    "ckpt.load": {"load", "load_cpu", "verify", "verify_cpu"},
    "ckpt.async_stall": {"stall", "stall_cpu"},
    "grpo.step": {"step_cpu", "generation_cpu", "training_cpu"},
}
OF_LAYOUTS = {
    "grpo.step": {
        "step_core_seconds_to_limit",
        *(
            f"{phase}_core_seconds_to_{to}"
            for phase in ("step", "generation", "training")
            for to in ("one_rank", "two_halves")
        ),
    },
}
"""Ratios of the points that have a layout, where they are others."""


@pytest.mark.parametrize("case", RATIOS)
def test_a_case_measures_its_ratios_with_equal_numbers(case: str) -> None:
    result = run_case(case, quick=True)
    assert result["success"], result["error"]
    for point in result["points"]:
        wanted = OF_LAYOUTS.get(case, RATIOS[case]) if "layout" in point["parameters"] else RATIOS[case]
        assert {
            name for name, metric in point["metrics"].items() if metric["unit"].startswith("ratio to ")
        } >= wanted
    assert result["cpu_seconds"] > 0.5


def test_ranks_in_processes_of_their_own_do_what_the_pool_s_do() -> None:
    from benchmarks.ranks import in_processes

    assert in_processes(2, "cpu", _sum_of_ranks) == [(0, 1), (1, 1)]
    with pytest.raises(AssertionError, match="rank 1 of _fail_on_one"):
        in_processes(2, "cpu", _fail_on_one)


def _sum_of_ranks() -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def _fail_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise RuntimeError("on purpose")


RECIPE = """
defaults: {configs}/quickstart/grpo.yaml
policy:
  model_name: {model}
  max_total_sequence_length: 32
  train_global_batch_size: 32
cluster:
  gpus_per_node: 1
  num_nodes: 2
data:
  train:
    path: {problems}
  validation:
    path: {problems}
"""


def test_a_recipe_s_layout_runs_on_two_nodes(tmp_path: Path) -> None:
    from megarl.quickstart.material import make_model, write_problems

    problems = write_problems(tmp_path / "train.jsonl", 8, 1)
    text = RECIPE.format(configs=ROOT / "configs", model=make_model(tmp_path / "model", 1), problems=problems)
    (tmp_path / "recipe.yaml").write_text(text)
    variables = {name: value for name, value in env.snapshot().items() if not name.startswith("RAY_")}
    command = [
        sys.executable,
        "-m",
        "tests.system.benchmark_nodes",
        str(tmp_path / "recipe.yaml"),
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    [result] = json.loads((tmp_path / "out" / "recipe.step.json").read_text())
    [point] = result["points"]
    assert (point["parameters"]["nodes"], point["parameters"]["layout"], point["run"]["gpus"]) == (
        2,
        "tp=2",
        0,
    )
    assert point["metrics"]["logprobs_over_third"]["median"] > 0
