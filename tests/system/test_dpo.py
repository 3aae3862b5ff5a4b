"""DPO as a whole program on Megatron, pairs dealt to two ranks and packed: against three steps of TRL's
trainer, and resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from tests.system.whole_runs import LONGEST_WAIT_S, ROOT
from tests.tiers import slow
from tests.unit.driver_runs import make_config
from tests.unit.tiny_model import make_tiny_model

STEPS, PAIRS, RATE, BETA, EPSILON = 3, 4, 2e-3, 0.3, 1e-3
# what megarl is told, and TRL
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dpo": ({}, {"loss_type": ["sigmoid"]}),
    "dpo-length-normalised": ({"preference_average_log_probs": True}, {"loss_type": ["sigmoid_norm"]}),
    "ipo": ({"preference_loss_type": "ipo", "preference_average_log_probs": True}, {"loss_type": ["ipo"]}),
}
BATCHING: dict[str, dict[str, Any]] = {
    "dpo": {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}},
    "dpo-length-normalised": {
        "dynamic_batching": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}
    },
    "ipo": {},
}
LINES = [
    {
        "prompt": f"{place}+{3 * place % 7}=",
        "chosen": str(place + 3 * place % 7),
        "rejected": "abcdefgh"[: 1 + 5 * place % 8],
    }
    for place in range(STEPS * PAIRS)
]


def of_megarl(
    form: str, model: str, directory: Path, steps: int = STEPS
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    directory.mkdir(exist_ok=True)
    file = directory / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    section = {"reference_policy_kl_penalty": BETA, "val_period": 0, "max_num_steps": steps, **FORMS[form][0]}
    config = make_config("dpo", directory / "run", model, str(file), **section)
    optimizer = {"lr": RATE, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": EPSILON}
    megatron = {
        "enabled": True,
        "tensor_model_parallel_size": 1,
        "optimizer": optimizer,
        "scheduler": {"lr_warmup_iters": 0},
    }
    config["policy"] |= {
        "train_global_batch_size": PAIRS,
        "megatron_cfg": megatron,
        "generation": None,
        **BATCHING[form],
    }
    config["data"] |= {"shuffle": False, "validation": None}
    config["cluster"]["gpus_per_node"] = 2
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "megarl.cli", "train", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONGEST_WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    return rows, load_file(directory / "run" / "hf" / f"step_{steps}" / "model.safetensors")


def of_trl(form: str, model: str, directory: Path) -> tuple[list[float], dict[str, Tensor]]:
    pytest.importorskip("trl")
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    losses: list[float] = []

    class InOrder(DPOTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *given: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *given: Any, **options: Any) -> Any:
            answer = super().compute_loss(*given, **options)
            losses.append(float(answer.detach()))
            return answer

    arguments = DPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=PAIRS,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_epsilon=EPSILON,
        max_grad_norm=1.0,
        beta=BETA,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        **FORMS[form][1],
    )
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = InOrder(
        model=network,
        args=arguments,
        train_dataset=Dataset.from_list(LINES),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    return losses, {name: tensor.detach() for name, tensor in network.state_dict().items()}


@slow
@pytest.mark.parametrize("form", FORMS)
def test_three_steps_of_trl(form: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", 5)
    losses, weights = of_trl(form, model, tmp_path)
    rows, trained = of_megarl(form, model, tmp_path)
    assert len(losses) == len(rows) == STEPS and len(set(losses)) == STEPS
    assert [row["train/loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    before = load_file(Path(model) / "model.safetensors")
    for name, tensor in trained.items():
        # a thousandth of what a step moves a weight
        torch.testing.assert_close(
            tensor, weights[name], rtol=1e-5, atol=1e-3 * RATE, msg=lambda said, name=name: f"{name}: {said}"
        )
    assert any(float((tensor - before[name]).abs().max()) > RATE / 10 for name, tensor in trained.items())


@slow
def test_a_resumed_run_is_the_whole_one_to_the_bit(tmp_path: Path) -> None:
    """Also where the kept log-probabilities of the reference are gone, and weights that were trained are
    there when they are computed."""
    model = make_tiny_model(tmp_path / "model", 5)
    rows, whole = of_megarl("dpo", model, tmp_path / "whole", steps=4)
    of_megarl("dpo", model, tmp_path / "resumed", steps=2)
    shutil.rmtree(tmp_path / "resumed" / "cache")
    again, resumed = of_megarl("dpo", model, tmp_path / "resumed", steps=4)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    names = ("loss", "accuracy", "rewards_margin_mean", "grad_norm")
    assert [[row[f"train/{name}"] for name in names] for row in again] == [
        [row[f"train/{name}"] for name in names] for row in rows
    ]
