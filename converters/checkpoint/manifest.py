"""The manifest ``conversion.json`` that a conversion writes: origin of the tensors, and a hash of each.

Hashes are of Hugging Face tensors in the recorded dtype, so a checkpoint in either format can be verified
with the manifest of the other. A conversion also verifies its source against the source's manifest, and
resumes unfinished work only if its fingerprint is unchanged, which covers everything that determines the
output.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from converters.checkpoint.boxes import bytes_of
from converters.checkpoint.exact import cast
from converters.errors import ChangedSourceError, ConversionError
from converters.files.atomic import whole_file
from converters.files.reading import require_regular
from converters.mapping.rule import Rule

MANIFEST_FILE = "conversion.json"
TOOL = "megarl convert"
FORMAT = 1
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""SHA-256 digest in hexadecimal."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Dtype, shape and SHA-256 of a Hugging Face tensor's bytes (little endian, row-major)."""

    dtype: str
    shape: tuple[int, ...]
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class ConversionManifest:
    """Source and output of a conversion.

    Attributes:
        source: directory or hub id of the source, with its revision if known.
        family: ``model_type``.
        tensors: Hugging Face tensor name -> record.
        also_stored: copy -> original, for tensors that the Hugging Face checkpoint stores twice, such as the
            output layer of a tied model.
        places: tensor name -> its location (stored name and shape, index, first row), for tensors that are
            stored under another name, such as in a stack of experts.
        notes: further information for the user, such as changed dtypes and the largest error.
        missing: excused tensors that the source did not have.
        left_out: excused names of the source without a counterpart.
        files: file next to the weights -> SHA-256; empty in manifests of the first releases.
    """

    source: str
    family: str
    tensors: dict[str, TensorRecord]
    also_stored: dict[str, str] = field(default_factory=dict)
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    files: dict[str, Sha256] = field(default_factory=dict)

    @property
    def excused(self) -> tuple[str, ...]:
        """Patterns of the excused names, for later checks."""
        # The names are later matched as patterns, so brackets in a name have to be escaped.
        return tuple(map(glob.escape, (*self.missing, *self.left_out)))

    def dtype_before(self, name: str, stored: torch.dtype) -> torch.dtype:
        """Return the dtype that a tensor had before an import widened it. An import widens tensors so that a
        stack of layers has a single dtype.

        Args:
            name: Hugging Face tensor name.
            stored: dtype in the checkpoint; returned if the tensor was not widened.
        """
        record = self.tensors.get(name)
        before = stored if record is None else dtype_called(record.dtype)
        # If the recorded dtype does not fit into ``stored``, the tensor cannot have been widened to
        # ``stored``.
        return before if torch.promote_types(before, stored) == stored else stored

    def write(self, directory: Path) -> None:
        """Write the manifest to its file in a directory."""
        content = {
            "format": FORMAT,
            "tool": TOOL,
            "version": tool_version(),
            "source": self.source,
            "family": self.family,
            "also_stored": self.also_stored,
            "places": self.places,
            "notes": self.notes,
            "files": self.files,
            "excused": {"missing": list(self.missing), "left_out": list(self.left_out)},
            "tensors": {name: asdict(record) for name, record in self.tensors.items()},
        }
        with whole_file(directory / MANIFEST_FILE) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())


NOT_FINITE_NOTE = "not_finite"


def not_finite_note(names: Iterable[str]) -> dict[str, Any]:
    """Return a note that lists tensors with NaN or infinity, which are converted unchanged; empty if there
    are none."""
    listed = sorted(names)
    shown = ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
    return {NOT_FINITE_NOTE: f"NaN or infinity in {shown}"} if listed else {}


def excused_notes(missing: tuple[str, ...], left_out: tuple[str, ...]) -> dict[str, list[str]]:
    """Return notes that list the excused names; empty if there are none."""
    return {key: list(names) for key, names in (("missing", missing), ("left_out", left_out)) if names}


def tool_version() -> str:
    """Return megarl's version, also of a checkout that is not installed; ``unknown`` without megarl."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("megarl-trainer")
    except PackageNotFoundError:
        # Read the file, because this package does not import megarl.
        file = Path(__file__).parents[2] / "megarl" / "__init__.py"
        found = re.search('__version__ = "(.+)"', file.read_text("utf-8")) if file.is_file() else None
        return found[1] if found else "unknown"


def read_manifest(directory: Path) -> ConversionManifest | None:
    """Return the manifest in a directory, or None if there is none.

    Raises:
        ConversionError: the manifest is damaged, or has an unknown format.
    """
    path = directory / MANIFEST_FILE
    try:
        content = json.loads(require_regular(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ConversionError(
                f"{path} has format {content['format']!r}, known is {FORMAT}",
                "use a newer megarl, or convert again",
            )
        # Manifests of the first releases have neither "excused" nor a list of files.
        return _MANIFEST.validate_python({**content, **content.get("excused", {})})
    except FileNotFoundError:
        return None
    # Re-raise it: a ConversionError is a ValueError, which a later clause would report as damage.
    except ConversionError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        raise ConversionError(
            f"{path} is damaged ({'.'.join(map(str, first['loc']))}: {first['msg']})", _AGAIN
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path} is damaged ({type(error).__name__}: {error})", _AGAIN) from error


_AGAIN = "remove it, or convert again"
_MANIFEST = TypeAdapter(ConversionManifest)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix: ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_called(name: str) -> torch.dtype:
    """Return the dtype with a name; inverse of ``dtype_name``.

    Raises:
        ConversionError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConversionError(f"{name!r} is no dtype", "write float32, bfloat16 or float16")
    return dtype


class TensorHashes:
    """Incremental SHA-256 hashes of tensors. Rows may arrive out of order, and are then buffered.

    Attributes:
        not_finite: names of tensors with NaN or infinity.
    """

    def __init__(self, names: Mapping[str, Any] | list[str] | tuple[str, ...]) -> None:
        self._hashes = {name: hashlib.sha256() for name in names}
        self._taken = dict.fromkeys(self._hashes, 0)
        self._held: dict[str, dict[int, Tensor]] = {name: {} for name in self._hashes}
        self.not_finite: set[str] = set()

    def update(self, name: str, rows: Tensor, start: int | None = None) -> None:
        """Add rows of a tensor.

        Args:
            name: name of the tensor.
            rows: the rows.
            start: index of the first row; None for the next one.
        """
        held = self._held[name]
        # A fused parameter is written in the order of its heads, but the hash needs the rows in order.
        held[self._taken[name] if start is None else start] = rows.contiguous()
        while self._taken[name] in held:
            turn = held.pop(self._taken[name])
            self._hashes[name].update(bytes_of(turn))
            self._taken[name] += len(turn)
        # If any value is not finite, the minimum or the maximum is not, and computing these needs no memory.
        # There is no kernel for 8-bit types.
        if (
            rows.is_floating_point()
            and rows.itemsize > 1
            and rows.numel()
            and not torch.stack(torch.aminmax(rows)).isfinite().all()
        ):
            self.not_finite.add(name)

    def digests(self) -> dict[str, str]:
        """Return name -> hexadecimal digest."""
        return {name: state.hexdigest() for name, state in self._hashes.items()}


class HeldAgainst:
    """Verifies the data that a conversion reads against the manifest of the source.

    Tensors that are written in the dtype of that manifest are hashed for the new manifest anyway. Tensors
    that are written in another dtype are hashed a second time, in the manifest's dtype.

    Args:
        manifest: manifest of the source; None accepts any data.
        directory: directory of the source, for error messages.
        dtypes: Hugging Face tensor name -> dtype in which it is written.
        other: names of tensors whose values the conversion changes, such as by merging an adapter; they are
            not verified.
    """

    def __init__(
        self,
        manifest: ConversionManifest | None,
        directory: Path,
        dtypes: Mapping[str, torch.dtype],
        other: Container[str] = (),
    ) -> None:
        self._directory = directory
        self._records, self._unknown, self._cast = {}, [], {}
        if manifest is None:
            return
        for name, dtype in dtypes.items():
            record = manifest.tensors.get(name)
            if record is None:
                self._unknown.append(name)
            elif name not in other:
                self._records[name] = record
                if record.dtype != dtype_name(dtype):
                    self._cast[name] = dtype_called(record.dtype)

    def hashes(self, names: Iterable[str]) -> TensorHashes:
        """Return new hashes for those tensors that have to be hashed a second time."""
        return TensorHashes([name for name in names if name in self._cast])

    def update(self, hashes: TensorHashes, name: str, rows: Tensor, start: int) -> None:
        """Add rows to the second hash of a tensor, if it has one.

        Args:
            hashes: result of ``hashes``.
            name: name of the tensor.
            rows: rows as they were read.
            start: index of the first row.
        """
        if name in self._cast:
            hashes.update(name, cast(rows, self._cast[name]), start)

    def refuse_changed(self, written: Mapping[str, str], before: Mapping[str, str]) -> None:
        """Check that the source matches its manifest.

        Args:
            written: name -> digest of each tensor in the dtype that is written.
            before: name -> digest in the dtype that the manifest records, for tensors in which the two dtypes
                differ.

        Raises:
            ChangedSourceError: lists the changed tensors.
        """
        changed = []
        for name, record in self._records.items():
            digests = before if name in self._cast else written
            if digests[name] != record.sha256:
                changed.append(name)
        # A manifest lists every tensor of the source, so that a tensor that it does not list was added later.
        changed += [f"{name}, which {MANIFEST_FILE} does not list" for name in self._unknown]
        if changed:
            raise ChangedSourceError(
                f"{self._directory} does not match its {MANIFEST_FILE}",
                f"convert again; or remove {MANIFEST_FILE} if the weights were changed on purpose",
                changed,
            )


# These texts are keys in the records of unfinished conversions. After a change of a text, these start over.
WEIGHTS = "the weights of the source (name, size or time of change of a file)"
RULES = "the rules of the family (the program, or a --family-file)"
THE_REST = "the program, which lays out the same files otherwise"
"""Name of all facts that have no name of their own."""


def fingerprints(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> hash of each fact. Facts must be JSON values."""
    return {
        # Sort the keys, because their order may differ between runs.
        name: hashlib.sha256(json.dumps(fact, sort_keys=True, default=str).encode()).hexdigest()
        for name, fact in facts.items()
    }


def fingerprint_of_rules(rules: Iterable[Rule]) -> list[str]:
    """Return the program's version and a digest of the rules, which change if a tensor would be written
    differently."""
    digest = hashlib.sha256()
    for rule in rules:
        # The repr contains all fields, so a new field of Rule is included automatically.
        digest.update(repr(rule).encode())
    # Another release may interpret the same rules differently.
    return [tool_version(), digest.hexdigest()]


def changed(before: object, now: Mapping[str, str]) -> list[str]:
    """Return the names of the facts that differ between two results of ``fingerprints``.

    Args:
        before: fingerprints of an earlier run, possibly of another release.
        now: fingerprints of this run.
    """
    if not isinstance(before, Mapping):  # Older releases recorded a single fingerprint.
        return [THE_REST]
    names = [name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)]
    # The rest depends on the named facts, so report it only if nothing else has changed.
    return [name for name in names if name != THE_REST] or names
