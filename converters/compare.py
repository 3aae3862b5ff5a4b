"""Two stored models compared tensor by tensor, bit for bit, in bounded memory; whichever formats they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields

import torch

from converters.architecture import Architecture
from converters.check import is_excused
from converters.exact import cast, unequal
from converters.logical import LogicalModel, MegatronModel
from converters.manifest import Manifest, TensorHashes, dtype_called, dtype_name
from converters.rule import HuggingFaceTensor, Kind
from converters.rules import all_rules, hf_tensors
from converters.work import row_ranges


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two models differ.

    Attributes:
        kind: ``config``, ``missing``, ``shape``, ``dtype``, ``values``, ``padding`` or ``hash``.
        name: of the config field or of the tensor.
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


@dataclass(frozen=True, slots=True)
class Recorded:
    """A stored model, and what a conversion recorded of it, if one made it."""

    model: LogicalModel
    manifest: Manifest | None = None

    @property
    def tensors(self) -> dict[str, HuggingFaceTensor]:
        """Those that are there, by name."""
        return {tensor.name: tensor for tensor in hf_tensors(self.model.architecture) if self.model.holds(tensor)}

    def dtype(self, tensor: HuggingFaceTensor) -> torch.dtype:
        """Of a tensor; before an import widened it, if one did."""
        stored = self.model.dtype(tensor)
        # what an export wrote in another dtype than its manifest says is a difference, and no widening
        widened = self.manifest is not None and isinstance(self.model, MegatronModel)
        return self.manifest.dtype_before(tensor.name, stored) if self.manifest is not None and widened else stored


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
    count, first, largest = 0, None, 0.0
    for start, stop in row_ranges(left.shape[0], torch.Size(left.shape[1:]).numel() * wide.itemsize):
        values = cast(one.model.read(left, start, stop), wide), cast(other.model.read(right, start, stop), wide)
        differing = unequal(*values)
        if bool(differing.any()):
            places = differing.nonzero()
            first = first or [start + int(places[0][0]), *places[0][1:].tolist()]
            count += places.shape[0]
            distance = (values[0].double() - values[1].double()).abs()[differing]
            largest = max(largest, float(distance.nan_to_num(float("inf")).max()))
    if count:
        total = torch.Size(left.shape).numel()
        yield Difference("values", left.name, f"{count} of {total} elements, the first at {first}, by at most {largest:.6g}")


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


def hash_differences(model: LogicalModel, manifest: Manifest, excused: Sequence[str] = ()) -> Iterator[Difference]:
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
