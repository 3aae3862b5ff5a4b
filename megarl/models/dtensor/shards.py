"""Where this rank's piece of a parameter lies in the whole one: for reading it from a checkpoint and for bringing all pieces together.

A parameter is cut twice: over tensor-parallel ranks in equal parts along one dimension (or not at all), and each part over the data and
context parallel ranks in runs of rows, as ``torch.chunk`` cuts: the last runs may be shorter or empty. Both cuts together give a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from converters.checkpoint.source import HuggingFaceSource


@dataclass(frozen=True, slots=True)
class Block:
    """This rank's piece.

    Attributes:
        shape: of the whole parameter, vocabulary padding included.
        tensor_dimension: cut over tensor-parallel ranks; None where each of them has the whole.
        tensor_rank, tensor_size: which of how many.
        sharding_rank, sharding_size: which run of rows of how many.
    """

    shape: tuple[int, ...]
    tensor_dimension: int | None
    tensor_rank: int
    tensor_size: int
    sharding_rank: int
    sharding_size: int

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of a tensor-parallel rank's part."""
        sizes = list(self.shape)
        if self.tensor_dimension is not None:
            sizes[self.tensor_dimension] //= self.tensor_size
        return tuple(sizes)

    @property
    def run(self) -> int:
        """Rows of a full run."""
        return -(-self.part[0] // self.sharding_size)

    @property
    def rows(self) -> tuple[int, int]:
        """The rows of the part that this rank has."""
        first = min(self.sharding_rank * self.run, self.part[0])
        return first, min(first + self.run, self.part[0])

    @property
    def slices(self) -> tuple[slice, ...]:
        """One a dimension: the block's place in the whole parameter."""
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
    """The block of a parameter that ``fully_shard`` has divided, perhaps after a tensor-parallel plan."""
    mesh, placements = parameter.device_mesh, parameter.placements
    tensor_dimension, tensor_rank, tensor_size = None, 0, 1
    if mesh.ndim == 2:
        tensor_rank, tensor_size = mesh.get_local_rank(1), mesh.size(1)
        tensor_dimension = placements[1].dim if placements[1].is_shard() else None  # type: ignore[attr-defined]
    block = Block(tuple(parameter.shape), tensor_dimension, tensor_rank, tensor_size, mesh.get_local_rank(0), mesh.size(0))
    if tensor_dimension is not None and block.shape[tensor_dimension] % tensor_size:
        raise ValueError(f"a parameter of shape {list(block.shape)} cannot be cut into {tensor_size} equal parts along {tensor_dimension}")
    return block


@torch.no_grad()
def read_block(parameter: DTensor, source: HuggingFaceSource, name: str) -> None:
    """Fill this rank's piece from a checkpoint, reading nothing but that piece; rows that only pad the vocabulary become zero."""
    block, true_rows = block_of(parameter), source.shape(name)[0]
    rows, *others = block.slices
    wanted = slice(min(rows.start, true_rows), min(rows.stop, true_rows))
    _fill(parameter, source.read(name, (wanted, *others)))


@torch.no_grad()
def write_block(parameter: DTensor, whole: torch.Tensor) -> None:
    """Fill this rank's piece from a whole tensor without vocabulary padding."""
    _fill(parameter, whole[block_of(parameter).slices])


def _fill(parameter: DTensor, values: torch.Tensor) -> None:
    local = parameter.to_local()
    local[: values.shape[0]].copy_(values)
    local[values.shape[0] :].zero_()


@torch.no_grad()
def gather_part(parameter: DTensor, device: torch.device) -> torch.Tensor:
    """This tensor-parallel rank's part, from the runs of all data and context parallel ranks, bit for bit, on ``device``."""
    block, mesh = block_of(parameter), parameter.device_mesh
    local = parameter.to_local().detach().to(device)
    run = local.new_zeros(block.run, *block.part[1:])
    run[: local.shape[0]].copy_(local)
    return all_gather(run, mesh.get_group(0)).flatten(0, 1)[: block.part[0]]


@torch.no_grad()
def gather(parameter: DTensor, device: torch.device, rows: int | None = None) -> torch.Tensor:
    """The whole parameter on every rank, from all pieces, bit for bit.

    Args:
        parameter: divided.
        device: where collectives work.
        rows: how many to keep, where the rest pads the vocabulary.
    """
    part, dimension = gather_part(parameter, device), block_of(parameter).tensor_dimension
    if dimension is not None:
        part = torch.cat(list(all_gather(part, parameter.device_mesh.get_group(1)).unbind(0)), dim=dimension)
    return part[:rows]


def all_gather(part: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """[ranks, ...]: the tensors of all ranks of ``group`` (of all ranks when None), which have one shape."""
    ranks = dist.get_world_size(group)
    whole = torch.empty(ranks * part.shape[0], *part.shape[1:], dtype=part.dtype, device=part.device)
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole.view(ranks, *part.shape)
