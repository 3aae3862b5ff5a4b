"""A reward model as a whole program on real Ray: it learns, is resumed to the bit, and transformers loads its
export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megarl.algorithms.loss_functions import NLLLoss
from megarl.cli import main
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.errors import ConfigError, StateError
from megarl.models.policy.lm_policy import Policy
from megarl.quickstart.material import generate_problems
from tests.dist import reference
from tests.dist.batches import make_batch
from tests.models import make_scoring, policy_config
from tests.system.whole_runs import CONFIGS, make_material
from tests.tiers import slow

BACKENDS: dict[str, list[str]] = {
    "megatron": [
        "policy.megatron_cfg.tensor_model_parallel_size=2",
        "policy.megatron_cfg.sequence_parallel=true",
    ],
    "fsdp1": [
        "policy.megatron_cfg.enabled=false",
        "policy.optimizer={name: torch.optim.AdamW, kwargs: {lr: 2.0e-3}}",
    ],
}


def write_pairs(path: Path, count: int, seed: int) -> list[dict[str, str]]:
    """Problems with their right answer, and the right answer of another one."""
    problems = generate_problems(count, seed=seed)
    others = [*problems[1:], problems[0]]
    pairs = [
        {
            "ask": one.prompt,
            "good": one.answer,
            "bad": other.answer if other.answer != one.answer else f"{other.answer}1",
        }
        for one, other in zip(problems, others, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, pairs)))
    return pairs


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@slow
def test_the_policy_gives_values_and_scores_in_the_order_of_the_batch(local_ray: int, tmp_path: Path) -> None:
    """On two replicas of two tensor-parallel ranks, packed, also of more rows than go round evenly; what it
    cannot do it refuses."""
    model = make_scoring(tmp_path / "model", "llama", 3)
    config: Any = {
        **policy_config(model, tp=2, batching="packed"),
        "generation": None,
        "reward_model_cfg": {"enabled": True},
    }
    config["max_total_sequence_length"] = 24
    cluster = RayVirtualCluster([4], use_gpus=False, name="scoring")
    policy = Policy(cluster, config, None, init_reference_model=False)
    loaded = reference.load_scoring(model)
    try:
        for rows in (1, 7):
            batch = make_batch(rows, 11, seed=rows)
            policy.prepare_for_lp_inference()
            given: Any = BatchedDataDict({key: batch[key] for key in ("input_ids", "input_lengths")})
            with torch.no_grad():
                values, scores = (
                    reference.token_values(loaded, batch),
                    loaded(input_ids=batch["input_ids"]).logits.squeeze(-1),
                )
            torch.testing.assert_close(policy.get_values(given)["values"], values, atol=1e-5, rtol=0)
            torch.testing.assert_close(policy.score(given)["scores"], scores, atol=1e-5, rtol=0)
        with pytest.raises(StateError, match=r"get_logprobs\(\): policy\.reward_model_cfg\.enabled = True"):
            policy.get_logprobs(given)
        with pytest.raises(ConfigError, match="this model gives values"):
            policy.train(BatchedDataDict(batch), NLLLoss())
    finally:
        assert policy.shutdown()
        cluster.shutdown()


@slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reward_model_as_a_program(backend: str, local_ray: int, tmp_path: Path) -> None:
    material = make_material(tmp_path, teach=False)
    write_pairs(tmp_path / "train.jsonl", 48, seed=1)
    held_out = write_pairs(tmp_path / "validation.jsonl", 11, seed=2)

    def train(run_dir: Path, steps: int) -> None:
        source = "{{path: {}, prompt_key: ask, chosen_key: good, rejected_key: bad}}"
        overrides = [
            "algorithm=rm",
            "~sft",
            "~data.train.answer_key",
            (
                f"+rm={{max_num_steps: {steps}, val_at_end: true, val_global_batch_size: 8, "
                "val_micro_batch_size: 2}"
            ),
            f"run_dir={run_dir}",
            f"policy.model_name={material.model}",
            "policy.generation=null",
            "+policy.reward_model_cfg={enabled: true, reward_model_type: bradley_terry}",
            "policy.train_global_batch_size=6",
            "policy.train_micro_batch_size=1",
            f"data.train={source.format(tmp_path / 'train.jsonl')}",
            f"data.validation={source.format(tmp_path / 'validation.jsonl')}",
            "checkpointing.save_period=2",
            "cluster.gpus_per_node=2",
            *BACKENDS[backend],
        ]
        assert main(["train", str(CONFIGS / "sft.yaml"), *overrides, "--dry-run"]) == 0
        assert main(["train", str(CONFIGS / "sft.yaml"), *overrides]) == 0

    train(tmp_path / "whole", 4)
    train(tmp_path / "parts", 2)
    train(tmp_path / "parts", 4)
    whole, parts = (
        load_file(tmp_path / name / "hf" / "step_4" / "model.safetensors") for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys() and "score.weight" in whole and "lm_head.weight" not in whole
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
    last = rows(tmp_path / "whole")[-1]
    assert last["step"] == 4 and last["validation/samples"] == 11

    exported = tmp_path / "whole" / "hf" / "step_4"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float32).eval()
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    texts = [pair["ask"] + pair[key] + tokenizer.eos_token for pair in held_out for key in ("good", "bad")]
    with torch.no_grad():
        scores = model(
            **tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        ).logits.squeeze(-1)
    margins = scores[::2] - scores[1::2]
    assert last["validation/margin"] == pytest.approx(float(margins.mean()), abs=1e-5)
    assert last["validation/loss"] == pytest.approx(
        float(-torch.nn.functional.logsigmoid(margins).mean()), abs=1e-5
    )
    assert last["validation/accuracy"] == pytest.approx(float((margins > 0).double().mean()), abs=1e-6)
