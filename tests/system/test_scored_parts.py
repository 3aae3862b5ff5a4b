"""Parts of a step whose log-probabilities are computed while others are sampled, in whole programs on Ray:
the bits of the same parts computed afterwards."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from tests.system.whole_runs import (
    CONFIGS,
    ON_TORCH,
    ROOT,
    Launches,
    Material,
    comparable,
    read_rows,
    write_config,
)
from tests.tiers import slow

pytestmark = [slow, pytest.mark.timeout(1800)]

STEPS = 3
TOYS = ROOT / "tests" / "toys" / "scored_parts.py"
APART = [
    "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}",
    "cluster.gpus_per_node=3",
    f"grpo.max_num_steps={STEPS}",
    "grpo.logprob_parts=3",
]


@pytest.mark.parametrize("backend", ["megatron", "dtensor", "fsdp1"])
def test_parts_that_were_scored_early_train_the_same(
    backend: str, tmp_path: Path, material: Material, launches: Launches
) -> None:
    base = write_config(tmp_path / "base.yaml", "grpo", material)
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"defaults": str(base), **ON_TORCH.get(backend, {})}))
    runs = {}
    for name, more in {
        "early": [],
        "afterwards": [f"algorithm={TOYS}:Afterwards"],
    }.items():
        launch = launches.start(config, tmp_path / name, [*APART, *more], {})
        assert launch.finish() == 0, launch.output()[-5000:]
        runs[name] = launch.run_dir
    assert comparable(runs["early"]) == comparable(runs["afterwards"])
    weights = [(run / f"hf/step_{STEPS}/model.safetensors").read_bytes() for run in runs.values()]
    assert weights[0] == weights[1]
    trained = [row for row in read_rows(runs["early"]) if row["step"] > 0]
    assert all("timing/logprobs_beside_s" in row and "timing/logprobs_s" in row for row in trained)
    assert any(row["train/grad_norm"] > 0 for row in trained)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_parts_are_scored_while_vllm_samples_the_others(
    tmp_path: Path, material: Material, launches: Launches
) -> None:
    """It completes responses one by one, and not twice at the same times: the parts are scored again in the
    same run."""
    base = write_config(tmp_path / "base.yaml", "grpo", material)
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"defaults": [str(base), str(CONFIGS / "vllm-apart.yaml")]}))
    changes = [*APART[1:], f"algorithm={TOYS}:Checked"]
    launch = launches.start(config, tmp_path / "run", changes, {})
    assert launch.finish() == 0, launch.output()[-5000:]
    trained = [row for row in read_rows(launch.run_dir) if row["step"] > 0]
    assert len(trained) == STEPS and all("timing/logprobs_beside_s" in row for row in trained)
