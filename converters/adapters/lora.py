"""Merge LoRA adapters of PEFT or Megatron-Bridge into a model while it is read.

An opened adapter has PEFT's names and shapes, whichever program saved it. The merged weight is W + scaling *
B A, computed in float32 from the stored base weight and rounded once. Each element sums over the ranks in
order, so the result does not depend on how many rows are read at a time, nor on the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from converters.adapters.lora_config import LoraConfig, is_among
from converters.adapters.megatron_adapter import PEFT_PREFIX, MegatronAdapter
from converters.adapters.peft_directory import PeftDirectory, is_peft_directory
from converters.adapters.replaced_rows import FLOATS, AdapterSource, Replacements
from converters.check import wrapped_names
from converters.errors import ConversionError
from converters.files.reading import identity_of
from converters.mapping.rule import HuggingFaceTensor, TensorLocation
from converters.mapping.rules import hf_tensors
from converters.model_config.architecture import Architecture
from converters.model_config.prediction_layers import beginnings
from converters.torch_dist.location import holds_checkpoint

# In an adapter, ``lora_A`` is [rank, in] and ``lora_B`` is [out, rank].
_FACTOR = re.compile(r"(?P<module>.+)\.(?P<factor>lora_(?:embedding_)?[AB])(?:\.weight)?")
# Number of float32 elements of a temporary, small enough for a processor's cache.
_BLOCK_ELEMENTS = 2**17


Member = tuple[HuggingFaceTensor, TensorLocation]
"""One expert's tensor, and its location in the stored stack of all experts."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The two low-rank matrices of a module, whose scaled product is added to the base weight.

    Attributes:
        down: name of the stored ``lora_A``.
        up: name of the stored ``lora_B``.
        scaling: factor on the product.
        rank: rank of the adapter.
        is_embedding: the factors are transposed, as PEFT stores them for embeddings.
        place: location of an expert's tensor in a stack, whose factors are stored together for all experts:
            the expert has ``rank`` rows of ``down``, every n-th column of ``up``, and the rows that ``place``
            gives.
    """

    down: str
    up: str
    scaling: float
    rank: int
    is_embedding: bool = False
    place: TensorLocation | None = None


class LoraAdapter:
    """A LoRA adapter that has been checked against a model.

    Args:
        directory: PEFT directory, or ``torch_dist`` checkpoint of adapters.
        architecture: architecture of the base model.

    Raises:
        ConversionError: the adapter is damaged, is not plain LoRA, or does not match the model.

    Attributes:
        source: reads the adapter's tensors.
        base: Hugging Face tensor name -> name of a base weight that is stored with the adapter.
        factors: Hugging Face tensor name -> its factors.
        replaced: Hugging Face tensor name -> rows that replace the base's rows.
        changed: names of all Hugging Face tensors that the adapter changes.
    """

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self.directory = directory
        is_megatron = not is_peft_directory(directory) and holds_checkpoint(directory)
        self.source: AdapterSource = (
            MegatronAdapter(directory, architecture) if is_megatron else PeftDirectory(directory)
        )
        self.base: dict[str, str] = {}
        tensors = {tensor.name: tensor for tensor in hf_tensors(architecture)}
        if isinstance(self.source, PeftDirectory):
            self.source.name_as(tensors)
        # Read the config after the renaming above: its patterns may use the names of another class.
        self._config = self.source.config
        replacements = Replacements(self.source, tensors, architecture.tied_embeddings)
        self.replaced = replacements.found
        self.factors = self._fit(tensors, architecture, replacements)
        self.changed = frozenset((*self.factors, *self.replaced))

    def __contains__(self, name: str) -> bool:
        """Return whether the adapter changes a Hugging Face tensor."""
        return name in self.changed

    def notes(self) -> dict[str, str | int]:
        """Return the adapter's name and its number of tensors, for the notes in a manifest."""
        return {"lora": self.directory.resolve().name, "lora_tensors": len(self.changed)}

    def identity(self) -> list[list[str | int]]:
        """Return name, size and modification time of each of the adapter's files."""
        return identity_of(self.source.files())

    def merge(
        self,
        name: str,
        rows: Tensor,
        start: int,
        dtype: torch.dtype | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """Merge the adapter into some rows of a base tensor.

        Args:
            name: Hugging Face tensor name.
            rows: [n, columns] rows of the base tensor, beginning with row ``start``.
            start: index of the first row.
            dtype: dtype of the result; None for the dtype of ``rows``.
            columns: (start, stop) of the columns in ``rows``; None for all. Only for tensors with factors.
        """
        if name in self.replaced:
            # Go through at least float32: values are then rounded only once, even if the adapter's dtype is
            # wider than the base's.
            merged = rows.to(torch.promote_types(rows.dtype, torch.float32))
            self.replaced[name].put(self.source, merged, start)
            return merged.to(dtype or rows.dtype)
        factors, stop = self.factors[name], start + rows.shape[0]
        if factors.is_embedding:
            # PEFT stores the factors of an embedding as A [rank, vocabulary] and B [hidden, rank]: its rows
            # are A's columns.
            up = self._read(factors.down, columns=(start, stop)).T
            down = self._read(factors.up).T.contiguous()
        elif factors.place is not None:
            up, down = self._of_expert(factors, factors.place, start, stop)
        else:
            up, down = self._read(factors.up, rows=(start, stop)), self._read(factors.down)
        if columns is not None:
            down = down[:, slice(*columns)].contiguous()
        merged, wide = (
            torch.empty(rows.shape, dtype=dtype or rows.dtype),
            torch.promote_types(rows.dtype, torch.float32),
        )
        # Blocks only limit the size of temporaries. An element's sum over the ranks does not depend on them.
        step = max(1, _BLOCK_ELEMENTS // max(1, rows.shape[1]))
        for begin in range(0, rows.shape[0], step):
            block = slice(begin, begin + step)
            merged[block] = rows[block].to(wide) + _product(up[block], down).mul_(factors.scaling)
        return merged

    def _of_expert(
        self, factors: Factors, place: TensorLocation, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        # PEFT views A as [experts, rank, in] but B as [out, rank, experts]. So an expert has adjacent rows of
        # A, and every ``experts``-th column of B.
        expert, experts, rank = place.index or 0, place.shape[0], factors.rank
        first = place.start + start * place.step
        rows = self._read(factors.up, rows=(first, max(first, first + (stop - start - 1) * place.step + 1)))
        return rows[:: place.step, expert::experts].contiguous(), self._read(
            factors.down, rows=(expert * rank, (expert + 1) * rank)
        )

    def _read(
        self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> Tensor:
        shape = self.source.shape(name)
        return self.source.read(name, (rows or (0, shape[0]), columns or (0, shape[1]))).float()

    def _fit(
        self, tensors: Mapping[str, HuggingFaceTensor], architecture: Architecture, replacements: Replacements
    ) -> dict[str, Factors]:
        """Match the adapter's tensors with the model's. Return Hugging Face tensor name -> factors.

        Raises:
            ConversionError: tensors are unknown, missing or have a wrong shape; lists all problems.
        """
        found: dict[str, dict[str, str]] = {}
        problems, tied = replacements.problems, architecture.tied_embeddings
        for name in sorted(set(self.source.keys()) - replacements.names):
            # PEFT moves a wrapped module to base_layer, and saves the base layer of an embedding along with
            # the adapter.
            base = name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
            if (
                name.endswith(".base_layer.weight")
                and base in tensors
                and self.source.shape(name) == tensors[base].shape
            ):
                self.base[base] = name
                continue
            match = (
                _FACTOR.fullmatch(name.removeprefix(PEFT_PREFIX)) if name.startswith(PEFT_PREFIX) else None
            )
            if match is None:
                problems.append(f"{name} {list(self.source.shape(name))}: not a factor of a LoRA module")
            else:
                found.setdefault(match["module"], {})[match["factor"]] = name
        fitted: dict[str, Factors] = {}
        stacks = expert_stacks(tensors)
        for module, names in found.items():
            # PEFT wraps a module once for each target parameter, so that a module with two stacks has this
            # suffix twice.
            block = module.removesuffix(".base_layer").removesuffix(".base_layer")
            candidates = {
                stack: members for stack, members in stacks.items() if stack.rpartition(".")[0] == block
            }
            if candidates:
                problems += self._fit_stack(module, names, candidates, fitted)
                continue
            faults = list(self._faults(module, names, tensors, tied))
            problems += faults
            if not faults:
                is_embedding = "lora_embedding_A" in names
                kind = "lora_embedding_" if is_embedding else "lora_"
                fitted[f"{module}.weight"] = Factors(
                    names[f"{kind}A"],
                    names[f"{kind}B"],
                    self._config.scaling_of(module),
                    self._config.rank_of(module),
                    is_embedding=is_embedding,
                )
        for name in fitted:
            if name in self.replaced:
                problems.append(f"{name} is changed twice: by LoRA factors and by a full tensor")
        untrained = _untrained_layers(architecture, [*fitted, *found, *self.replaced])
        # In transformers 5, experts are not modules, so ``target_modules`` does not select them.
        stacked = {tensor.name for members in stacks.values() for tensor, _ in members}
        has_experts = any(f"{module}.weight" in stacked for module in found) or stacked & fitted.keys()
        modules = {name: tensors[name] for name in tensors if has_experts or name not in stacked}
        problems += _left_out(self._config, modules, set(found), untrained)
        for stack, members in stacks.items():
            incomplete = any(tensor.name not in fitted for tensor, _ in members)
            if (
                is_among(stack, self._config.target_parameters)
                and incomplete
                and not stack.startswith(untrained)
            ):
                problems.append(f"missing: {stack}, which target_parameters lists")
        # A wrapper's prefix makes all names unknown. Report it as one error instead of a long list.
        if problems:
            self._refuse_wrapped(tensors)
        if problems or not (fitted or self.replaced):
            raise ConversionError(
                f"the adapter in {self.directory} does not fit this {architecture.family} model",
                "use the base model that the adapter was trained on (base_model_name_or_path = "
                f"{self.source.raw_config.get('base_model_name_or_path')!r}), and an adapter of plain LoRA",
                problems or ["it is empty"],
            )
        return fitted

    def _refuse_wrapped(self, tensors: Mapping[str, HuggingFaceTensor]) -> None:
        expected = set()
        for name in tensors:
            module = PEFT_PREFIX + name.removesuffix(".weight")
            expected |= {f"{module}.lora_A.weight", f"{module}.lora_B.weight"}
        wrapped = wrapped_names(self.source.keys(), expected)
        if wrapped is not None:
            raise ConversionError(
                f"the tensors of the adapter in {self.directory} have names with {wrapped[0]}, as "
                f"{wrapped[1]} gives them (such as "
                f"{min(set(self.source.keys()) - expected)})",
                (
                    "save the adapter with save_pretrained of the PEFT model inside the wrapper, or rename "
                    "the "
                    "tensors"
                ),
            )

    def _fit_stack(
        self,
        module: str,
        names: Mapping[str, str],
        stacks: Mapping[str, list[Member]],
        fitted: dict[str, Factors],
    ) -> list[str]:
        """Match the factors of a module with one of its stacks of experts, and return the problems. PEFT
        gives both stacks of a layer the same names, so the shapes decide."""
        if set(names) != {"lora_A", "lora_B"}:
            return [f"{module}: has {', '.join(names)}; lora_A and lora_B are needed"]
        down, up = names["lora_A"], names["lora_B"]
        shapes = self.source.shape(down), self.source.shape(up)
        wanted = {}
        for stack, members in stacks.items():
            tensor, place = members[0]
            # PEFT concatenates the ranks of all experts.
            rank = self._config.rank_of(stack) * place.shape[0]
            rows = place.shape[2] if place.transposed else place.shape[1]
            wanted[stack] = ((rank, tensor.shape[1]), (rows, rank))
        fitting = [stack for stack, expected in wanted.items() if expected == shapes]
        if len(fitting) != 1:
            listing = ", ".join(
                f"{stack} needs {list(map(list, expected))}" for stack, expected in wanted.items()
            )
            return [f"shape: {down} and {up} are {list(map(list, shapes))}; {listing}"]
        dtypes = list(map(self.source.dtype, (down, up)))
        if not set(dtypes) <= set(FLOATS):
            return [f"dtype: {down} and {up} are {dtypes}; float32, bfloat16 or float16 is needed"]
        problems = []
        scaling, rank = self._config.scaling_of(fitting[0]), self._config.rank_of(fitting[0])
        for tensor, place in stacks[fitting[0]]:
            if tensor.name in fitted:
                problems.append(f"{tensor.name} is changed twice, by {module} too")
            fitted[tensor.name] = Factors(down, up, scaling, rank, place=place)
        return problems

    def _faults(
        self, module: str, names: Mapping[str, str], tensors: Mapping[str, HuggingFaceTensor], tied: bool
    ) -> list[str]:
        tensor = tensors.get(f"{module}.weight")
        if tensor is None or len(tensor.shape) != 2:
            return [f"{name}: the model has no matrix {module}.weight" for name in names.values()]
        if set(names) not in ({"lora_A", "lora_B"}, {"lora_embedding_A", "lora_embedding_B"}):
            return [
                f"{module}: has {', '.join(names)}; lora_A and lora_B are needed, or those of an embedding"
            ]
        if not self._config.chooses(module):
            said = "PEFT drops them: name it there, or take them out"
            return [f"{module}: has factors, but target_modules does not choose it, so that {said}"]
        if tied and (module == "lm_head" or module.endswith(".embed_tokens")):
            return [
                (
                    f"{module}: tie_word_embeddings is true, but the adapter would make embedding "
                    "and output layer differ"
                )
            ]
        rank = self._config.rank_of(module)
        (rows, columns), is_embedding = tensor.shape, "lora_embedding_A" in names
        shapes = {
            "A": (rank, rows if is_embedding else columns),
            "B": (columns if is_embedding else rows, rank),
        }
        faults = []
        for factor, name in names.items():
            expected = shapes[factor[-1]]
            if self.source.shape(name) != expected:
                faults.append(
                    f"shape: {name} is {list(self.source.shape(name))}, rank {rank} and {module}.weight ask "
                    f"for {list(expected)}"
                )
            elif self.source.dtype(name) not in FLOATS:
                faults.append(
                    f"dtype: {name} is {self.source.dtype(name)}; float32, bfloat16 or float16 is needed"
                )
        return faults


def expert_stacks(tensors: Mapping[str, HuggingFaceTensor]) -> dict[str, list[Member]]:
    """Return the parameters that stack the matrices of all experts of a layer: stored name -> members."""
    stacks: dict[str, list[Member]] = {}
    for tensor in tensors.values():
        for place in tensor.places:
            # Stacked biases have two dimensions, and MXFP4 blocks are another form of the same weights.
            if place.index is not None and len(place.shape) == 3 and place.written:
                stacks.setdefault(place.name, []).append((tensor, place))
    return stacks


def _product(up: Tensor, down: Tensor) -> Tensor:
    """Multiply [n, r] by [r, columns], and round after each term, so that the result does not depend on n."""
    # matmul chooses the order of summation by the number of rows, and addcmul may use a fused multiply-add.
    total = torch.zeros(up.shape[0], down.shape[1])
    term = torch.empty_like(total)
    for rank in range(down.shape[0]):
        torch.mul(up[:, rank : rank + 1], down[rank], out=term)
        total += term
    return total


def _untrained_layers(architecture: Architecture, changed: Iterable[str]) -> tuple[str, ...]:
    """Return the name prefixes of multi-token-prediction layers that the adapter does not change.
    transformers does not implement these layers, so its adapters have no factors for them."""
    names = list(changed)
    return tuple(
        prefix for prefix in beginnings(architecture) if not any(name.startswith(prefix) for name in names)
    )


def _left_out(
    config: LoraConfig, tensors: Mapping[str, HuggingFaceTensor], found: set[str], untrained: tuple[str, ...]
) -> list[str]:
    """Return a problem for each module that the config lists but that has no factors, except in ``untrained``
    layers."""
    problems = []
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        may_have_factors = module != name and len(tensor.shape) == 2 and not module.startswith(untrained)
        if may_have_factors and is_among(module, config.targets) and module not in found:
            problems.append(f"missing: {module}, which target_modules lists")
    return problems
