"""Layers of experts in recorded decoding steps against Megatron's own, against answers of steps that are not
recorded, and of plain transformers. With one rank no step reads a number from the device, or has a shape that
depends on one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.engine.step import evaluation_mode
from megarl.models.megatron import generation, moe_decoding
from megarl.models.megatron.moe_decoding import MoELayer, fixed_shapes
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures, reference
from tests.dist.checks import check_recorded, prompts, tokens_of
from tests.dist.test_megatron_experts import LAYOUTS as EXPERT_LAYOUTS
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled

FAMILIES = (
    "mixtral",
    "qwen3_moe_mixed",
    "qwen2_moe",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v2_groups",
    "deepseek_v3",
)
LAYOUTS = {name: EXPERT_LAYOUTS[name] for name in EXPERT_LAYOUTS if name != "dp2"}
# rows of 16 bytes, which the grouped product wants
WIDE = {"hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("recorded")
    tiny = {family: make_tiny(root / family, family, tied=False, seed=31) for family in FAMILIES}
    tiny |= {
        f"{name}_wide": make_tiny(root / f"{name}_wide", name, tied=False, seed=32, **WIDE)
        for name in ("mixtral", "gpt_oss")
    }
    tiny["qwen3_moe_four"] = make_tiny(root / "four", "qwen3_moe", tied=True, seed=33, layers=4)
    return tiny


def check_answers(pool: WorkerPool, world: int, model: Path, changes: dict[str, Any]) -> None:
    """Greedy ones of transformers, and sampled ones of steps that are not recorded."""
    batch = prompts(12)
    settings = {"stop_token_ids": list(range(2, 100, 9)), "max_new_tokens": 12}
    expected = {True: reference.greedy(mixtures.load(model), batch, 12, settings["stop_token_ids"])}
    [plain] = pool.run(1, jobs.generate, policy_config(model, generation=settings), batch, False)
    expected[False] = tokens_of(plain)
    for greedy, ids in expected.items():
        check_recorded(pool, world, policy_config(model, generation=settings, **changes), batch, greedy, ids)


@newest_megatron(family=["qwen2_moe", "deepseek_v3"])
@sampled(3, family=["deepseek_v3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_answers_of_each_family(pool: WorkerPool, models: dict[str, Path], family: str) -> None:
    check_answers(pool, 1, models[family], {})


@newest_megatron(layout=["tp2-sp-ep2-etp2", "pp2-tp2-sp-ep2"])
@sampled(2)
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "ep1"])
def test_recorded_answers_of_each_layout(
    pool: WorkerPool, models: dict[str, Path], layout: str, family: str
) -> None:
    world, changes = LAYOUTS[layout]
    check_answers(pool, world, models["qwen3_moe_four" if "vpp" in layout else family], changes)


def outputs(config: Mapping[str, Any], grouped: bool, disagreeing: bool = False) -> dict[str, Any]:
    """What all layers of experts of this rank make of the same rows, by Megatron's own forward pass and in a
    step, and how often the grouped product was called. ``disagreeing``: in a step, the router of all ranks
    but the first chooses other experts."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    backend = worker.backend
    generator = torch.Generator().manual_seed(3)
    layers = [
        module for stage in backend.stages for module in stage.modules() if isinstance(module, MoELayer)
    ]
    dtype = next(layers[0].parameters()).dtype
    rows = [
        torch.randn(1, 7, backend.stages[0].config.hidden_size, generator=generator).to(dtype) for _ in layers
    ]
    calls: Counter[str] = Counter()
    product = moe_decoding.grouped_mlp

    def counted(*arguments: Any) -> Tensor:
        calls["grouped"] += 1
        return product(*arguments)

    def elsewhere(module: Any, given: Any, routed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return routed[0].roll(1, dims=1), routed[1].roll(1, dims=1)

    with evaluation_mode(backend), generation._whole_sequences(backend.stages):
        own = [layer(hidden)[0] for layer, hidden in zip(layers, rows, strict=True)]
        if disagreeing and dist.get_rank(backend.experts.tensor_and_model) > 0:
            for layer in layers:
                layer.router.register_forward_hook(elsewhere)
        in_a_step: Any = SimpleNamespace(is_step=True, fixed=True)
        wanted = dtype if grouped else None
        with (
            mock.patch.object(moe_decoding, "_DTYPE", wanted),
            mock.patch.object(moe_decoding, "grouped_mlp", counted),
            fixed_shapes(backend.stages, backend.groups, backend.experts, in_a_step),
        ):
            steps = [layer(hidden)[0] for layer, hidden in zip(layers, rows, strict=True)]
        # taken back
        again = [layer(hidden)[0] for layer, hidden in zip(layers, rows, strict=True)]
    backend.close()
    return {"own": own, "steps": steps, "again": again, "grouped": calls["grouped"]}


@newest_megatron(layout=["tp2-sp-ep2-etp2"])
@sampled(4)
@pytest.mark.parametrize("kind", ["loop", "grouped", "backwards"])
@pytest.mark.parametrize("family", ["mixtral_wide", "gpt_oss_wide"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "vpp" not in name and name != "ep4"])
def test_a_step_of_a_layer_equals_its_own_pass(
    pool: WorkerPool, models: dict[str, Path], layout: str, family: str, kind: str
) -> None:
    """Experts with biases too; the weights of Megatron's own experts lie backwards in its buffers."""
    world, changes = LAYOUTS[layout]
    if family == "gpt_oss_wide" and "etp" in changes:
        changes = {**changes, "etp": 1}
    config = policy_config(models[family], grouped=kind != "backwards", **changes)
    for result in pool.run(world, outputs, config, kind != "loop"):
        assert (result["grouped"] > 0) == (kind != "loop")
        for own, step, again in zip(result["own"], result["steps"], result["again"], strict=True):
            torch.testing.assert_close(step, own, atol=2e-6, rtol=1e-5)
            assert torch.equal(again, own)


@pytest.mark.parametrize("layout", ["ep2", "etp2", "cp2-ep2"])
def test_replicas_follow_the_router_of_the_first(
    pool: WorkerPool, models: dict[str, Path], layout: str
) -> None:
    """Rounding may let replicas choose different experts, of which nobody would compute some, and two ranks
    others."""
    world, changes = LAYOUTS[layout]
    for result in pool.run(world, outputs, policy_config(models["mixtral"], **changes), False, True):
        torch.testing.assert_close(result["steps"], result["own"], atol=2e-6, rtol=1e-5)


@newest_megatron(kind=[None])
@pytest.mark.parametrize("kind", [None, True], ids=["backwards", "forwards"])
def test_grouped_products_read_nothing_from_the_device(
    pool: WorkerPool, models: dict[str, Path], kind: bool | None
) -> None:
    """In bfloat16, as on a GPU; what is behind the limits of a product is undefined, and must not come
    back."""
    config = policy_config(
        models["gpt_oss_wide"], grouped=kind, precision="bfloat16", generation={"stop_token_ids": []}
    )
    [(rows, (recorded, replayed), products)] = pool.run(1, grouped_generation, config, prompts(6))
    assert products > 0 and replayed > recorded > 1
    for row in rows:
        torch.testing.assert_close(row["logprobs"], row["recomputed"], atol=0.1, rtol=0)


def grouped_generation(config: Mapping[str, Any], batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """``jobs.generate_recorded``, and how often the grouped product was called."""
    with mock.patch.object(moe_decoding, "grouped_mlp", wraps=moe_decoding.grouped_mlp) as product:
        return *jobs.generate_recorded(config, batch, True), product.call_count


@newest_megatron
def test_a_recorded_token_takes_few_launches(pool: WorkerPool, models: dict[str, Path]) -> None:
    config = policy_config(models["deepseek_v3"], generation={"stop_token_ids": []})
    [operations] = pool.run(1, jobs.operations_of_a_token, config, prompts(4))
    assert operations["recorded"] < 20 < operations["not recorded"] / 10


def test_experts_of_transformer_engine_are_found() -> None:
    """All first layers are in one module there, and all last ones; in Megatron's buffers the last expert
    comes first."""
    home = torch.randn(3, 2, 64, dtype=torch.bfloat16)
    weights = [[home[2 - expert, layer].view(8, 8) for expert in range(3)] for layer in range(2)]
    first, last = (
        SimpleNamespace(**{f"weight{expert}": of_layer[expert] for expert in range(3)})
        for of_layer in weights
    )
    experts = SimpleNamespace(num_local_experts=3, linear_fc1=first, linear_fc2=last)
    linears, backwards = moe_decoding._grouped_in_place(experts)
    assert backwards and linears is not None
    assert [linear.weight.data_ptr() for linear in linears[0]] == [
        weight.data_ptr() for weight in weights[0][::-1]
    ]
    assert all(linear.bias is None for of_layer in linears for linear in of_layer)
    first.weight1 = first.weight1.clone()
    assert moe_decoding._grouped_in_place(experts) == (None, False)


def test_experts_of_transformer_engine_compute_all_rows_where_products_are_not_grouped() -> None:
    """As many rows each, which are told on the host; what a row does not go to may overflow."""

    class Experts:
        num_local_experts = 3

        def __call__(self, rows: Tensor, counts: Tensor, probs: Tensor) -> tuple[Tensor, None]:
            assert counts.device.type == "cpu"
            first, second, third = rows.split(counts.tolist())
            return torch.cat([first, (second * 1e30).square(), third * 3]) * probs[:, None], None

    step = object.__new__(moe_decoding._Step)
    step._layer = SimpleNamespace(experts=Experts(), local_expert_indices=[1, 2, 3])
    rows = torch.rand(4, 5)
    probs = torch.tensor(
        [[-1, 0.5, -1, 0.25, -1], [0.7, -1, -1, 0.5, -1], [0.1, -1, -1, -1, 0.2], [-1, 0.0, -1, 1, -1]]
    )
    torch.testing.assert_close(
        step._each_row_by_all(rows, probs), rows * torch.tensor([1.25, 1.5, 0, 3])[:, None]
    )
