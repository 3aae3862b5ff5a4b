"""The quickstart's job on every backend, changed by one layer of configuration: the same samples, losses,
gradient norms and rewards."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.system.whole_runs import CONFIGS, LONGEST_WAIT_S, ROOT, Material, make_material, write_config
from tests.tiers import slow

# float32, the sums in another order, carried on through the optimizer steps
CLOSE = 1e-5


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("backends"))


def measured(backend: str, algorithm: str, material: Material, directory: Path) -> list[dict[str, Any]]:
    """What a whole run wrote down, step by step."""
    config = write_config(
        directory / f"{algorithm}.yaml", algorithm, material, checkpointing={"enabled": False}
    )
    run_dir = directory / f"{algorithm}-{backend}"
    # Megatron alone warms up in the quickstart's supervised part
    changes = [
        f"run_dir={run_dir}",
        "policy.train_micro_batch_size=1",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    ]
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        str(config),
        "--with",
        str(CONFIGS / f"{backend}.yaml"),
        *changes,
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_WAIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def on_megatron(
    material: Material, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, Any]]]:
    """What the run of an algorithm on Megatron measured, which is made once."""
    return functools.cache(
        lambda algorithm: measured("megatron", algorithm, material, tmp_path_factory.mktemp("megatron"))
    )


@slow
@pytest.mark.parametrize("backend", ["dtensor", "fsdp1"])
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_backends_walk_the_same_way(
    algorithm: str,
    backend: str,
    on_megatron: Callable[[str], list[dict[str, Any]]],
    material: Material,
    tmp_path: Path,
) -> None:
    rows, expected = measured(backend, algorithm, material, tmp_path), on_megatron(algorithm)
    assert any(row.get("train/grad_norm") for row in expected), (
        "nothing was learned, so that nothing could differ"
    )
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        names = {name for name in other if name.startswith(("train/", "validation/"))}
        assert names <= row.keys() | {"train/wd"}, f"{backend} lacks {names - row.keys()}"
        for name in names - {"train/wd"}:
            assert row[name] == pytest.approx(other[name], rel=CLOSE, abs=CLOSE), f"step {row['step']} {name}"
