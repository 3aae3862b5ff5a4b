"""Two stored models compared tensor by tensor, bit for bit, in bounded memory; whichever formats they have."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from converters.check import is_excused
from converters.checkpoint.artifacts import file_hashes, speaks
from converters.checkpoint.exact import cast, unequal
from converters.checkpoint.files import read_json_object
from converters.checkpoint.manifest import ConversionManifest, TensorHashes, dtype_called, dtype_name
from converters.checkpoint.restricted import load_plain
from converters.checkpoint.work import row_ranges
from converters.errors import ConversionError
from converters.families.read import with_defaults
from converters.mapping.logical import LogicalModel, MegatronModel
from converters.mapping.rule import HuggingFaceTensor, Kind
from converters.mapping.rules import all_rules, hf_tensors
from converters.model_config.architecture import Architecture
from converters.model_config.inert_keys import SPEAKING_KEYS
from converters.torch_dist.reader import TorchDistCheckpoint


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two models differ.

    Attributes:
        kind: ``config``, ``file``, ``missing``, ``shape``, ``dtype``, ``values``, ``padding``, ``object`` or ``hash``.
        name: of the config field, the file, the tensor or the object.
        text: both sides, for people.
    """

    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}: {self.text}"


def config_differences(one: Architecture, other: Architecture) -> Iterator[Difference]:
    """Fields of the architectures that are not equal."""
    for field in fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if left != right:
            shown = [asdict(value) if hasattr(value, "__dataclass_fields__") else value for value in (left, right)]
            yield Difference("config", field.name, f"{shown[0]!r} and {shown[1]!r}")


def setting_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """Keys of two ``config.json`` that no architecture has and that are not equal: dtype, special tokens, labels, text generation.

    A key that one leaves out has the default of the config's class in transformers. One without a dtype has that of its weights.
    """
    # transformers takes settings of text generation out of a config
    sides = [{**with_defaults(config), **config} for config in (one, other)]
    left, right = ({_spelling(key): value for key, value in side.items() if value is not None} for side in sides)
    for key in sorted({_spelling(key) for key in SPEAKING_KEYS}):
        values = [_plain(side.get(key)) for side in (left, right)]
        if values[0] != values[1] and not (key == "dtype" and None in values):
            yield Difference("config", key, f"{values[0]!r} and {values[1]!r}")


def _spelling(key: str) -> str:
    return "dtype" if key == "torch_dtype" else key


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): inner for key, inner in value.items()}
    return str(value).removeprefix("torch.") if isinstance(value, str | torch.dtype) else value


def file_differences(one: Path, other: Path) -> Iterator[Difference]:
    """Files beside the weights of two models that change what a model is told or says, and are not equal; ``config.json`` is compared by
    its keys, other JSON files by what they hold."""
    left, right = file_hashes(one), file_hashes(other)
    for name in sorted(filter(speaks, {*left, *right} - {"config.json"})):
        if name not in left or name not in right:
            yield Difference("file", name, f"only in the {'first' if name in left else 'second'}")
        elif left[name] != right[name] and not _hold_the_same(one / name, other / name):
            yield Difference("file", name, "they are not equal")


def _hold_the_same(one: Path, other: Path) -> bool:
    if one.suffix != ".json":
        return False
    try:
        left, right = (read_json_object(path) for path in (one, other))
    except ConversionError:  # one holds something else than an object
        return False
    return {**left, "transformers_version": None} == {**right, "transformers_version": None}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A stored model, and what a conversion recorded of it, if one made it."""

    model: LogicalModel
    manifest: ConversionManifest | None = None

    @property
    def tensors(self) -> dict[str, HuggingFaceTensor]:
        """Those that are there, by name."""
        return {tensor.name: tensor for tensor in hf_tensors(self.model.architecture) if self.model.holds(tensor)}

    def dtype(self, tensor: HuggingFaceTensor) -> torch.dtype:
        """Dtype of a tensor; before an import widened it, if one did."""
        stored = self.model.dtype(tensor)
        # what an export wrote in another dtype than its manifest says is a difference, and no widening
        widened = self.manifest is not None and isinstance(self.model, MegatronModel)
        return self.manifest.dtype_before(tensor.name, stored) if self.manifest is not None and widened else stored


NOT_FINITE = "not finite"
"""Kind of what is wrong with a tensor that is equal on both sides and that no model works with."""


def tensor_differences(one: Recorded, other: Recorded, excused: Sequence[str] = ()) -> Iterator[Difference]:
    """Tensors that are not equal: those that only one has, and those of another shape, dtype or content.

    Args:
        one, other: the models.
        excused: patterns (``*`` and ``?``) of names that need no counterpart.
    """
    left, right = one.tensors, other.tensors
    for name in [*left, *(name for name in right if name not in left)]:
        if name not in left or name not in right:
            if not is_excused([name], excused):
                yield Difference("missing", name, f"only in the {'first' if name in left else 'second'}")
        elif left[name].shape != right[name].shape:
            yield Difference("shape", name, f"{list(left[name].shape)} and {list(right[name].shape)}")
        else:
            yield from _content_differences(one, other, left[name], right[name])


def _content_differences(one: Recorded, other: Recorded, left: HuggingFaceTensor, right: HuggingFaceTensor) -> Iterator[Difference]:
    dtypes = one.dtype(left), other.dtype(right)
    if dtypes[0] != dtypes[1]:
        yield Difference("dtype", left.name, f"{dtype_name(dtypes[0])} and {dtype_name(dtypes[1])}")
    # in which both are exactly what is stored, whatever was recorded
    wide = torch.promote_types(one.model.dtype(left), other.model.dtype(right))
    count, first, largest, not_finite = 0, None, 0.0, 0
    for start, stop in row_ranges(left.shape[0], torch.Size(left.shape[1:]).numel() * wide.itemsize):
        values = cast(one.model.read(left, start, stop), wide), cast(other.model.read(right, start, stop), wide)
        differing = unequal(*values)
        not_finite += int(values[0].isfinite().logical_not().sum())
        if bool(differing.any()):
            places = differing.nonzero()
            first = first or [start + int(places[0][0]), *places[0][1:].tolist()]
            count += places.shape[0]
            distance = (values[0].double() - values[1].double()).abs()[differing]
            largest = max(largest, float(distance.nan_to_num(float("inf")).max()))
    if count:
        total = torch.Size(left.shape).numel()
        yield Difference("values", left.name, f"{count} of {total} elements, the first at {first}, by at most {largest:.6g}")
    elif not_finite:
        yield Difference(NOT_FINITE, left.name, f"equal, and {not_finite} elements are NaN or infinity")


def object_differences(stored: TorchDistCheckpoint) -> Iterator[Difference]:
    """Return what is no tensor in a checkpoint that a conversion made: an import leaves empty states of modules alone."""
    for key in stored.objects:
        if load_plain(io.BytesIO(stored.read_object(key)), f"{key} in {stored.directory}") != [None]:
            yield Difference("object", key, "it holds a state, and a conversion leaves none")


def value_problems(model: LogicalModel) -> Iterator[Difference]:
    """Tensors with values that are not finite. Reads every tensor, and so finds what cannot be read."""
    for tensor in hf_tensors(model.architecture):
        if not model.holds(tensor):
            continue
        count, first = 0, None
        for start, stop in row_ranges(tensor.shape[0], torch.Size(tensor.shape[1:]).numel() * model.dtype(tensor).itemsize):
            rows = model.read(tensor, start, stop)
            if not bool(rows.isfinite().all()):
                places = rows.isfinite().logical_not().nonzero()
                first = first or [start + int(places[0][0]), *places[0][1:].tolist()]
                count += places.shape[0]
        if count:
            total = torch.Size(tensor.shape).numel()
            yield Difference("values", tensor.name, f"{count} of {total} elements are not finite, the first at {first}")


def padding_differences(model: MegatronModel) -> Iterator[Difference]:
    """Rows behind the vocabulary that are not zero."""
    for rule in all_rules(model.architecture):
        if rule.kind is not Kind.VOCAB or not model.has(rule):
            continue
        vocabulary, padded = rule.parts[0].shape[0], model.parameter_shape(rule)[0]
        rows = model.read_rows(rule, vocabulary, padded)
        if bool(rows.any()):
            row = vocabulary + int(rows.reshape(rows.shape[0], -1).any(dim=1).nonzero()[0])
            yield Difference("padding", rule.megatron_name, f"row {row} behind the vocabulary of {vocabulary} is not zero")


def hash_differences(model: LogicalModel, manifest: ConversionManifest, excused: Sequence[str] = ()) -> Iterator[Difference]:
    """Tensors that are not what the manifest says; one that is excused may be missing."""
    tensors = Recorded(model).tensors
    for name in [*tensors, *(name for name in manifest.tensors if name not in tensors)]:
        record = manifest.tensors.get(name)
        if name not in tensors and is_excused([name], excused):
            continue
        if name not in tensors or record is None:
            yield Difference("hash", name, "the manifest does not know it" if record is None else "only the manifest knows it")
            continue
        hashes, dtype, stored = TensorHashes([name]), dtype_called(record.dtype), model.dtype(tensors[name])
        shape, exact = tensors[name].shape, True
        for start, stop in row_ranges(shape[0], torch.Size(shape[1:]).numel() * dtype.itemsize):
            rows = model.read(tensors[name], start, stop)
            before = cast(rows, dtype)
            exact = exact and not bool(unequal(cast(before, stored), rows).any())
            hashes.update(name, before)
        # an import widens a tensor where others of its stack need it
        if not exact or (stored != dtype and not isinstance(model, MegatronModel)):
            yield Difference("dtype", name, f"the manifest says {record.dtype}, it holds {dtype_name(stored)}")
        elif hashes.digests()[name] != record.sha256:
            yield Difference("hash", name, f"the manifest says {record.sha256[:12]}…, it is {hashes.digests()[name][:12]}…")
        if hashes.not_finite:
            yield Difference("values", name, "it has values that are not finite")
