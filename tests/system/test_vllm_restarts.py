"""Runs with real vLLM engines, one of whose processes is killed: the run goes on with a new one, and ends as
if nothing had happened."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.models.generation.vllm.generation import VllmGeneration
from megarl.observe.launches import ENGINES, FINISHED, read_launches
from megarl.run.run import run
from megarl.watch.run_state import read_run_state
from megarl.watch.status import as_plain
from tests.dist.key_models import SPECIAL, tokenizer_of_words
from tests.models import policy_config
from tests.system.vllm_engines import VOCABULARY, dense_model, processes_of
from tests.system.whole_runs import comparable, read_rows
from tests.tiers import slow

pytestmark = [
    slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_model(
        tmp_path_factory.mktemp("model") / "tiny",
        intermediate_size=112,
        num_hidden_layers=2,
        initializer_range=0.2,
    )


def config_of(run_dir: Path, model: Path, shared: bool) -> dict[str, Any]:
    data = run_dir.with_name("data.jsonl")
    data.parent.mkdir()
    data.write_text(
        "\n".join(
            json.dumps({"prompt": f"w{left} w{left + 1}", "answer": str(left % 5)}) for left in range(9, 20)
        )
    )
    source = {"path": str(data), "prompt_key": "prompt", "answer_key": "answer"}
    policy = policy_config(model, gbs=8, mbs=4, temperature=0.7)
    # beside a config.json transformers takes the words for Qwen's own tokenizer, which knows none of them
    tokens = tokenizer_of_words(
        run_dir.with_name("tokenizer"), [f"w{number}" for number in range(len(SPECIAL), VOCABULARY)]
    )
    policy["tokenizer"] = {"name": str(tokens), "chat_template": None}
    policy["generation"] = {
        "backend": "vllm",
        "max_new_tokens": 5,
        "temperature": 0.7,
        "colocated": {"enabled": True} if shared else {"enabled": False, "resources": {"gpus_per_node": 1}},
        "vllm_cfg": {"enforce_eager": True, "kv_cache_gb": 0.02, "env_vars": {"VLLM_CPU_CI_ENV": "1"}},
    }
    return {
        "algorithm": "grpo",
        "seed": 3,
        "run_dir": str(run_dir),
        "policy": policy,
        "data": {"train": source, "validation": source, "max_input_seq_length": 20},
        "checkpointing": {"enabled": True, "save_period": 1, "keep_top_k": None, "export_hf": True},
        "cluster": {"gpus_per_node": 1 if shared else 2, "num_nodes": 1, "device": "cpu"},
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 2,
            "max_num_steps": STEPS,
            "val_period": 1,
            "max_val_samples": 3,
        },
        "env": {
            "environment": str(Path(__file__).parents[1] / "toys" / "as_long.py") + ":AsLong",
            "options": {"farthest": 40},
        },
        "loss_fn": {
            "reference_policy_kl_penalty": 0.01,
            "ratio_clip_min": 0.2,
            "ratio_clip_max": 0.2,
            "ratio_clip_c": None,
            "use_on_policy_kl_approximation": False,
            "use_importance_sampling_correction": False,
            "token_level_loss": True,
        },
    }


@pytest.mark.parametrize("shared", [True, False], ids=["colocated", "apart"])
@pytest.mark.parametrize("method", ["generate", "_results"])
def test_a_killed_engine_is_replaced(
    local_ray: int, model: Path, tmp_path: Path, shared: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before it answers, and while a refit is waited for."""
    assert run(config_of(tmp_path / "whole" / "run", shutil.copytree(model, tmp_path / "model"), shared)) == 0
    real, calls, killed = getattr(VllmGeneration, method), [0], list[int]()

    def kill_first(self: VllmGeneration, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == (3 if method == "generate" else 12) and not killed:
            killed.extend(processes_of(self.worker_group))
            os.kill(killed[0], signal.SIGKILL)
        return real(self, *arguments, **options)

    monkeypatch.setattr(VllmGeneration, method, kill_first)
    assert run(config_of(tmp_path / "again" / "run", tmp_path / "model", shared)) == 0
    assert len(killed) == 1
    one, other = (tmp_path / name / "run" for name in ("again", "whole"))
    assert (
        comparable(one) == comparable(other)
        and len({row["train/reward"] for row in read_rows(other) if row["step"]}) > 1
    )
    weights = [load_file(each / "hf" / f"step_{STEPS}" / "model.safetensors") for each in (one, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    [launch] = read_launches(one)
    assert [restart.what for restart in launch.restarts] == [ENGINES] and launch.outcome == FINISHED
    assert as_plain(read_run_state(one))["engine_restarts"] == 1
