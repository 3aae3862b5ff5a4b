"""A divided model and its optimizer state as a checkpoint holds them: named tensors that do not show how the model is divided.

In a checkpoint every tensor has its true shape (without vocabulary padding) and is cut over all ranks in runs of rows, so that any layout,
and the other torch backend, can read it. One tensor at a time is brought together and cut anew; what stays on a rank is its share alone,
in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megarl.models.dtensor.shards import all_gather, gather, write_block
from megarl.models.huggingface.checkpoint import OptimizerState


class EvenState:
    """Brings tensors into the form of a checkpoint and back.

    Args:
        rows: true rows of every parameter.
        device: where collectives work.
    """

    def __init__(self, rows: Mapping[str, int], device: torch.device) -> None:
        self._rows = rows
        self._device = device
        # no process groups: nothing is ever sent over this mesh
        self._mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("world",), _init_backend=False)

    def cut(self, tensors: Mapping[str, DTensor]) -> dict[str, torch.Tensor]:
        """This rank's even share of every tensor of the model's shapes. A collective."""
        return {name: self._share_of(gather(tensor, self._device, self._rows[name])) for name, tensor in tensors.items()}

    def write(self, state: Mapping[str, torch.Tensor], tensors: Mapping[str, DTensor]) -> None:
        """The reverse of ``cut``, into ``tensors``. A collective."""
        for name, tensor in tensors.items():
            write_block(tensor, self._whole(state[name]))

    def cut_optimizer(self, state: OptimizerState) -> OptimizerState:
        """Optimizer state by parameter name with its divided tensors cut evenly. A collective."""
        even = {
            name: {key: self.cut({name: value})[name] if isinstance(value, DTensor) else value for key, value in values.items()}
            for name, values in state["state"].items()
        }
        return {**state, "state": even}

    def divide_optimizer(self, state: OptimizerState, like: Mapping[str, DTensor]) -> OptimizerState:
        """The reverse: tensors of a parameter's shape divided as the parameter is. A collective."""
        divided = {
            name: {key: self._divided(value, like[name]) if isinstance(value, DTensor) else value for key, value in values.items()}
            for name, values in state["state"].items()
        }
        return {**state, "state": divided}

    def _divided(self, value: DTensor, like: DTensor) -> DTensor:
        tensor = cast(DTensor, torch.zeros_like(like.detach(), dtype=value.dtype))
        write_block(tensor, self._whole(value))
        return tensor

    def _share_of(self, whole: torch.Tensor) -> DTensor:
        first, last = self._range(whole.shape[0])
        local = whole[first:last].to("cpu", copy=True)
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.contiguous().stride())

    def _whole(self, share: torch.Tensor) -> torch.Tensor:
        assert isinstance(share, DTensor)
        local = share.to_local().to(self._device)
        run = local.new_zeros(-(-share.shape[0] // dist.get_world_size()), *share.shape[1:])
        run[: local.shape[0]].copy_(local)
        return all_gather(run).flatten(0, 1)[: share.shape[0]]

    def _range(self, rows: int) -> tuple[int, int]:
        run = -(-rows // dist.get_world_size())
        first = min(dist.get_rank() * run, rows)
        return first, min(first + run, rows)
