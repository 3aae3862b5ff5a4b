"""Map the tensors of a checkpoint to the keys of ``converters.torch_dist.keys``, whatever their names and
sharding.

Known variants: a prefix of all keys; norms named as in Megatron-Core's own layer spec, or as fused by
Transformer Engine; experts stored one by one; gate and up stored separately (``singleton_local_shards``). The
legacy ``GroupedMLP`` stores the same tensors as other experts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from converters.checkpoint.boxes import Box, part, relative, shape_of, whole
from converters.errors import ConversionError
from converters.mapping.rule import PORTABLE_NORMS
from converters.torch_dist.keys import is_of_optimizer
from converters.torch_dist.reader import StoredTensors, missing_elements, overlaps

EMBEDDING = "embedding.word_embeddings.weight"
# Keys of adapters that Megatron-Bridge adds to a linear layer, and the name under which it then stores the
# layer's weight.
_ADAPTER = re.compile(r"(^|\.)(adapter\.(adapter_\w+\.)?linear_(in|out)\.|to_wrap\.|lora_[AB]\b)")
_EXPERTS = re.compile(r"(.*mlp\.experts\.)experts\.(linear_fc[12]\.(?:weight|bias))")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stored tensor that is a section of a larger tensor.

    Attributes:
        key: name of the stored tensor.
        box: its range in the larger tensor.
        added_axis: dimension of size 1 that exists only in the larger tensor, if any.
    """

    key: str
    box: Box
    added_axis: int | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the view, and the stored tensors from which it is assembled."""

    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]


class ViewedTensors:
    """A view of stored tensors that implements ``StoredTensors``. Each key maps to one stored tensor.

    Args:
        tensors: the stored tensors.
    """

    def __init__(self, tensors: StoredTensors) -> None:
        self._tensors = tensors

    def _stored(self, key: str) -> tuple[StoredTensors, str]:
        """Return the collection that contains a key, and the name of the tensor there."""
        return self._tensors, key

    @property
    def directory(self) -> Path:
        """See ``StoredTensors``."""
        return self._tensors.directory

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def shape(self, key: str) -> tuple[int, ...]:
        """See ``StoredTensors``."""
        tensors, name = self._stored(key)
        return tensors.shape(name)

    def dtype(self, key: str) -> torch.dtype:
        """See ``StoredTensors``."""
        tensors, name = self._stored(key)
        return tensors.dtype(name)

    def read(self, key: str, box: Box) -> Tensor:
        """See ``StoredTensors``."""
        tensors, name = self._stored(key)
        return tensors.read(name, box)

    def is_saved(self, key: str, box: Box) -> bool:
        """See ``StoredTensors``."""
        tensors, name = self._stored(key)
        return tensors.is_saved(name, box)


class RenamedTensors(ViewedTensors):
    """A view of tensors under other keys.

    Args:
        tensors: the stored tensors.
        names: key in the view -> stored key; other tensors are hidden.
    """

    def __init__(self, tensors: StoredTensors, names: Mapping[str, str]) -> None:
        super().__init__(tensors)
        self._names = dict(names)

    def _stored(self, key: str) -> tuple[StoredTensors, str]:
        return self._tensors, self._names[key]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __contains__(self, key: str) -> bool:
        return key in self._names


class CanonicalTensors(ViewedTensors):
    """A view of tensors under the keys that a model needs.

    Args:
        tensors: the stored tensors.
        grids: key -> sizes of its leading dimensions of layers and experts.

    Raises:
        ConversionError: a tensor is stored under two names.
    """

    def __init__(self, tensors: StoredTensors, grids: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(tensors)
        self._entries: dict[str, _Entry] = {}
        used: set[str] = set()
        for key, grid in grids.items():
            entry = _find(tensors, key, grid)
            if entry is not None:
                self._entries[key] = entry
                used.update(piece.key for piece in entry.pieces)
        # Keep keys visible that no entry uses, so that they are reported as unknown.
        self._keys = frozenset((*self._entries, *(key for key in tensors if key not in used)))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._keys))

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def shape(self, key: str) -> tuple[int, ...]:
        """See ``StoredTensors``."""
        return self._entries[key].shape if key in self._entries else super().shape(key)

    def dtype(self, key: str) -> torch.dtype:
        """See ``StoredTensors``. If the pieces have different dtypes, return one to which all convert
        exactly."""
        if key not in self._entries:
            return super().dtype(key)
        return functools.reduce(
            torch.promote_types, map(self._tensors.dtype, (piece.key for piece in self._entries[key].pieces))
        )

    def read(self, key: str, box: Box) -> Tensor:
        """See ``StoredTensors``."""
        if key not in self._entries:
            return super().read(key, box)
        found = overlaps(box, self._entries[key].pieces)
        if len(found) == 1 and found[0][0] == box:
            return self._read(found[0][1], box).to(self.dtype(key))
        if missing_elements(box, found):
            raise ConversionError(
                f"{key}: not every part of {box} was saved", "the checkpoint is incomplete; save it again"
            )
        out = torch.empty(shape_of(box), dtype=self.dtype(key))
        for common, piece in found:
            part(out, relative(common, box)).copy_(self._read(piece, common))
        return out

    def is_saved(self, key: str, box: Box) -> bool:
        """See ``StoredTensors``."""
        if key not in self._entries:
            return super().is_saved(key, box)
        found = overlaps(box, self._entries[key].pieces)
        return not missing_elements(box, found) and all(
            self._tensors.is_saved(piece.key, _inside(piece, common)) for common, piece in found
        )

    def _read(self, piece: _Piece, box: Box) -> Tensor:
        return self._tensors.read(piece.key, _inside(piece, box)).reshape(shape_of(box))


def refuse_adapters(tensors: StoredTensors) -> None:
    """Reject a checkpoint of LoRA training, in which Megatron-Bridge stores adapters next to the base
    weights.

    Raises:
        ConversionError: there are adapters.
    """
    found = [key for key in tensors if _ADAPTER.search(key) and not is_of_optimizer(key)]
    if found:
        raise ConversionError(
            f"{tensors.directory} holds the LoRA adapters of its trainer ({len(found)} tensors, "
            f"the first {found[0]}), not a model",
            (
                "write them as a PEFT adapter (megarl convert adapter), or merge them: megarl convert import "
                "BASE OUT --lora and this directory, then megarl convert export OUT; verify compares two "
                "adapters"
            ),
        )


def refuse_own_gated_delta_nets(tensors: StoredTensors) -> None:
    """Reject checkpoints whose gated delta nets are in Megatron-Core's native layout. It splits the input
    projection into parts and stores the output norm as ``weight - 1``; adding the 1 back does not restore the
    original bits.

    Raises:
        ConversionError: the checkpoint has such layers.
    """
    for key in tensors:
        if key.endswith("self_attention.in_proj.weight.query") and "optimizer." not in key:
            raise ConversionError(
                f"{tensors.directory} holds Megatron-Core's own gated delta nets ({key}), which are not "
                "converted",
                "convert what megarl has trained, or export it with the trainer that wrote it",
            )


def without_prefix(tensors: StoredTensors) -> StoredTensors:
    """Remove the prefix of a model's keys (``model.``, ``module.``). Other keys, such as those of optimizers,
    are unchanged.

    Raises:
        ConversionError: the checkpoint contains several models.
    """
    # Every model has one word embedding, so its key reveals the prefix.
    embeddings = [key for key in tensors if key.endswith(EMBEDDING) and "optimizer." not in key]
    prefixes = {key.removesuffix(EMBEDDING) for key in embeddings}
    if len(prefixes) > 1:
        raise ConversionError(
            f"{tensors.directory} holds several models: {', '.join(sorted(embeddings))}",
            "convert a checkpoint of one",
        )
    prefix = prefixes.pop() if prefixes else ""
    if not prefix or not prefix.endswith("."):
        return tensors
    names = {key.removeprefix(prefix): key for key in tensors}
    if len(names) != len(list(tensors)):
        raise ConversionError(
            f"{tensors.directory} has the same keys with and without {prefix!r}",
            "convert a checkpoint of one model",
        )
    return RenamedTensors(tensors, names)


_BLOCK = re.compile(r"decoder\.layers\.(0|[1-9]\d*)\.((\w+)\..+)")
_LAST_NORM, _LAST_NORM_OF_GPT = "decoder.final_norm.", "decoder.final_layernorm."
_PREDICTION = "mtp."
# Module of a HybridModel's block -> half of a GPTModel's layer: 0 for the mixer, 1 for the MLP.
_HALF = {"input_layernorm": 0, "self_attention": 0, "pre_mlp_layernorm": 1, "mlp": 1}


def with_whole_layers(tensors: StoredTensors) -> StoredTensors:
    """Map the tensors of a HybridModel (formerly MambaModel) to the keys of GPTModel. Other tensors are
    returned unchanged.

    A HybridModel counts the token mixer and the MLP of a layer as two layers.

    Raises:
        ConversionError: the blocks are not alternately mixers and MLPs, or there are multi-token-prediction
            layers.
    """
    if not any(key.startswith(_LAST_NORM) for key in tensors):
        return tensors
    if any(key.startswith(_PREDICTION) for key in tensors):
        raise ConversionError(
            f"{tensors.directory}: layers of a HybridModel that predict further tokens ({_PREDICTION}*) are "
            "not converted",
            "save the checkpoint without them",
        )
    # HybridModel stores attention and MLP as layers of their own: 2n and 2n + 1 for layer n.
    names: dict[str, str] = {}
    for key in tensors:
        match = _BLOCK.fullmatch(key)
        if match is None:
            names[key.replace(_LAST_NORM, _LAST_NORM_OF_GPT, 1) if key.startswith(_LAST_NORM) else key] = key
            continue
        block, name, module = int(match.group(1)), match.group(2), match.group(3)
        if _HALF.get(module) != block % 2:
            what = "a mixer of tokens" if block % 2 == 0 else "an MLP or experts"
            raise ConversionError(
                f"{tensors.directory}: {key} is stored where layer {block} of a HybridModel has to be {what}",
                "convert a model in which every layer is attention followed by an MLP or experts",
            )
        names[f"decoder.layers.{block // 2}.{name}"] = key
    return RenamedTensors(tensors, names)


def _find(tensors: StoredTensors, key: str, grid: tuple[int, ...]) -> _Entry | None:
    """Return how a model's key is assembled from stored tensors; None if it is not stored."""
    names = [key, *_other_norms(key)]
    alone = map(functools.partial(_alone, tensors), names)
    halves = map(functools.partial(_halves, tensors), names)
    entries = list(filter(None, (*alone, *halves, _experts(tensors, key, grid))))
    if len(entries) > 1:
        stored = ", ".join(entry.pieces[0].key for entry in entries)
        raise ConversionError(
            f"{key} is stored more than once: {stored}", "keep one of them in the checkpoint"
        )
    return entries[0] if entries else None


def _other_norms(key: str) -> Iterator[str]:
    """Yield the other names of a norm."""
    for one, other in PORTABLE_NORMS.items():
        for name, instead in ((one, other), (other, one)):
            if key.endswith(f".{name}"):
                yield key.removesuffix(name) + instead


def _alone(tensors: StoredTensors, key: str) -> _Entry | None:
    """Return a tensor that is stored under this key, or None if it is not."""
    if key not in tensors:
        return None
    return _Entry(tensors.shape(key), (_Piece(key, whole(tensors.shape(key))),))


def _halves(tensors: StoredTensors, key: str) -> _Entry | None:
    """Return a gated matrix whose halves are stored separately, or None."""
    gate, up = f"{key}_w", f"{key}_v"
    if gate not in tensors or up not in tensors:
        return None
    rows, *rest = tensors.shape(gate)
    further = tensors.shape(up)[0]
    pieces = (_Piece(gate, ((0, rows), *whole(rest))), _Piece(up, ((rows, rows + further), *whole(rest))))
    return _Entry((rows + further, *rest), pieces)


def _experts(tensors: StoredTensors, key: str, grid: tuple[int, ...]) -> _Entry | None:
    """Return the stack of experts, of one or all layers, if experts are stored one by one; else None."""
    match = _EXPERTS.fullmatch(key)
    if match is None or not grid:
        return None
    block, name = match.groups()
    axis = len(grid) - 1
    pieces: list[_Piece] = []
    shape: tuple[int, ...] = ()
    for expert in range(grid[-1]):
        for middle in ("experts", "local_experts"):
            stored = f"{block}{middle}.{expert}.{name}"
            entry = _alone(tensors, stored) or _halves(tensors, stored)
            if entry is not None:
                shape = entry.shape
                pieces += [
                    _Piece(one.key, (*one.box[:axis], (expert, expert + 1), *one.box[axis:]), axis)
                    for one in entry.pieces
                ]
    return _Entry((*shape[:axis], grid[-1], *shape[axis:]), tuple(pieces)) if pieces else None


def _inside(piece: _Piece, box: Box) -> Box:
    """Convert a box of the larger tensor to a box of the stored tensor."""
    inside = relative(box, piece.box)
    return (
        inside if piece.added_axis is None else (*inside[: piece.added_axis], *inside[piece.added_axis + 1 :])
    )
