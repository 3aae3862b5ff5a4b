"""What a mapping rule is: which Hugging Face tensors make up one Megatron-Core parameter, and how it is cut over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How the full parameter is laid out and cut over the tensor-parallel ranks."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    COLUMN = "column"
    """Rank t holds the t-th part of the rows (dimension 0)."""
    ROW = "row"
    """Rank t holds the t-th part of the columns (dimension 1)."""
    QKV = "qkv"
    """Query, key and value rows interleaved by key-value group, then cut by rows. Weights and biases alike."""
    GATED = "gated"
    """Rank t holds the t-th part of the gate rows, then the t-th part of the up rows. Weights and biases alike."""
    VOCAB = "vocab"
    """Rows padded with zeros to the padded vocabulary, then cut by rows."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint may keep a tensor: as a stored tensor of its own, or as consecutive rows of a larger one.

    Attributes:
        name: of the stored tensor.
        shape: of all of the stored tensor.
        index: position along the first dimension of the stored tensor, which the tensor itself does not have (the expert, where experts
            are stacked); None if there is no such dimension.
        start: first row, along the first dimension that the tensor has.
        step: from a row of the tensor to the next; more than 1 where tensors lie between one another.
        transposed: the stored tensor has the two dimensions of the tensor in the other order. ``start`` and ``step`` count along the first
            dimension that the tensor has all the same, which is the last of the stored one.
        written: the tensor may be written in this form; False for one that is only read.
    """

    name: str
    shape: tuple[int, ...]
    index: int | None = None
    start: int = 0
    step: int = 1
    transposed: bool = False
    written: bool = True

    @property
    def is_consecutive(self) -> bool:
        """Whether the tensor lies there as it is, row behind row."""
        return self.step == 1 and not self.transposed


@dataclass(frozen=True, slots=True)
class HuggingFaceTensor:
    """One tensor of a Hugging Face checkpoint.

    Attributes:
        name: that ``save_pretrained`` gives it; it is written under this name.
        shape: full.
        alternatives: other places where transformers finds it; it is read from the one that exists.
        alone: it may be stored by itself under its name. Where it may not, the first of ``alternatives`` is where it is written, and the
            name, which then is nothing but ours, is that of an expert's tensor in other families.
        stays_float32: asking for another dtype of the model does not narrow it.
    """

    name: str
    shape: tuple[int, ...]
    alternatives: tuple[Place, ...] = ()
    stays_float32: bool = False
    alone: bool = True

    @property
    def places(self) -> tuple[Place, ...]:
        """Every place where it may be stored; the first is where it is written."""
        return (Place(self.name, self.shape), *self.alternatives) if self.alone else self.alternatives


@dataclass(frozen=True, slots=True)
class Rule:
    """How one Megatron-Core parameter is made of Hugging Face tensors.

    Attributes:
        megatron_name: parameter name with the global layer and expert index; for a parameter inside a layer, the name of the portable layer
            spec.
        kind: the layout.
        parts: the tensors it is made of, in the order the layout wants (query, key, value; gate, up).
        emits: False for a copy of a parameter that another rule already writes (the output layer of a tied model).
    """

    megatron_name: str
    kind: Kind
    parts: tuple[HuggingFaceTensor, ...]
    emits: bool = True

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names of the tensors it is made of."""
        return tuple(part.name for part in self.parts)
