"""The files of a model beside its weights: config, generation config, tokenizer, chat template, code, licence. Copied, never run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from converters.errors import ConversionError
from converters.manifest import MANIFEST_FILE, dtype_name

HF_DIRECTORY = "huggingface"
"""Where a Megatron checkpoint keeps these files."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".distcp", ".npz"}


def artifacts(directory: Path) -> Iterator[Path]:
    """The files beside the weights of a Hugging Face directory, sorted; nothing hidden and nothing from directories inside."""
    for path in sorted(directory.iterdir()):
        weights = path.suffix in _WEIGHTS or path.name.endswith((".safetensors.index.json", ".bin.index.json"))
        if path.is_file() and not weights and not path.name.startswith(".") and path.name != MANIFEST_FILE:
            yield path


def copy_artifacts(source: Path, target: Path) -> None:
    """Copy them byte for byte."""
    target.mkdir(exist_ok=True)
    for path in artifacts(source):
        shutil.copyfile(path, target / path.name)


def write_config(directory: Path, dtype: torch.dtype) -> None:
    """Let ``config.json`` say the dtype that the weights have now; a config that says it already stays as it is, byte for byte.

    Raises:
        ConversionError: there is no ``config.json``.
    """
    path = directory / "config.json"
    config = read_config(directory)
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    stale = [key for key in keys if config[key] != dtype_name(dtype)]
    if stale or not keys:
        config |= dict.fromkeys(stale or ["dtype"], dtype_name(dtype))
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json``.

    Raises:
        ConversionError: it is missing or damaged.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read ({error})", "fetch or write the file again") from error
    if not isinstance(config, dict):
        raise ConversionError(f"{path} is no JSON object", "fetch or write the file again")
    return config
