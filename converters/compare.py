"""Compare two stored models of any format, tensor by tensor and bit by bit, in bounded memory."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters.check import is_excused
from converters.checkpoint.artifacts import file_hashes, speaks
from converters.checkpoint.exact import cast, unequal
from converters.checkpoint.manifest import MANIFEST_FILE, TensorHashes, dtype_called, dtype_name
from converters.checkpoint.work import row_ranges
from converters.errors import ConversionError
from converters.families.read import with_defaults
from converters.files.reading import read_json_object
from converters.files.restricted import load_plain
from converters.mapping.logical import MegatronModel
from converters.mapping.rule import HuggingFaceTensor, Kind
from converters.mapping.rules import all_rules
from converters.model_config.architecture import Architecture
from converters.model_config.inert_keys import SPEAKING_KEYS
from converters.opening import Opened
from converters.torch_dist.reader import TorchDistCheckpoint


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two models.

    Attributes:
        kind: ``config``, ``file``, ``keys``, ``missing``, ``shape``, ``dtype``, ``values``, ``not finite``,
            ``padding``, ``object`` or ``hash``.
        name: name of the config field, file, tensor or object.
        text: description of both sides.
    """

    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}: {self.text}"


def config_differences(one: Architecture, other: Architecture) -> Iterator[Difference]:
    """Yield the fields in which two architectures differ."""
    for field in fields(one):
        sides = []
        for side in (one, other):
            value = getattr(side, field.name)
            sides.append(asdict(value) if hasattr(value, "__dataclass_fields__") else value)
        yield from _leaf_differences(field.name, *sides)


def _leaf_differences(name: str, left: Any, right: Any) -> Iterator[Difference]:
    """Yield the entries in which two settings differ; an entry of an object has the path to it as its
    name."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in dict.fromkeys((*left, *right)):
            if key in left and key in right:
                yield from _leaf_differences(f"{name}.{key}", left[key], right[key])
            else:
                # An absent entry differs from null.
                sides = (repr(side[key]) if key in side else "absent" for side in (left, right))
                yield Difference("config", f"{name}.{key}", " and ".join(sides))
    elif left != right:
        yield Difference("config", name, f"{left!r} and {right!r}")


def setting_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield differences between two ``config.json`` in keys that an ``Architecture`` does not contain: dtype,
    special tokens, labels, text generation.

    A missing key has the default of transformers' config class. A config without a dtype matches any dtype.
    """
    # Fill in default values, because transformers removes settings of text generation from a config.
    sides = []
    for config in (one, other):
        settings = {**with_defaults(config), **config}
        sides.append({_spelling(key): value for key, value in settings.items() if value is not None})
    for key in sorted(set(map(_spelling, SPEAKING_KEYS))):
        left, right = (_plain(side.get(key)) for side in sides)
        if not (key == "dtype" and None in (left, right)):
            yield from _leaf_differences(key, left, right)


def _spelling(key: str) -> str:
    return "dtype" if key == "torch_dtype" else key


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): inner for key, inner in value.items()}
    return str(value).removeprefix("torch.") if isinstance(value, str | torch.dtype) else value


def file_differences(one: Path, other: Path) -> Iterator[Difference]:
    """Yield the files next to the weights that affect a model's input or output and differ. JSON files are
    compared by content. ``config.json`` is compared elsewhere."""
    left, right = file_hashes(one), file_hashes(other)
    for name in sorted(filter(speaks, {*left, *right} - {"config.json"})):
        if name not in left or name not in right:
            yield Difference("file", name, f"only in the {'first' if name in left else 'second'}")
        # JSON files with other formatting or another version of transformers have the same content.
        elif left[name] != right[name] and not _hold_the_same(one / name, other / name):
            yield Difference("file", name, "they are not equal")


def _hold_the_same(one: Path, other: Path) -> bool:
    if one.suffix != ".json":
        return False
    try:
        left, right = map(read_json_object, (one, other))
    except ConversionError:  # One of them is not a JSON object.
        return False
    # Each save writes its own version of transformers.
    return {**left, "transformers_version": None} == {**right, "transformers_version": None}


NOT_FINITE = "not finite"
"""Kind of a tensor that is equal on both sides but contains NaN or infinity."""


def tensor_differences(one: Opened, other: Opened, excused: Sequence[str] = ()) -> Iterator[Difference]:
    """Yield the tensors that only one model has, or that differ in shape, dtype or content.

    Args:
        one, other: the models.
        excused: patterns (``*`` and ``?``) of tensor names that may exist on one side only.
    """
    left, right = one.tensors, other.tensors
    # dict.fromkeys keeps the order of the layers, which a set would lose.
    for name in dict.fromkeys((*left, *right)):
        if name not in left or name not in right:
            if not is_excused([name], excused):
                yield Difference("missing", name, f"only in the {'first' if name in left else 'second'}")
        elif left[name].shape != right[name].shape:
            yield Difference("shape", name, f"{list(left[name].shape)} and {list(right[name].shape)}")
        else:
            yield from _content_differences(one, other, left[name], right[name])


class _Elements:
    """Counts selected elements of a tensor, and remembers the position of the first. Rows must be added in
    order."""

    def __init__(self, tensor: HuggingFaceTensor) -> None:
        self.count, self._first, self._total = 0, [0], torch.Size(tensor.shape).numel()

    def add(self, start: int, chosen: Tensor) -> None:
        """Count the elements for which ``chosen`` is true.

        Args:
            start: index of the first row of ``chosen``.
            chosen: boolean mask for some rows of the tensor.
        """
        places = chosen.nonzero()
        if not self.count and len(places):
            self._first = [start + int(places[0][0]), *places[0][1:].tolist()]
        self.count += len(places)

    def said(self, what: str) -> str:
        return f"{self.count} of {self._total} elements{what}, the first at {self._first}"


def _content_differences(
    one: Opened, other: Opened, left: HuggingFaceTensor, right: HuggingFaceTensor
) -> Iterator[Difference]:
    dtypes = one.dtype(left), other.dtype(right)
    if dtypes[0] != dtypes[1]:
        yield Difference("dtype", left.name, f"{dtype_name(dtypes[0])} and {dtype_name(dtypes[1])}")
    # Both stored dtypes convert to this one exactly.
    wide = torch.promote_types(one.model.dtype(left), other.model.dtype(right))
    found, largest, not_finite = _Elements(left), 0.0, 0
    for start, stop in row_ranges(left.shape, wide.itemsize):
        values = (
            cast(one.model.read(left, start, stop), wide),
            cast(other.model.read(right, start, stop), wide),
        )
        differing = unequal(*values)
        not_finite += int(values[0].isfinite().logical_not().sum())
        if bool(differing.any()):
            found.add(start, differing)
            distance = (values[0].double() - values[1].double()).abs()[differing]
            # If only one side is NaN, the distance is NaN, and counts as infinite.
            largest = max(largest, float(distance.nan_to_num(float("inf")).max()))
    if found.count:
        yield Difference("values", left.name, f"{found.said('')}, by at most {largest:.6g}")
    elif not_finite:
        yield Difference(NOT_FINITE, left.name, f"equal, and {not_finite} elements are NaN or infinity")


def object_differences(stored: TorchDistCheckpoint) -> Iterator[Difference]:
    """Yield the objects of a converted checkpoint that are not empty; an import writes only empty module
    states."""
    for key in stored.objects:
        if load_plain(io.BytesIO(stored.read_object(key)), f"{key} in {stored.directory}") != [None]:
            yield Difference("object", key, "it holds state, but a conversion writes none")


def padding_differences(model: MegatronModel) -> Iterator[Difference]:
    """Yield parameters whose padding rows after the vocabulary are not zero."""
    for rule in all_rules(model.architecture):
        if rule.kind is not Kind.VOCAB or not model.has(rule):
            continue
        vocabulary, padded = rule.parts[0].shape[0], model.parameter_shape(rule)[0]
        rows = model.read_rows(rule, vocabulary, padded)
        if bool(rows.any()):
            row = vocabulary + int(rows.reshape(rows.shape[0], -1).any(dim=1).nonzero()[0])
            yield Difference(
                "padding", rule.megatron_name, f"row {row} after the vocabulary of {vocabulary} is not zero"
            )


def content_problems(opened: Opened, excused: Sequence[str] = ()) -> Iterator[Difference]:
    """Yield tensors that contradict the manifest, if there is one, or contain NaN or infinity. Every tensor
    is read, so that unreadable data are found too. An excused tensor may be missing."""
    model, known = opened.model, None if opened.manifest is None else opened.manifest.tensors
    for name in dict.fromkeys((*opened.tensors, *(known or ()))):
        tensor, record = opened.tensors.get(name), None if known is None else known.get(name)
        if tensor is None or (record is None and known is not None):
            if tensor is not None or not is_excused([name], excused):
                yield Difference(
                    "hash",
                    name,
                    f"only {MANIFEST_FILE} lists it" if tensor is None else f"{MANIFEST_FILE} lacks it",
                )
            continue
        stored = model.dtype(tensor)
        dtype = stored if record is None else dtype_called(record.dtype)
        hashes, not_finite, exact = TensorHashes([] if record is None else [name]), _Elements(tensor), True
        for start, stop in row_ranges(tensor.shape, dtype.itemsize):
            rows = model.read(tensor, start, stop)
            not_finite.add(start, rows.isfinite().logical_not())
            if record is not None:
                # If a value changes by a cast to the recorded dtype and back, it was not imported from that
                # dtype.
                before = cast(rows, dtype)
                exact = exact and not bool(unequal(cast(before, stored), rows).any())
                hashes.update(name, before)
        # A Megatron checkpoint may store a wider dtype, because an import widens a tensor to the dtype of its
        # stack.
        if record is not None and (not exact or (stored != dtype and not isinstance(model, MegatronModel))):
            yield Difference(
                "dtype", name, f"{MANIFEST_FILE} records {record.dtype}, stored is {dtype_name(stored)}"
            )
        elif record is not None and hashes.digests()[name] != record.sha256:
            yield Difference(
                "hash",
                name,
                f"{MANIFEST_FILE} records {record.sha256[:12]}…, it is {hashes.digests()[name][:12]}…",
            )
        if not_finite.count:
            yield Difference("values", name, not_finite.said(" are not finite"))
