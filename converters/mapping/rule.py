"""Mapping rules: which Hugging Face tensors form one Megatron-Core parameter, and how it is sharded over
tensor-parallel ranks.

Names of experts: a rank that holds experts 4 to 7 of a layer numbers them 0 to 3, but the rules need 4 to 7.
Experts that run one after another (``SequentialMLP``) are separate modules,
``mlp.experts.local_experts.5.linear_fc1.weight``. Experts that run in one grouped matrix product
(``TEGroupedMLP``) are numbered weights of one module, ``mlp.experts.linear_fc1.weight5``. Names of norms:
Transformer Engine keeps a layer's norms inside the linear layer that follows. Checkpoints of Megatron-Core
use these names, whichever layer spec the model was built from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from converters.errors import ConversionError
from converters.model_config.layer_kind import LayerKind


class Kind(StrEnum):
    """Kind of a parameter, which determines the layout of the full parameter and its sharding over
    tensor-parallel ranks."""

    REPLICATED = "replicated"
    """Every rank holds the whole parameter."""
    COLUMN = "column"
    """Rank t holds the t-th part of the rows (dimension 0)."""
    ROW = "row"
    """Rank t holds the t-th part of the columns (dimension 1)."""
    QKV = "qkv"
    """Query, key and value rows are interleaved by key-value group, then sharded by rows. This applies to
    weights and biases."""
    GATED = "gated"
    """Rank t holds the t-th part of the gate rows, then the t-th part of the up rows. This applies to weights
    and biases."""
    GROUPED = "grouped"
    """Rows of the parts are interleaved by group, as ``Rule.group_rows`` gives them, then sharded by rows."""
    VOCAB = "vocab"
    """Rows are padded with zeros to the padded vocabulary, then sharded by rows."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Possible location of a tensor in a checkpoint: a separate stored tensor, or rows of a larger one.

    Attributes:
        name: name of the stored tensor.
        shape: shape of the whole stored tensor.
        index: index along the first dimension of the stored tensor, which the tensor itself lacks (the
            expert, if experts are stacked); None if there is no such dimension.
        start: first row, along the first dimension of the tensor.
        step: distance between two rows of the tensor; more than 1 if tensors are interleaved.
        transposed: whether the stored tensor has the two dimensions of the tensor in reverse order. ``start``
            and ``step`` still count along the tensor's first dimension, which is the last one of the stored
            tensor.
        written: whether the tensor may be written in this format; False if it is only read.
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
        """True if the tensor's rows are stored consecutively and not transposed."""
        return self.step == 1 and not self.transposed


@dataclass(frozen=True, slots=True)
class HuggingFaceTensor:
    """Tensor of a Hugging Face checkpoint.

    Attributes:
        name: name that ``save_pretrained`` gives the tensor, and under which it is written.
        shape: full shape.
        alternatives: other locations where transformers looks for the tensor; it is read from the one that
            exists.
        alone: whether the tensor may be stored separately under its name. If not, it is written to the first
            of ``alternatives``, and its name is used only in this package; the name has the form of an
            expert's tensor in other families.
        stays_float32: whether the tensor is not narrowed when another dtype is requested.
    """

    name: str
    shape: tuple[int, ...]
    alternatives: tuple[TensorLocation, ...] = ()
    stays_float32: bool = False
    alone: bool = True

    @property
    def places(self) -> tuple[TensorLocation, ...]:
        """All possible locations of the tensor; the first is used for writing."""
        return (
            (TensorLocation(self.name, self.shape), *self.alternatives) if self.alone else self.alternatives
        )


def renamed(tensor: HuggingFaceTensor, old: str, new: str) -> HuggingFaceTensor:
    """Return the tensor and all its locations with the name prefix ``old`` replaced by ``new``."""

    def change(name: str) -> str:
        return new + name.removeprefix(old) if name.startswith(old) else name

    places = tuple(replace(place, name=change(place.name)) for place in tensor.alternatives)
    return replace(tensor, name=change(tensor.name), alternatives=places)


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Rows of one part that belong to a group: ``count`` rows, which for group g start at ``start + g *
    stride``."""

    part: int
    start: int
    count: int
    stride: int


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule that builds one Megatron-Core parameter from Hugging Face tensors.

    Attributes:
        megatron_name: parameter name with the global layer and expert index; for a parameter inside a layer,
            the name in the portable layer spec.
        kind: the layout.
        parts: the tensors that form the parameter, in the order of the layout (query, key, value; gate, up).
        emits: False for a copy of a parameter that another rule already writes (the output layer of a tied
            model).
        groups: number of groups that ``Kind.GROUPED`` interleaves.
        group_rows: rows of a group, in order, for ``Kind.GROUPED`` only. Each row of each part belongs to one
            group.
    """

    megatron_name: str
    kind: Kind
    parts: tuple[HuggingFaceTensor, ...]
    emits: bool = True
    groups: int = 1
    group_rows: tuple[GroupRows, ...] = ()

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names of the tensors that form the parameter."""
        return tuple(part.name for part in self.parts)

    @property
    def rows(self) -> int:
        """Number of rows of the tensors that form the parameter."""
        return sum(part.shape[0] for part in self.parts)


def parts_in(rules: Iterable[Rule]) -> Iterator[HuggingFaceTensor]:
    """Yield the tensors that form parameters, in order."""
    for rule in rules:
        yield from rule.parts


def module_rules(
    megatron: str, kind: Kind, weights: Mapping[str, tuple[int, ...]], *, bias: bool = False
) -> Iterator[Rule]:
    """Yield the rule of a module's weight and, if it has one, of its bias.

    Args:
        megatron: name of the module.
        kind: kind of the weight. The bias of a layer that is sharded by columns is on every rank.
        weights: shapes of the weights that form it, by the names of their Hugging Face modules.
        bias: whether each of these modules has a bias.
    """
    yield Rule(
        f"{megatron}.weight",
        kind,
        tuple(HuggingFaceTensor(f"{name}.weight", shape) for name, shape in weights.items()),
    )
    if bias:
        parts = tuple(HuggingFaceTensor(f"{name}.bias", shape[:1]) for name, shape in weights.items())
        yield Rule(f"{megatron}.bias", Kind.REPLICATED if kind is Kind.ROW else kind, parts)


# Refuse leading zeros, so that the name can be restored from its number.
_SEQUENTIAL = re.compile(
    r"(.*mlp\.experts\.local_experts\.)(0|[1-9]\d*)(\.linear_fc[12]\.(?:weight|bias|adapter\.\w+))"
)
_GROUPED = re.compile(r"(.*mlp\.experts)(\.linear_fc[12]\.(?:weight|bias))(0|[1-9]\d*)")


def is_expert(megatron_name: str) -> bool:
    """Return whether a parameter belongs to a routed expert, so that it is sharded over the *expert*
    tensor-parallel ranks and distributed over the expert-parallel ranks. Routers and shared experts are not.
    """
    # Prepend a dot, because a name may begin inside a layer, with mlp itself.
    return ".mlp.experts." in f".{megatron_name}"


def expert_index(megatron_name: str) -> int:
    """Return the index of the expert that a parameter belongs to, as it is in the name.

    Raises:
        ConversionError: the name does not belong to an expert's parameter.
    """
    return int(_split(megatron_name)[1])


def shift_expert(megatron_name: str, offset: int) -> str:
    """Return the name with ``offset`` added to its expert index. On rank r of an expert-parallel group, an
    offset of r times the experts on a rank makes a local name global.

    Raises:
        ConversionError: the name does not belong to an expert's parameter.
    """
    before, index, after = _split(megatron_name)
    return f"{before}{int(index) + offset}{after}"


def sequential_name(megatron_name: str) -> str:
    """Return the ``SequentialMLP`` name of an expert's parameter; other names are returned unchanged."""
    match = _GROUPED.fullmatch(megatron_name)
    if match is None:
        return megatron_name
    before, weight, index = match.groups()
    return f"{before}.local_experts.{index}{weight}"


def _split(megatron_name: str) -> tuple[str, str, str]:
    """Split a name into the text before the expert's number, the number, and the text after it."""
    sequential = _SEQUENTIAL.fullmatch(megatron_name)
    if sequential is not None:
        before, index, after = sequential.groups()
        return before, index, after
    grouped = _GROUPED.fullmatch(megatron_name)
    if grouped is None:
        raise ConversionError(
            f"{megatron_name} is not the name of a weight of one expert",
            "give a name such as decoder.layers.0.mlp.experts.local_experts.5.linear_fc1.weight; without "
            "Transformer Engine switch "
            "moe_grouped_gemm off, because Megatron's own GroupedMLP has no weights of single experts",
        )
    before, weight, index = grouped.groups()
    return before + weight, index, ""


_BEFORE_ATTENTION = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"}
_BEFORE_GATED_DELTA = {"input_layernorm.weight": "self_attention.in_proj.layer_norm_weight"}
_BEFORE_MLP = {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
_INSIDE_LATENT_ATTENTION = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_OF_MIXER = {
    "attention": _BEFORE_ATTENTION,
    "latent": _INSIDE_LATENT_ATTENTION,
    "gated_delta": _BEFORE_GATED_DELTA,
}
PORTABLE_NORMS = {
    fused: norm for names in (*_OF_MIXER.values(), _BEFORE_MLP) for norm, fused in names.items()
}
"""Transformer Engine's names of norms, without the prefix of a layer, with the names in the portable layer
spec."""


def fused_norms(kind: LayerKind) -> dict[str, str]:
    """Return the norms of a layer that are fused into the following linear layer, by name in the portable
    layer spec, with Transformer Engine's names. The norm before the first projections of latent attention and
    the norm before experts are not fused."""
    return _OF_MIXER[kind.mixer] | ({} if kind.sparse else _BEFORE_MLP)
