"""The gated delta rule shared by context-parallel ranks against one rank: outputs, and gradients of inputs
and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.models.engine import gated_delta
from megarl.models.engine.context import ContextShare
from megarl.parity.pool import WorkerPool
from tests.tiers import sampled
from tests.unit.test_gated_delta import gradients_of, leaves, mixed_by

# in units of two chunks a rank: 1 makes runs that are shorter than the convolution reaches back
SEQUENCES = {"one": (5,), "packed": (1, 3, 2, 7)}
OF_TOKENS = ("inputs", "decay", "step", "pull")


def mix(starts: tuple[int, ...], chunk: int, dtype: torch.dtype) -> dict[str, Any]:
    """This rank's outputs and gradients, and the positions that they belong to."""
    gated_delta.CHUNK = chunk
    gated_delta._plan.cache_clear()
    share = ContextShare(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    index = share.index(starts)
    given = leaves(starts[-1], dtype)
    here = {
        name: (tensor[index] if name in OF_TOKENS else tensor).detach().requires_grad_()
        for name, tensor in given.items()
    }
    output = mixed_by(here, starts, share)
    return {"output": output.detach(), "index": index, **gradients_of(here, output)}


@sampled("pairs")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("case", SEQUENCES)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_share_sequences_exactly(
    pool: WorkerPool, world: int, case: str, chunk: int, dtype: torch.dtype
) -> None:
    lengths = [2 * world * units for units in SEQUENCES[case]]
    starts = tuple(sum(lengths[:count]) for count in range(len(lengths) + 1))
    wanted = leaves(starts[-1])
    whole = mixed_by(wanted, starts)
    expected = {"output": whole.detach(), **gradients_of(wanted, whole)}
    beside = leaves(starts[-1], dtype)
    once = mixed_by(beside, starts)
    alone = {"output": once.detach(), **gradients_of(beside, once)}
    results = pool.run(world, mix, starts, chunk, dtype)
    for name, tensor in expected.items():
        if name in OF_TOKENS or name == "output":
            got = torch.zeros_like(tensor)
            for result in results:
                got[result["index"]] = result[name].double()
        else:
            got = torch.stack([result[name].double() for result in results]).sum(0)
        error, of_one_rank = (
            (found.double() - tensor).norm() / tensor.norm() for found in (got, alone[name])
        )
        # one rank in float32 rounds gradients by more than 1e-6 too
        bound = 1e-12 if dtype is torch.float64 else max(1e-6, 2 * float(of_one_rank))
        assert error <= bound, f"{name}: {float(error):.1e}, of one rank {float(of_one_rank):.1e}"
