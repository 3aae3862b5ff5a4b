"""A new engine, algorithm and environment, each in one file of tests/toys, in a whole program on Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config.engines import engine_kind
from tests.system.whole_runs import CONFIGS, ROOT, make_material
from tests.tiers import slow

TOYS = ROOT / "tests" / "toys"


@slow
def test_a_program_of_toys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """REINFORCE on Megatron with two ranks, refitted by broadcast into transformers, in an environment that
    knows lengths.

    That the responses come from the newest weights shows in their log-probabilities, which are those that the
    policy computes.
    """
    material = make_material(tmp_path, teach=False)
    backend = f"{TOYS}/transformers_engine.py:KIND"
    assert engine_kind(backend).title == "transformers"
    overrides = {
        "algorithm": f"{TOYS}/reinforce.py:Reinforce",
        "+reinforce": "{prompts: 8, max_num_steps: 3, scale: 3.0}",
        "run_dir": str(tmp_path / "run"),
        "env": f"{{environment: '{TOYS}/as_long.py:AsLong', options: {{farthest: 5}}}}",
        "policy.model_name": str(material.model),
        "policy.train_global_batch_size": "8",
        "policy.generation.backend": backend,
        "+policy.generation.engine_cfg": "{threads: 2}",
        "+policy.generation.colocated": "{enabled: false, resources: {gpus_per_node: 1}}",
        "cluster.gpus_per_node": "3",
        "data.train.path": str(material.train),
        "data.max_input_seq_length": "28",
        "data.validation": "null",
    }
    arguments = ["~grpo", "~loss_fn", *(f"{key}={value}" for key, value in overrides.items())]
    assert main(["train", str(CONFIGS / "grpo.yaml"), *arguments, "--dry-run"]) == 0
    code = main(["train", str(CONFIGS / "grpo.yaml"), *arguments])
    said = capfd.readouterr()
    assert code == 0, said.out[-3000:] + said.err[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["timing/refit_s"] > 0 and row["train/grad_norm"] > 0 for row in rows)
    assert all(row["train/mismatch_max"] < 1e-5 for row in rows)
    assert len({row["train/reward"] for row in rows}) > 1
