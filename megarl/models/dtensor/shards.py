"""Shards of a model: a rank's position in each parameter, and the layout of parameters in checkpoints.

A parameter is sharded twice: over tensor-parallel ranks into equal parts along one dimension (or not at all),
then each part over data- and context-parallel ranks by rows. The row split follows ``torch.chunk``, so the
last shards may be shorter or empty. A rank's shard after both splits is called a block.

In a checkpoint every tensor, including optimizer state, has its true shape (no vocabulary padding) and is
sharded by rows over all ranks, so that any layout and the other torch backend can read it. Tensors are
gathered and sharded again one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from converters.checkpoint.source import HuggingFaceSource
from megarl.models.engine.backend import Place
from megarl.models.engine.gather_stream import in_buckets
from megarl.models.huggingface.checkpoint import (
    OptimizerState,
    install_optimizer_state,
    named_optimizer_state,
)
from megarl.models.huggingface.mover import move_model


@dataclass(frozen=True, slots=True)
class Block:
    """Position of a rank's shard in a parameter.

    Attributes:
        shape: shape of the full parameter, including vocabulary padding.
        tensor_dimension: dimension that is split over tensor-parallel ranks; None if the parameter is
            replicated on them.
        tensor_rank, tensor_size: rank in the tensor-parallel group, and its size.
        sharding_rank, sharding_size: rank among the data- and context-parallel ranks over which rows are
            sharded, and their number.
    """

    shape: tuple[int, ...]
    tensor_dimension: int | None
    tensor_rank: int
    tensor_size: int
    sharding_rank: int
    sharding_size: int

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of the part that belongs to one tensor-parallel rank."""
        sizes = list(self.shape)
        if self.tensor_dimension is not None:
            sizes[self.tensor_dimension] //= self.tensor_size
        return tuple(sizes)

    @property
    def run(self) -> int:
        """Number of rows of a full-sized shard."""
        return -(-self.part[0] // self.sharding_size)

    @property
    def rows(self) -> tuple[int, int]:
        """First row (inclusive) and last row (exclusive) of this block in the tensor-parallel part."""
        first = min(self.sharding_rank * self.run, self.part[0])
        return first, min(first + self.run, self.part[0])

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices of the full parameter that give this block, one per dimension."""
        first, last = self.rows
        places = [slice(first, last), *(slice(0, size) for size in self.shape[1:])]
        if self.tensor_dimension is not None:
            offset = self.tensor_rank * self.part[self.tensor_dimension]
            if self.tensor_dimension == 0:
                places[0] = slice(offset + first, offset + last)
            else:
                places[self.tensor_dimension] = slice(offset, offset + self.part[self.tensor_dimension])
        return tuple(places)


def block_of(parameter: DTensor) -> Block:
    """Return this rank's block of a parameter sharded by ``fully_shard``, possibly after a tensor-parallel
    plan.

    Raises:
        ValueError: the parameter cannot be split equally over the tensor-parallel ranks.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    tensor_dimension, tensor_rank, tensor_size = None, 0, 1
    if mesh.ndim == 2:
        tensor_rank, tensor_size = mesh.get_local_rank(1), mesh.size(1)
        tensor_dimension = placements[1].dim if placements[1].is_shard() else None  # type: ignore[attr-defined]
    block = Block(
        tuple(parameter.shape),
        tensor_dimension,
        tensor_rank,
        tensor_size,
        mesh.get_local_rank(0),
        mesh.size(0),
    )
    if tensor_dimension is not None and block.shape[tensor_dimension] % tensor_size:
        raise ValueError(
            f"a parameter of shape {list(block.shape)} cannot be cut into {tensor_size} equal parts along "
            f"{tensor_dimension}"
        )
    return block


@torch.no_grad()
def read_block(parameter: DTensor, source: HuggingFaceSource, name: str) -> None:
    """Load this rank's shard of a parameter from a checkpoint, reading only that slice. Vocabulary padding
    becomes zero."""
    block, true_rows = block_of(parameter), source.shape(name)[0]
    rows, *others = block.slices
    wanted = slice(min(rows.start, true_rows), min(rows.stop, true_rows))
    _fill(parameter, source.read(name, (wanted, *others)))


@torch.no_grad()
def write_block(parameter: DTensor, whole: torch.Tensor) -> None:
    """Copy this rank's shard from a full tensor without vocabulary padding."""
    _fill(parameter, whole[block_of(parameter).slices])


def _fill(parameter: DTensor, values: torch.Tensor) -> None:
    local = parameter.to_local()
    local[: values.shape[0]].copy_(values)
    # Zero the vocabulary padding: it is never sampled, but takes part in matmuls, where a NaN would spread.
    local[values.shape[0] :].zero_()


@torch.no_grad()
def gather_parts(
    parameters: Mapping[str, DTensor], dtype: torch.dtype, device: torch.device, bucket_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """All-gather this tensor-parallel rank's parts of parameters over the data- and context-parallel ranks;
    yield them by name on ``device``.

    All parameters must be on one mesh. Values are converted to ``dtype``. Consecutive parameters are gathered
    together, about ``bucket_bytes`` over all ranks at a time.
    """
    blocks, spaces = {}, {}
    for name, parameter in parameters.items():
        blocks[name] = block = block_of(parameter)
        spaces[name] = block.run * math.prod(block.part[1:])
    ranks = next(iter(blocks.values())).sharding_size
    for names in in_buckets(blocks, lambda name: spaces[name] * ranks * dtype.itemsize, bucket_bytes):
        widths = [spaces[name] for name in names]
        # Zeros, because the row may be longer than a shard, and all of it is sent.
        row = torch.zeros(sum(widths), dtype=dtype, device=device)
        for name, space in zip(names, row.split(widths), strict=True):
            piece = parameters[name].to_local().flatten()
            space[: len(piece)].copy_(piece)
        rows = all_gather(row, parameters[names[0]].device_mesh.get_group(0)) if ranks > 1 else row[None]
        for name, runs in zip(names, rows.split(widths, dim=1), strict=True):
            part = blocks[name].part
            yield name, runs.reshape(ranks * blocks[name].run, *part[1:])[: part[0]]


@torch.no_grad()
def gather(parameter: DTensor, device: torch.device, rows: int | None = None) -> torch.Tensor:
    """Return the full parameter on every rank, gathered without rounding. Collective over all ranks.

    Args:
        parameter: the sharded parameter.
        device: device for collectives.
        rows: number of rows to return, to drop vocabulary padding; None for all.
    """
    [(_, part)] = gather_parts({"": parameter}, parameter.dtype, device, 0)
    dimension = block_of(parameter).tensor_dimension
    if dimension is not None:
        part = torch.cat(list(all_gather(part, parameter.device_mesh.get_group(1)).unbind(0)), dim=dimension)
    return part[:rows]


def all_gather(part: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """All-gather tensors of one shape from ``group`` (None for all ranks), stacked as [ranks, ...]."""
    ranks = dist.get_world_size(group)
    whole = torch.empty(ranks * part.shape[0], *part.shape[1:], dtype=part.dtype, device=part.device)
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole.view(ranks, *part.shape)


class DividedParameters:
    """``ParameterStore`` for a model sharded by ``fully_shard``.

    Args:
        model: model with the parameters.
        parameters: sharded parameters by name.
        rows: number of rows of each parameter, without vocabulary padding.
        device: device of the model and for collectives.
    """

    def __init__(
        self, model: Any, parameters: Mapping[str, DTensor], rows: Mapping[str, int], device: torch.device
    ) -> None:
        self._model, self._parameters, self._rows, self._device = model, parameters, rows, device
        # No process groups, because nothing is ever sent over this mesh.
        self._mesh = DeviceMesh(
            "cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("world",), _init_backend=False
        )

    def move(self, place: Place) -> None:
        """Move parameters and buffers to the device or to host memory."""
        move_model(self._model, self._device if place == "device" else torch.device("cpu"))

    def state(self) -> dict[str, torch.Tensor]:
        """Return each parameter as a DTensor sharded evenly by rows over all ranks; see
        ``ParameterStore``."""
        return {name: self._cut(name, parameter) for name, parameter in self._parameters.items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy a loaded ``state`` into the parameters; see ``ParameterStore``."""
        for name, parameter in self._parameters.items():
            write_block(parameter, self._whole(state[name]))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Return the optimizer state, with sharded tensors evenly split by rows over all ranks; see
        ``ParameterStore``."""
        return _with_tensors(named_optimizer_state(optimizer, self._named()), self._cut)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, loaded: OptimizerState) -> None:
        """Load the result of ``optimizer_state``; see ``ParameterStore``."""
        install_optimizer_state(optimizer, self._named(), _with_tensors(loaded, self._divided))

    def _named(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        return cast(Iterable[tuple[str, torch.nn.Parameter]], self._parameters.items())

    def _cut(self, name: str, tensor: DTensor) -> torch.Tensor:
        return self._share_of(gather(tensor, self._device, self._rows[name]))

    def _divided(self, name: str, share: DTensor) -> torch.Tensor:
        """Build a tensor with a parameter's shape and sharding from all ranks' even row shards."""
        tensor = cast(DTensor, torch.zeros_like(self._parameters[name].detach(), dtype=share.dtype))
        write_block(tensor, self._whole(share))
        return tensor

    def _share_of(self, whole: torch.Tensor) -> DTensor:
        first, last = self._range(whole.shape[0])
        # Keep the shards in host memory, because the device cannot hold a checkpoint in addition to the
        # model.
        local = whole[first:last].to("cpu", copy=True)
        return DTensor.from_local(
            local,
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=whole.shape,
            stride=whole.contiguous().stride(),
        )

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


def _with_tensors(state: OptimizerState, change: Callable[[str, DTensor], torch.Tensor]) -> OptimizerState:
    """Return the optimizer state with each DTensor replaced by ``change(parameter name, tensor)``."""
    changed: dict[str, dict[str, Any]] = {}
    for name, values in state["state"].items():
        changed[name] = dict(values)
        for key, value in values.items():
            if isinstance(value, DTensor):
                changed[name][key] = change(name, value)
    return {**state, "state": changed}
