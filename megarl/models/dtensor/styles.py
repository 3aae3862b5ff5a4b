"""How one module is divided over tensor-parallel ranks, beyond the styles that torch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

HEADS = 2  # [n, t, H, D]


class VocabularyEmbedding(ParallelStyle):
    """An embedding of which each rank holds a run of rows.

    torch's own row-wise embedding makes a gradient of the whole vocabulary on every rank; here each rank's is as large as its rows.

    Args:
        output_layouts: ``Replicate()``, or ``Shard(1)`` for sequence parallelism.
    """

    def __init__(self, *, output_layouts: Placement | None = None) -> None:
        super().__init__()
        self.output_layouts = output_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding), "this style is for embeddings"
        _divide(module, "weight", device_mesh, Shard(0))

        def forward(ids: torch.Tensor) -> torch.Tensor:
            weight = cast(DTensor, module.weight).to_local()
            local = ids - device_mesh.get_local_rank() * weight.shape[0]
            mine = (local >= 0) & (local < weight.shape[0])
            rows = F.embedding(local.where(mine, torch.zeros_like(local)), weight) * mine[..., None]
            summed = DTensor.from_local(rows, device_mesh, [Partial()], run_check=False).redistribute(placements=[self.output_layouts])
            return summed.to_local()

        setattr(module, "forward", forward)  # noqa: B010 - mypy takes a method for something that cannot be replaced
        return module


class HeadNorm(ParallelStyle):
    """A norm over the head dimension of [n, t, H, D] whose one weight serves all heads, where each rank has some of the heads: the
    weight's gradient is the sum over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in list(module.named_parameters(recurse=False)):
            _divide(module, name, device_mesh, Replicate())

        def annotate(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (DTensor.from_local(inputs[0], device_mesh, [Shard(HEADS)], run_check=False), *inputs[1:])

        module.register_forward_pre_hook(annotate)
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


def _divide(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    parameter = module.get_parameter(name)
    divided = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    # names that transformers' own plans use besides
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": HeadNorm,
    "embedding_rowwise": VocabularyEmbedding,
}


def translate_parallel_style(style: str) -> ParallelStyle:
    """The style that a plan of transformers names.

    Raises:
        AssertionError: ``style`` is no string.
        ValueError: an unknown name.
    """
    assert isinstance(style, str), f"a parallel style is named by a string, got {type(style).__name__}"
    if style not in _STYLES:
        raise ValueError(f"unknown parallel style {style!r}: expected one of {', '.join(_STYLES)}")
    return _STYLES[style]()
