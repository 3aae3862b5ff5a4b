"""Experts of a mixture as vLLM takes them with least work: three stacks a layer in the place of three weights
for each expert.

vLLM's layer-wise reload works through every weight three times: it binds the loader's arguments, counts what
would be copied, and copies once the layer is complete. For thousands of experts that takes seconds of a host.
Its loader of experts takes a stack of all experts of this rank as well, so the weights are copied into one as
they come, and experts of other ranks are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from megarl.weight_sync.plan import TensorInfo
from megarl.weight_sync.slices import PartialWeight, Slice, Slices

# where the base of a LoRA layer or vLLM's runner of experts stands in a module's name, and not in that of a
# weight
_INNER = ".routed_experts"


@dataclass(slots=True, eq=False)
class _Stack:
    """One of the three weights of all experts that a layer has on this rank.

    Attributes:
        layer: that has them.
        name: of the layer's parameter in the model.
        shard: what vLLM's loader calls the weight: ``w1`` (gate), ``w2`` (down) or ``w3`` (up).
        expert: one of the experts; its loader looks up whether it is on this rank.
        count: experts on this rank.
        whole: shape of one expert's whole weight.
        where: what this rank reads of each; None for all of it.
        values: [count, *part], what came; None where nothing did.
        pieces: the experts' views of ``values``.
        missing: experts that did not come yet.
    """

    layer: RoutedExperts
    name: str
    shard: str
    expert: int
    count: int
    whole: tuple[int, ...]
    where: Slice | None
    values: torch.Tensor | None = None
    pieces: Sequence[torch.Tensor] = ()
    missing: int = field(default=0)

    def add(self, places: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        """Copy what is read of some experts."""
        if self.values is None:
            self.values = torch.empty(
                (self.count, *parts[0].shape), dtype=parts[0].dtype, device=parts[0].device
            )
            self.pieces, self.missing = self.values.unbind(), self.count
        # One launch for all experts of a group, where a loop would launch one for each.
        torch._foreach_copy_([self.pieces[place] for place in places], list(parts))
        self.missing -= len(parts)

    def load(self) -> None:
        """Hand all experts to vLLM's loader, and keep none."""
        assert self.values is not None
        weight = self.values
        if self.where is not None:
            # One dimension further: the stack has the experts in front.
            where = Slice(self.where.dim + 1, self.where.start, self.where.length)
            weight = PartialWeight.of(weight, (self.count, *self.whole), where)
        self.forget()
        parameter: Any = getattr(self.layer, self.name.rpartition(".")[2])
        parameter.weight_loader(
            parameter, weight, self.name, shard_id=self.shard, expert_id=self.expert, return_success=True
        )

    def forget(self) -> None:
        self.values, self.pieces, self.missing = None, (), 0


class ExpertStacks:
    """The stacks of all layers of a model; empty for a model that keeps its experts otherwise.

    Args:
        model: vLLM's.
        tensors: what the policy sends.
        reads: the slices that this rank reads of them; empty where that is not known, or all.
    """

    def __init__(self, model: torch.nn.Module, tensors: Iterable[TensorInfo], reads: Slices) -> None:
        infos = {info.name: info for info in tensors}
        # of each expert's weight the stack and the place in it; -1 for an expert of another rank
        self._places: dict[str, tuple[_Stack, int]] = {}
        for name, layer in model.named_modules():
            if isinstance(layer, RoutedExperts) and _takes_stacks(layer):
                for stack, names in _stacks_of(name, layer, infos, reads):
                    self._places.update({name: (stack, place) for name, place in names.items()})

    @property
    def names(self) -> KeysView[str]:
        """Names of the weights that come in stacks."""
        return self._places.keys()

    def take(self, weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Copy what is read of experts' weights, hand each stack that is complete to its loader, and yield
        the parameter's name then."""
        coming: dict[_Stack, tuple[list[int], list[torch.Tensor]]] = {}
        for name, part in weights.items():
            stack, place = self._places[name]
            if place >= 0:
                places, parts = coming.setdefault(stack, ([], []))
                places.append(place)
                parts.append(part)
        for stack, (places, parts) in coming.items():
            stack.add(places, parts)
            if not stack.missing:
                stack.load()
                yield stack.name

    def forget(self) -> None:
        """Let go of what came of a reload that was given up."""
        for stack, _ in self._places.values():
            stack.forget()


def _takes_stacks(layer: RoutedExperts) -> bool:
    """Return whether vLLM's loader of a layer takes the experts of this rank together: plain ones, each of
    them once."""
    config = layer.moe_config
    plain = isinstance(layer.quant_method, UnquantizedFusedMoEMethod) and not layer.lora_base_layer_prefix
    once = (
        config.num_experts == config.num_logical_experts
        and not layer.expert_map_manager.num_fused_shared_experts
    )
    return plain and once and config.is_act_and_mul


def _stacks_of(
    name: str, layer: RoutedExperts, infos: Mapping[str, TensorInfo], reads: Slices
) -> Iterator[tuple[_Stack, dict[str, int]]]:
    """The stacks of a layer, each with the names of its weights and their places. A stack whose experts are
    not read alike is left out."""
    shards = (("w1", "w13_weight", layer.ckpt_gate_proj_name), ("w3", "w13_weight", layer.ckpt_up_proj_name))
    for shard, parameter, module in (*shards, ("w2", "w2_weight", layer.ckpt_down_proj_name)):
        experts = range(layer.moe_config.num_experts)
        names = [f"{name.removesuffix(_INNER)}.{expert}.{module}.weight" for expert in experts]
        places = [layer.expert_map_manager.map_global_to_local(expert) for expert in experts]
        here = [expert for expert in experts if places[expert] >= 0]
        if not here or any(name not in infos for name in names):
            continue
        alike = {
            (infos[names[expert]].shape, infos[names[expert]].dtype, reads.get(names[expert]))
            for expert in here
        }
        elsewhere = {
            where.length if (where := reads.get(names[expert])) else None
            for expert in experts
            if places[expert] < 0
        }
        if (
            # One shape, dtype and slice for all, and nothing read of experts of other ranks: else no stack.
            len(alike) > 1
            or not elsewhere <= ({0} if reads else {None})
            or len(here) != layer.local_num_experts
        ):
            continue
        [(whole, _, where)] = alike
        stack = _Stack(layer, f"{name}.{parameter}", shard, here[0], len(here), whole, where)
        yield stack, dict(zip(names, places, strict=True))
