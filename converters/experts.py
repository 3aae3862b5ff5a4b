"""Names of expert parameters in Megatron-Core, which counts experts in two ways and names them in two ways.

A rank that holds experts 4 to 7 of a layer calls them 0 to 3; the mapping rules want 4 to 7. Experts run one after another
(``SequentialMLP``) are modules of their own, ``mlp.experts.local_experts.5.linear_fc1.weight``; experts run in one grouped matrix
product (``TEGroupedMLP``) are numbered weights of one module, ``mlp.experts.linear_fc1.weight5``.
"""

from __future__ import annotations

import re

from converters.errors import ConversionError

_SEQUENTIAL = re.compile(r"(.*mlp\.experts\.local_experts\.)(0|[1-9]\d*)(\.linear_fc[12]\.(?:weight|bias))")
_GROUPED = re.compile(r"(.*mlp\.experts)(\.linear_fc[12]\.(?:weight|bias))(0|[1-9]\d*)")


def is_expert(megatron_name: str) -> bool:
    """Whether a parameter belongs to a routed expert, so that it is cut over the *expert* tensor-parallel ranks and divided over the
    expert-parallel ones. Routers and shared experts do not."""
    return ".mlp.experts." in f".{megatron_name}"


def expert_index(megatron_name: str) -> int:
    """The expert that a parameter belongs to, counted as the name counts.

    Raises:
        ConversionError: the name is not that of an expert's parameter.
    """
    return int(_split(megatron_name)[1])


def shift_expert(megatron_name: str, offset: int) -> str:
    """The name with ``offset`` added to its expert: on rank r of an expert-parallel group, r times the experts of a rank makes a local name
    global.

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
    """What stands before the number of the expert, the number, and what stands behind it."""
    sequential = _SEQUENTIAL.fullmatch(megatron_name)
    if sequential is not None:
        return sequential.group(1), sequential.group(2), sequential.group(3)
    grouped = _GROUPED.fullmatch(megatron_name)
    if grouped is None:
        raise ConversionError(
            f"{megatron_name} is not the name of a weight of one expert",
            "give a name such as decoder.layers.0.mlp.experts.local_experts.5.linear_fc1.weight; without Transformer Engine switch "
            "moe_grouped_gemm off, because Megatron's own GroupedMLP has no weights of single experts",
        )
    return grouped.group(1) + grouped.group(2), grouped.group(3), ""
