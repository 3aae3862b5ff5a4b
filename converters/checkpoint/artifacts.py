"""Handle the files next to a model's weights: config, generation config, tokenizer, chat template, code,
licence. They are copied and never executed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from converters.checkpoint.manifest import MANIFEST_FILE, dtype_name
from converters.errors import ConversionError
from converters.files.kinds import misplaced_kind
from converters.files.reading import read_json_object, require_regular, special_kind

HF_DIRECTORY = "huggingface"
"""Directory of these files in a Megatron checkpoint."""
TEMPLATES_DIRECTORY = "additional_chat_templates"
"""Directory in which transformers stores additional chat templates."""
_SPEAKING = re.compile(
    r"(generation_|tokenizer_|special_tokens_|added_)?(config|map|tokens)\.json|(tokenizer|vocab)[^/]*"
    r"|merges\.txt|chat_template[^/]*|"
    rf"[^/]*\.(model|jinja|tiktoken)|{TEMPLATES_DIRECTORY}/.*"
)
# A custom tokenizer's code is stored next to it.
_TOKENIZER = re.compile(
    r"(tokenizer_config|special_tokens_map|added_tokens|tekken)\.json|(tokenizer|vocab)[^/]*(?<!\.py)"
    r"|merges\.txt|chat_template[^/]*|tokenization[^/]*\.py|[^/]*\.(model|jinja|tiktoken)"
)
_WEIGHTS = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
    ".ckpt",
    ".distcp",
    ".npz",
}


# Larger files are weights in formats that are not recognised by name (ONNX, Rust, archives); smaller files
# are copied.
_LARGEST = 2**26


def artifacts(directory: Path) -> list[Path]:
    """Return the files next to the weights of a Hugging Face directory, sorted. Hidden files and
    subdirectories are skipped, except additional chat templates.

    Raises:
        ConversionError: a symlink leads out of the directory or is dangling. Symlinks of the hub's cache may
            lead to its ``blobs``.
    """
    found, problems = [], []
    for path in [*sorted(directory.iterdir()), *sorted((directory / TEMPLATES_DIRECTORY).glob("*.jinja"))]:
        weights = path.suffix in _WEIGHTS or path.name.endswith(
            (".safetensors.index.json", ".bin.index.json")
        )
        if weights or path.name.startswith(".") or path.name == MANIFEST_FILE or path.is_dir():
            continue
        # A link out of the directory could copy any file of this machine into the checkpoint.
        if path.is_symlink() and not _stays(path, directory):
            problems.append(f"{path.relative_to(directory)} leads to {os.readlink(path)}")
        elif path.is_file():
            found.append(path)
            _refuse_misplaced(path)
        else:
            problems.append(f"{path.relative_to(directory)} is {special_kind(path) or 'no file'}")
    if problems:
        raise ConversionError(
            f"{directory} has links that lead outside it or to nothing, or entries that are not files",
            "put the files themselves there, or remove the links",
            problems,
        )
    return found


def _stays(path: Path, directory: Path) -> bool:
    """Return whether a symlink leads to an allowed file: inside the directory, in the ``blobs`` of the hub's
    cache, or next to the weights that the directory's own symlinks lead to (for a directory of symlinks to
    another one)."""
    inside = [directory.resolve()]
    # In the hub's cache, files in snapshots/COMMIT/ are links to files in blobs/.
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parent.parent / "blobs")
    place = path.resolve()
    beside = {weights.resolve().parent for weights in directory.glob("*.safetensors") if weights.is_symlink()}
    return place.is_file() and (any(each in place.parents for each in inside) or place.parent in beside)


def _refuse_misplaced(path: Path) -> None:
    """Reject a settings, tokenizer or template file with unexpected content, such as a git-lfs pointer. Other
    files, such as images, are not checked."""
    kind = misplaced_kind(path) if _SPEAKING.fullmatch(path.name) else None
    # ``merges.txt`` may be empty, and a chat template may look like a web page.
    if kind is not None and (
        path.suffix == ".json" or (kind[0] != "empty" and path.suffix != ".jinja") or "git-lfs" in kind[0]
    ):
        raise ConversionError(f"{path} is {kind[0]}", kind[1])


def copy_artifacts(source: Path, target: Path) -> None:
    """Copy the files next to the weights unchanged. Files above 64 MiB are skipped unless they belong to the
    tokenizer. Errors as in ``artifacts``."""
    target.mkdir(exist_ok=True)
    for path in artifacts(source):
        if path.stat().st_size > _LARGEST and not speaks(path.name):
            continue
        place = target / path.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        # ``copyfile`` follows links, so that a copy never points into the hub's cache.
        shutil.copyfile(path, place)


def replace_tokenizer(directory: Path, source: Path | None = None) -> None:
    """Replace the tokenizer files of a directory by those of ``source``. All old ones are deleted, because a
    loader may prefer any that is left."""
    for path in _tokenizer_files(directory):
        path.unlink()
    if source is None:
        return
    # A tokenizer of a custom class needs its code files.
    for path in (*_tokenizer_files(source), *source.glob("*.py")):
        place = directory / path.relative_to(source)
        # An existing code file may belong to the model, so keep it.
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)


def _tokenizer_files(directory: Path) -> list[Path]:
    paths = [path for path in directory.iterdir() if _TOKENIZER.fullmatch(path.name) and path.is_file()]
    return [*paths, *(directory / TEMPLATES_DIRECTORY).glob("*.jinja")]


def change_tokenizer(directory: Path, changes: Mapping[str, str], template: str | None) -> None:
    """Change keys of ``tokenizer_config.json`` and, unless it is None, the chat template. The template is
    written to each file that has one, because older releases of transformers read it only from
    ``tokenizer_config.json``."""
    path, content = directory / "tokenizer_config.json", dict(changes)
    config = read_json_object(path) if path.exists() else {}
    if template is not None:
        others = [*directory.glob("chat_template.*"), *(directory / TEMPLATES_DIRECTORY).glob("*.jinja")]
        for other in others:
            other.unlink()
        # vLLM prefers Mistral's own tokenizer, which has no chat template.
        if (directory / "tokenizer.json").exists():
            (directory / "tekken.json").unlink(missing_ok=True)
        if others:
            (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        if "chat_template" in config or not others:
            content["chat_template"] = template
    if content:
        path.write_text(json.dumps(config | content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def file_hashes(directory: Path) -> dict[str, str]:
    """Return relative path -> SHA-256 of the files next to the weights. Errors as in ``artifacts``."""
    hashes = {}
    for path in artifacts(directory):
        with path.open("rb") as file:
            hashes[path.relative_to(directory).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def changed_files(directory: Path, recorded: Mapping[str, str]) -> dict[str, str]:
    """Return file -> description of the change, for files that were changed or deleted since their hashes
    were recorded."""
    found = file_hashes(directory)
    return {
        name: "was changed" if name in found else "is gone"
        for name, digest in recorded.items()
        if found.get(name) != digest
    }


def refuse_changed_files(directory: Path, source: Path, recorded: Mapping[str, str]) -> None:
    """Check that the files next to the weights are still those that a conversion wrote.

    Args:
        directory: directory of the files.
        source: directory of the checkpoint with the manifest.
        recorded: ``ConversionManifest.files``; empty skips the check.

    Raises:
        ConversionError: lists the changed files.
    """
    changes = changed_files(directory, recorded) if recorded else {}
    if changes:
        raise ConversionError(
            f"{directory} does not match {source / MANIFEST_FILE}",
            f"restore the files, or remove {MANIFEST_FILE} if they were changed on purpose",
            [f"{name} {change}" for name, change in changes.items()],
        )


def speaks(name: str) -> bool:
    """Return whether a file of this name affects a model's input or output: settings, tokenizer, chat
    templates."""
    return _SPEAKING.fullmatch(name) is not None


def config_hash(directory: Path) -> str:
    """Return the SHA-256 of ``config.json``.

    Raises:
        ConversionError: the file is missing or cannot be read.
    """
    path = directory / "config.json"
    try:
        return hashlib.sha256(require_regular(path).read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise ConversionError(
            f"{directory} has no config.json", "give the directory of a complete model"
        ) from error
    except OSError as error:
        raise ConversionError(
            f"{path} cannot be read ({error.strerror})",
            "give the directory of a complete model that you may read",
        ) from error


def refuse_changed_config(directory: Path, planned: str, source: Path) -> None:
    """Check that ``config.json`` is still the one with which a conversion was planned.

    The error is not a ``ChangedSourceError``, because the unfinished conversion can continue when the file is
    restored.

    Args:
        directory: directory whose file is checked.
        planned: ``config_hash`` of the source when the conversion was planned.
        source: source directory, for the message.

    Raises:
        ConversionError: the file was changed.
    """
    found = config_hash(directory)
    if found != planned:
        raise ConversionError(
            f"{source / 'config.json'} was changed while the weights were converted (SHA-256 "
            f"{planned[:12]}... when the conversion "
            f"was planned, {found[:12]}... now)",
            "restore the earlier file, or convert again with the new one; do not change the source meanwhile",
        )


def _dtypes(section: Mapping[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """Return the dtype keys of a config section with a new value. Older releases of transformers use
    ``torch_dtype``."""
    return {key: dtype_name(dtype) for key in ("dtype", "torch_dtype") if key in section}


def write_config(
    directory: Path, dtype: torch.dtype, changes: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Set the dtype and other keys of ``config.json``. The file is not rewritten if the values are unchanged.

    Raises:
        ConversionError: there is no ``config.json``.
    """
    path = directory / "config.json"
    config = read_config(directory)
    changes = {**changes, **(_dtypes(config, dtype) or {"dtype": dtype_name(dtype)})}
    text = config.get("text_config")
    if isinstance(text, dict):
        # The text part of a multimodal model may be loaded alone, from its own section.
        changes["text_config"] = text | _dtypes(text, dtype)
    changes = {key: value for key, value in changes.items() if key not in config or config[key] != value}
    if changes:
        config |= changes
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_config(directory: Path) -> dict[str, Any]:
    """Return the contents of ``config.json``.

    Raises:
        ConversionError: the file is missing or damaged.
    """
    absent = (f"{directory} has no config.json", "give the directory of a complete model")
    return read_json_object(directory / "config.json", absent)
