"""Mapping rules: which Hugging Face tensors make up one Megatron-Core parameter, and how it is cut over
tensor-parallel ranks.

Names of experts: a rank that holds experts 4 to 7 of a layer calls them 0 to 3; the rules want 4 to 7.
Experts run one after another (``SequentialMLP``) are modules of their own,
``mlp.experts.local_experts.5.linear_fc1.weight``; experts run in one grouped matrix product
(``TEGroupedMLP``) are numbered weights of one module, ``mlp.experts.linear_fc1.weight5``. Names of norms:
Transformer Engine keeps those of a layer inside the linear layer that follows, and checkpoints of
Megatron-Core name them so, whichever layer spec the model was built of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from converters.errors import ConversionError
from converters.model_config.layer_kind import LayerKind


class Kind(StrEnum):
    """Kind of a parameter: how the full one is laid out and cut over the tensor-parallel ranks."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    COLUMN = "column"
    """Rank t holds the t-th part of the rows (dimension 0)."""
    ROW = "row"
    """Rank t holds the t-th part of the columns (dimension 1)."""
    QKV = "qkv"
    """Query, key and value rows interleaved by key-value group, then cut by rows. Weights and biases
    alike."""
    GATED = "gated"
    """Rank t holds the t-th part of the gate rows, then the t-th part of the up rows. Weights and biases
    alike."""
    GROUPED = "grouped"
    """Rows of the parts interleaved by group, as ``Rule.group_rows`` says, then cut by rows."""
    VOCAB = "vocab"
    """Rows padded with zeros to the padded vocabulary, then cut by rows."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A place where a checkpoint may keep a tensor: as a stored tensor of its own, or as consecutive rows of
    a larger one.

    Attributes:
        name: of the stored tensor.
        shape: of all of the stored tensor.
        index: position along the first dimension of the stored tensor, which the tensor itself does not have
            (the expert, where experts are stacked); None if there is no such dimension.
        start: first row, along the first dimension that the tensor has.
        step: from a row of the tensor to the next; more than 1 where tensors lie between one another.
        transposed: the stored tensor has the two dimensions of the tensor in the other order. ``start`` and
            ``step`` count along the first dimension that the tensor has all the same, which is the last of
            the stored one.
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
        """True if the tensor is stored there as it is, row behind row."""
        return self.step == 1 and not self.transposed


@dataclass(frozen=True, slots=True)
class HuggingFaceTensor:
    """One tensor of a Hugging Face checkpoint.

    Attributes:
        name: that ``save_pretrained`` gives it; it is written under this name.
        shape: full.
        alternatives: other places where transformers finds it; it is read from the one that exists.
        alone: it may be stored by itself under its name. Where it may not, the first of ``alternatives`` is
            where it is written, and the name, which then is nothing but ours, is that of an expert's tensor
            in other families.
        stays_float32: asking for another dtype of the model does not narrow it.
    """

    name: str
    shape: tuple[int, ...]
    alternatives: tuple[TensorLocation, ...] = ()
    stays_float32: bool = False
    alone: bool = True

    @property
    def places(self) -> tuple[TensorLocation, ...]:
        """Every place where it may be stored; the first is where it is written."""
        return (
            (TensorLocation(self.name, self.shape), *self.alternatives) if self.alone else self.alternatives
        )


def renamed(tensor: HuggingFaceTensor, old: str, new: str) -> HuggingFaceTensor:
    """The tensor and all its places, with ``new`` where a name begins with ``old``."""

    def change(name: str) -> str:
        return new + name.removeprefix(old) if name.startswith(old) else name

    places = tuple(replace(place, name=change(place.name)) for place in tensor.alternatives)
    return replace(tensor, name=change(tensor.name), alternatives=places)


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Rows that a group has of one part: ``count`` rows, those of group g from ``start + g * stride`` on."""

    part: int
    start: int
    count: int
    stride: int


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule by which one Megatron-Core parameter is made of Hugging Face tensors.

    Attributes:
        megatron_name: parameter name with the global layer and expert index; for a parameter inside a layer,
            the name of the portable layer spec.
        kind: the layout.
        parts: the tensors it is made of, in the order the layout wants (query, key, value; gate, up).
        emits: False for a copy of a parameter that another rule already writes (the output layer of a tied
            model).
        groups: that ``Kind.GROUPED`` interleaves.
        group_rows: what a group has, in order; of ``Kind.GROUPED`` alone. Each row of each part belongs to
            one group.
    """

    megatron_name: str
    kind: Kind
    parts: tuple[HuggingFaceTensor, ...]
    emits: bool = True
    groups: int = 1
    group_rows: tuple[GroupRows, ...] = ()

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names of the tensors it is made of."""
        return tuple(part.name for part in self.parts)


def module_rules(
    megatron: str, kind: Kind, weights: Mapping[str, tuple[int, ...]], *, bias: bool = False
) -> Iterator[Rule]:
    """Yield the rule of a module's weight and, if it has one, of its bias.

    Args:
        megatron: name of the module.
        kind: of the weight. The bias of a layer that is cut by columns is on every rank.
        weights: shapes of the weights that it is made of, by the names of their Hugging Face modules.
        bias: whether each of these has a bias.
    """
    yield Rule(
        f"{megatron}.weight",
        kind,
        tuple(HuggingFaceTensor(f"{name}.weight", shape) for name, shape in weights.items()),
    )
    if bias:
        parts = tuple(HuggingFaceTensor(f"{name}.bias", shape[:1]) for name, shape in weights.items())
        yield Rule(f"{megatron}.bias", Kind.REPLICATED if kind is Kind.ROW else kind, parts)


# No leading zeros: a name has to come back from its number as it was.
_SEQUENTIAL = re.compile(
    r"(.*mlp\.experts\.local_experts\.)(0|[1-9]\d*)(\.linear_fc[12]\.(?:weight|bias|adapter\.\w+))"
)
_GROUPED = re.compile(r"(.*mlp\.experts)(\.linear_fc[12]\.(?:weight|bias))(0|[1-9]\d*)")


def is_expert(megatron_name: str) -> bool:
    """Tell whether a parameter belongs to a routed expert, so that it is cut over the *expert*
    tensor-parallel ranks and divided over the expert-parallel ones. Routers and shared experts do not."""
    # A name may begin inside of a layer, with mlp itself.
    return ".mlp.experts." in f".{megatron_name}"


def expert_index(megatron_name: str) -> int:
    """The expert that a parameter belongs to, counted as the name counts.

    Raises:
        ConversionError: the name is not that of an expert's parameter.
    """
    return int(_split(megatron_name)[1])


def shift_expert(megatron_name: str, offset: int) -> str:
    """The name with ``offset`` added to its expert: on rank r of an expert-parallel group, r times the
    experts of a rank makes a local name global.

    Raises:
        ConversionError: the name is not that of an expert's parameter.
    """
    before, index, after = _split(megatron_name)
    return f"{before}{int(index) + offset}{after}"


def sequential_name(megatron_name: str) -> str:
    """The name that experts run one after another have; other names come back as they are."""
    match = _GROUPED.fullmatch(megatron_name)
    if match is None:
        return megatron_name
    before, weight, index = match.groups()
    return f"{before}.local_experts.{index}{weight}"


def _split(megatron_name: str) -> tuple[str, str, str]:
    """Return what stands before the number of the expert, the number, and what stands behind it."""
    sequential = _SEQUENTIAL.fullmatch(megatron_name)
    if sequential is not None:
        return sequential.group(1), sequential.group(2), sequential.group(3)
    grouped = _GROUPED.fullmatch(megatron_name)
    if grouped is None:
        raise ConversionError(
            f"{megatron_name} is not the name of a weight of one expert",
            "give a name such as decoder.layers.0.mlp.experts.local_experts.5.linear_fc1.weight; without "
            "Transformer Engine switch "
            "moe_grouped_gemm off, because Megatron's own GroupedMLP has no weights of single experts",
        )
    return grouped.group(1) + grouped.group(2), grouped.group(3), ""


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
"""Names behind the prefix of a layer: those of Transformer Engine, with those of the portable layer spec."""


def fused_norms(kind: LayerKind) -> dict[str, str]:
    """The norms of a layer, by their names in the portable layer spec, with those of Transformer Engine:
    nothing is fused with the norm before the first projections of latent attention, nor with that before
    experts."""
    return _OF_MIXER[kind.mixer] | ({} if kind.sparse else _BEFORE_MLP)
