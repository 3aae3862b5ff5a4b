"""Low-rank adapters of both backends against PEFT, in every layout: training, reference, refits, checkpoints
and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from converters.command import main
from megarl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss
from megarl.checkpoint.restricted import read_plain_index
from megarl.config.adapters import adapter_parameters, vocabulary_adapter_parameters
from megarl.config.backend import enabled_backend
from megarl.config.defaults import complete_policy
from megarl.config.model_facts import read_model_facts
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures, peft_jobs, reference, refit_jobs
from tests.dist.batches import make_batch
from tests.dist.checks import check_close, prompts
from tests.dist.layouts import CONFIG, DTENSOR, LAYOUTS, MEGATRON
from tests.dist.layouts import layout as named
from tests.dist.test_refit import BUDGET, stored
from tests.dist.test_refit import check as refits_are_exports
from tests.dist.test_refit_slices import check as slices_are_exports
from tests.dist.test_refit_slices import wanted_of
from tests.dist.training import PG_LOSS
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled, slow

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
ALL = [*ATTENTION, *MLP]
LAYERS = 4
# of the fused layers some matrices alone, and a name that one layer has
SOME = ["q_proj", "v_proj", "model.layers.2.mlp.up_proj", "down_proj"]
CASES = [
    ("megatron", family, layout) for family in ("qwen2", "qwen3-tied", "llama") for layout in MEGATRON.split()
]
CASES += [("dtensor", family, layout) for family in ("qwen2", "qwen3-tied") for layout in DTENSOR.split()]
OPTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("megatron", "tp2-sp", {"recompute": True, "batching": "packed"}),
    ("megatron", "pp2", {"recompute": True}),
    ("megatron", "dp2", {"distributed_optimizer": False, "batching": "dynamic"}),
    ("dtensor", "tp2-sp", {"recompute": True, "batching": "packed"}),
    ("dtensor", "dp2", {"offload": True}),
]
# experts have no adapters; attention, dense layers and shared experts do
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
MIXTURES = {
    "qwen3_moe_mixed": ATTENTION,
    "deepseek_v3": LATENT,
    "deepseek_v2": ["q_proj", *LATENT[2:]],
    "qwen2_moe": [*ATTENTION, "shared_expert.up_proj", "shared_expert.down_proj"],
}
NO_EXPERTS = ["*.mlp.experts.*"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("peft")
    names = ["qwen2", "qwen3-tied", "llama"]
    made = {
        name: make_tiny(root / name, name.split("-")[0], tied=name.endswith("-tied"), seed=7, layers=LAYERS)
        for name in names
    }
    for name, model in made.items():
        peft_jobs.saved_by_peft(model, root / f"{name}-all", ALL)
        peft_jobs.saved_by_peft(model, root / f"{name}-some", SOME)
    return made


def adapter_of(model: Path, kind: str) -> Path:
    return model.with_name(f"{model.name}-{kind}")


def configured(
    backend: str, layout: str, model: Path, kind: str, **changes: Any
) -> tuple[int, dict[str, Any]]:
    world, placed = LAYOUTS[backend][layout]
    if placed.get("pp") == 2:
        placed = {key: value for key, value in placed.items() if key not in ("first", "last")} | (
            {"first": 3, "last": 1} if placed.get("first") == 2 else {}
        )
    config = CONFIG[backend](model, **{**placed, "gbs": 12, "mbs": 3, "clip": 0.5, **changes})
    targets = SOME if kind == "some" else ALL
    return world, peft_jobs.with_adapters(
        config, adapter_path=str(adapter_of(model, kind)), target_modules=targets
    )


@newest_megatron(backend=("megatron",))
@sampled(4)
@pytest.mark.parametrize(("backend", "family", "layout"), CASES)
def test_five_steps_equal_peft(
    pool: WorkerPool, models: dict[str, Path], backend: str, family: str, layout: str
) -> None:
    kind = "some" if family == "qwen2" else "all"
    world, config = configured(backend, layout, models[family], kind)
    check_trained(pool, world, config, models[family], adapter_of(models[family], kind))


def check_trained(
    pool: WorkerPool,
    world: int,
    config: dict[str, Any],
    model: Path,
    adapter: Path,
    loss_fn: Any = None,
    *,
    apart: bool = False,
) -> None:
    batches = [make_batch(rows=12, length=12, seed=seed) for seed in range(1, 6)]
    loss_fn = loss_fn or ClippedPGLossFn(PG_LOSS)
    expected = peft_jobs.expected_of(model, adapter, batches, loss_fn, apart=apart)
    base = reference.logprobs(mixtures.load(model), batches[0])
    counts: set[int] = set()
    for result in pool.run(world, peft_jobs.train, config, batches, loss_fn):
        torch.testing.assert_close(result["losses"], expected["losses"], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(result["norms"], expected["norms"], atol=1e-6, rtol=1e-5)
        assert result["factors"].keys() == expected["factors"].keys()
        check_close(result["factors"], expected["factors"])
        assert result["weights"].keys() == expected["weights"].keys()
        check_close(result["weights"], expected["weights"])
        # neither steps nor exports write to the base, which is the reference policy
        assert result["base_is_the_same"]
        counts.add(result["counts"][0])
        before, after = result["reference"]
        assert torch.equal(before, after)
        torch.testing.assert_close(after, base, atol=2e-5, rtol=0)
        assert (result["logprobs"] - base).abs().max() > 0.1
    if enabled_backend(config) == "megatron" and config["megatron_cfg"]["pipeline_model_parallel_size"] == 1:
        facts, section = read_model_facts(str(model)), complete_policy(config)["peft"]
        assert facts is not None
        megatron = config["megatron_cfg"]
        experts = (
            facts.num_experts // megatron["expert_model_parallel_size"],
            megatron["expert_tensor_parallel_size"],
        )
        tensor = megatron["tensor_model_parallel_size"]
        outside = vocabulary_adapter_parameters(section, facts, tensor)
        assert counts == {
            adapter_parameters(section, facts, range(facts.num_layers), tensor, experts) + sum(outside)
        }


@sampled(1)
@pytest.mark.parametrize(("backend", "layout", "changes"), OPTIONS, ids=str)
def test_options_change_nothing(
    pool: WorkerPool, models: dict[str, Path], backend: str, layout: str, changes: dict[str, Any]
) -> None:
    model = models["qwen3-tied"]
    world, config = configured(backend, layout, model, "all", **changes)
    check_trained(pool, world, config, model, adapter_of(model, "all"))


@sampled(1)
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("layout", ["tp1", "tp2-sp-ep2", "pp2", "ep2-dp2"])
def test_a_mixture_has_adapters_beside_all_but_its_experts(
    pool: WorkerPool, tmp_path: Path, family: str, layout: str
) -> None:
    model = make_tiny(tmp_path / "model", family, tied=False, seed=5)
    adapter = peft_jobs.saved_by_peft(model, tmp_path / "adapter", MIXTURES[family])
    world, placed = named(layout, padded=True)
    config = policy_config(model, **{**placed, "gbs": 12, "mbs": 3, "clip": 0.5})
    section = {
        "adapter_path": str(adapter),
        "target_modules": MIXTURES[family],
        "exclude_modules": NO_EXPERTS,
    }
    check_trained(pool, world, peft_jobs.with_adapters(config, **section), model, adapter)


@pytest.mark.parametrize(("backend", "layout"), [("megatron", "tp2-sp"), ("dtensor", "tp2")])
@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=slow)])
def test_a_new_adapter_changes_no_bit(
    pool: WorkerPool, models: dict[str, Path], backend: str, layout: str, precision: str
) -> None:
    world, placed = LAYOUTS[backend][layout]
    config = CONFIG[backend](models["llama"], **{**placed, "precision": precision})
    batch = make_batch(rows=6, length=13, seed=3)
    plain = pool.run(world, jobs.logprobs, config, batch)
    section = {"use_rslora": True, "lora_A_init_method": "xavier"}
    for (first, base), expected in zip(
        pool.run(
            world, peft_jobs.logprobs_of_new_adapters, peft_jobs.with_adapters(config, **section), batch
        ),
        plain,
        strict=True,
    ):
        assert torch.equal(first, expected) and torch.equal(base, expected)


@sampled(1)
@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize(
    ("backend", "layout"),
    [("megatron", "tp2-sp"), ("megatron", "tp2-dp2"), ("dtensor", "tp2"), ("dtensor", "dp1")],
)
def test_dropout_is_of_training_alone_and_leaves_copies_alike(
    pool: WorkerPool, models: dict[str, Path], backend: str, layout: str, position: str
) -> None:
    """A factor that several ranks have whole stays the same on all of them, though they drop other values."""
    model = models["qwen3-tied"]
    world, config = configured(backend, layout, model, "all")
    dropped = {**config, "peft": {**config["peft"], "dropout": 0.3, "dropout_position": position}}
    batches = [make_batch(rows=12, length=12, seed=seed) for seed in (1, 2)]
    plain = pool.run(world, peft_jobs.train, config, batches, NLLLoss())
    first, *others = pool.run(world, peft_jobs.train, dropped, batches, NLLLoss())
    assert abs(first["losses"][0] - plain[0]["losses"][0]) > 1e-4
    assert torch.equal(first["reference"][0], plain[0]["reference"][0])
    assert all(result["drops_nothing_when_scored"] for result in (first, *others))
    for other in others:
        assert all(
            torch.equal(other["copies"][name], tensor)
            for name, tensor in first["copies"].items()
            if name in other["copies"]
        )


@sampled(1)
@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_ranks_that_were_replicas_drop_the_same_behind_a_resume(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, backend: str, position: str
) -> None:
    """Replicas have drawn different numbers of random numbers, for as many tokens as each had."""
    batches = [make_batch(rows=12, length=24, seed=seed) for seed in (2, 4)]
    assert int(batches[0]["input_lengths"].sum()) % 2
    dropped = []
    for layout in ("dp2", "tp2"):
        world, config = configured(backend, layout, models["qwen2"], "all", batching="packed", mbs=1)
        section = {**config["peft"], "dropout": 0.3, "dropout_position": position}
        dropped.append({**config, "peft": section})
    pool.run(world, peft_jobs.save_on_the_way, dropped[0], batches, NLLLoss(), tmp_path)
    first, second = pool.run(world, peft_jobs.copies_after_resume, dropped[1], batches, NLLLoss(), tmp_path)
    assert len(first) == 7 * LAYERS
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name


@newest_megatron(backend=("megatron",))
@sampled(2)
@pytest.mark.parametrize(
    ("backend", "before", "after"),
    [
        ("megatron", "tp2-sp", "tp2-sp"),
        ("megatron", "pp2", "tp2-dp2"),
        ("megatron", "pp2-vpp2", "cp2"),
        ("megatron", "dp2", "tp2-pp2"),
        ("dtensor", "tp2", "tp2"),
        ("dtensor", "dp2", "tp2-sp"),
    ],
)
def test_a_checkpoint_holds_adapters_alone_and_resumes_in_any_layout(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, backend: str, before: str, after: str
) -> None:
    model, batches = models["qwen2"], [make_batch(rows=12, length=12, seed=seed) for seed in (1, 2, 3)]
    world, config = configured(backend, before, model, "some")
    expected = pool.run(world, peft_jobs.save_on_the_way, config, batches, NLLLoss(), tmp_path)[0]
    stored = [
        key
        for part in ("weights", "optimizer")
        for key in read_plain_index(tmp_path / part).state_dict_metadata
    ]
    # newer releases of Megatron-Core index what is no tensor
    beside = ("param_groups", "common_state")
    assert [
        key
        for key in stored
        if not (".adapter." in key or ".lora_" in key or any(word in key for word in beside))
    ] == []
    world, config = configured(backend, after, model, "some")
    losses, factors = pool.run(world, peft_jobs.resume, config, batches, NLLLoss(), tmp_path)[0]
    if before == after:
        assert losses == expected[0] and all(
            torch.equal(factors[name], tensor) for name, tensor in expected[1].items()
        )
    torch.testing.assert_close(losses, expected[0], atol=1e-6, rtol=1e-5)
    check_close(factors, expected[1])


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_a_checkpoint_of_another_adapter_or_base_is_refused(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, backend: str
) -> None:
    model = models["qwen2"]
    _, config = configured(backend, "tp1" if backend == "megatron" else "dp1", model, "all")
    batch = [make_batch(rows=12, length=12, seed=1)]
    pool.run(1, peft_jobs.save_on_the_way, config, batch, NLLLoss(), tmp_path)
    other = make_tiny(tmp_path / "other", "qwen2", tied=False, seed=8, layers=LAYERS)
    changes: dict[str, Any] = {
        "with alpha = 5.0": {"peft": {"enabled": True, "dim": 3, "alpha": 6.0}},
        "not those of that model": {
            "model_name": str(other),
            "peft": {"enabled": True, "dim": 3, "alpha": 5.0, "target_modules": ALL},
        },
        "holds only the adapters of": {"peft": None},
        "target_modules": {"peft": {"enabled": True, "dim": 3, "alpha": 5.0, "target_modules": ["q_proj"]}},
    }
    for message, change in changes.items():
        [said] = pool.run(1, peft_jobs.load_error, {**config, **change}, tmp_path / "weights")
        assert said.startswith("CheckpointError") and message in said, said


@sampled(1)
@pytest.mark.parametrize(
    ("backend", "layout"),
    [("megatron", "tp2-pp2"), ("megatron", "tp2-sp"), ("dtensor", "tp2-dp2"), ("dtensor", "dp1")],
)
def test_an_export_is_the_merged_model_with_the_adapter_inside(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, backend: str, layout: str
) -> None:
    model, batch = models["qwen2"], make_batch(rows=12, length=12, seed=1)
    world, config = configured(backend, layout, model, "some")
    expected = pool.run(world, peft_jobs.train_and_export, config, batch, NLLLoss(), tmp_path / "out")[0]
    merged = reference.logprobs(reference.load(tmp_path / "out"), batch)
    beside = reference.logprobs(
        PeftModel.from_pretrained(reference.load(model), tmp_path / "out" / "adapter").eval(), batch
    )
    torch.testing.assert_close(merged, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(beside, expected, atol=2e-5, rtol=0)
    if backend == "megatron":
        assert main(["adapter", str(tmp_path / "weights"), str(tmp_path / "converted")]) == 0
        one, other = (
            load_file(tmp_path / path / "adapter_model.safetensors") for path in ("converted", "out/adapter")
        )
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        assert LoraConfig.from_pretrained(str(tmp_path / "converted")).lora_alpha == 5
    # the same directory is what training goes on from
    again = {**config, "peft": {**config["peft"], "adapter_path": str(tmp_path / "out" / "adapter")}}
    for first, _ in pool.run(world, peft_jobs.logprobs_of_new_adapters, again, batch):
        torch.testing.assert_close(first, expected, atol=2e-5, rtol=0)


@sampled(1)
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("megatron", "tp2-sp"),
        ("megatron", "pp2-vpp2"),
        ("megatron", "tp2-pp2"),
        ("dtensor", "dp2"),
        ("dtensor", "tp2-dp2"),
    ],
)
def test_an_engine_reads_merged_weights(
    pool: WorkerPool, models: dict[str, Path], backend: str, layout: str
) -> None:
    """Before the first step to the bit those of the base; afterwards the export's, which PEFT's equal."""
    world, placed = LAYOUTS[backend][layout]
    placed = {key: value for key, value in placed.items() if key not in ("first", "last")}
    config = peft_jobs.with_adapters(CONFIG[backend](models["qwen3-tied"], gbs=12, mbs=2, **placed))
    refits_are_exports(pool.run(world, refit_jobs.refits, config, BUDGET), stored(models["qwen3-tied"]))


@slow
@pytest.mark.parametrize(
    ("backend", "layout", "targets"),
    [
        ("megatron", "tp2-pp2", ALL),
        ("megatron", "tp2-sp", ["q_proj", "embed_tokens", "lm_head"]),
        ("dtensor", "tp2-dp2", ALL),
    ],
)
def test_a_hundred_refits_leave_the_base_as_it_was(
    pool: WorkerPool, models: dict[str, Path], backend: str, layout: str, targets: list[str]
) -> None:
    """To the bit, although each refit merges other factors into it; so that with the first factors again an
    engine reads what it read at first."""
    world, placed = LAYOUTS[backend][layout]
    placed = {key: value for key, value in placed.items() if key not in ("first", "last")}
    config = CONFIG[backend](models["llama"], gbs=4, mbs=2, precision="bfloat16", **placed)
    config = peft_jobs.with_adapters(config, target_modules=targets)
    for found in pool.run(world, refit_jobs.refits_beside_a_base, config, 100, BUDGET):
        assert found["base"] > 5 and found["changed"] == [] and found["lost"] == []
        assert len(found["different"]) > 5


def test_an_engine_s_ranks_read_slices_of_merged_weights(pool: WorkerPool, models: dict[str, Path]) -> None:
    model = models["qwen3-tied"]
    wanted = wanted_of(model, 2)
    config = peft_jobs.with_adapters(policy_config(model, gbs=12, mbs=2, tp=2))
    slices_are_exports(pool.run(2, refit_jobs.sliced_refits, config, wanted, BUDGET), wanted)


@sampled(1)
@pytest.mark.parametrize(
    ("backend", "layout"), [("megatron", "tp2"), ("megatron", "pp2"), ("dtensor", "tp2"), ("dtensor", "dp1")]
)
def test_the_policy_generates_with_its_adapters(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, backend: str, layout: str
) -> None:
    model = models["llama"]
    world, config = configured(backend, layout, model, "all")
    whole = PeftModel.from_pretrained(reference.load(model), adapter_of(model, "all")).merge_and_unload()
    batch = prompts()
    expected = reference.greedy(whole, batch, 8, [2])
    assert expected != reference.greedy(reference.load(model), batch, 8, [2])
    for rows in pool.run(world, jobs.generate, config, batch, True):
        assert [row["ids"] for row in rows] == expected
