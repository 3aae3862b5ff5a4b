"""PPO as a whole program on Megatron, actor and critic in turns on the same ranks: it runs in one layout as
in another, and killed at random moments it ends with both models as if nobody had disturbed it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.manifest import verify
from tests.system.whole_runs import ON_TORCH, STEPS, Launches, Material, comparable, read_rows, write_config
from tests.tiers import slow

pytestmark = pytest.mark.timeout(1800)
SEED = 5
"""Of the moments of the kills."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, material: Material, launches: Launches) -> Path:
    """A run on tensor parallel 2 that nobody disturbed."""
    directory = tmp_path_factory.mktemp("whole")
    return launches.finish(write_config(directory / "ppo.yaml", "ppo", material), directory / "ppo")


def files_of(run_dir: Path, role: str) -> dict[str, bytes]:
    """Weights and optimizer state of a role in the last checkpoint."""
    directory = run_dir / "checkpoints" / f"step_{STEPS}" / role
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*.distcp"))
    }


@slow
def test_both_models_are_trained(whole: Path) -> None:
    checkpoints = whole / "checkpoints"
    assert {path.name for path in (checkpoints / "step_1").iterdir() if path.is_dir()} >= {"policy", "critic"}
    assert all(verify(path) == [] for path in checkpoints.glob("step_*"))
    trained = [row for row in read_rows(whole) if "train/critic_loss" in row]
    assert ["train/loss" in row for row in trained] == [False, True, True, True], "the critic begins alone"
    assert all(row["performance/critic_memory_gib"] > 0 for row in trained)
    assert len({row["train/critic_grad_norm"] for row in trained}) == STEPS


@slow
def test_killed_at_random_moments_both_models_end_as_undisturbed(
    whole: Path, tmp_path: Path, material: Material, launches: Launches
) -> None:
    config, draw = write_config(tmp_path / "ppo.yaml", "ppo", material), random.Random(SEED)
    took = {row["step"]: row["timing/step_s"] for row in read_rows(whole) if "timing/step_s" in row}
    for step in (1, 2, 3):
        launch = launches.start(config, tmp_path / "ppo")
        seconds = draw.random() * took[step]
        print(f"seed {SEED}: kill {seconds:.2f} s into step {step}")
        launch.await_moment(launch.logged(step - 1) if step > 1 else launch.workers_are_up)
        end = time.monotonic() + seconds
        # on a machine that has become faster the step may be over before
        while time.monotonic() < end and not launch.logged(step)():
            launch.stay(0.02)
        launch.kill_when(lambda: True)
        assert all(verify(path) == [] for path in (tmp_path / "ppo" / "checkpoints").glob("step_*"))
    launch = launches.start(config, tmp_path / "ppo")
    launch.kill_when(launch.writing(STEPS))
    launches.finish(config, tmp_path / "ppo")
    assert comparable(tmp_path / "ppo") == comparable(whole)
    for role in ("policy", "critic"):
        files = files_of(tmp_path / "ppo", role)
        assert files and files == files_of(whole, role), role


LAYOUTS: dict[str, dict[str, Any]] = {
    "data-parallel-packed": {
        "policy": {
            "megatron_cfg": {"tensor_model_parallel_size": 1},
            "sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96},
        }
    },
    "critic-divided-otherwise": {
        "critic": {
            "train_micro_batch_size": 2,
            "megatron_cfg": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2},
        }
    },
    **ON_TORCH,
}


@slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_has_the_same_curves(
    layout: str, whole: Path, tmp_path: Path, material: Material, launches: Launches
) -> None:
    """To rounding: the same tokens are drawn, and so the same rewards."""
    import yaml

    config = tmp_path / "other.yaml"
    base = write_config(tmp_path / "ppo.yaml", "ppo", material)
    config.write_text(yaml.safe_dump({"defaults": str(base), **LAYOUTS[layout]}))
    other = launches.finish(config, tmp_path / "ppo")
    for ours, theirs in zip(comparable(other), comparable(whole), strict=True):
        for name in ("train/reward", "validation/accuracy", "train/num_tokens", "train/truncated"):
            assert ours.get(name) == theirs.get(name), (ours["step"], name)
        for name in (
            "loss",
            "grad_norm",
            "critic_loss",
            "critic_grad_norm",
            "critic_values_mean",
            "explained_variance",
            "advantages_max",
        ):
            # the actor has no loss while the critic is warmed up
            expected = theirs.get(f"train/{name}")
            assert ours.get(f"train/{name}") == (expected and pytest.approx(expected, rel=1e-4, abs=1e-5)), (
                ours["step"],
                name,
            )
