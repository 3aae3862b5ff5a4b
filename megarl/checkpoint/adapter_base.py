"""Record of an adapter checkpoint's base model, stored in place of the base weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from converters.checkpoint.source import HuggingFaceSource
from megarl.checkpoint.storage import is_file, read_again
from megarl.errors import CheckpointError

BASE_FILE = "base_model.json"
_KEY = "policy.peft"
# These settings have to be the same: PEFT's names, each with the name in the configuration.
_SAME = {
    "r": "dim",
    "lora_alpha": "alpha",
    "use_rslora": "use_rslora",
    "target_modules": "target_modules",
    "target_parameters": "target_parameters",
}
_HASHED = 2**20


class _Record(TypedDict, total=False):
    """Content of ``BASE_FILE``. ``adapter`` is that of PEFT's ``adapter_config.json``."""

    model_name: object
    weights: str
    adapter: Mapping[str, object]


class BaseModel:
    """The base model of adapters, with which their checkpoint is matched.

    Args:
        source: the base model's files.
    """

    def __init__(self, source: HuggingFaceSource) -> None:
        self._source = source

    @cached_property
    def digest(self) -> str:
        """Digest of size, first and last bytes of each weight file, in the order of file names."""
        return _digest_of(self._source.files())

    def write(self, directory: Path, peft: Mapping[str, object]) -> None:
        """Record in an adapter checkpoint its base model and adapter settings."""
        record: _Record = {
            "model_name": peft["base_model_name_or_path"],
            "weights": self.digest,
            "adapter": dict(peft),
        }
        (directory / BASE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def require_same(self, directory: Path, peft: Mapping[str, object]) -> None:
        """Check that a checkpoint contains adapters of the same settings and base model. Local.

        Raises:
            CheckpointError: it does not; the message describes the difference.
        """
        if not is_file(directory / BASE_FILE):
            raise CheckpointError(
                f"{directory} holds all weights of a model, but {_KEY}.enabled is true. Fix: "
                f"export it and name the export as policy.model_name, or set {_KEY}.enabled to "
                "false"
            )
        record = _read_json(directory / BASE_FILE)
        stored = record.get("adapter") or {}
        for key, name in _SAME.items():
            if stored.get(key) != peft.get(key):
                raise CheckpointError(
                    f"{directory} holds adapters with {name} = {stored.get(key)!r}, but {_KEY} "
                    f"gives {peft.get(key)!r}. Fix: set {_KEY}.{name} to the checkpoint's"
                )
        weights, place = record.get("weights"), self._source.directory
        # Earlier versions hashed all safetensors files.
        if weights != self.digest and weights != _digest_of(sorted(place.glob("*.safetensors"))):
            raise CheckpointError(
                f"{directory} holds adapters of {record.get('model_name')}, but the weights in "
                f"{place} are not those of that model. Fix: set policy.model_name to the "
                "model that they were trained on"
            )


def _digest_of(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    # Hash only the ends of each file, because reading every byte would take minutes at each start. A file's
    # header contains names and shapes of its tensors.
    for path in files:
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{size}".encode())
            digest.update(file.read(_HASHED))
            file.seek(max(0, size - _HASHED))
            digest.update(file.read(_HASHED))
    return digest.hexdigest()


def refuse_adapters(directory: Path) -> None:
    """Check, for a model without adapters, that the checkpoint contains none. Local.

    Raises:
        CheckpointError: the checkpoint contains adapters.
    """
    if is_file(directory / BASE_FILE):
        name = _read_json(directory / BASE_FILE).get("model_name")
        raise CheckpointError(
            f"{directory} holds only the adapters of {name}. Fix: set {_KEY} as in its {BASE_FILE}"
        )


def _read_json(path: Path) -> _Record:
    try:
        found: _Record = json.loads(read_again(path.read_bytes, str(path)))
    except ValueError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. It is damaged; use another checkpoint"
        ) from error
    return found if isinstance(found, dict) else {}
