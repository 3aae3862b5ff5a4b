"""The manifest that a conversion writes into its directory: the source of the tensors, and the hash of each.

The hashes cover Hugging Face tensors in the dtype that the manifest gives, so that either format can be
checked against the other's manifest. A conversion compares the data that it reads with the manifest of its
source. Unfinished work is resumed only if nothing that determines its bytes (the fingerprint) has changed.
"""

from __future__ import annotations

import glob
import hashlib
import json
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
"""A SHA-256 digest in hexadecimal."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Dtype, shape and SHA-256 of the bytes (little endian, row-major) of one Hugging Face tensor."""

    dtype: str
    shape: tuple[int, ...]
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class ConversionManifest:
    """Record of a conversion's source and output.

    Attributes:
        source: directory or hub id of the source, with its revision if it has one.
        family: ``model_type``.
        tensors: records by Hugging Face name.
        also_stored: names that the Hugging Face checkpoint stored although they repeat another tensor (the
            output layer of a tied model), with the name of that tensor.
        places: locations of tensors that the Hugging Face checkpoint stored under other names: name and shape
            of the stored tensor, index and first row in it.
        notes: further information for the user: changed dtypes, with the largest error.
        missing: excused Hugging Face tensors that the source did not have.
        left_out: excused names of the source that had no counterpart.
        files: SHA-256 of each file next to the weights, by name; empty in manifests of the first releases.
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
        """Patterns of the excused names, which need no counterpart."""
        # The names are later matched as patterns, so brackets in a name have to be escaped.
        return tuple(map(glob.escape, (*self.missing, *self.left_out)))

    def dtype_before(self, name: str, stored: torch.dtype) -> torch.dtype:
        """Return the dtype that a tensor had before an import widened it to ``stored`` to give a stack of
        layers a single dtype; ``stored`` if it was not widened."""
        record = self.tensors.get(name)
        before = stored if record is None else dtype_called(record.dtype)
        # If the recorded dtype does not fit into ``stored``, the tensor cannot have been widened to
        # ``stored``.
        return before if torch.promote_types(before, stored) == stored else stored

    def write(self, directory: Path) -> None:
        """Write the manifest into its file."""
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
    """Return a note that names the tensors with NaN or infinity, which are converted unchanged; empty if
    there are none."""
    listed = sorted(names)
    shown = ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
    return {NOT_FINITE_NOTE: f"NaN or infinity in {shown}"} if listed else {}


def excused_notes(missing: tuple[str, ...], left_out: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the notes of a conversion about excused names; empty if there are none."""
    return {key: list(names) for key, names in (("missing", missing), ("left_out", left_out)) if names}


def tool_version() -> str:
    """Return the version of the installed package, or ``unknown`` if the files are used without being
    installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("megarl-trainer")
    except PackageNotFoundError:
        return "unknown"


def read_manifest(directory: Path) -> ConversionManifest | None:
    """Read the manifest of a directory, or return None if there is none.

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
    """Return a dtype's name without the prefix, such as ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_called(name: str) -> torch.dtype:
    """Return the dtype of that name; the inverse of ``dtype_name``.

    Raises:
        ConversionError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConversionError(f"{name!r} is no dtype", "write float32, bfloat16 or float16")
    return dtype


class TensorHashes:
    """Hashes of several tensors, computed over their rows in order. Rows that arrive early are held until it
    is their turn.

    Attributes:
        not_finite: names of the tensors in which a value was NaN or infinite.
    """

    def __init__(self, names: Mapping[str, Any] | list[str] | tuple[str, ...]) -> None:
        self._hashes = {name: hashlib.sha256() for name in names}
        self._taken = dict.fromkeys(self._hashes, 0)
        self._held: dict[str, dict[int, Tensor]] = {name: {} for name in self._hashes}
        self.not_finite: set[str] = set()

    def update(self, name: str, rows: Tensor, start: int | None = None) -> None:
        """Add rows of a tensor to its hash: those from ``start`` on, or the next rows if ``start`` is
        None."""
        held = self._held[name]
        # Buffer rows that arrive out of order: the hash is over rows in order, while a fused parameter is
        # written in the order of its heads.
        held[self._taken[name] if start is None else start] = rows.contiguous()
        while self._taken[name] in held:
            turn = held.pop(self._taken[name])
            self._hashes[name].update(bytes_of(turn))
            self._taken[name] += len(turn)
        # The minimum or the maximum is not finite if any value is not, and computing them needs no memory.
        # 8-bit types have no kernel for this.
        if (
            rows.is_floating_point()
            and rows.itemsize > 1
            and rows.numel()
            and not torch.stack(torch.aminmax(rows)).isfinite().all()
        ):
            self.not_finite.add(name)

    def digests(self) -> dict[str, str]:
        """Return the hexadecimal digests by name."""
        return {name: state.hexdigest() for name, state in self._hashes.items()}


class HeldAgainst:
    """Comparison of the data read from a source with the manifest of the source.

    A tensor that is written in the manifest's dtype is hashed for the new manifest anyway. A tensor that is
    written in another dtype is hashed a second time, in the manifest's dtype.

    Args:
        manifest: manifest of the source; None, if no conversion wrote the source, accepts any data.
        directory: directory of the source, for errors.
        dtypes: dtype in which each Hugging Face tensor is written.
        other: names of tensors that are changed before they are written, such as those that an adapter is
            merged into.
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
        """Return empty hashes for those tensors that are written in another dtype than the manifest's."""
        return TensorHashes([name for name in names if name in self._cast])

    def update(self, hashes: TensorHashes, name: str, rows: Tensor, start: int) -> None:
        """Add rows of a tensor from ``start`` on, as they were read, to its hash, if ``hashes`` has one for
        it."""
        if name in self._cast:
            hashes.update(name, cast(rows, self._cast[name]), start)

    def refuse_changed(self, written: Mapping[str, str], before: Mapping[str, str]) -> None:
        """Refuse a source that does not match its manifest.

        Args:
            written: digests of the tensors as they were written.
            before: digests of ``hashes``.

        Raises:
            ChangedSourceError: lists the changed tensors.
        """
        changed = []
        for name, record in self._records.items():
            digests = before if name in self._cast else written
            if digests[name] != record.sha256:
                changed.append(name)
        # A manifest lists every tensor of the source, so that a tensor that it does not list was added later.
        changed += [f"{name}, which the manifest does not list" for name in self._unknown]
        if changed:
            raise ChangedSourceError(
                f"{self._directory} does not match its {MANIFEST_FILE}",
                f"convert again; or remove {MANIFEST_FILE} if the weights were changed on purpose",
                changed,
            )


# Unfinished conversions have these texts as keys of their facts: with another text they would start over.
WEIGHTS = "the weights of the source (name, size or time of change of a file)"
RULES = "the rules of the family (the program, or a --family-file)"
THE_REST = "the program, which lays out the same files otherwise"
"""Name for everything that the named facts do not determine."""


def fingerprints(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each fact, by its name. Facts have to be JSON values."""
    return {
        # Sort the keys: two runs may collect the same fact in different orders.
        name: hashlib.sha256(json.dumps(fact, sort_keys=True, default=str).encode()).hexdigest()
        for name, fact in facts.items()
    }


def fingerprint_of_rules(rules: Iterable[Rule]) -> list[str]:
    """Return a version and a digest that change when the rules would write a different tensor, or a different
    part of one, to the same location."""
    digest = hashlib.sha256()
    for rule in rules:
        # Hash the repr, which names every field, so that a new field of Rule changes the fingerprint
        # automatically.
        digest.update(repr(rule).encode())
    # Include the version: another release may write other bytes by the same rules.
    return [tool_version(), digest.hexdigest()]


def changed(before: object, now: Mapping[str, str]) -> list[str]:
    """Return the names of the facts that differ between two results of ``fingerprints``.

    Args:
        before: fingerprints that an earlier run of any release recorded.
        now: fingerprints of this run.
    """
    if not isinstance(before, Mapping):  # An older release recorded one fingerprint of everything.
        return [THE_REST]
    names = [name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)]
    # Name the rest only if nothing else has changed, because the rest follows from the other facts.
    return [name for name in names if name != THE_REST] or names
