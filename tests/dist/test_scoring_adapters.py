"""Adapters of models that score, reward models and critics, whose score layer is trained whole beside them,
against PEFT."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from megarl.algorithms.value_losses import PreferenceLoss, ValueLoss, last_values
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, peft_jobs, reference, scoring_jobs
from tests.dist.checks import check_close, check_equal
from tests.dist.remembered import remembered, without_layout
from tests.dist.test_scoring import config_for, pair_batch
from tests.models import make_scoring, policy_config
from tests.tiers import newest_megatron, sampled

LOSSES: dict[str, Any] = {"preference": PreferenceLoss(), "value": ValueLoss(0.2)}
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
LAYOUTS = [
    "tp1",
    "tp2-sp",
    "dp2",
    "pp2",
    "tp2-sp-pp2-uneven",
    "cp2",
    "dtensor-dp2",
    "dtensor-tp2-sp",
    "dtensor-tp2",
]
BATCHES = [pair_batch(seed=seed) for seed in range(1, 6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scoring(tmp_path_factory.mktemp("scoring") / "qwen2", "qwen2", 3)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    """With factors and a score layer of its own."""
    torch.manual_seed(4)
    changed = get_peft_model(
        reference.load_scoring(model),
        LoraConfig(task_type="SEQ_CLS", r=3, lora_alpha=5, target_modules=TARGETS),
    )
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    changed.save_pretrained(model.with_name("adapter"))
    return model.with_name("adapter")


def loaded(model: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(reference.load_scoring(model), adapter, is_trainable=True)


class PeftTrainer(reference.ReferenceTrainer):
    def read(self, data: Mapping[str, Any], temperature: float) -> dict[str, torch.Tensor]:
        return {"values": reference.token_values(self.model.base_model.model, data)}  # type: ignore[union-attr]


@remembered
def trained_by_peft(model: Path, adapter: Path, config: Mapping[str, Any], loss: str) -> dict[str, Any]:
    """Losses, norms and merged weights of a step of float64 for each batch."""
    trainer = PeftTrainer(loaded(model, adapter).double(), config)
    exact = [
        {name: column.double() if column.is_floating_point() else column for name, column in batch.items()}
        for batch in BATCHES
    ]
    measured = [trainer.step(batch, LOSSES[loss]) for batch in exact]
    whole: Any = trainer.model.merge_and_unload()  # type: ignore[operator]
    return {
        "losses": [m[0] for m in measured],
        "norms": [m[1] for m in measured],
        "weights": dict(whole.state_dict()),
    }


def configured(layout: str, model: Path, adapter: Path, **changes: Any) -> tuple[int, dict[str, Any]]:
    world, config = config_for(layout, model, "fixed", **{"gbs": 12, "mbs": 2, **changes})
    return world, peft_jobs.with_adapters(config, adapter_path=str(adapter), target_modules=TARGETS)


@newest_megatron(layout=["tp2-sp-pp2-uneven"])
@sampled(3)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_adam_steps_equal_peft(
    pool: WorkerPool, model: Path, adapter: Path, layout: str, loss: str
) -> None:
    expected = trained_by_peft(model, adapter, without_layout(policy_config(model, gbs=12)), loss)
    world, config = configured(layout, model, adapter)
    for result in pool.run(world, jobs.train, config, BATCHES, LOSSES[loss]):
        torch.testing.assert_close(result["losses"], expected["losses"], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(result["norms"], expected["norms"], atol=1e-6, rtol=1e-5)
        assert result["weights"].keys() == expected["weights"].keys()
        check_close(result["weights"], expected["weights"])


@sampled(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [("tp2-sp", "tp2-sp"), ("pp2", "dp2"), ("dtensor-dp2", "dtensor-dp2"), ("dtensor-tp2", "dtensor-dp2")],
)
def test_training_goes_on_from_a_checkpoint(
    pool: WorkerPool, model: Path, adapter: Path, before: str, after: str, tmp_path: Path
) -> None:
    """To the bit in its own layout."""
    world, config = configured(before, model, adapter)
    expected = pool.run(world, scoring_jobs.train_and_save, config, BATCHES[:3], LOSSES["value"], tmp_path)[0]
    world, config = configured(after, model, adapter)
    found = pool.run(world, scoring_jobs.resume, config, BATCHES[:3], LOSSES["value"], tmp_path)[0]
    (check_equal if before == after else check_close)(found, expected)


@sampled(1)
@pytest.mark.parametrize("layout", ["tp2-sp", "pp2", "dtensor-tp2"])
def test_an_export_is_merged_with_the_adapter_and_its_score_layer_inside(
    pool: WorkerPool, model: Path, adapter: Path, layout: str, tmp_path: Path
) -> None:
    batch = pair_batch(rows=6, length=11, seed=4)
    world, config = configured(layout, model, adapter)
    [result, *_] = pool.run(world, scoring_jobs.export, config, batch, tmp_path / "hf", None)
    scores = last_values(result, batch["input_lengths"])
    beside = [
        loaded(model, directory).base_model.model for directory in (tmp_path / "hf" / "adapter", adapter)
    ]
    for whole in (reference.load_scoring(tmp_path / "hf"), *beside):
        with torch.no_grad():
            found = reference.token_values(whole, batch)
        torch.testing.assert_close(last_values(found, batch["input_lengths"]), scores, atol=1e-5, rtol=0)


@sampled(2)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layout", ["tp1", "tp2-sp", "pp2", "tp2-sp-pp2-uneven", "dtensor-dp2", "dtensor-tp2"]
)
def test_two_adapters_share_one_base(
    pool: WorkerPool, model: Path, adapter: Path, layout: str, precision: str
) -> None:
    """A model trains on the base of another worker as on a base of its own."""
    world, config = configured(layout, model, adapter, precision=precision)
    arguments = config, BATCHES[:3], LOSSES["value"]
    alone = pool.run(world, jobs.train, *arguments)
    shared = pool.run(world, scoring_jobs.train_on_shared_base, *arguments, config)
    for expected, (found, taken, frozen, sees) in zip(alone, shared, strict=True):
        check_equal(found["weights"], expected["weights"])
        assert found["losses"] == expected["losses"]
        assert taken == frozen > 0
        assert sees


@pytest.mark.parametrize("layout", ["pp2", "dtensor-dp2"])
def test_a_base_that_cannot_be_shared_stays_with_each_model(
    pool: WorkerPool, model: Path, adapter: Path, layout: str
) -> None:
    world, config = configured(layout, model, adapter)
    for empty, of_nobody, of_another_machine, *refused in pool.run(world, scoring_jobs.share_nothing, config):
        assert (empty, of_nobody, of_another_machine) == ({}, 0, 0)
        for method, text in zip(("share_base", "take_base"), refused, strict=True):
            assert text.startswith(f"StateError: {method}() needs parameters on the device")


@pytest.mark.parametrize("layout", ["tp2-sp", "dtensor-dp2"])
def test_weights_that_differ_are_not_shared(
    pool: WorkerPool, model: Path, adapter: Path, layout: str, tmp_path: Path
) -> None:
    """One weight is another in the other model."""
    other = Path(shutil.copytree(model, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name][0, 0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    world, config = configured(layout, model, adapter)
    _, of = configured(layout, other, adapter)
    arguments = config, BATCHES[:2], LOSSES["value"]
    alone = pool.run(world, jobs.train, *arguments)
    shared = pool.run(world, scoring_jobs.train_on_shared_base, *arguments, of)
    apart = 0
    for expected, (found, taken, frozen, sees) in zip(alone, shared, strict=True):
        check_equal(found["weights"], expected["weights"])
        assert sees == (taken == frozen)
        apart += frozen - taken
    # Only one rank has the changed element.
    assert apart == weights[name].nbytes // 2
