"""Signatures of checkpoint manifests, which tell a run's own files on shared storage from those that others
have put there.

The signature is an HMAC-SHA256 of the table of files, with a key that only the readers and the writer of the
checkpoints can read. It does not tell an older checkpoint from a newer one of the same key, and only covers
data as they are when it is checked.
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
# This text is signed as well, so that no signature that the key makes for another purpose fits a manifest.
_PURPOSE = b"megarl checkpoint manifest\n"
_KIND = "hmac-sha256:"
_SIGNED = ("version", "algorithm", "files")
# The manifest of a trainer may be at most this many levels above the weights.
_LEVELS = 3
# A conversion of the model's weights does not read this directory of a trainer's checkpoint, which has most
# of the bytes.
_UNREAD = "optimizer"


def read_key(path: Path) -> bytes:
    """Return the key in a file that only its owner may read.

    Raises:
        ConversionError: the key cannot be read, others may read it, or it is too short or too long.
    """
    fix = f"make one: (umask 077; openssl rand -hex 32 > {path})"
    try:
        # Open the key once and check the open file, because the file behind a name may change between two
        # look-ups.
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
    # Make one text for each content, so that order of keys and white space in the file do not count.
    text = json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()
    return _KIND + hmac.new(key, _PURPOSE + text, hashlib.sha256).hexdigest()


def fault_of_signature(manifest: Mapping[str, Any], key: bytes) -> str | None:
    """Return the problem with a manifest's signature, or None if this key signed the manifest."""
    given = manifest.get(FIELD)
    if given is None:
        return f"{MANIFEST_NAME} is not signed, but a key is given"
    # Compare bytes, because compare_digest refuses a str that is not ASCII.
    if not isinstance(given, str) or not hmac.compare_digest(
        given.encode(), signature_of(manifest, key).encode()
    ):
        return (
            f"the signature of {MANIFEST_NAME} is not by the key that is given, or its table of files "
            "was changed"
        )
    return None


def require_signed(directory: Path, key: bytes, *, whole: bool = False) -> None:
    """Refuse a trainer's checkpoint that is not signed by a key, or that differs from what was signed.

    Args:
        directory: directory of the checkpoint's weights; its manifest is there or up to three levels above.
        key: key from ``read_key``.
        whole: whether the optimizer state is read, and has to be checked, too.

    Raises:
        ConversionError: lists the problems.
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
    # Read the table only under a valid signature: it then comes from the owner of the key, and has the usual
    # form.
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
        elif not is_regular:
            yield f"{name} is no regular file"
        elif entry != {"size": (root / name).stat().st_size, "hash": hash_of(root / name)}:
            yield f"{name} has other bytes than were signed"
    for name in files:
        if name not in there and (whole or _UNREAD not in Path(name).parts):
            yield f"{name} is missing"
