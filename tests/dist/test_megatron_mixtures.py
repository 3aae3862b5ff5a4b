"""Families of mixtures on Megatron, each with layers of its own: generation, exports, checkpoints, half
precision, and a reference policy. That they train as in transformers is in ``test_training_mixtures.py``,
which says what is particular to each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.checkpoint.source import open_source
from converters.importing import import_model, plan_import
from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import JobError, WorkerPool
from tests.dist import jobs, mixtures
from tests.dist.batches import make_batch
from tests.dist.checks import check_equal, check_generated, check_resumed, prompts
from tests.dist.test_megatron_checkpoint import load_and_train, train_and_save
from tests.dist.test_megatron_experts import LAYOUTS, export
from tests.dist.training import check_fusions
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled, slow

WIDE = ("mlp.gate.e_score_correction_bias", ".A_log", ".dt_bias")
NEWEST = ("tp2-sp-ep2-etp2", "tp2-sp-ep2")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny model of a family, with as many layers as the layout wants: an interleaved pipeline one that its
    chunks divide."""
    root = tmp_path_factory.mktemp("mixtures")

    @cache
    def made(family: str, layers: int) -> Path:
        return make_tiny(
            root / f"{family}-{layers}", family, tied=layers == 4, seed=41 + len(family), layers=layers
        )

    return lambda family, layout="": made(family, 4 if "vpp" in layout else 3)


@slow
@newest_megatron(layout=NEWEST)
@sampled(4)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *[("qwen2_moe_mixed", layout) for layout in ("ep2-dp2", "tp2-sp-ep2-etp2", "cp2-ep2", "pp2-ep2")],
        *[("glm4_moe_mixed", layout) for layout in ("tp2-sp-ep2-etp2", "pp2-ep2")],
        *[("gpt_oss", layout) for layout in ("tp2-sp-ep2", "pp2-ep2")],
        ("deepseek_v3", "tp2-sp-ep2-etp2"),
        ("deepseek_v2", "cp2-ep2"),
        *[("qwen3_next", layout) for layout in ("tp2-sp-ep2-etp2", "cp2-ep2", "pp2-ep2", "ep2-dp2")],
    ],
)
def test_greedy_equals_transformers(
    pool: WorkerPool, model_of: Callable[..., Path], family: str, layout: str
) -> None:
    (world, changes), model, batch = LAYOUTS[layout], model_of(family), prompts(rows=8)
    config = policy_config(model, generation={"stop_token_ids": []}, **changes)
    check_generated(pool, world, config, batch, True, mixtures.greedy(model, batch, 8))


@sampled(3)
@pytest.mark.parametrize(
    ("family", "layout", "precision"),
    [
        ("qwen2_moe_mixed", "tp2-sp-ep2-etp2", "float32"),
        ("qwen2_moe_mixed", "pp2-tp2-sp-ep2", "float32"),
        ("glm4_moe", "pp2-ep2", "float32"),
        ("glm4_moe", "pp2-ep2", "bfloat16"),
        ("gpt_oss", "tp2-sp-ep2", "float32"),
        ("gpt_oss", "pp2-ep2", "float32"),
        ("qwen3_next", "tp2-sp-ep2-etp2", "float32"),
        ("qwen3_next", "pp2-ep2", "bfloat16"),
    ],
)
def test_export_gives_back_what_was_loaded(
    pool: WorkerPool, model_of: Callable[..., Path], tmp_path: Path, family: str, layout: str, precision: str
) -> None:
    """Corrections, and decays of gated delta nets, in float32 also where everything else is bfloat16; of
    GPT-OSS all experts of a layer together, transposed, with rows of gate and up in turns."""
    (world, changes), model = LAYOUTS[layout], model_of(family)
    stored = mixtures.weights_of(mixtures.load(model), tmp_path / "expected")
    expected = {
        name: tensor if name.endswith(WIDE) else tensor.to(getattr(torch, precision))
        for name, tensor in stored.items()
    }
    for result in pool.run(world, export, policy_config(model, precision=precision, **changes)):
        check_equal(result, expected)
        assert all(tensor.dtype == expected[name].dtype for name, tensor in result.items())


@newest_megatron
@pytest.mark.parametrize(
    ("written", "distributed"), [("pp2-ep2", True), ("pp2-ep2", False), ("tp2-sp-ep2", False)]
)
def test_resume_where_the_first_stage_has_no_experts(
    pool: WorkerPool, model_of: Callable[..., Path], tmp_path: Path, written: str, distributed: bool
) -> None:
    """Rank 0, whose counts of Adam's steps a checkpoint keeps, takes no step on experts."""
    before, after = (
        (world, policy_config(model_of("qwen2_moe_mixed"), distributed_optimizer=distributed, **changes))
        for world, changes in (LAYOUTS[written], LAYOUTS["pp2-ep2"])
    )
    check_resumed(pool, train_and_save, load_and_train, before, after, tmp_path)


@newest_megatron
@slow
@pytest.mark.parametrize(
    ("family", "written", "read"),
    [
        ("qwen2_moe_mixed", "tp2-sp-ep2-etp2", "tp2-sp-ep2-etp2"),
        ("qwen2_moe_mixed", "tp2-sp-ep2-etp2", "pp2-ep2"),
        ("qwen2_moe_mixed", "ep2-dp2", "tp2-sp-ep4"),
        ("qwen2_moe_mixed", "pp2-ep2", "tp2-sp-ep2"),
        ("glm4_moe_mixed", "tp2-sp-ep2", "pp2-ep2"),
        ("gpt_oss", "tp2-sp-ep2", "pp2-ep2"),
        ("deepseek_v3", "tp2-sp-ep2-etp2", "tp2-sp-ep2-etp2"),
        ("deepseek_v3", "tp2-sp-ep2-etp2", "pp2-ep2"),
        ("qwen3_next", "tp2-sp-ep2-etp2", "tp2-sp-ep2-etp2"),
        ("qwen3_next", "tp2-sp-ep2-etp2", "pp2-ep2"),
    ],
)
def test_resume(
    pool: WorkerPool, model_of: Callable[..., Path], tmp_path: Path, family: str, written: str, read: str
) -> None:
    """From another model of the family where the layout is another one, so that all of it has to come from
    the checkpoint."""
    other = (
        model_of(family) if written == read else make_tiny(tmp_path / "other", family, tied=False, seed=60)
    )
    (world, changes), (new_world, new_changes) = LAYOUTS[written], LAYOUTS[read]
    before, after = (
        (world, policy_config(model_of(family), **changes)),
        (new_world, policy_config(other, **new_changes)),
    )
    check_resumed(pool, train_and_save, load_and_train, before, after, tmp_path)


@slow
@pytest.mark.parametrize(
    ("family", "precision"),
    # at the loss scale that training begins with, gradients in front of the output norm of a gated delta net
    # overflow float16
    [*itertools.product(["qwen2_moe", "deepseek_v2"], ["bfloat16", "float16"]), ("qwen3_next", "bfloat16")],
)
def test_half_precision_trains_in_step(
    pool: WorkerPool, model_of: Callable[..., Path], family: str, precision: str
) -> None:
    norms = {}
    for name in ("float32", precision):
        config = policy_config(model_of(family), precision=name, tp=2, sp=True, multiple=2)
        norms[name] = pool.run(2, jobs.train, config, [make_batch(rows=8, length=12, seed=1)], NLLLoss())[0][
            "norms"
        ][0]
    assert norms[precision] == pytest.approx(norms["float32"], rel=0.05)


@slow
@pytest.mark.parametrize("family", ["qwen2_moe_mixed", "gpt_oss"])
def test_functions_that_a_gpu_fuses_give_the_same(
    pool: WorkerPool, model_of: Callable[..., Path], family: str
) -> None:
    """Without that of GPT-OSS's gates, which Megatron-Core would limit before their bias is added."""
    check_fusions(pool, policy_config(model_of(family)))


def reference_after_loading(
    config: dict[str, Any], weights: str, batch: dict[str, Any]
) -> list[torch.Tensor]:
    """Log-probabilities of the reference, which is the model as it was built, after another model's weights
    were read, and of that."""
    worker = jobs.build(config)
    worker.load_checkpoint(weights, None)
    found = [
        jobs.logprobs_of(worker, batch, method)
        for method in ("get_reference_policy_logprobs", "get_logprobs")
    ]
    worker.backend.close()
    return found


def test_the_reference_keeps_its_own_correction(
    pool: WorkerPool, model_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Weights of the same model, but for the correction."""
    model, batch = model_of("glm4_moe"), make_batch(rows=7, length=19, seed=4)
    other = mixtures.load(model)
    with torch.no_grad():
        for gate in mixtures.gates(other):
            gate.e_score_correction_bias.copy_(torch.rand(16) - 0.5)
    other.save_pretrained(tmp_path / "other")
    import_model(plan_import(open_source(tmp_path / "other")), tmp_path / "weights")
    ((reference, loaded),) = pool.run(
        1, reference_after_loading, policy_config(model), str(tmp_path / "weights"), batch
    )
    torch.testing.assert_close(reference, mixtures.logprobs(model, batch, 1.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(loaded, mixtures.logprobs(tmp_path / "other", batch, 1.0), atol=1e-5, rtol=0)
    assert (reference - loaded).abs().max() > 1e-2


def test_a_ring_with_sinks_is_refused(pool: WorkerPool, model_of: Callable[..., Path]) -> None:
    with pytest.raises(JobError, match="sinks does not send keys and values around; choose all_gather"):
        pool.run(2, export, policy_config(model_of("gpt_oss"), cp=2, comm="p2p", multiple=4))
