"""What DTensorPolicyWorker alone does: pieces of parameters, loss scales, exports in buckets, a caller's own
loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import dtensor_jobs, jobs, reference
from tests.dist.batches import make_batch
from tests.dist.checks import prompts
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.layouts import LAYOUTS as LAYOUTS_OF_ALL
from tests.tiers import sampled, slow

LAYOUTS = LAYOUTS_OF_ALL["dtensor"]
BATCHES = [make_batch(rows=12, length=12, seed=seed) for seed in range(4)]


SOME = ["dp2", "tp2-sp", "cp2"]
# four ranks take many times as long as two
FOUR_RANKS = [pytest.param("cp2-tp2-sp", marks=slow)]


# what changes nothing


@sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["tp2", "tp2-dp2", *FOUR_RANKS])
def test_replicas_agree_to_the_bit(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, precision: str
) -> None:
    """Norms, which all tensor-parallel ranks have as a whole, stay one parameter; and pieces cover every
    parameter."""
    world, changes = LAYOUTS[layout]
    config = dtensor_config(tiny_models["qwen3-tied"], precision=precision, gbs=12, **changes)
    assert pool.run(world, dtensor_jobs.replicas_agree, config, BATCHES[:3]) == [[]] * world


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp", pytest.param("cp2-tp2-sp", marks=slow)])
def test_a_pass_that_was_broken_off_leaves_no_trace(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str
) -> None:
    world, changes = LAYOUTS[layout]
    config = dtensor_config(tiny_models["qwen3-tied"], gbs=12, **changes)
    assert (
        pool.run(world, dtensor_jobs.train_after_an_error, config, make_batch(12, 11, seed=4)) == [[]] * world
    )


# precisions


def test_the_loss_scale_leaves_no_trace_in_the_gradients(
    pool: WorkerPool, tiny_models: dict[str, Path]
) -> None:
    """Adam forgives a gradient that is 65536 times too large; SGD does not."""
    shared = {"clip": None, "torch_optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05}}}
    batches = [make_batch(8, 12, seed=seed) for seed in range(2)]
    exact = pool.run(1, jobs.train, dtensor_config(tiny_models["qwen3"], **shared), batches, NLLLoss())[0]
    half = dtensor_config(tiny_models["qwen3"], precision="float16", tp=2, **shared)
    for result in pool.run(2, jobs.train, half, batches, NLLLoss()):
        assert result["losses"] == pytest.approx(exact["losses"], rel=0.005)
        for name, tensor in result["weights"].items():
            assert (tensor.float() - exact["weights"][name]).norm() < 0.002 * exact["weights"][name].norm(), (
                name
            )


# export and loading


EXPORTED: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "dp3": (3, {}),
    "tp2": (2, {"tp": 2}),
    "dp2-tp2": (4, {"tp": 2}),
    "cp2-tp2": (4, {"cp": 2, "tp": 2}),
}


@sampled(2)
@pytest.mark.parametrize(("world", "changes"), EXPORTED.values(), ids=EXPORTED)
@pytest.mark.parametrize(("family", "precision"), [("qwen2-tied", "bfloat16"), ("llama", "float32")])
def test_exports_in_buckets_are_the_parameters_one_by_one(
    pool: WorkerPool,
    tiny_models: dict[str, Path],
    family: str,
    precision: str,
    world: int,
    changes: dict[str, int],
) -> None:
    """Rows that three ranks share unevenly, a padded vocabulary, blocks that are cut both ways; in many
    buckets and in one."""
    config = dtensor_config(tiny_models[family], precision=precision, gbs=12, **changes)
    for nbytes, most in ((20_000, None), (2**26, 1)):
        for result in pool.run(world, dtensor_jobs.export_in_buckets, config, nbytes):
            assert result["wrong"] == result["left"] == []
            # rows of the padded vocabulary and ends of uneven runs; were norms sent by all who have them, it
            # would be more
            assert sum(result["gathers"]) - result["elements"] < (800 if world == 3 else 250)
            if world == 1:
                assert result["gathers"] == []
            elif most is not None:
                assert len(result["gathers"]) == most
            else:
                assert 2 < len(result["gathers"]) < result["parameters"]


def test_every_rank_reads_its_own_slices_alone(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    results = pool.run(4, dtensor_jobs.bytes_read, dtensor_config(tiny_models["llama"], tp=2))
    (total,) = {whole for _, whole in results}
    replicated = sum(
        tensor.numel() for tensor in reference.load(tiny_models["llama"]).parameters() if tensor.ndim == 1
    )
    assert (
        sum(read for read, _ in results) == total + replicated
    )  # two tensor-parallel ranks each read the norms


# generation


@sampled(1)
@pytest.mark.parametrize(
    ("layout", "precision"), [("dp2", "bfloat16"), ("tp2-sp", "bfloat16"), ("dp2", "float32")]
)
def test_the_model_that_generates_is_the_trained_one(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, precision: str
) -> None:
    """Its rotary frequencies too: rounded to bfloat16 they turn far positions elsewhere than in training."""
    world, changes = LAYOUTS[layout]
    config = dtensor_config(tiny_models["qwen2-tied"], precision=precision, gbs=12, **changes)
    for wrong in pool.run(world, dtensor_jobs.generates_with_what_it_trains, config, prompts(), BATCHES[:2]):
        assert wrong == []


# the rest of the contract


@sampled(1)
@pytest.mark.parametrize(
    ("layout", "rotate"), [("cp2", None), ("cp2", "alltoall"), ("cp2-tp2-sp", "allgather")]
)
def test_a_callers_own_loop_under_context_parallelism(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, rotate: str | None
) -> None:
    world, changes = LAYOUTS[layout]
    batch = make_batch(3, 16, seed=0)
    with torch.no_grad():
        expected = reference.load(tiny_models["qwen3"])(input_ids=batch["input_ids"]).logits
    results = pool.run(
        world, dtensor_jobs.own_loop, dtensor_config(tiny_models["qwen3"], **changes), batch, rotate
    )
    tensor = changes.get("tp", 1)
    for rank, result in enumerate(results):
        columns = slice(rank % tensor * 51, None) if tensor == 2 else slice(None)
        wanted = expected[:, :, columns][:, :, : result["logits"].shape[-1]]
        torch.testing.assert_close(result["logits"][:, :, : wanted.shape[-1]], wanted, atol=1e-5, rtol=1e-4)
        assert result["restored"]
        assert [error.split(":")[0] for error in result["errors"]] == [
            "BatchError",
            "BatchError",
            "ConfigError",
        ]


@sampled(1)
@pytest.mark.parametrize("layout", SOME)
def test_names_of_the_contract(pool: WorkerPool, tiny_models: dict[str, Path], layout: str) -> None:
    world, changes = LAYOUTS[layout]
    for rank, answers in enumerate(
        pool.run(
            world, dtensor_jobs.names_of_the_contract, dtensor_config(tiny_models["qwen2-tied"], **changes)
        )
    ):
        assert answers["repr"] == f"DTensorPolicyWorker[rank={rank}]"
        assert answers["info"]["world_size"] == world
        assert (
            answers["divided again"]
            and answers["own memory"]
            and answers["same model"]
            and answers["other model"]
            and answers["weights stay"]
        )
        assert all(0.002 < spread < 0.03 for spread in answers["noise"].values()), answers["noise"]
        assert answers["pieces"]["model.norm.weight"] == (36 * changes.get("tp", 1) // world,)
        if layout == "dp2":
            assert answers["gathered"]["model.layers.0.mlp.up_proj.weight"] == (52, 36)
