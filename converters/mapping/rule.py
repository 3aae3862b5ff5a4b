"""Mapping rules: the Hugging Face tensors that form a Megatron-Core parameter, and its tensor-parallel
sharding.

Experts: rules use global expert numbers, while a rank numbers its own from 0. In ``SequentialMLP`` each
expert is a module, ``mlp.experts.local_experts.5.linear_fc1.weight``. In ``TEGroupedMLP`` (grouped matmul)
experts are weights of one module, ``mlp.experts.linear_fc1.weight5``.

Norms: Transformer Engine stores a norm inside the linear layer that follows it. Megatron-Core's checkpoints
use its names, whichever layer spec the model has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from converters.errors import ConversionError
from converters.model_config.layer_kind import LayerKind


class Kind(StrEnum):
    """Layout of a parameter, which determines the order of its rows and its tensor-parallel sharding."""

    REPLICATED = "replicated"
    """Every rank has the full parameter."""
    COLUMN = "column"
    """Rank t has the t-th share of the rows (dimension 0)."""
    ROW = "row"
    """Rank t has the t-th share of the columns (dimension 1)."""
    QKV = "qkv"
    """Query, key and value rows are interleaved by key-value group, then sharded by rows. Weights and
    biases."""
    GATED = "gated"
    """Rank t has the t-th share of the gate rows, followed by the t-th share of the up rows. Weights and
    biases."""
    GROUPED = "grouped"
    """Rows of the parts are interleaved by group as in ``Rule.group_rows``, then sharded by rows."""
    VOCAB = "vocab"
    """Rows are padded with zeros to the padded vocabulary size, then sharded by rows."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A possible location of a tensor in a checkpoint: a stored tensor of its own, or rows of a larger one.

    Attributes:
        name: name of the stored tensor.
        shape: full shape of the stored tensor.
        index: index in the first dimension of the stored tensor, which the tensor itself does not have (the
            expert, in a stack of experts); None without such a dimension.
        start: first row in the stored tensor.
        step: distance between rows in the stored tensor; above 1 if tensors are interleaved.
        transposed: the stored tensor has the tensor's two dimensions in reverse order. ``start`` and ``step``
            then apply to the last dimension of the stored tensor.
        written: the format may be written; otherwise it is only read.
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
    """A tensor of a Hugging Face checkpoint.

    Attributes:
        name: name that ``save_pretrained`` gives it, and under which it is written.
        shape: full shape.
        alternatives: other locations from which transformers can load the tensor.
        alone: the tensor may be stored under its own name. Otherwise it is written to the first of
            ``alternatives``, and the name, in the form of other families' experts, is only used internally.
        stays_float32: the tensor is not narrowed when another dtype is requested.
    """

    name: str
    shape: tuple[int, ...]
    alternatives: tuple[TensorLocation, ...] = ()
    stays_float32: bool = False
    alone: bool = True

    @property
    def places(self) -> tuple[TensorLocation, ...]:
        """All possible locations; the first is used for writing."""
        return (
            (TensorLocation(self.name, self.shape), *self.alternatives) if self.alone else self.alternatives
        )


def renamed(tensor: HuggingFaceTensor, old: str, new: str) -> HuggingFaceTensor:
    """Replace the name prefix ``old`` by ``new`` in a tensor and all its locations."""

    def change(name: str) -> str:
        return new + name.removeprefix(old) if name.startswith(old) else name

    places = tuple(replace(place, name=change(place.name)) for place in tensor.alternatives)
    return replace(tensor, name=change(tensor.name), alternatives=places)


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Rows of a part that belong to a group: for group g, ``count`` rows from ``start + g * stride`` on."""

    part: int
    start: int
    count: int
    stride: int


@dataclass(frozen=True, slots=True)
class Rule:
    """Builds a Megatron-Core parameter from Hugging Face tensors.

    Attributes:
        megatron_name: parameter name in the portable layer spec, with global layer and expert index.
        kind: layout of the parameter.
        parts: tensors that form it, in the order of the layout (query, key, value; gate, up).
        emits: False for a copy of a parameter that another rule writes (the output layer of a tied model).
        groups: number of groups, for ``Kind.GROUPED``.
        group_rows: rows of a group in order, for ``Kind.GROUPED``. Each row of each part belongs to one
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
    """Yield the rules of a module's weight and bias.

    Args:
        megatron: name of the module in Megatron-Core.
        kind: layout of the weight. The bias of a row-parallel module is replicated.
        weights: Hugging Face module name -> shape of its weight; together they form the module's weight.
        bias: the modules have a bias.
    """
    yield Rule(
        f"{megatron}.weight",
        kind,
        tuple(HuggingFaceTensor(f"{name}.weight", shape) for name, shape in weights.items()),
    )
    if bias:
        # A row-parallel layer adds its bias after summing over ranks, so each rank has the complete bias.
        parts = tuple(HuggingFaceTensor(f"{name}.bias", shape[:1]) for name, shape in weights.items())
        yield Rule(f"{megatron}.bias", Kind.REPLICATED if kind is Kind.ROW else kind, parts)


# No leading zeros, so that the name can be restored from its number.
_SEQUENTIAL = re.compile(
    r"(.*mlp\.experts\.local_experts\.)(0|[1-9]\d*)(\.linear_fc[12]\.(?:weight|bias|adapter\.\w+))"
)
_GROUPED = re.compile(r"(.*mlp\.experts)(\.linear_fc[12]\.(?:weight|bias))(0|[1-9]\d*)")


def is_expert(megatron_name: str) -> bool:
    """Return whether a parameter belongs to a routed expert. It is then sharded over the
    *expert*-tensor-parallel ranks and distributed over the expert-parallel ranks. Routers and shared experts
    are not."""
    # A name inside a layer may begin with mlp, so prepend a dot.
    return ".mlp.experts." in f".{megatron_name}"


def expert_index(megatron_name: str) -> int:
    """Return the expert index in a parameter's name.

    Raises:
        ConversionError: the parameter does not belong to an expert.
    """
    return int(_split(megatron_name)[1])


def shift_expert(megatron_name: str, offset: int) -> str:
    """Add ``offset`` to the expert index in a parameter's name. With the expert-parallel rank times the
    experts per rank as the offset, a local name becomes global.

    Raises:
        ConversionError: the parameter does not belong to an expert.
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
    """Split an expert's parameter name into the text before the index, the index, and the text after it."""
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
"""Transformer Engine's name of a norm -> its name in the portable layer spec, both without the layer's
prefix."""


def fused_norms(kind: LayerKind) -> dict[str, str]:
    """Return name in the portable layer spec -> Transformer Engine's name, for norms that are fused into the
    following linear layer. Norms before latent attention's first projections and before experts are not
    fused."""
    return _OF_MIXER[kind.mixer] | ({} if kind.sparse else _BEFORE_MLP)
