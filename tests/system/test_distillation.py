"""Distillation as a whole program on Megatron, policy and teacher in turns on the same ranks: it comes nearer
to its teacher, in one layout as in another, and killed and resumed it ends as if nobody had disturbed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.checkpoint.manifest import verify
from tests.system.whole_runs import ON_TORCH, STEPS, Launches, Material, comparable, read_rows, write_config
from tests.tiers import slow

pytestmark = pytest.mark.timeout(1800)


def configuration(directory: Path, material: Material, **changes: Any) -> Path:
    """An untaught model that learns from one that was taught."""
    directory.mkdir(exist_ok=True)
    base = write_config(
        directory / "base.yaml", "distillation", material, teacher={"model_name": str(material.taught)}
    )
    config = directory / "distillation.yaml"
    layers = {"policy": {"model_name": str(material.model)}}
    for name, section in changes.items():
        layers[name] = {**layers.get(name, {}), **section}
    config.write_text(yaml.safe_dump({"defaults": str(base), **layers}))
    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, material: Material, launches: Launches) -> Path:
    """A run on tensor parallel 2 that nobody disturbed."""
    directory = tmp_path_factory.mktemp("whole")
    return launches.finish(configuration(directory, material), directory / "run")


def files_of(run_dir: Path) -> dict[str, bytes]:
    directory = run_dir / "checkpoints" / f"step_{STEPS}" / "policy"
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*.distcp"))
    }


@slow
def test_it_comes_nearer_to_its_teacher(whole: Path) -> None:
    trained = [row for row in read_rows(whole) if "train/loss" in row]
    apart = [row["train/sampled_reverse_kl"] for row in trained]
    assert len(apart) == STEPS and apart[-1] < 0.8 * apart[0], apart
    assert all(row["performance/teacher_memory_gib"] > 0 for row in trained)
    checkpoint = whole / "checkpoints" / f"step_{STEPS}"
    assert verify(checkpoint) == [] and not (checkpoint / "teacher").exists()


@slow
def test_killed_and_resumed_it_ends_as_undisturbed(
    whole: Path, tmp_path: Path, material: Material, launches: Launches
) -> None:
    config = configuration(tmp_path / "config", material)
    launch = launches.start(config, tmp_path / "run")
    launch.await_moment(launch.logged(2))
    launch.kill_when(lambda: True)
    launches.finish(config, tmp_path / "run")
    assert comparable(tmp_path / "run") == comparable(whole)
    files = files_of(tmp_path / "run")
    assert files and files == files_of(whole)


LAYOUTS: dict[str, dict[str, Any]] = {
    "policy-packed-teacher-in-two-stages": {
        "policy": {
            "megatron_cfg": {"tensor_model_parallel_size": 1},
            "sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96},
            "logprob_chunk_size": 7,
        },
        "teacher": {"megatron_cfg": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}},
    },
    **ON_TORCH,
}


@slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_has_the_same_curves(
    layout: str, whole: Path, tmp_path: Path, material: Material, launches: Launches
) -> None:
    """To rounding: the same tokens are drawn, and the teacher says the same of them."""
    other = launches.finish(configuration(tmp_path / "config", material, **LAYOUTS[layout]), tmp_path / "run")
    for ours, theirs in zip(comparable(other), comparable(whole), strict=True):
        for name in ("train/reward", "validation/accuracy", "train/num_tokens", "train/truncated"):
            assert ours.get(name) == theirs.get(name), (ours["step"], name)
        for name in (
            "loss",
            "grad_norm",
            "forward_kl",
            "reverse_kl",
            "teacher_mass",
            "policy_mass",
            "sampled_reverse_kl",
        ):
            # the validation before the first step has none of them
            expected = theirs.get(f"train/{name}")
            assert ours.get(f"train/{name}") == (expected and pytest.approx(expected, rel=1e-4, abs=1e-5)), (
                ours["step"],
                name,
            )
