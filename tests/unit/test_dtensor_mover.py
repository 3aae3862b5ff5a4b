"""Optimizer state of a divided model goes where it is sent, whatever devices the mesh is of."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megarl.models.huggingface.mover import move_optimizer


def test_state_stays_where_it_is_put() -> None:
    """On a mesh of the meta device, as that of a GPU's state in host memory: no device but that of the mesh
    is asked for."""
    mesh = DeviceMesh("meta", torch.zeros(1, dtype=torch.int64), _init_backend=False, _rank=0)
    optimizer = torch.optim.AdamW([parameter := torch.nn.Parameter(torch.zeros(3, 2))])
    moment = DTensor.from_local(
        torch.empty(3, 2, device="meta"), mesh, [Shard(0)], run_check=False, shape=(3, 2), stride=(2, 1)
    )
    optimizer.state[parameter] = {"exp_avg": moment, "step": torch.tensor(1.0)}
    values = torch.arange(6.0).view(3, 2)
    move_optimizer(optimizer, lambda tensor: values)
    moved = optimizer.state[parameter]["exp_avg"]
    assert (
        isinstance(moved, DTensor)
        and moved.to_local().device.type == "cpu"
        and moved.to_local().data_ptr() == values.data_ptr()
    )
    assert (moved.device_mesh, moved.placements, moved.shape, moved.stride()) == (
        mesh,
        (Shard(0),),
        (3, 2),
        (2, 1),
    )
    assert optimizer.state[parameter]["step"] == 1.0
