"""Tensor-parallel styles on local tensors against the same modules undivided: outputs, gradients of inputs
and parameters, collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from megarl.algorithms.loss_functions import NLLLoss
from megarl.models.dtensor import mesh as dtensor_mesh
from megarl.models.dtensor.styles import ColumnLinear, NormOfParts, RowLinear, WholeInput
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.dist.dtensor_jobs import dtensor_config

ROWS, LENGTH, WIDTH = 2, 6, 8
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


class Block(nn.Module):
    """Two linear layers with biases that read one input, a norm over the features of each half of the first,
    and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.norm = nn.LayerNorm(3)

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = self.norm(self.first(hidden_states).unflatten(-1, (-1, 3))).flatten(-2)
        output: Tensor = self.last(normed * self.second(hidden_states).sigmoid())
        return output


def whole() -> dict[str, ParallelStyle]:
    shared = {name: ColumnLinear(shared_input=True) for name in ("first", "second")}
    return {"": WholeInput(Replicate()), **shared, "norm": NormOfParts(), "last": RowLinear()}


def over_the_sequence() -> dict[str, ParallelStyle]:
    return {**whole(), "": WholeInput(Shard(1)), "last": RowLinear(output_layouts=Shard(1))}


def alone() -> dict[str, ParallelStyle]:
    return {
        "first": ColumnLinear(),
        "second": ColumnLinear(input_layouts=Replicate()),
        "norm": NormOfParts(),
        "last": RowLinear(),
    }


def alone_over_the_sequence() -> dict[str, ParallelStyle]:
    columns = {name: ColumnLinear(input_layouts=Shard(1)) for name in ("first", "second")}
    return {**columns, "norm": NormOfParts(), "last": RowLinear(output_layouts=Shard(1))}


def gathered() -> dict[str, ParallelStyle]:
    """Outputs of the first layers are whole, and the last one takes its part of them."""
    columns = {name: ColumnLinear(output_layouts=Replicate()) for name in ("first", "second")}
    return {**columns, "last": RowLinear(input_layouts=Replicate())}


def mixed() -> dict[str, ParallelStyle]:
    """torch's styles around ours, which hand over DTensors."""
    prepared = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),))
    gives = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    return {
        "": prepared,
        "first": ColumnLinear(output_layouts=Replicate()),
        "second": gives,
        "last": RowLinear(output_layouts=Shard(1)),
    }


def torchs() -> dict[str, ParallelStyle]:
    return {
        "first": ColwiseParallel(),
        "second": ColwiseParallel(),
        "norm": NormOfParts(),
        "last": RowwiseParallel(),
    }


class Mixing(Block):
    """As ``Block``, where the first layers' outputs may be a tensor and a DTensor."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        one, other = self.first(hidden_states), self.second(hidden_states)
        if isinstance(other, DTensor):
            one = DTensor.from_local(one, other.device_mesh, [Replicate()], run_check=False)
        output: Tensor = self.last(one * other.sigmoid())
        return output


def compare(
    plan: Callable[[], dict[str, Any]], kind: type[Block], layout: Any, frozen: str
) -> tuple[dict[str, float], Counter[str]]:
    """Largest differences of a divided block from the undivided one, by what differs, and how often each
    collective ran."""
    torch.manual_seed(0)
    undivided, divided = kind(), kind()
    divided.load_state_dict(undivided.state_dict())
    for model in (undivided, divided):
        model.get_parameter(frozen).requires_grad_(False)
    inputs, weights = torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, LENGTH, WIDTH)
    expected_input = inputs.clone().requires_grad_(True)
    (undivided(expected_input) * weights).sum().backward()

    dtensor_mesh._forget_earlier_meshes()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(divided, mesh, plan(), src_data_rank=None)

    def mine(tensor: Tensor) -> Tensor:
        return tensor.chunk(2, dim=layout.dim)[dist.get_rank()] if isinstance(layout, Shard) else tensor

    own = mine(inputs).clone().requires_grad_(True)
    calls: Counter[str] = Counter()
    with counting(calls):
        output = divided(own)
        output = output.to_local() if isinstance(output, DTensor) else output
        (output * mine(weights)).sum().backward()
    differences = {
        "output": _largest(output, mine(undivided(inputs))),
        "input": _largest(own.grad, mine(expected_input.grad)),
    }
    for name, parameter in undivided.named_parameters():
        gradient = divided.get_parameter(name).grad
        assert (
            (gradient is None)
            == (parameter.grad is None)
            == (name == frozen or ("norm" in name and kind is Mixing))
        ), name
        if parameter.grad is not None:
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            differences[name] = _largest(full, parameter.grad)
    return differences, calls


def _largest(one: Any, other: Any) -> float:
    assert one.shape == other.shape
    return float((one - other).detach().abs().max())


def counting(calls: Counter[str]) -> Any:
    """Inside, collectives are counted in ``calls``."""
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return originals[name](*arguments, **keywords)

        return call

    return mock.patch.multiple(dist, **{name: counted(name) for name in COLLECTIVES})


@pytest.mark.parametrize(
    ("plan", "kind", "layout", "frozen", "collectives"),
    [
        (whole, Block, Replicate(), "first.bias", {"all_reduce": 2}),
        (whole, Block, Replicate(), "last.weight", {"all_reduce": 2}),
        (
            over_the_sequence,
            Block,
            Shard(1),
            "norm.bias",
            {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2},
        ),
        (alone, Block, Replicate(), "last.bias", {"all_reduce": 3}),
        (
            alone_over_the_sequence,
            Block,
            Shard(1),
            "second.weight",
            {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 3},
        ),
        (gathered, Mixing, Replicate(), "first.weight", None),
        (mixed, Mixing, Shard(1), "second.bias", None),
        (torchs, Block, Replicate(), "first.bias", None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_divided_block_computes_as_a_whole_one(
    pool: WorkerPool,
    plan: Any,
    kind: type[Block],
    layout: Any,
    frozen: str,
    collectives: dict[str, int] | None,
) -> None:
    for differences, calls in pool.run(2, compare, plan, kind, layout, frozen):
        assert max(differences.values()) < 2e-5, differences
        assert collectives is None or dict(calls) == collectives


def uneven(dimension: int) -> str:
    """Return the error for a sequence that does not divide."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layer = parallelize_module(
        nn.Linear(WIDTH, WIDTH), mesh, RowLinear(output_layouts=Shard(dimension)), src_data_rank=None
    )
    try:
        layer(torch.zeros(1, 5, WIDTH // 2))
    except ValueError as error:
        return str(error)
    return "no error"


def test_runs_are_of_one_length(pool: WorkerPool) -> None:
    assert all(
        "[1, 5, 8] has no 2 equal runs along dimension 1: pad it" in message
        for message in pool.run(2, uneven, 1)
    )


def of_a_step(config: dict[str, Any], batch: dict[str, Any]) -> Counter[str]:
    """Collectives of a training step."""
    worker = jobs.build(config, init_reference_model=False)
    share, calls = jobs.my_share(worker, batch), Counter[str]()
    worker.train(data=share, loss_fn=NLLLoss())
    with counting(calls):
        worker.train(data=share, loss_fn=NLLLoss())
    worker.backend.close()
    return calls


def test_a_micro_batch_sends_as_often_as_it_must(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    """One micro-batch more costs two all-reduces a layer each way, one behind the embedding and one before
    the output layer."""
    batch = make_batch(rows=12, length=12, seed=1)
    counts = []
    for rows in (12, 6):
        config = dtensor_config(tiny_models["qwen2"], tp=2, gbs=12, mbs=rows)
        counts.append(pool.run(2, of_a_step, config, batch)[0])
    more = counts[1] - counts[0]
    layers = 3
    assert more["all_reduce"] == 4 * layers + 2, more
    assert more["reduce_scatter_tensor"] == 0
