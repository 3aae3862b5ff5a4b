"""Experts of a mixture-of-experts model in the form that vLLM loads fastest: three stacks per layer instead
of three weights per expert.

vLLM's layer-wise reload handles every weight three times: it binds the loader's arguments, counts the
elements that would be copied, and copies them once the layer is complete. For thousands of experts this takes
seconds of host time. vLLM's expert loader also accepts a stack of all experts on this rank. So weights are
copied into a stack as they arrive, and experts of other ranks are skipped.
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

# vLLM's expert runner, or the base of a LoRA layer, adds this to a module's name, but not to weight names.
_INNER = ".routed_experts"


@dataclass(slots=True, eq=False)
class _Stack:
    """One of the three weights (gate, down or up) of all experts of a layer on this rank.

    Attributes:
        layer: the layer of the experts.
        name: name of the layer's parameter in the model.
        shard: name of the weight in vLLM's loader: ``w1`` (gate), ``w2`` (down) or ``w3`` (up).
        expert: id of any expert on this rank; vLLM's loader checks that it is on this rank.
        count: number of experts on this rank.
        whole: shape of one expert's full weight.
        where: the slice of each weight that this rank reads; None for the full weight.
        values: [count, *shape of the slice], the values that have arrived; None before the first.
        pieces: views of ``values``, one per expert.
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
        """Copy the slices of some experts into the stack, at the indices ``places``."""
        if self.values is None:
            self.values = torch.empty(
                (self.count, *parts[0].shape), dtype=parts[0].dtype, device=parts[0].device
            )
            self.pieces, self.missing = self.values.unbind(), self.count
        # One kernel launch for all experts of a group, instead of one per expert.
        torch._foreach_copy_([self.pieces[place] for place in places], list(parts))
        self.missing -= len(parts)

    def load(self) -> None:
        """Pass the complete stack to vLLM's loader, and release it."""
        assert self.values is not None
        weight = self.values
        if self.where is not None:
            # The first dimension of a stack is the expert, so shift the sliced dimension by one.
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
    """The stacks of all layers of a model. Empty if the model stores its experts in a way that stacks do not
    support.

    Args:
        model: vLLM's model.
        tensors: the tensors that the policy sends.
        reads: the slice that this rank reads of each tensor; empty if it reads full tensors, or if the slices
            are unknown.
    """

    def __init__(self, model: torch.nn.Module, tensors: Iterable[TensorInfo], reads: Slices) -> None:
        infos = {info.name: info for info in tensors}
        # By weight name: the weight's stack and its index there, or -1 if the expert is on another rank.
        self._places: dict[str, tuple[_Stack, int]] = {}
        for name, layer in model.named_modules():
            if isinstance(layer, RoutedExperts) and _takes_stacks(layer):
                for stack, names in _stacks_of(name, layer, infos, reads):
                    for weight, place in names.items():
                        self._places[weight] = (stack, place)

    @property
    def names(self) -> KeysView[str]:
        """Names of the weights that are loaded through stacks."""
        return self._places.keys()

    def take(self, weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Copy slices of experts' weights into their stacks. Load each stack that is now complete, and yield
        the name of its parameter."""
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
        """Release the stacks of a reload that was aborted."""
        for stack, _ in self._places.values():
            stack.forget()


def _takes_stacks(layer: RoutedExperts) -> bool:
    """Return whether vLLM's loader accepts all of this rank's experts as one stack. This requires unquantized
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
    """Yield the stacks of a layer, each with the names of its weights and their indices in the stack. A
    weight whose experts differ in shape, dtype or slice gets no stack."""
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
            # A stack needs one shape, dtype and slice for all its experts, and the loader must not read
            # experts of other ranks.
            len(alike) > 1
            or not elsewhere <= ({0} if reads else {None})
            or len(here) != layer.local_num_experts
        ):
            continue
        [(whole, _, where)] = alike
        stack = _Stack(layer, f"{name}.{parameter}", shard, here[0], len(here), whole, where)
        yield stack, dict(zip(names, places, strict=True))
