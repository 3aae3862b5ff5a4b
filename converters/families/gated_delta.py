"""Rules of gated delta nets (dimensions: ``converters.model_config.gated_delta``).

The input projection is one matrix as in Megatron-Core, but ordered by key head: query, key, values, gates of
the values, and the two gates of each value head. So a tensor-parallel rank has consecutive rows, as with QKV
matrices, and a checkpoint can be loaded with any tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from converters.mapping.rule import GroupRows, HuggingFaceTensor, Kind, Rule, module_rules

if TYPE_CHECKING:
    from converters.model_config.architecture import ModelFacts


def mixer_rules(facts: ModelFacts, layer: int) -> Iterator[Rule]:
    """Yield the rules of a gated delta net, without the norm before it."""
    net, hidden = facts.gated_delta, facts.hidden_size
    assert net is not None, facts.family
    megatron, prefix = f"decoder.layers.{layer}.self_attention.", f"model.layers.{layer}.linear_attn."
    # Sizes of one group of rows: each key head has its own queries, keys, values and gates.
    heads, keys, values, gates = (
        net.key_heads,
        net.key_width,
        net.values // net.key_heads,
        net.value_heads // net.key_heads,
    )
    stored: dict[str, tuple[int, ...]]
    if net.stored_by_head:
        stored = {"in_proj_qkvz": (2 * keys + 2 * values,), "in_proj_ba": (2 * gates,)}
    else:
        stored = {
            "in_proj_qkv": (keys, keys, values),
            "in_proj_z": (values,),
            "in_proj_b": (gates,),
            "in_proj_a": (gates,),
        }
    yield Rule(
        f"{megatron}in_proj.weight",
        Kind.GROUPED,
        tuple(
            HuggingFaceTensor(f"{prefix}{name}.weight", (heads * sum(widths), hidden))
            for name, widths in stored.items()
        ),
        groups=heads,
        group_rows=_rows_of_groups(tuple(stored.values()), heads),
    )
    yield Rule(
        f"{megatron}conv1d.weight",
        Kind.GROUPED,
        (HuggingFaceTensor(f"{prefix}conv1d.weight", (net.convolved, 1, net.convolution)),),
        groups=heads,
        group_rows=_rows_of_groups(((keys, keys, values),), heads),
    )
    for name in ("dt_bias", "A_log"):
        tensor = HuggingFaceTensor(f"{prefix}{name}", (net.value_heads,), stays_float32=True)
        yield Rule(f"{megatron}{name}", Kind.COLUMN, (tensor,))
    yield from module_rules(f"{megatron}out_norm", Kind.REPLICATED, {f"{prefix}norm": (net.value_width,)})
    yield from module_rules(f"{megatron}out_proj", Kind.ROW, {f"{prefix}out_proj": (hidden, net.values)})


def _rows_of_groups(parts: tuple[tuple[int, ...], ...], groups: int) -> tuple[GroupRows, ...]:
    """Return the rows of one group.

    Args:
        parts: for each tensor, the rows per group in each of its consecutive sections.
        groups: number of groups.
    """
    found = []
    for part, widths in enumerate(parts):
        start = 0
        for width in widths:
            found.append(GroupRows(part, start, width, width))
            # A section contains the rows of all groups, one after the other.
            start += groups * width
    return tuple(found)
