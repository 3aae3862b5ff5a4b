"""Experts of a mixture in the form that vLLM loads with the least work: three stacks per layer instead of
three weights per expert.

vLLM's layer-wise reload processes every weight three times: it binds the loader's arguments, counts what
would be copied, and copies once the layer is complete. For thousands of experts that takes seconds of host
time. Its loader of experts also accepts a stack of all experts of this rank, so the weights are copied into a
stack as they arrive, and experts of other ranks are left out.
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

# vLLM's runner of experts, or the base of a LoRA layer, adds this to a module's name but not to weight names.
_INNER = ".routed_experts"


@dataclass(slots=True, eq=False)
class _Stack:
    """One of the three weights of all experts that a layer has on this rank.

    Attributes:
        layer: the layer of the experts.
        name: name of the layer's parameter in the model.
        shard: name of the weight in vLLM's loader: ``w1`` (gate), ``w2`` (down) or ``w3`` (up).
        expert: one of the experts; the loader checks that this expert is on this rank.
        count: number of experts on this rank.
        whole: shape of one expert's full weight.
        where: slice of each weight that this rank reads; None for all of it.
        values: [count, *part], the values that have arrived; None before any arrive.
        pieces: the experts' views of ``values``.
        missing: number of experts that have not arrived yet.
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
        """Copy the parts that are read of some experts into the stack."""
        if self.values is None:
            self.values = torch.empty(
                (self.count, *parts[0].shape), dtype=parts[0].dtype, device=parts[0].device
            )
            self.pieces, self.missing = self.values.unbind(), self.count
        # Launch one kernel for all experts of a group, where a loop would launch one for each.
        torch._foreach_copy_([self.pieces[place] for place in places], list(parts))
        self.missing -= len(parts)

    def load(self) -> None:
        """Pass all experts to vLLM's loader, and release the stack."""
        assert self.values is not None
        weight = self.values
        if self.where is not None:
            # Shift the dimension by one, because a stack has the experts in front.
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
    """The stacks of all layers of a model; empty for a model that stores its experts differently.

    Args:
        model: vLLM's model.
        tensors: the tensors that the policy sends.
        reads: the slices of the tensors that this rank reads; empty if it reads them in full, or if the
            slices are not known.
    """

    def __init__(self, model: torch.nn.Module, tensors: Iterable[TensorInfo], reads: Slices) -> None:
        infos = {info.name: info for info in tensors}
        # The stack of each expert's weight and the index in it; the index is -1 for an expert of another
        # rank.
        self._places: dict[str, tuple[_Stack, int]] = {}
        for name, layer in model.named_modules():
            if isinstance(layer, RoutedExperts) and _takes_stacks(layer):
                for stack, names in _stacks_of(name, layer, infos, reads):
                    for weight, place in names.items():
                        self._places[weight] = (stack, place)

    @property
    def names(self) -> KeysView[str]:
        """Names of the weights that are loaded in stacks."""
        return self._places.keys()

    def take(self, weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Copy the parts that are read of experts' weights. Each stack that is complete is passed to its
        loader, and its parameter's name is yielded."""
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
        """Release what has arrived of a reload that was abandoned."""
        for stack, _ in self._places.values():
            stack.forget()


def _takes_stacks(layer: RoutedExperts) -> bool:
    """Return whether vLLM's loader accepts all of this rank's experts as one stack, which needs unquantised
    experts without adapters and without duplicates."""
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
    """Yield the stacks of a layer, each with the names of its weights and their indices in the stack. A stack
    whose experts are read differently is left out."""
    shards = (("w1", "w13_weight", layer.ckpt_gate_proj_name), ("w3", "w13_weight", layer.ckpt_up_proj_name))
    for shard, parameter, module in (*shards, ("w2", "w2_weight", layer.ckpt_down_proj_name)):
        experts = range(layer.moe_config.num_experts)
        names = [f"{name.removesuffix(_INNER)}.{expert}.{module}.weight" for expert in experts]
        places = list(map(layer.expert_map_manager.map_global_to_local, experts))
        here = [expert for expert in experts if places[expert] >= 0]
        if not here or any(name not in infos for name in names):
            continue
        alike, elsewhere = set(), set()
        for weight, place in zip(names, places, strict=True):
            where = reads.get(weight)
            if place >= 0:
                alike.add((infos[weight].shape, infos[weight].dtype, where))
            else:
                elsewhere.add(where.length if where else None)
        if (
            # Require one shape, dtype and slice for all experts, and no reads of other ranks' experts;
            # otherwise build no stack.
            len(alike) > 1
            or not elsewhere <= ({0} if reads else {None})
            or len(here) != layer.local_num_experts
        ):
            continue
        [(whole, _, where)] = alike
        stack = _Stack(layer, f"{name}.{parameter}", shard, here[0], len(here), whole, where)
        yield stack, dict(zip(names, places, strict=True))
