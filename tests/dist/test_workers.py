"""Workers of the three backends: what must change nothing, the reference policy, precisions, odd batches,
checkpoints, exports, and the names of the contract."""

from __future__ import annotations

import copy
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, reference, worker_jobs
from tests.dist.batches import make_batch
from tests.dist.checks import check_close, check_equal
from tests.dist.contract import parameters_of
from tests.dist.layouts import DTENSOR, configured, over
from tests.models import policy_config
from tests.tables import read_table
from tests.tiers import newest_megatron, sampled, slow

BATCHES = [make_batch(rows=12, length=12, seed=seed) for seed in range(4)]
SAVED_AFTER = 2
CONTRACT = read_table("contract.yaml")
PRECISIONS = ["float32", "bfloat16"]


@pytest.mark.parametrize("path", [path for path in CONTRACT if "." in path])
def test_every_name_of_the_contract_has_its_signature(path: str) -> None:
    module, _, name = path.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    methods = CONTRACT[path] if name == "Policy" else CONTRACT["every worker"] | CONTRACT[path]
    assert {method: parameters_of(getattr(owner, method)) for method in methods} == methods
    train = inspect.signature(owner.train).parameters
    assert [train[name].default for name in ("eval_mode", "gbs", "mbs")] == [False, None, None]
    taken = ["weights_path", "optimizer_path", "init_optimizer", "init_reference_model"]
    if name != "Policy":
        assert list(inspect.signature(owner).parameters)[:6] == ["config", "tokenizer", *taken]
        return
    taken = [
        "name_prefix",
        "workers_per_node",
        "init_optimizer",
        "weights_path",
        "optimizer_path",
        "init_reference_model",
    ]
    assert parameters_of(owner.__init__)[:9] == ["cluster", "config", "tokenizer", *taken]
    assert not getattr(owner, "__abstractmethods__", frozenset())


# what changes nothing


@newest_megatron(layout=["pp2", "dp2-overlap"], backend=["megatron"])
@sampled(4)
@pytest.mark.parametrize("precision", PRECISIONS)
@over(megatron="tp1 tp2-sp pp2 dp2-overlap", dtensor="dp2 cp2 cp2-tp2-sp", fsdp1="dp1 dp2")
def test_evaluation_changes_no_bit(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str, layout: str, precision: str
) -> None:
    world, config = configured(backend, layout, tiny_models["qwen2-tied"], precision=precision, gbs=12)
    for result in pool.run(world, worker_jobs.evaluate_between, config, make_batch(12, 11, seed=4)):
        assert {name: changed for name, changed in result["changed"].items() if changed} == {}
        assert result["evaluated"]["grad_norm"] is None
        assert torch.equal(result["evaluated"]["global_loss"], result["trained"]["global_loss"])


@newest_megatron(precision=["bfloat16"], backend=["megatron"])
@sampled(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@over(megatron="dp2-overlap pp2", dtensor="dp2 tp2-sp cp2 cp2-tp2-sp", fsdp1="dp1 dp2 dp3")
def test_reference_swap_leaves_no_trace(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str, layout: str, precision: str
) -> None:
    world, config = configured(backend, layout, tiny_models["qwen2-tied"], precision=precision, gbs=12)
    for facts in pool.run(world, worker_jobs.reference_swap, config, make_batch(12, 10, seed=2)):
        assert torch.equal(facts["reference"], facts["first"]) and torch.equal(
            facts["nested"], facts["first"]
        )
        assert torch.equal(facts["own"], facts["own again"]) and not torch.equal(
            facts["own"], facts["reference"]
        )
        assert facts["after an error"] == facts["after nesting"] == facts["trained otherwise"] == []
        assert [text.partition(":")[0] for text in facts["refused"]] == ["StateError"] * 3


@newest_megatron(recompute=[True], backend=["megatron"])
@sampled(3)
@pytest.mark.parametrize("recompute", [False, True])
@over(megatron="tp1 tp2 tp2-sp pp2", dtensor="dp1 tp2 cp2 cp2-tp2-sp")
def test_logprobs_equal_those_inside_the_loss_to_the_bit(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str, layout: str, recompute: bool
) -> None:
    world, config = configured(backend, layout, tiny_models["llama"], temperature=0.8, recompute=recompute)
    pairs = [
        pair
        for found in pool.run(world, worker_jobs.logprobs_in_loss, config, make_batch(8, 13, seed=6), 2)
        for pair in found
    ]
    assert pairs
    for inside, outside in pairs:
        assert torch.equal(inside, outside)


# odd batches


@newest_megatron(backend=["megatron"])
@sampled(4)
@pytest.mark.parametrize("masked", ["tokens of one rank", "samples of one rank", "all tokens", "all samples"])
@over(False, megatron="dp2-overlap", dtensor="dp2 tp2-dp2", fsdp1="dp1 dp2")
def test_batches_without_valid_tokens(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str, layout: str, masked: str
) -> None:
    world, config = configured(backend, layout, tiny_models["qwen3"], weight_decay=0.0)
    batch = make_batch(8, 12, seed=1)
    batch["sample_mask"] = torch.ones(8)
    rows = slice(4, 8) if "one rank" in masked else slice(0, 8)
    batch["token_mask" if "token" in masked else "sample_mask"][rows] = 0.0
    trainer = reference.ReferenceTrainer(
        reference.load(tiny_models["qwen3"]), policy_config(tiny_models["qwen3"])
    )
    alone = (
        trainer.step({key: value[:4] for key, value in batch.items()}, NLLLoss())
        if "one rank" in masked
        else (0.0, 0.0)
    )
    for result in pool.run(
        world, worker_jobs.train_and_look, config, [batch, make_batch(8, 12, seed=2)], NLLLoss()
    ):
        first, second = result["results"]
        assert result["agree"]
        assert (float(first["global_loss"]), float(first["grad_norm"])) == pytest.approx(alone, rel=1e-5)
        assert float(second["grad_norm"]) > 0
        assert all(tensor.isfinite().all() for tensor in result["weights"].values())
        assert (result["moved"][0] == []) == ("all" in masked)


@newest_megatron(backend=["megatron"])
@sampled(2)
@over(False, megatron="dp2", dtensor="dp2 tp2-dp2")
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str, layout: str
) -> None:
    world, config = configured(backend, layout, tiny_models["qwen3"], precision="float16")
    poisoned = make_batch(8, 12, seed=3)
    poisoned["sample_mask"][7] = 2.0
    batches = [make_batch(8, 12, seed=1), poisoned, make_batch(8, 12, seed=2)]
    for result in pool.run(world, worker_jobs.train_and_look, config, batches, worker_jobs.OverflowingLoss()):
        assert [step["all_mb_metrics"]["skipped_steps"] for step in result["results"]] == [
            [0.0],
            [1.0],
            [0.0],
        ]
        assert [bool(moved) for moved in result["moved"]] == [True, False, True]
        assert result["agree"]
        assert backend == "megatron" or result["scales"] == [2.0**16, 2.0**15, 2.0**15]


# precisions


@newest_megatron(backend=["megatron"])
@sampled(2)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@over(megatron="dp2-overlap tp2 pp2", dtensor="dp2 tp2-sp cp2 cp2-tp2-sp")
def test_half_precision_follows_float32(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str, layout: str, precision: str
) -> None:
    batches = [make_batch(8, 12, seed=seed % 2) for seed in range(6)]
    alone = configured(backend, "tp1" if backend == "megatron" else "dp1", tiny_models["qwen2-tied"], lr=3e-3)
    exact = pool.run(alone[0], jobs.train, alone[1], batches, NLLLoss())[0]
    world, config = configured(backend, layout, tiny_models["qwen2-tied"], lr=3e-3, precision=precision)
    bound = {"bfloat16": 0.03, "float16": 0.005}[precision]
    for result in pool.run(world, jobs.train, config, batches, NLLLoss()):
        assert result["losses"] == pytest.approx(exact["losses"], rel=bound)
        assert result["losses"][4] < result["losses"][0] - 0.05
        assert result["norms"] == pytest.approx(exact["norms"], rel=4 * bound)
        assert all(tensor.dtype == getattr(torch, precision) for tensor in result["weights"].values())


# checkpoints


def check_resumed(
    pool: WorkerPool,
    world: int,
    config: dict[str, Any],
    directory: Path,
    *,
    live: bool = False,
    saved_after: int = SAVED_AFTER,
) -> list[dict[str, Any]]:
    """A run that is loaded goes on as the undisturbed one, to the bit; what each rank has at its end."""
    undisturbed = pool.run(world, worker_jobs.train_and_save, config, BATCHES, saved_after, directory)
    resumed: list[dict[str, Any]] = pool.run(
        world, worker_jobs.load_and_train, config, BATCHES[saved_after:], directory, live
    )
    for before, after in zip(undisturbed, resumed, strict=True):
        assert after["measured"] == before["measured"]
        assert worker_jobs.differences(after["snapshot"], before["snapshot"]) == []
        check_equal(after["weights"], before["weights"])
    return resumed


@newest_megatron(backend=["megatron"], precision=["bfloat16"])
@sampled(3)
@pytest.mark.parametrize("live", [False, True], ids=["new-worker", "live-worker"])
@pytest.mark.parametrize("precision", PRECISIONS)
@over(megatron="dp2", dtensor=DTENSOR, fsdp1="dp1 dp2 dp3")
def test_resume_is_exact(
    pool: WorkerPool,
    tiny_models: dict[str, Path],
    tmp_path: Path,
    backend: str,
    layout: str,
    precision: str,
    live: bool,
) -> None:
    world, config = configured(backend, layout, tiny_models["qwen2-tied"], precision=precision, gbs=12)
    check_resumed(pool, world, config, tmp_path, live=live)


@newest_megatron(backend=["megatron"])
@sampled(1)
@pytest.mark.parametrize("live", [False, True], ids=["new-worker", "live-worker"])
@over(megatron="dp2", dtensor=DTENSOR)
def test_resume_with_a_loss_scale_is_exact(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, backend: str, layout: str, live: bool
) -> None:
    world, config = configured(backend, layout, tiny_models["qwen2-tied"], precision="float16", gbs=12)
    check_resumed(pool, world, config, tmp_path, live=live)


@newest_megatron(momentum=[0.9])
@sampled(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_megatrons_sgd_resumes(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, momentum: float, precision: str
) -> None:
    config = policy_config(
        tiny_models["qwen3"],
        optimizer="sgd",
        lr=0.05,
        distributed_optimizer=False,
        precision=precision,
        gbs=12,
    )
    config["megatron_cfg"]["optimizer"]["sgd_momentum"] = momentum
    check_resumed(pool, 2, config, tmp_path)


@slow
@pytest.mark.parametrize("live", [False, True], ids=["new-worker", "live-worker"])
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "torch.optim.SGD", "kwargs": {"lr": 0.01}},
        {"name": "torch.optim.SGD", "kwargs": {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}},
        {"name": "torch.optim.NAdam", "kwargs": {"lr": 0.001}},
    ],
    ids=["sgd", "momentum", "nadam"],
)
@pytest.mark.parametrize("saved_after", [0, 2])
def test_resume_of_other_optimizers_and_before_the_first_step(
    pool: WorkerPool,
    tiny_models: dict[str, Path],
    tmp_path: Path,
    optimizer: dict[str, Any],
    saved_after: int,
    live: bool,
) -> None:
    schedule = [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 2}},
        {"name": "torch.optim.lr_scheduler.MultiStepLR", "kwargs": {"milestones": [1, 2], "gamma": 0.7}},
        {"milestones": [2]},
    ]
    world, config = configured(
        "fsdp1", "dp2", tiny_models["llama"], gbs=12, torch_optimizer=optimizer, scheduler=schedule
    )
    check_resumed(pool, world, config, tmp_path, live=live, saved_after=saved_after)


@slow
@pytest.mark.parametrize("written", ["open", "plain"])
@over(fsdp1="dp3", dtensor="dp2 tp2-sp tp2-dp2")
def test_an_open_kernel_goes_on_as_the_checkpoint_was_written(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, backend: str, layout: str, written: str
) -> None:
    """To the bit, whether the checkpoint is of the fused kernel or of an older version, which ran the plain
    one."""
    world, plain = configured(backend, layout, tiny_models["qwen2-tied"], gbs=12)
    open_kernel = copy.deepcopy(plain)
    for key in ("foreach", "fused"):
        del open_kernel["optimizer"]["kwargs"][key]
    saved = open_kernel if written == "open" else plain
    undisturbed = pool.run(world, worker_jobs.train_and_save, saved, BATCHES, SAVED_AFTER, tmp_path)
    resumed = pool.run(world, worker_jobs.load_and_train, open_kernel, BATCHES[SAVED_AFTER:], tmp_path, False)
    for before, after in zip(undisturbed, resumed, strict=True):
        assert after["measured"] == before["measured"]
        check_equal(after["weights"], before["weights"])
        assert after["snapshot"]["group 0 fused"] is (written == "open")


@sampled(2)
@pytest.mark.parametrize(
    ("written", "read"),
    [
        (("dtensor", "tp2-dp2"), ("dtensor", "dp1")),
        (("dtensor", "dp1"), ("dtensor", "tp2-sp")),
        (("dtensor", "cp2"), ("dtensor", "tp2")),
        (("fsdp1", "dp1"), ("fsdp1", "dp2")),
        (("fsdp1", "dp2"), ("fsdp1", "dp1")),
        (("fsdp1", "dp3"), ("fsdp1", "dp2")),
        (("fsdp1", "dp2"), ("fsdp1", "dp3")),
        pytest.param(("dtensor", "dp2"), ("dtensor", "cp2-tp2-sp"), marks=slow),
        pytest.param(("dtensor", "cp2-tp2-sp"), ("dtensor", "tp2"), marks=slow),
        pytest.param(("dtensor", "tp2-dp2"), ("fsdp1", "dp2"), marks=slow),
        pytest.param(("fsdp1", "dp3"), ("dtensor", "tp2-dp2"), marks=slow),
    ],
    ids="-".join,
)
def test_any_layout_reads_any_other(
    pool: WorkerPool,
    tiny_models: dict[str, Path],
    tmp_path: Path,
    written: tuple[str, str],
    read: tuple[str, str],
) -> None:
    model = tiny_models["qwen2-tied" if written[0] == read[0] else "llama"]
    (world, before), (new_world, after) = (
        configured(*written, model, gbs=12),
        configured(*read, model, gbs=12),
    )
    undisturbed = pool.run(world, worker_jobs.train_and_save, before, BATCHES, SAVED_AFTER, tmp_path)[0]
    resumed = pool.run(new_world, worker_jobs.load_and_train, after, BATCHES[SAVED_AFTER:], tmp_path, False)[
        0
    ]
    torch.testing.assert_close(resumed["measured"], undisturbed["measured"], atol=1e-6, rtol=1e-5)
    check_close(resumed["weights"], undisturbed["weights"])


# exports, and what is refused


@sampled(3)
@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
@over(dtensor=DTENSOR, fsdp1="dp1 dp2 dp3")
def test_export_is_exact(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, backend: str, layout: str, family: str
) -> None:
    world, config = configured(backend, layout, tiny_models[family])
    results = pool.run(world, worker_jobs.export, config, str(tmp_path / "hf"))
    check_equal(
        reference.load(tmp_path / "hf").state_dict(), reference.load(tiny_models[family]).state_dict()
    )
    names = [list(result) for result in results]
    assert all(order == names[0] for order in names)
    assert ("lm_head.weight" in names[0]) == (family == "llama")


MUON = {"name": "torch.optim.Muon", "kwargs": {}}


@pytest.mark.parametrize(
    ("backend", "layout", "changes", "words"),
    [
        ("fsdp1", "dp2", {"precision": "float16"}, ["policy.precision", "loss scaling"]),
        ("fsdp1", "dp2", {"torch_optimizer": MUON}, ["policy.optimizer.name", "flat pieces"]),
        ("dtensor", "tp2-dp2", {"tp": 4}, ["tensor_parallel_size = 4", "num_attention_heads = 6"]),
        ("dtensor", "tp2-dp2", {"cp": 3}, ["4 ranks", "6"]),
        ("dtensor", "tp2-dp2", {"precision": "int8"}, ["policy.precision"]),
        ("dtensor", "tp2-dp2", {"plan": "tests.no_such_plan"}, ["custom_parallel_plan", "import path"]),
        (
            "dtensor",
            "tp2-dp2",
            {"plan": {"model.layers.*.mlp.gate": "colwise"}},
            ["has no module model.layers.*.mlp.gate"],
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(
    pool: WorkerPool,
    tiny_models: dict[str, Path],
    backend: str,
    layout: str,
    changes: dict[str, Any],
    words: list[str],
) -> None:
    world, config = configured(backend, layout, tiny_models["llama"], **changes)
    for message in pool.run(world, jobs.build_error, config):
        assert message.startswith("ConfigError") and all(word in message for word in words), message
