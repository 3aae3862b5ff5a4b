"""One rank's loss, gradient or weight that is not finite: all ranks act alike, and nothing is changed by
it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.parity.pool import WorkerPool
from tests.dist import nonfinite_jobs as jobs
from tests.dist.batches import make_batch
from tests.dist.checks import check_equal
from tests.dist.jobs import build_error
from tests.dist.layouts import CONFIG, layout
from tests.tiers import newest_megatron, sampled, slow

SCHEDULE = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 7}}
# of Megatron "whole": without the distributed optimizer; "host": with its states in host memory, where a step
# goes on when the next batch, or its refusal, comes
LAYOUTS = [
    "megatron-dp2",
    "megatron-pp2-tp2-sp",
    "megatron-dp2-whole",
    "megatron-dp2-host",
    "dtensor-dp2",
    "dtensor-tp2-dp2",
    "fsdp1-dp2",
    "fsdp1-dp1",
]


def configured(name: str, model: Path, **changes: Any) -> tuple[int, dict[str, Any]]:
    """Ranks and configuration of a run that warms up over seven steps."""
    backend, _, placed = name.partition("-")
    world, layout_changes = layout(placed, torch=backend != "megatron")
    if "whole" in placed:
        changes["distributed_optimizer"] = False
    config = CONFIG[backend](model, **layout_changes, **changes)
    if backend == "megatron":
        if "host" in placed:
            config["megatron_cfg"]["optimizer"]["optimizer_offload_fraction"] = 1.0
            config["megatron_cfg"]["distributed_data_parallel_config"]["overlap_grad_reduce"] = None
        config["megatron_cfg"]["scheduler"] = {"lr_warmup_iters": 7, "lr_decay_style": "constant"}
        return world, config
    return world, config | {"scheduler": SCHEDULE}


def batches(*poisoned: int, count: int = 4, rows: int = 8) -> list[dict[str, torch.Tensor]]:
    """Batches of which some have a marked row, which the last replica gets."""
    made = [make_batch(rows, 11, seed=seed) for seed in range(count)]
    for number in poisoned:
        made[number]["sample_mask"][-1] = jobs.MARK
    return made


@newest_megatron(layout=["megatron-dp2", "megatron-pp2-tp2-sp"])
@sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantity", ["loss", "gradient"])
def test_a_batch_that_is_not_finite_is_as_if_it_had_not_been(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, precision: str, quantity: str
) -> None:
    world, config = configured(layout, tiny_models["qwen3"], precision=precision)
    given = batches(2)
    skipping = pool.run(world, jobs.train, config, given, quantity)
    without = pool.run(world, jobs.train, config, [given[0], given[1], given[3]], quantity)
    for run, clean in zip(skipping, without, strict=True):
        assert run["error"] is None and run["steps"] == [[0.0], [0.0], [1.0], [0.0]]
        assert run["lr"][3] == run["lr"][2] == clean["lr"][2], "the schedule stands still"
        assert [len(batch) for batch in run["skipped"]] == [0, 0, 1, 0]
        (skipped,) = run["skipped"][2]
        assert str(skipped) == str(skipping[0]["skipped"][2][0]), "all ranks know the same"
        seen = {
            (place["data_rank"], place["micro_batch"], tuple(place["rows"]), place["quantity"])
            for place in skipped["seen"]
        }
        replicas = len({other["place"][1] for other in skipping})
        rows = 8 // replicas
        assert seen == {(replicas - 1, rows // 2 - 1, (rows - 2, rows), quantity)}
        check_equal(run["weights"], clean["weights"])


@newest_megatron
@sampled(1)
@pytest.mark.parametrize("layout", ["megatron-dp2", "dtensor-dp2", "fsdp1-dp2"])
@pytest.mark.parametrize("quantity", ["loss", "gradient"])
def test_all_ranks_end_where_it_is_not_allowed(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, quantity: str
) -> None:
    world, config = configured(layout, tiny_models["qwen3"])
    config |= {"on_nonfinite": "raise"}
    given = batches(2)
    runs = pool.run(world, jobs.train, config, given, quantity)
    before = pool.run(world, jobs.train, config, given[:2], quantity)
    for run, clean in zip(runs, before, strict=True):
        kind, text = run["error"]
        assert kind == "NonFiniteError" and len(run["steps"]) == 2
        assert (
            f"seen first: rank 1 (pp0 dp1 cp0 tp0), micro-batch 1, in the {quantity}. No weight was changed"
            in text
        )
        assert text == runs[0]["error"][1]
        check_equal(run["weights"], clean["weights"])


@sampled(1)
@pytest.mark.parametrize("layout", ["megatron-dp2", "dtensor-dp2", "fsdp1-dp2"])
def test_too_many_in_a_row_end_the_run(pool: WorkerPool, tiny_models: dict[str, Path], layout: str) -> None:
    world, config = configured(layout, tiny_models["qwen3"])
    config |= {"max_consecutive_skips": 2}
    for run in pool.run(world, jobs.train, config, batches(0, 2, 3, 4, count=6), "loss"):
        assert run["steps"] == [[1.0], [0.0], [1.0]], "a step in between starts the count again"
        assert run["error"][0] == "NonFiniteError"
        assert (
            "2 optimizer steps in a row were skipped, policy.max_consecutive_skips = 2; the last: global "
            "batch 0"
        ) in run["error"][1]


@slow
def test_one_of_two_global_batches_of_a_call(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    for name in ("megatron-dp2", "dtensor-dp2", "fsdp1-dp2"):
        world, config = configured(name, tiny_models["qwen3"])
        (together,) = batches(0, count=1, rows=16)
        # the second half of the call is the global batch without a step
        (run, _) = pool.run(world, jobs.train, config, [together], "loss")
        (alone, _) = pool.run(
            world, jobs.train, config, [{key: value[:8] for key, value in together.items()}], "loss"
        )
        assert run["steps"] == [[1.0]]
        assert [(batch["global_batch"], batch["seen"][0]["rows"]) for batch in run["skipped"][0]] == [
            (1, (6, 8))
        ]
        check_equal(run["weights"], alone["weights"])


@sampled(1)
@pytest.mark.parametrize("layout", ["megatron-pp2-tp2-sp", "dtensor-tp2-dp2", "fsdp1-dp2"])
def test_weights_that_are_not_finite_are_neither_saved_nor_exported(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    world, config = configured(layout, tiny_models["qwen3"])
    for texts in pool.run(world, jobs.refusals, config, str(tmp_path)):
        for name in ("save", "export"):
            assert (
                texts[name].startswith("NonFiniteError: ")
                and "nothing was written: NaN or infinity in " in texts[name]
            )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "good", "good-optimizer"]


@sampled(2)
@pytest.mark.parametrize(
    "layout",
    ["megatron-dp2", "megatron-pp2-tp2-sp", "dtensor-dp2", "dtensor-tp2-dp2", "fsdp1-dp2", "fsdp1-dp1"],
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_model_that_arrives_so_is_refused(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, layout: str, value: float
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_models["qwen3"].iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][-1, -1] = value
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((model / "config.json").read_text())["num_hidden_layers"] > 1
    world, config = configured(layout, model)
    for text in pool.run(world, build_error, config):
        assert (
            text.startswith("ModelError: policy.model_name = ")
            and "NaN or infinity in " in text
            and ".1.mlp." in text
        )
