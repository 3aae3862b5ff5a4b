"""Write a Hugging Face checkpoint directory from a stream of tensors, atomically, with at most one shard in
memory."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from converters.checkpoint.narrowing import main_dtype
from converters.checkpoint.staging import check_target, follow_umask, put_in_place
from converters.errors import ConversionError
from converters.files.atomic import fsync_tree, rename_surely

_DEFAULT_SHARD_BYTES = 5_000_000_000


def write_hf(
    stream: Iterable[tuple[str, Tensor]],
    out_dir: str | Path,
    beside: Callable[[Path, torch.dtype], None],
    *,
    max_shard_bytes: float = _DEFAULT_SHARD_BYTES,
) -> Path:
    """Write a checkpoint directory.

    Files are written to a temporary directory next to the target, flushed to disk, and renamed at the end. On
    an error the temporary directory is deleted, and ``out_dir`` is untouched.

    Args:
        stream: (name, tensor) pairs. Each tensor is copied, so the producer may reuse its buffer.
        out_dir: directory to create, with its parents.
        beside: writes ``config.json`` and all other files. Called with the temporary directory and the dtype
            that has the most bytes.
        max_shard_bytes: maximum bytes of tensor data per file; a larger tensor gets a file of its own.

    Returns:
        ``out_dir`` as an absolute path.

    Raises:
        ConversionError: the target exists, or a name is repeated.
    """
    target = Path(out_dir).expanduser().absolute()
    check_target(target, overwrite=False, others_in=lambda _: [])
    if max_shard_bytes <= 0:
        raise ConversionError(
            f"max_shard_bytes = {max_shard_bytes}: must be above 0", "leave it out, or give a number of bytes"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # A stream cannot be resumed, so each attempt has its own directory.
    partial = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:12]}"
    partial.mkdir()
    try:
        shards = _ShardWriter(partial, max_shard_bytes)
        for name, tensor in stream:
            shards.add(name, tensor)
        shards.finish()
        beside(partial, main_dtype(shards.sizes))
        # ``config.json`` was created with the default mode.
        follow_umask(partial, partial / "config.json")
        # All files must be on disk before the rename makes the directory visible.
        fsync_tree(partial)
        put_in_place(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


class _ShardWriter:
    """Collects tensors up to the size of a shard, and writes one shard after the other."""

    def __init__(self, directory: Path, max_shard_bytes: float) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shard_of: dict[str, int] = {}
        self._shard_count = 0
        self.sizes: list[tuple[torch.dtype, int]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to the pending shard. If it does not fit, write that shard first."""
        if name in self._shard_of:
            raise ConversionError(
                f"tensor {name!r} comes twice in the stream",
                "let every parameter be emitted by one rank only",
            )
        size = tensor.numel() * tensor.element_size()
        # A tensor that exceeds the limit gets a shard of its own.
        if self._pending and self._pending_bytes + size > self._max_shard_bytes:
            self._write_shard()
        # Copy even a CPU tensor, because the stream may reuse its buffer for the next one.
        self._pending[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._shard_of[name] = self._shard_count
        self._pending_bytes += size
        self.sizes.append((tensor.dtype, size))

    def finish(self) -> None:
        """Write the last shard, give the files their final names, and write the index if there are
        several."""
        if not self._shard_of:
            raise ConversionError("the stream of tensors is empty", "pass the parameters of the model")
        self._write_shard()
        if self._shard_count == 1:
            rename_surely(self._part_path(0), self._directory / "model.safetensors")
            return
        # The final names contain the number of shards, which is known only now.
        names = [
            f"model-{number:05d}-of-{self._shard_count:05d}.safetensors"
            for number in range(1, self._shard_count + 1)
        ]
        for number, name in enumerate(names):
            rename_surely(self._part_path(number), self._directory / name)
        index = {
            "metadata": {"total_size": sum(size for _, size in self.sizes)},
            "weight_map": {name: names[number] for name, number in sorted(self._shard_of.items())},
        }
        text = json.dumps(index, indent=2) + "\n"
        (self._directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _write_shard(self) -> None:
        # Older releases of transformers refuse a file whose metadata does not name the format.
        save_file(self._pending, self._part_path(self._shard_count), metadata={"format": "pt"})
        self._shard_count += 1
        self._pending = {}
        self._pending_bytes = 0

    def _part_path(self, number: int) -> Path:
        return self._directory / f"part-{number}.safetensors"
