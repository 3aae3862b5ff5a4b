"""Sign checkpoint manifests, to tell a run's own files on shared storage from files that others have put
there.

The signature is an HMAC-SHA256 of the table of files. It cannot tell an older checkpoint from a newer one
with the same key, and is valid only for the data at the time of the check.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from converters.errors import ConversionError
from converters.files.hashing import entries_below, hash_of
from converters.files.reading import read_json_object

MANIFEST_NAME = "manifest.json"
FIELD = "signature"
SHORTEST, LONGEST = 32, 4096
"""Limits of a key's length in bytes, without surrounding whitespace."""
# Signed as well, so that no signature made with the key for another purpose is valid for a manifest.
_PURPOSE = b"megarl checkpoint manifest\n"
_KIND = "hmac-sha256:"
_SIGNED = ("version", "algorithm", "files")
# A training checkpoint has its manifest up to this number of levels above the weights.
_LEVELS = 3
# Directory with most of the bytes, which a conversion of the weights does not read.
_UNREAD = "optimizer"


def read_key(path: Path) -> bytes:
    """Return the key in a file that only its owner can read.

    Raises:
        ConversionError: the file cannot be read, others can read it, or the key is too short or too long.
    """
    fix = f"make one: (umask 077; openssl rand -hex 32 > {path})"
    try:
        # Check the opened file, because the path may point to another file a moment later.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConversionError(f"the key {path} is no file", fix)
            if status.st_mode & 0o177:
                raise ConversionError(
                    f"the key {path} has mode {stat.S_IMODE(status.st_mode):04o}, and others may read it, "
                    "at most 0600 is accepted",
                    f"chmod 600 {path}; make another key if somebody may have read it",
                )
            # One byte more than allowed reveals a key that is too long.
            key = stream.read(LONGEST + 1).strip()
    except OSError as error:
        raise ConversionError(f"the key {path} cannot be read: {error.strerror}", fix) from error
    if not SHORTEST <= len(key) <= LONGEST:
        raise ConversionError(
            f"the key {path} has {len(key)} bytes, {SHORTEST} to {LONGEST} are accepted", fix
        )
    return key


def signature_of(manifest: Mapping[str, Any], key: bytes) -> str:
    """Return the signature of a manifest's version, algorithm and table of files."""
    signed = {name: manifest.get(name) for name in _SIGNED}
    # Canonical JSON, so that key order and whitespace do not matter.
    text = json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()
    return _KIND + hmac.new(key, _PURPOSE + text, hashlib.sha256).hexdigest()


def fault_of_signature(manifest: Mapping[str, Any], key: bytes) -> str | None:
    """Return the fault of a manifest's signature; None if it is valid for this key."""
    given = manifest.get(FIELD)
    if given is None:
        return f"{MANIFEST_NAME} is not signed, but a key is given"
    # compare_digest rejects strings that are not ASCII.
    if not isinstance(given, str) or not hmac.compare_digest(
        given.encode(), signature_of(manifest, key).encode()
    ):
        return (
            f"the signature of {MANIFEST_NAME} is not by the key that is given, or its table of files "
            "was changed"
        )
    return None


def require_signed(directory: Path, key: bytes, *, whole: bool = False) -> None:
    """Check that a training checkpoint is signed by a key, and that its files are those that were signed.

    Args:
        directory: directory of the weights; the manifest is there or up to three levels above.
        key: result of ``read_key``.
        whole: verify the optimizer state too.

    Raises:
        ConversionError: lists the faults.
    """
    absolute = directory.resolve()
    root = next(
        (place for place in (absolute, *absolute.parents[:_LEVELS]) if (place / MANIFEST_NAME).is_file()),
        None,
    )
    if root is None:
        raise ConversionError(
            f"{directory} belongs to no checkpoint with a {MANIFEST_NAME}, so nothing in it is signed",
            _FIX,
        )
    manifest = read_json_object(root / MANIFEST_NAME)
    fault = fault_of_signature(manifest, key)
    # Trust the table only if the signature is valid; then it has the usual form.
    faults = [fault] if fault is not None else list(_other_files(root, manifest.get("files"), whole))
    if faults:
        raise ConversionError(f"{root} is not what the owner of the key has signed", _FIX, faults)


_FIX = "leave the key out if you trust everybody who can write there, or take another checkpoint"


def _other_files(root: Path, files: Any, whole: bool) -> Iterator[str]:
    """Yield the differences between a directory and a signed table of files."""
    there = set()
    for name, is_regular in entries_below(root):
        if name == MANIFEST_NAME or (not whole and _UNREAD in Path(name).parts):
            continue
        there.add(name)
        entry = files.get(name)
        if entry is None:
            yield f"{name} was not signed"
        # A link or pipe may return other bytes when it is read again.
        elif not is_regular:
            yield f"{name} is no regular file"
        elif entry != {"size": (root / name).stat().st_size, "hash": hash_of(root / name)}:
            yield f"{name} has other bytes than were signed"
    for name in files:
        if name not in there and (whole or _UNREAD not in Path(name).parts):
            yield f"{name} is missing"
