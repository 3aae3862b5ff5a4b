"""The manifest of a checkpoint: size and hash of every file, written last and verified before loading.

Layout of ``manifest.json``: ``{"version": 1, "algorithm": "sha256", "files": {relative path: {"size": bytes,
"hash": hex}}, "digest": sha256 of the canonical JSON of "files"}``. The digest reveals damage to the manifest
itself. With a signing key there is also a "signature" (``converters.files.signature``).
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TypedDict

from converters.errors import ConversionError
from converters.files.atomic import fsync_directory, in_parallel, json_bytes, write_bytes_durably
from converters.files.hashing import ALGORITHM, entries_below, hash_of, open_regular
from converters.files.signature import FIELD as SIGNATURE
from converters.files.signature import MANIFEST_NAME, fault_of_signature, read_key, signature_of
from megarl.checkpoint.storage import read_again
from megarl.errors import CheckpointError, ConfigError, StorageError, Violation

SIGNING_KEY = "checkpointing.signing_key_file"
_VERSION = 1


class Entry(TypedDict):
    """A file's entry in the manifest; ``size`` is in bytes."""

    size: int
    hash: str


class Manifest(TypedDict):
    """Content of ``manifest.json``, without the signature."""

    version: int
    algorithm: str
    digest: str
    files: dict[str, Entry]


def write_manifest(root: Path, known: Mapping[str, Entry] | None = None) -> Manifest:
    """Hash every file below ``root`` and write ``manifest.json`` there.

    Args:
        root: directory of a checkpoint.
        known: entries of files, by relative path. These files are not read again, and are included even if a
            network file system does not list them yet.

    Returns:
        The manifest.

    Raises:
        CheckpointError: there is a symbolic link or special file below ``root``; a checkpoint must contain
            its own bytes.
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    names = [name for name in _file_names(root) if name not in (known or {})]
    read = in_parallel(lambda name: entry_of(root / name), names)
    files = dict(sorted([*zip(names, read, strict=True), *(known or {}).items()]))
    manifest: Manifest = {
        "version": _VERSION,
        "algorithm": ALGORITHM,
        "digest": _digest(files),
        "files": files,
    }
    write_bytes_durably(root / MANIFEST_NAME, json_bytes(manifest))
    return manifest


def entry_of(path: Path) -> Entry:
    """Return a file's entry for the manifest.

    Raises:
        OSError: the file cannot be read, or is a symbolic link.
    """
    return {"size": path.stat().st_size, "hash": hash_of(path)}


def read_signing_key(path: str | None) -> bytes | None:
    """Return the key in ``checkpointing.signing_key_file``; None if no file is configured.

    Raises:
        ConfigError: the key cannot be used.
    """
    if path is None:
        return None
    try:
        return read_key(Path(path))
    except ConversionError as error:
        raise ConfigError([Violation(SIGNING_KEY, path, error.what, error.fix)]) from error


def sign_manifest(root: Path, key: bytes) -> None:
    """Sign the manifest of a directory that nobody reads yet.

    Raises:
        CheckpointError: the manifest is missing or damaged.
        OSError: the signature cannot be written.
    """
    manifest = _read(root)
    write_bytes_durably(
        root / MANIFEST_NAME, json_bytes({**manifest, SIGNATURE: signature_of(manifest, key)})
    )
    fsync_directory(root)


def verify(root: str | Path, hashes: bool = True, key: bytes | None = None) -> list[str]:
    """Compare a directory with its manifest.

    Files that are not in the manifest are ignored, unless a signature is required. Paths in the manifest that
    lead out of ``root`` or through a symbolic link are never opened.

    Args:
        root: directory of a checkpoint.
        hashes: read and hash every file; otherwise only names and sizes are compared.
        key: key with which the manifest must be signed; the directory may then contain no file that is not in
            it. None accepts any manifest.

    Returns:
        The faults, one sentence each; empty if the checkpoint is complete.

    Raises:
        StorageError: the storage fails, so the faults are unknown.
    """
    directory = Path(root)
    try:
        manifest = read_again(lambda: _read(directory), str(directory / MANIFEST_NAME))
        files = manifest["files"]
        if key is not None and (problems := _faults_of_signed(directory, manifest, key)):
            return problems
        # Check sizes first, which needs no reading and already detects an interrupted write.
        problems = []
        for name, entry in files.items():
            problem = _check_size(directory, name, entry["size"])
            if problem:
                problems.append(problem)
        if problems or not hashes:
            return problems
        hash_faults = in_parallel(lambda name: _check_hash(directory, name, files[name]["hash"]), list(files))
        return list(filter(None, hash_faults))
    except StorageError:
        raise
    except (OSError, CheckpointError) as error:
        return [str(error)]


def _read(root: Path) -> Manifest:
    """Read the manifest and check its digest.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    path = root / MANIFEST_NAME
    try:
        with open_regular(path) as stream:
            manifest: Manifest = json.loads(stream.read().decode())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint was never finished") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if (
        not isinstance(manifest, dict)
        or manifest.get("version") != _VERSION
        or manifest.get("algorithm") != ALGORITHM
    ):
        raise CheckpointError(
            f"{path} is damaged or of another version; this megarl reads version {_VERSION} with {ALGORITHM}"
        )
    files = manifest.get("files")
    # An empty table has a correct digest too, but the checkpoint has no files.
    if files == {}:
        raise CheckpointError(f"{path} lists no files: the checkpoint is empty")
    if (
        not isinstance(files, dict)
        or manifest.get("digest") != _digest(files)
        or not all(map(_is_entry, files.values()))
    ):
        raise CheckpointError(f"{path} is damaged: its file table does not match its digest")
    return manifest


def _faults_of_signed(root: Path, manifest: Manifest, key: bytes) -> list[str]:
    """Return the reasons to doubt that the owner of the key wrote this checkpoint: its signature, and files
    that are not in the manifest."""
    fault = fault_of_signature(manifest, key)
    if fault is not None:
        return [f"{fault} ({SIGNING_KEY})"]
    # A loader selects files by name, so a file outside the manifest could come from anybody.
    return [
        f"{name} is not in {MANIFEST_NAME}, which is signed"
        for name in sorted(set(_file_names(root)) - set(manifest["files"]))
    ]


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict) and isinstance(entry.get("size"), int) and isinstance(entry.get("hash"), str)
    )


def _check_size(root: Path, name: str, size: int) -> str | None:
    path = root / name
    if not _is_inside(root, name):
        return f"{MANIFEST_NAME} names {name!r}, which is not a plain path inside the checkpoint"
    try:
        status = read_again(path.lstat, str(path))
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is not a regular file"
    return None if status.st_size == size else f"{name} has {status.st_size} bytes, the manifest says {size}"


def _check_hash(root: Path, name: str, expected: str) -> str | None:
    try:
        found = read_again(lambda: hash_of(root / name), str(root / name))
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return (
        None
        if found == expected
        else f"{name} is damaged: {ALGORITHM} {found[:12]}..., the manifest says {expected[:12]}..."
    )


def _is_inside(root: Path, name: str) -> bool:
    """Return whether ``name`` is a plain relative path without symbolic links to directories."""
    path = PurePosixPath(name)
    # Reject `a//b` and `./a`, which would be second names of a file, and null bytes, for which `lstat` raises
    # ValueError.
    if path.is_absolute() or not path.parts or ".." in path.parts or str(path) != name or "\0" in name:
        return False
    return not any((root / parent).is_symlink() for parent in path.parents if parent.parts)


def _file_names(root: Path) -> Iterator[str]:
    for name, is_regular in entries_below(root):
        if not is_regular:
            raise CheckpointError(
                f"{root / name} is a symbolic link or special file. Fix: put a copy of the file into the "
                "checkpoint"
            )
        if name != MANIFEST_NAME:
            yield name


def _digest(files: Mapping[str, Entry]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
