"""PEFT's adapters of query, key and value, or of gate and up, in one adapter of a fused layer: exactly, and the way back.

With the factors A_q, A_k, A_v [rank, in] and B_q, B_k, B_v, the adapter of the fused layer has the rank of all together: ``linear_in`` is
A_q over A_k over A_v, and ``linear_out`` has in the rows of a part (interleaved as those of the weight are) the part's B in the columns of
its own ranks, and zeros in those of others. Every product is one of PEFT's or a product with zero, so that the sum is the same. Megatron
has one rank for all adapters of a model: those of other layers get rows and columns of zeros. Where all parts of every fused layer have the
same A, as those that Megatron-Bridge trained have, no rank is needed more than once (``shared``).

Where which part is follows from the manifest alone: from the ranks of PEFT's tensors, and from the note of the form.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from converters.adapters.linears import peft_name
from converters.checkpoint.manifest import Manifest, TensorHashes
from converters.errors import ConversionError
from converters.mapping.rule import Rule

if TYPE_CHECKING:
    from converters.adapters.megatron_adapter import MegatronAdapter

Block = tuple[int, int]
"""The first rank of a part in the adapter of its layer, and the one behind its last."""
FORM_NOTE, SHARED, BLOCKS = "adapter_form", "shared", "blocks"
_CHANGED = "import the adapter again; or remove the manifest if it was trained further: its adapters are then those of fused layers"


def block(part: int, rank: int, form: str) -> Block:
    """The ranks of a part."""
    return (0, rank) if form == SHARED else (part * rank, (part + 1) * rank)


def blocks_of(manifest: Manifest, rules: Iterable[Rule], stored_rank: int) -> dict[str, Block]:
    """The ranks of each part that has an adapter, by the name of its Hugging Face tensor.

    Raises:
        ConversionError: the manifest is not one of adapters, or says other ranks than are stored.
    """
    form = manifest.notes.get(FORM_NOTE)
    ranks = {record.shape[0] for name, record in manifest.tensors.items() if name.endswith(".lora_A.weight") and len(record.shape) == 2}
    if form not in (SHARED, BLOCKS) or len(ranks) != 1:
        raise ConversionError(f"the manifest says {FORM_NOTE} = {form!r} and the ranks {sorted(ranks)}", _CHANGED)
    rank = ranks.pop()
    found = {
        part.name: block(number, rank, form)
        for rule in rules
        for number, part in enumerate(rule.parts)
        if peft_name(part, "lora_A") in manifest.tensors
    }
    if max((stop for _, stop in found.values()), default=0) > stored_rank:
        raise ConversionError(f"the manifest says rank {rank} of each part, stored are {stored_rank}", _CHANGED)
    return found


def require_as_written(adapter: MegatronAdapter, manifest: Manifest, path: Path, between: Iterable[tuple[str, Tensor]]) -> None:
    """Check that a checkpoint of adapters still is what its manifest says.

    Args:
        adapter: the checkpoint.
        manifest, path: what it says of itself, and where.
        between: what has to be zero, by key.

    Raises:
        ConversionError: something was changed.
    """
    changed, names = [key for key, values in between if torch.count_nonzero(values)], adapter.keys()
    for name in names:
        hashes = TensorHashes([name])
        hashes.update(name, adapter.read(name))
        if name not in manifest.tensors or hashes.digests()[name] != manifest.tensors[name].sha256:
            changed.append(name)
    changed += [f"missing: {name}" for name in manifest.tensors if name not in names]
    if changed:
        raise ConversionError(f"{adapter.directory} is not what its {path.name} says", _CHANGED, list(dict.fromkeys(changed)))
