"""Expert layers in decoding steps of fixed shape, which CUDA graphs can record.

Megatron's token dispatchers read from the device how many tokens go to each expert, and exchange that many. A
decoding step needs neither: all ranks that share experts decode the same rows
(``megarl.models.megatron.generation``), so each rank runs the rows through its own experts, and one sum over
the ranks gives the layer's output.

If torch has a grouped matmul that reads its limits on the device, an expert computes only the rows routed to
it. Otherwise it computes all rows, zeroing those routed elsewhere: a step has few rows and reads the weights
of nearly all experts anyway.

Notation: b rows, k experts per row, E experts, e of them on this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from megarl.models.engine.decoded_rows import DecodedRows
from megarl.models.engine.groups import ParallelGroups
from megarl.models.megatron.grouped_experts import Linears, can_group, grouped_mlp, linears_of, shared_view
from megarl.models.megatron.parallel import ExpertGroups
from megarl.patched import patched

# Major compute capabilities and dtype for which torch's grouped matmul is a single kernel. Otherwise it is a
# loop whose limits the host must read.
_CAPABILITIES, _DTYPE = (9, 10), torch.bfloat16


def fixed_shapes(
    stages: Sequence[torch.nn.Module], groups: ParallelGroups, experts: ExpertGroups, rows: DecodedRows
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which expert layers use fixed shapes in the decoding steps of ``rows``, if ``rows``
    requires them. Passes over prompts keep Megatron's forward method.

    Args:
        stages: model chunks.
        groups, experts: this rank's process groups. All ranks that share experts must enter the context and
            decode the same rows.
        rows: the rows being decoded.
    """
    steps = []
    for module in torch.nn.ModuleList(stages).modules():
        if rows.fixed and isinstance(module, MoELayer):
            steps.append((module, "forward", _Step(module, groups, experts, rows)))
    return patched(*steps)


class _Step:
    """Forward method of an expert layer in decoding steps; see ``fixed_shapes``."""

    def __init__(self, layer: Any, groups: ParallelGroups, experts: ExpertGroups, rows: DecodedRows) -> None:
        self._layer, self._rows, self._group = layer, rows, experts.tensor_and_model
        self._passes_over_prompts = layer.forward
        self._linears, self._backwards = _grouped_in_place(layer.experts)
        # Hidden states are bitwise equal within a tensor-parallel group. Those of replicas differ by rounding
        # and could choose different experts, so that a replica would not compute an expert on which another
        # relies.
        members = set(dist.get_process_group_ranks(self._group))
        self._may_differ = not members <= set(dist.get_process_group_ranks(groups.tensor))

    def __call__(self, hidden: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
        """Run the layer as ``MoELayer.forward`` does; in a step ``hidden`` is [1, b, H]."""
        if not self._rows.is_step:
            own: tuple[torch.Tensor, None] = self._passes_over_prompts(hidden, *arguments, **options)
            return own
        probs, went_to = self._layer.router(hidden)
        # Mark experts that are not chosen with -1, because a chosen one may have weight 0. One broadcast then
        # sends weights and choices.
        weights = probs.masked_fill(~went_to, -1)
        if self._may_differ:
            dist.broadcast(weights, src=dist.get_global_rank(self._group, 0), group=self._group)
        output = (
            self._each_row_by_all(hidden[0], weights)
            if self._linears is None
            else self._grouped(hidden[0], weights, self._linears)
        )
        if dist.get_world_size(self._group) > 1:
            # The same sum serves experts on one rank and experts sharded over several.
            dist.all_reduce(output, group=self._group)
        shared = self._layer.shared_experts
        return output[None] if shared is None else output[None] + shared(hidden), None

    def _grouped(self, rows: torch.Tensor, weights: torch.Tensor, linears: Linears) -> torch.Tensor:
        """Return the contribution of this rank's experts to rows [b, H]. ``weights`` [b, E] is -1 for experts
        that a row is not routed to."""
        experts = self._layer.experts
        number, chosen = experts.num_local_experts, self._layer.router.topk
        # A fixed number of experts per row keeps the shapes fixed, as a CUDA graph requires.
        probs, names = weights.topk(chosen)
        first, *_, last = self._layer.local_expert_indices
        local = last - names.flatten() if self._backwards else names.flatten() - first
        # Treat the experts of other ranks as one additional expert, whose rows come after the matmul's last
        # limit.
        local, order = local.masked_fill((local < 0) | (local >= number), number).sort(stable=True)
        limits = torch.searchsorted(
            local, torch.arange(number, device=local.device), right=True, out_int32=True
        )
        output = grouped_mlp(experts.config, linears, rows[order // chosen], limits, probs.flatten()[order])
        # Results after the last limit are uninitialised memory and may be NaN.
        output = output.masked_fill_((local == number)[:, None], 0)
        # Restore the row order by a copy and sum in a fixed order; the order of a scattered sum would vary on
        # a GPU.
        return torch.empty_like(output).index_copy_(0, order, output).unflatten(0, (-1, chosen)).sum(1)

    def _each_row_by_all(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the contribution of this rank's experts to rows [b, H], running all rows through each
        expert. ``weights`` [b, E] is -1 for experts that a row is not routed to."""
        experts, first = self._layer.experts, self._layer.local_expert_indices[0]
        mine = weights[:, first : first + experts.num_local_experts].t()
        # Zero the rows of other experts: their activation in this expert may be infinite, and infinity times
        # 0 is NaN.
        inputs, probs = (
            rows.expand(len(mine), -1, -1).masked_fill((mine < 0)[..., None], 0),
            mine.clamp(min=0),
        )
        if isinstance(experts, SequentialMLP):
            of_experts = zip(experts.local_experts, inputs, probs, strict=True)
            return torch.stack([expert(given, scale)[0] for expert, given, scale in of_experts]).sum(0)
        # Transformer Engine's experts need the row counts on the host.
        outputs: torch.Tensor = experts(
            inputs.flatten(0, 1), torch.full(mine.shape[:1], len(rows)), probs.flatten()
        )[0]
        return outputs.view_as(inputs).sum(0)


def _grouped_in_place(experts: Any) -> tuple[Linears | None, bool]:
    """Return the linear layers of a rank's experts if their matmuls can be grouped without copying weights,
    else None; and whether the experts are in reverse order.

    Megatron's buffers store weights in reverse order, except for ``GroupedExperts``.
    """
    linears = linears_of(experts) if isinstance(experts, SequentialMLP) else _unpacked(experts)
    weight = linears[0][0].weight
    has_kernel = (
        weight.device.type == "cpu" or torch.cuda.get_device_capability(weight.device)[0] in _CAPABILITIES
    )
    if weight.dtype == _DTYPE and has_kernel and can_group(linears):
        for backwards, ordered in enumerate((linears, (linears[0][::-1], linears[1][::-1]))):
            if all(shared_view([linear.weight for linear in of_layer]) is not None for of_layer in ordered):
                return ordered, bool(backwards)
    return None, False


def _unpacked(experts: Any) -> Linears:
    """Return the linear layers of each of Transformer Engine's experts, which keep the weights of all experts
    in two modules."""

    def layers(linear: Any) -> list[Any]:
        names = range(experts.num_local_experts)
        return [
            SimpleNamespace(
                weight=getattr(linear, f"weight{name}"), bias=getattr(linear, f"bias{name}", None)
            )
            for name in names
        ]

    return layers(experts.linear_fc1), layers(experts.linear_fc2)
