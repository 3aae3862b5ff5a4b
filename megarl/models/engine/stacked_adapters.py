"""Adapters of expert stacks, the parameters in which transformers stores the matrices of all experts of a
layer, in PEFT's format (``target_parameters``).

A stack [E, m, n] has one pair of factors. In A [E r, n], each expert has r consecutive rows. In B [m, E r],
each expert has every E-th column. If a stack contains several matrices per expert (gate and up), they share A
and have separate rows of B.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from converters.adapters.lora import expert_stacks
from converters.mapping.rules import hf_tensors
from converters.model_config.architecture import Architecture
from megarl.config.adapters import stack_of

# PEFT wraps a module once for each adapted parameter. The wrapper of the last parameter is the outermost one.
_WRAPPER = ".base_layer"


@dataclass(frozen=True, slots=True)
class Stack:
    """An expert stack: a parameter with the matrices of all experts of a layer.

    Attributes:
        name: name of the parameter in transformers' model.
        experts: number of experts, E.
        rows: m, the number of rows of all matrices of one expert.
        places: expert and rows of each matrix in the stack, by the name of the matrix.
    """

    name: str
    experts: int
    rows: int
    places: Mapping[str, tuple[int, slice]]

    @property
    def block(self) -> str:
        """Name of the module that contains the parameter."""
        return self.name.rpartition(".")[0]

    def of_expert(self, expert: int) -> str:
        """Return megarl's name for one expert's part of the stack."""
        block, _, leaf = self.name.rpartition(".")
        return f"{block}.{expert}.{leaf}"


def stacks_of(architecture: Architecture) -> list[Stack]:
    """Return all expert stacks of a model, in the order of its parameters."""
    stacks = []
    for name, members in expert_stacks({tensor.name: tensor for tensor in hf_tensors(architecture)}).items():
        if stack_of(members[0][0]) != name:
            continue
        places = {
            tensor.name.removesuffix(".weight"): (
                place.index or 0,
                slice(place.start, place.start + tensor.shape[0] * place.step, place.step),
            )
            for tensor, place in members
        }
        _, place = members[0]
        stacks.append(Stack(name, place.shape[0], place.shape[2 if place.transposed else 1], places))
    return stacks


def peft_modules(stacks: Sequence[Stack]) -> dict[str, str]:
    """Return, by stack name, PEFT's name of the module that contains the stack's factors."""
    found = {}
    for place, stack in enumerate(stacks):
        outside = sum(other.block == stack.block for other in stacks[place + 1 :])
        found[stack.name] = stack.block + outside * _WRAPPER
    return found


class StackedFactors:
    """Conversion of factors between PEFT's form for stacks and separate factors per expert.

    Args:
        stacks: stacks that have adapters.
        rank: rank of each adapter.
    """

    def __init__(self, stacks: Sequence[Stack], rank: int) -> None:
        self.stacks, self.modules, self._rank = stacks, peft_modules(stacks), rank
        self._experts = {
            stack.of_expert(expert): (stack, expert) for stack in stacks for expert in range(stack.experts)
        }

    def __contains__(self, module: str) -> bool:
        """Return whether ``module`` names one expert's part of a stack."""
        return module in self._experts

    def taken(self, module: str, letter: str) -> tuple[str, tuple[slice, slice]]:
        """Return where one expert's factor is stored: PEFT's module, and the expert's slices in the module's
        factor."""
        stack, expert = self._experts[module]
        rows = slice(expert * self._rank, (expert + 1) * self._rank)
        # PEFT views B as [m, r, E], so consecutive columns belong to consecutive experts.
        return self.modules[stack.name], (rows, slice(None)) if letter == "A" else (
            slice(None),
            slice(expert, None, stack.experts),
        )

    def joined(
        self, factors: Iterable[tuple[str, str, torch.Tensor]]
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Join the factors of experts to PEFT's factors of stacks.

        Args:
            factors: (module, letter, factor). For a stack, A comes under the name ``Stack.of_expert`` and B
                under the name of the matrix. Factors of other layers pass through unchanged.

        Yields:
            (PEFT's module, letter, factor); a stack's factor once its last part has arrived.
        """
        wanted: dict[tuple[str, str], tuple[Stack, int, slice]] = {}
        for module, (stack, expert) in self._experts.items():
            wanted[module, "A"] = stack, expert, slice(None)
        for stack in self.stacks:
            for module, place in stack.places.items():
                wanted[module, "B"] = stack, *place
        begun: dict[tuple[str, str], tuple[torch.Tensor, int]] = {}
        for module, letter, factor in factors:
            if (module, letter) not in wanted:
                yield module, letter, factor
                continue
            stack, expert, rows = wanted[module, letter]
            key, ranks = (stack.name, letter), stack.experts * self._rank
            shape = (ranks, factor.shape[1]) if letter == "A" else (stack.rows, ranks)
            if key not in begun:
                begun[key] = factor.new_empty(shape), stack.experts if letter == "A" else len(stack.places)
            # Yield a stack's factor as soon as its last part has arrived, so that only incomplete ones take
            # memory.
            whole, missing = begun.pop(key)
            if letter == "A":
                whole[expert * self._rank : (expert + 1) * self._rank] = factor
            else:
                whole[rows, expert :: stack.experts] = factor
            if missing > 1:
                begun[key] = whole, missing - 1
            else:
                yield self.modules[stack.name], letter, whole


def listed(names: Collection[str], others: Collection[str], parts: int) -> list[str]:
    """Return parameter names in the form of PEFT's config. It is ``module.parameter`` if all parameters with
    this ending are in ``names``, otherwise the full name."""

    def end(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    unlike = set(map(end, others))
    return sorted({end(name) if end(name) not in unlike else name for name in names})
