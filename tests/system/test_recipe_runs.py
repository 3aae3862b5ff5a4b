"""The recipes on public data run whole on real Ray and Megatron with two ranks, on tiny models and rows of
the published form of their sets."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.run.run import run
from tests.small_recipes import RECIPES, STEPS, make_small_model, small
from tests.tiers import slow


@slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_whole_on_two_ranks(recipe: str, local_ray: int, tmp_path: Path) -> None:
    model = make_small_model(tmp_path / "model", RECIPES[recipe][1])
    assert run(small(recipe, model, tmp_path, ranks=2)) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in trained] == [1, STEPS] and all(
        math.isfinite(row["train/grad_norm"]) for row in trained
    )
    key = "validation/accuracy" if recipe.startswith(("grpo", "ppo")) else "validation/loss"
    assert all(math.isfinite(row[key]) for row in rows if key in row) and key in rows[-1]
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (model, tmp_path / "run" / "hf" / f"step_{STEPS}")
    )
    assert before.config.model_type == after.config.model_type
    # a model that is never right learns nothing from rewards alone, and all of it from conversations
    changed = any(
        not torch.equal(one, other)
        for one, other in zip(before.parameters(), after.parameters(), strict=True)
    )
    assert changed or recipe.startswith(("grpo", "ppo"))
