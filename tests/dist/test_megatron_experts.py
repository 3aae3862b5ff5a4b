"""Mixtures of experts on Megatron against one process of plain transformers: every layout, dispatcher and
router option.

The default tier runs a sample of the layouts with each kind of micro-batch, dispatcher and balancing loss,
another with every commit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures
from tests.dist.batches import make_batch
from tests.dist.checks import check_equal, check_generated, check_resumed, prompts, tokens_of
from tests.dist.layouts import layout
from tests.dist.mixtures import BATCHES
from tests.dist.test_megatron_checkpoint import load_and_train, train_and_save
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled

UNEVEN = {"first": 1, "last": 2}
OVER = (
    "ep1 dp2 ep2 ep4 ep2-dp2 tp2-sp tp2-sp-etp2 tp2-sp-ep2 tp2-sp-ep2-dp2 tp2-sp-ep4 tp2-sp-ep2-etp2 etp2 "
    "ep2-etp2 pp2-ep2 pp2-vpp2-ep2 "
    "pp3 cp2-ep2 cp2-ep4 cp2-tp2-sp-ep2 pp2-tp2-sp-ep2"
)
LAYOUTS = {name: layout(name, padded=True) for name in OVER.split()}
BATCHING = ["fixed", "dynamic", "packed"]
DISPATCHERS = ["alltoall", "allgather"]
# layouts that together have every group and both pipeline schedules
NEWEST = ("ep4", "tp2-sp-ep2-etp2", "pp2-vpp2-ep2", "cp2-tp2-sp-ep2")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mixtures")
    names = {"mixtral": 11, "qwen3_moe": 12, "qwen3_moe_mixed": 13}
    tiny = {name: make_tiny(root / name, name, tied=False, seed=seed) for name, seed in names.items()}
    tiny["qwen3_moe_four"] = make_tiny(root / "qwen3_moe_four", "qwen3_moe", tied=True, seed=14, layers=4)
    return tiny


def family_for(layout: str, otherwise: str) -> str:
    """The interleaved pipeline wants a number of layers that its chunks divide."""
    return "qwen3_moe_four" if "vpp" in layout else otherwise


@newest_megatron(layout=NEWEST[1:])
@sampled(1)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_equals_transformers(
    pool: WorkerPool, models: dict[str, Path], layout: str, dispatcher: str
) -> None:
    world, changes = LAYOUTS[layout]
    model = models[family_for(layout, "mixtral" if dispatcher == "alltoall" else "qwen3_moe_mixed")]
    batch = prompts(rows=8)
    expected = mixtures.greedy(model, batch, 8)
    config = policy_config(model, dispatcher=dispatcher, generation={"stop_token_ids": []}, **changes)
    check_generated(pool, world, config, batch, True, expected)


@newest_megatron
@sampled(1)
@pytest.mark.parametrize("rows", [1, 3])
def test_replicas_that_share_experts_decode_uneven_rows(
    pool: WorkerPool, models: dict[str, Path], rows: int
) -> None:
    """One row for two replicas leaves one of them with none; sampling without seeds of one's own has to stay
    in step."""
    batch = {key: value[:rows] for key, value in prompts().items()}
    config = policy_config(models["mixtral"], ep=2)
    alone = tokens_of(pool.run(1, jobs.generate, policy_config(models["mixtral"]), batch, False)[0])
    check_generated(pool, 2, config, batch, False, alone)
    del batch["sampling_seeds"]
    drawn = [tokens_of(found) for found in pool.run(2, jobs.generate, config, batch, False)]
    assert drawn[0] == drawn[1]


@sampled(1)
@pytest.mark.parametrize("batching", BATCHING)
def test_a_batch_without_any_real_token_leaves_no_trace(
    pool: WorkerPool, models: dict[str, Path], batching: str
) -> None:
    """Zero gradient, finite figures, all ranks in step."""
    config = policy_config(
        models["mixtral"], ep=2, batching=batching, balancing="aux_loss", aux=0.5, z=0.1, weight_decay=0.0
    )
    batch = {**BATCHES[0], "sample_mask": torch.zeros(8)}
    before = mixtures.weights_of(
        mixtures.load(models["mixtral"]), models["mixtral"].parent / f"copy-{batching}"
    )
    for result in pool.run(2, jobs.train, config, [batch], NLLLoss()):
        assert result["norms"] == [0.0]
        assert result["metrics"][0]["moe_aux_loss"] == [0.0]
        for name, tensor in result["weights"].items():
            assert torch.equal(tensor, before[name]), name


def export(config: dict[str, Any]) -> dict[str, Tensor]:
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    weights = jobs.full_weights(worker)
    worker.backend.close()
    return weights


@newest_megatron(layout=NEWEST)
@sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_gives_back_what_was_loaded(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    world, changes = LAYOUTS[layout]
    model = models[family_for(layout, "qwen3_moe_mixed")]
    expected = mixtures.weights_of(mixtures.load(model), tmp_path / "expected")
    results = pool.run(world, export, policy_config(model, **changes))
    assert len({tuple(result) for result in results}) == 1, "one order on all ranks"
    for result in results:
        check_equal(result, expected)


def different_numbers_of_micro_batches(config: dict[str, Any], batch: dict[str, Tensor]) -> str:
    """What the worker says when its replica has more rows than the other."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    rows = 6 if worker.backend.groups.data_rank else 3
    share = BatchedDataDict({key: batch[key][:rows] for key in ("input_ids", "input_lengths")})
    message = jobs.said(lambda: worker.get_logprobs(data=share))
    worker.backend.close()
    return message


def test_replicas_out_of_step_are_refused(pool: WorkerPool, models: dict[str, Path]) -> None:
    config = policy_config(models["mixtral"], ep=2, logprob_batch_size=3)
    for message in pool.run(2, different_numbers_of_micro_batches, config, BATCHES[0]):
        assert "data-parallel replicas have [1, 2] micro-batches" in message


def logprobs_of_unequal_replicas(config: dict[str, Any], batches: list[dict[str, Tensor]]) -> Tensor:
    """Each replica gets a batch of its own, of its own length."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    mine = batches[worker.backend.groups.data_rank]
    result = worker.get_logprobs(
        data=BatchedDataDict({key: mine[key] for key in ("input_ids", "input_lengths")})
    )["logprobs"]
    worker.backend.close()
    return result


@newest_megatron
@sampled(2)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(
    "changes", [{}, {"pp": 2, **UNEVEN}, {"tp": 2, "sp": True, "ep": 4}], ids=["ep2", "pp2-ep2", "tp2-sp-ep4"]
)
def test_replicas_of_unequal_lengths(
    pool: WorkerPool, models: dict[str, Path], dispatcher: str, changes: dict[str, Any]
) -> None:
    """Ranks that share experts bring different numbers of tokens."""
    batches = [make_batch(rows=5, length=length, seed=length) for length in (18, 8)]
    config = policy_config(
        models["mixtral"], dispatcher=dispatcher, logprob_batch_size=2, **{"ep": 2, **changes}
    )
    world = 2 * changes.get("pp", 1) * changes.get("tp", 1)
    results = pool.run(world, logprobs_of_unequal_replicas, config, batches)
    for rank, result in enumerate(results):
        replica = (rank // changes.get("tp", 1)) % 2
        torch.testing.assert_close(
            result, mixtures.logprobs(models["mixtral"], batches[replica], 1.0), atol=1e-5, rtol=0
        )


def reference_logprobs(config: dict[str, Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Log-probabilities before training, and after it those of the reference policy and of the policy
    itself."""
    worker = jobs.build(config)
    mine = jobs.my_share(worker, batch)
    before = worker.get_logprobs(data=mine)["logprobs"]
    worker.train(data=mine, loss_fn=NLLLoss())
    reference_policy = worker.get_reference_policy_logprobs(data=mine)["reference_logprobs"]
    after = worker.get_logprobs(data=mine)["logprobs"]
    worker.offload_after_refit()
    worker.prepare_for_training()
    again = worker.get_logprobs(data=mine)["logprobs"]
    worker.backend.close()
    return {"before": before, "reference": reference_policy, "after": after, "again": again}


@newest_megatron(layout=["tp2-sp-ep2-etp2"])
@sampled(1)
@pytest.mark.parametrize("layout", ["ep2-dp2", "tp2-sp-ep2-etp2", "pp2-ep2"])
def test_reference_policy_and_offload_hold_for_experts(
    pool: WorkerPool, models: dict[str, Path], layout: str
) -> None:
    world, changes = LAYOUTS[layout]
    for result in pool.run(
        world, reference_logprobs, policy_config(models["mixtral"], lr=0.05, **changes), BATCHES[0]
    ):
        assert torch.equal(result["reference"], result["before"])
        assert torch.equal(result["again"], result["after"])
        assert not torch.equal(result["after"], result["before"])


CHECKPOINTS = [
    ("ep2", "ep2"),
    ("ep2-dp2", "ep2-dp2"),
    ("tp2-sp-ep2-etp2", "tp2-sp-ep2-etp2"),
    ("pp3", "pp3"),
    ("pp3", "ep1"),
    ("ep2", "ep1"),
    ("ep1", "pp2-ep2"),
    ("ep2-dp2", "tp2-sp-ep4"),
    ("tp2-sp-ep2-etp2", "pp2-ep2"),
    ("etp2", "ep4"),
    ("pp2-vpp2-ep2", "tp2-sp-ep2"),
]


ROUTERS = ["trained", "frozen"]


@newest_megatron(written=["tp2-sp-ep2-etp2", "pp2-vpp2-ep2"])
@sampled(1)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("written", "read"), CHECKPOINTS)
def test_resume(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, written: str, read: str, router: str
) -> None:
    model = models["qwen3_moe_four" if "vpp" in written else "qwen3_moe_mixed"]
    options = {"freeze_router": router == "frozen", "balancing": "aux_loss", "aux": 0.1}
    before, after = (
        (world, policy_config(model, **options, **changes))
        for world, changes in (LAYOUTS[written], LAYOUTS[read])
    )
    check_resumed(pool, train_and_save, load_and_train, before, after, tmp_path)


@newest_megatron
@sampled(1)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_in_step(pool: WorkerPool, models: dict[str, Path], precision: str) -> None:
    """The balancing loss is scaled as the main loss is: its share of the first gradient norm is that of
    float32."""
    norms = {}
    for name in ("float32", precision):
        config = policy_config(models["mixtral"], ep=2, precision=name, balancing="aux_loss", aux=3.0)
        norms[name] = pool.run(2, jobs.train, config, BATCHES[:1], NLLLoss())[0]["norms"][0]
    assert norms[precision] == pytest.approx(norms["float32"], rel=0.05)
