"""Models that score, in every layout and kind of micro-batch, against transformers' sequence classification
in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.algorithms.value_losses import PreferenceLoss, ValueLoss, last_values
from megarl.config.layout import consecutive_layers
from megarl.config.model_facts import facts_of_policy
from megarl.config.parameters import stage_parameters
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, reference, scoring_jobs
from tests.dist.batches import make_batch
from tests.dist.checks import check_close, check_equal, check_trained, run_reference
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.dist.layouts import layout
from tests.dist.remembered import remembered
from tests.models import make_scoring, policy_config
from tests.tiers import newest_megatron, sampled, slow

SCORING = {"enabled": True}
MEGATRON = {
    name: layout(name, padded="vpp" in name)
    for name in [
        "tp1",
        "tp2",
        "tp2-sp",
        "dp2",
        "cp2",
        "pp2",
        "tp2-sp-pp2-uneven",
        "cp2-tp2-sp",
        "cp3-ring",
        "pp2-vpp2-tp2-sp",
    ]
}
DTENSOR: dict[str, tuple[int, dict[str, Any]]] = {
    **{
        f"dtensor-{name}": layout(name, torch=True)
        for name in ["dp2", "tp2", "tp2-sp", "cp2", "cp2-tp2-sp", "tp2-sp-dp2"]
    },
    "dtensor-tp2-named": (2, {"tp": 2, "plan": "tests.dist.plans.by_names"}),
}
FSDP1 = {"fsdp1-1": 1, "fsdp1-2": 2, "fsdp1-3": 3}
LAYOUTS = [*MEGATRON, *DTENSOR, *FSDP1]
BATCHING = ["fixed", "dynamic", "packed"]
FAMILIES = {"vpp": "qwen3-four", "dtensor-tp2": "qwen2", "fsdp1": "qwen3"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models that score, saved by transformers, their weights random; the configs say tied, which means
    nothing for them."""
    root = tmp_path_factory.mktemp("scoring")
    names = ["llama", "qwen2", "qwen3", "qwen3-four", "mixtral"]
    return {
        name: make_scoring(root / name, name.removesuffix("-four"), 4 if "four" in name else 3)
        for name in names
    }


def family_for(layout: str) -> str:
    return next((family for part, family in FAMILIES.items() if part in layout), "llama")


def config_for(layout: str, model: Path, batching: str, **changes: Any) -> tuple[int, dict[str, Any]]:
    """World size and policy configuration; budgets of tokens that hold a pair of the longest sequences,
    padded."""
    if layout in MEGATRON:
        world, placed = MEGATRON[layout]
        config = policy_config(model, batching=batching, **placed, **changes)
    elif layout in DTENSOR:
        world, placed = DTENSOR[layout]
        config = dtensor_config(model, batching, **placed, **changes)
    else:
        world, config = FSDP1[layout], fsdp1_config(model, batching, **changes)
    for way in ("sequence_packing", "dynamic_batching"):
        if config[way]["enabled"]:
            config[way] |= {"train_mb_tokens": 40, "logprob_mb_tokens": 41}
    return world, {**config, "reward_model_cfg": SCORING}


def pair_batch(rows: int = 12, length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """Pairs of rows, of which one does not count, and columns for a value model."""
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(rows, length, seed)
    batch["sample_mask"] = torch.ones(rows)
    batch["sample_mask"][4:6] = 0.0
    noise = {name: torch.randn(rows, length, generator=generator) for name in ("returns", "prev_values")}
    return {**batch, **noise}


@remembered
def values_and_scores(model: Path, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loaded = reference.load_scoring(model)
    with torch.no_grad():
        return reference.token_values(loaded, batch), loaded(input_ids=batch["input_ids"]).logits.squeeze(-1)


@newest_megatron(layout=["tp2-sp-pp2-uneven"])
@sampled(5)
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_equal_transformers(
    pool: WorkerPool, models: dict[str, Path], layout: str, batching: str
) -> None:
    """Of every token; and the score of a sequence is what transformers' own class says of it,
    right-padded."""
    model = models[family_for(layout)]
    batch = make_batch(rows=7, length=13, seed=3)
    expected, scores = values_and_scores(model, batch)
    # values know no temperature
    world, config = config_for(layout, model, batching, temperature=0.7)
    for result in pool.run(world, scoring_jobs.values, config, batch):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(last_values(result, batch["input_lengths"]), scores, atol=1e-5, rtol=0)
        outside = torch.arange(13)[None] >= batch["input_lengths"][:, None]
        assert result[outside].eq(0).all()


LOSSES = {"preference": PreferenceLoss(), "value": ValueLoss(0.2)}


@newest_megatron(layout=["tp2-sp-pp2-uneven"])
@sampled(3)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_adam_steps_equal_transformers(
    pool: WorkerPool, models: dict[str, Path], layout: str, batching: str, loss: str
) -> None:
    check_training(pool, layout, models[family_for(layout)], batching, LOSSES[loss], mbs=2)


@slow
@pytest.mark.parametrize("layout", ["tp2-sp", "pp2", "dp2"])
def test_a_mixture_of_experts_learns_to_score(pool: WorkerPool, models: dict[str, Path], layout: str) -> None:
    check_training(pool, layout, models["mixtral"], "packed", PreferenceLoss(), mbs=2)


@sampled(1)
@pytest.mark.parametrize(
    "changes", [{"mbs": 4}, {"recompute": True}, {"overlap": True}, {"distributed_optimizer": False}], ids=str
)
def test_options_change_nothing(pool: WorkerPool, models: dict[str, Path], changes: dict[str, Any]) -> None:
    check_training(pool, "tp2-sp", models["llama"], "fixed", PreferenceLoss(), **changes)


def check_training(
    pool: WorkerPool, layout: str, model: Path, batching: str, loss_fn: Any, **changes: Any
) -> None:
    batches = [pair_batch(seed=seed) for seed in (1, 2, 3)]
    losses, norms, weights = run_reference(
        model, policy_config(model, gbs=12), batches, loss_fn, kind="scoring"
    )
    world, config = config_for(layout, model, batching, gbs=12, **changes)
    results = pool.run(world, jobs.train, config, batches, loss_fn)
    # of a mixture transformers keeps all experts of a layer in one tensor; those that go by one name on both
    # sides are compared
    common = weights.keys() & results[0]["weights"].keys()
    assert "score.weight" in common and (common == weights.keys() or "mixtral" in model.name)
    for result in results:
        result["weights"] = {name: result["weights"][name] for name in common}
    check_trained(results, losses, norms, {name: weights[name] for name in common})


# checkpoints, exports, a new score layer


SAVED = {
    "megatron": ("tp2-sp-pp2-uneven", "tp1"),
    "dtensor": ("dtensor-tp2-sp", "fsdp1-1"),
    "fsdp1": ("fsdp1-2", "dtensor-dp2"),
}


@sampled(1)
@pytest.mark.parametrize("saved", SAVED)
def test_training_goes_on_from_a_checkpoint(
    pool: WorkerPool, models: dict[str, Path], saved: str, tmp_path: Path
) -> None:
    """To the bit in its own layout, and in another one, or on another torch backend, to rounding."""
    batches = [pair_batch(seed=seed) for seed in (1, 2, 3)]
    own, other = SAVED[saved]
    world, config = config_for(own, models["llama"], "fixed", gbs=12)
    whole = pool.run(world, scoring_jobs.train_and_save, config, batches, PreferenceLoss(), tmp_path)[0]
    again = pool.run(world, scoring_jobs.resume, config, batches, PreferenceLoss(), tmp_path)[0]
    check_equal(again, whole)
    world, config = config_for(other, models["llama"], "fixed", gbs=12)
    elsewhere = pool.run(world, scoring_jobs.resume, config, batches, PreferenceLoss(), tmp_path)[0]
    check_close(elsewhere, whole)


class PaddingWith3:
    """Stands for a tokenizer whose padding token is not the one that the model's config names."""

    pad_token_id = 3

    def save_pretrained(self, directory: Any) -> None:
        """Nothing of it is looked at."""


@sampled(2)
@pytest.mark.parametrize("layout", ["tp2-sp-pp2-uneven", "dtensor-tp2", "fsdp1-2"])
def test_a_language_model_gets_a_score_layer_and_is_exported(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, tmp_path: Path
) -> None:
    """Drawn from the seed alone, so that it is the same everywhere; transformers loads the export and gives
    the same scores."""
    model, batch = tiny_models["qwen2-tied"], make_batch(rows=6, length=11, seed=4)
    batch["input_ids"] = batch["input_ids"].clamp(min=4)
    padding = torch.arange(11)[None] >= batch["input_lengths"][:, None]
    batch["input_ids"][padding] = 3
    world, config = config_for(layout, model, "fixed")
    results = pool.run(world, scoring_jobs.export, config, batch, tmp_path / "hf", PaddingWith3())
    loaded = reference.load_scoring(tmp_path / "hf")
    assert type(loaded).__name__ == "Qwen2ForSequenceClassification" and loaded.config.num_labels == 1
    drawn = torch.randn(1, 36, generator=torch.Generator().manual_seed(5)) * 0.2
    assert torch.equal(loaded.score.weight.detach(), drawn)
    with torch.no_grad():
        scores = loaded(input_ids=batch["input_ids"]).logits.squeeze(-1)
    for result in results:
        torch.testing.assert_close(last_values(result, batch["input_lengths"]), scores, atol=1e-5, rtol=0)


def test_the_seed_decides_the_new_layer(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    batch = make_batch(rows=4, length=7, seed=4)
    _, config = config_for("tp1", tiny_models["llama"], "fixed")
    first, again, other = (pool.run(1, scoring_jobs.values, config, batch, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@sampled(1)
@pytest.mark.parametrize("layout", ["tp1", "dtensor-dp2", "fsdp1-1"])
def test_in_16_bit_values_are_near(pool: WorkerPool, models: dict[str, Path], layout: str) -> None:
    batch = make_batch(rows=6, length=11, seed=4)
    expected, _ = values_and_scores(models["llama"], batch)
    world, config = config_for(layout, models["llama"], "fixed", precision="bfloat16")
    found = pool.run(world, scoring_jobs.values, config, batch)[0]
    assert found.dtype == torch.float32 and 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()
    assert torch.equal(found, found.bfloat16().float())
    if layout == "tp1":
        config["megatron_cfg"]["float32_logits"] = True
        sums = pool.run(world, scoring_jobs.values, config, batch)[0]
        assert not torch.equal(sums, sums.bfloat16().float()) and torch.equal(sums.bfloat16().float(), found)


@sampled(1)
@pytest.mark.parametrize("layout", ["tp2-sp-pp2-uneven", "dtensor-dp2", "fsdp1-1"])
def test_the_memory_estimate_counts_its_parameters(
    pool: WorkerPool, models: dict[str, Path], layout: str
) -> None:
    world, config = config_for(layout, models["llama"], "fixed")
    facts = facts_of_policy(config)
    assert facts is not None and facts.head is not None
    held = pool.run(world, scoring_jobs.held_parameters, config)
    if layout in MEGATRON:
        assert held == [
            stage_parameters(facts, 2, stage, consecutive_layers([2, 1])) for stage in (0, 0, 1, 1)
        ]
    else:
        assert sum(held) == stage_parameters(facts, 1, 0, [range(3)])


# what is refused


@sampled(1)
@pytest.mark.parametrize("layout", ["tp1", "dtensor-dp2", "fsdp1-1"])
def test_what_a_model_that_scores_does_not_do(
    pool: WorkerPool, models: dict[str, Path], tiny_models: dict[str, Path], layout: str
) -> None:
    world, config = config_for(layout, models["llama"], "fixed")
    calls: dict[str, Any] = {
        "get_logprobs": {"data": {}},
        "generate": {"data": {}},
        "prepare_refit_info": {},
        "begin_refit": {},
    }
    calls["train"] = {"data": {}, "loss_fn": NLLLoss()}
    said = pool.run(world, scoring_jobs.refused, config, calls)[0]
    assert said.keys() == calls.keys()
    for method in calls.keys() - {"train"}:
        assert "StateError" in said[method] and "reward_model_cfg.enabled" in said[method], said[method]
    assert "a loss of log-probabilities, for a language model, and this model gives values" in said["train"]
    of_language = {**config, "model_name": str(tiny_models["llama"]), "reward_model_cfg": None}
    calls = {"get_values": {"data": {}}, "train": {"data": {}, "loss_fn": PreferenceLoss()}}
    said = pool.run(world, scoring_jobs.refused, of_language, calls)[0]
    assert (
        "this is a language model" in said["get_values"]
        and "a loss of values, for a scoring model" in said["train"]
    )


@pytest.mark.parametrize("layout", ["tp1", "fsdp1-1"])
def test_a_model_that_scores_is_asked_for_as_such(
    pool: WorkerPool, models: dict[str, Path], layout: str
) -> None:
    world, config = config_for(layout, models["llama"], "fixed")
    [said] = pool.run(world, scoring_jobs.refused, {**config, "reward_model_cfg": {"enabled": False}}, {})
    assert "build" in said and "score" in said["build"], said


def test_a_checkpoint_of_the_other_kind_is_refused(
    pool: WorkerPool, models: dict[str, Path], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Megatron-Core would take the first row of a vocabulary for a score layer, and a score layer for the
    first row of a vocabulary."""
    world, scoring = config_for("pp2", models["llama"], "fixed")
    language = {**scoring, "model_name": str(tiny_models["llama"]), "reward_model_cfg": None}
    for name, own, other in (("language", language, scoring), ("scoring", scoring, language)):
        pool.run(world, scoring_jobs.save, own, tmp_path / name)
        said = pool.run(world, scoring_jobs.cannot_load, other, tmp_path / name / "weights")
        assert all("CheckpointError" in each for each in said)
        assert any("output_layer.weight of" in each and "reward_model_cfg" in each for each in said), said
