"""Adapters of PEFT in a model of Megatron-Core, read by its own loader in several layouts, and what it saves
of them back in PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from converters.command import main
from megarl.parity.pool import WorkerPool
from tests.dist import adapters, mixtures
from tests.dist.batches import make_batch
from tests.dist.reference import logprobs
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled

pytestmark = newest_megatron
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: list[tuple[str, int, dict[str, Any], list[str]]] = [
    ("qwen2", 2, {"tp": 2}, [*ATTENTION, "gate_proj", "up_proj", "down_proj"]),
    ("llama", 2, {"pp": 2, "first": 1, "last": 2}, [*ATTENTION, "gate_proj", "up_proj", "down_proj"]),
    ("qwen3_moe_mixed", 1, {}, ATTENTION),
]


def saved_by_peft(model: Path, directory: Path, targets: list[str]) -> None:
    torch.manual_seed(4)
    changed = get_peft_model(mixtures.load(model), LoraConfig(r=2, lora_alpha=3, target_modules=targets))
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    changed.save_pretrained(directory)


def logprobs_in_peft(model: Path, directory: Path, batch: dict[str, Tensor]) -> Tensor:
    """With the adapter beside the base model, nothing merged."""
    return logprobs(PeftModel.from_pretrained(mixtures.load(model), directory).eval(), batch)


@sampled(1)
@pytest.mark.parametrize(
    ("family", "world", "layout", "targets"),
    CASES,
    ids=[f"{family}-{layout}" for family, _, layout, _ in CASES],
)
def test_adapters_compute_on_both_sides_what_they_do_in_peft(
    family: str,
    world: int,
    layout: dict[str, Any],
    targets: list[str],
    pool: WorkerPool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = make_tiny(tmp_path / "hf", family, tied=False, seed=3)
    saved_by_peft(model, tmp_path / "peft", targets)
    capsys.readouterr()
    assert (
        main(
            ["adapter", str(tmp_path / "peft"), str(tmp_path / "mcore"), "--hf-config", str(model), "--json"]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    batch = make_batch(rows=6, length=13, seed=5)
    plain = logprobs(mixtures.load(model), batch)
    expected = logprobs_in_peft(model, tmp_path / "peft", batch)
    assert (expected - plain).abs().max() > 0.1  # the adapter changes something
    config = policy_config(model, **layout)
    trained = tmp_path / "run" / "iter_0000001"
    blocks = list(adapters.PLACES) if "gate_proj" in targets else ["self_attention"]
    arguments = (config, blocks, str(tmp_path / "mcore"), batch, said, str(trained))
    results = pool.run(world, adapters.load_compute_train_and_save, *arguments)
    assert main(["adapter", str(trained), str(tmp_path / "back"), "--hf-config", str(model)]) == 0
    again = logprobs_in_peft(model, tmp_path / "back", batch)
    assert (again - expected).abs().max() > 0.1
    for first, second in results:
        torch.testing.assert_close(first, expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(second, again, atol=2e-5, rtol=0)
