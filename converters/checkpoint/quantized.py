"""Read quantised Hugging Face checkpoints as if they were not quantised.

Scales are hidden, and values are computed in float32 in small chunks, and returned in bfloat16 or the
requested dtype.

* FP8 with block scales (DeepSeek-V3): a value times the scale of its block. Blocks at the lower and right
  edge may be incomplete.
* MXFP4 (GPT-OSS): two values per byte, the lower half first, each times two to the power of the scale of its
  group of 32. transformers transposes these matrices; the family's rules handle that.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters.checkpoint.artifacts import read_config
from converters.checkpoint.boxes import Box, shape_of
from converters.checkpoint.source import HuggingFaceSource, open_source
from converters.errors import ConversionError
from converters.families.read import remedy_for_quantized
from converters.model_config.sizes import is_off

Read = Callable[[Box], Tensor]
"""Reads a box of a stored tensor."""
GROUP = 32
"""Number of MXFP4 values that share a scale."""
# The 4-bit values of the Open Compute Project's Microscaling formats: sign, two bits of exponent, one bit of
# mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Scales are E8M0: an exponent with this bias; 255 means NaN.
_EXPONENT_BIAS, _NO_NUMBER = 127, 255
_PIECE_ELEMENTS = 2**18


class BlockScaled:
    """An FP8 tensor with a scale per block.

    Args:
        name: name for error messages.
        shape: shape of the weight; its last two dimensions are divided into blocks.
        block: rows and columns of a block.
        read_weight, read_scale: read the stored tensors.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], block: tuple[int, int], read_weight: Read, read_scale: Read
    ) -> None:
        self.name, self.shape, self._block = name, shape, block
        self._read_weight, self._read_scale = read_weight, read_scale

    def read(self, box: Box, dtype: torch.dtype) -> Tensor:
        """Return the values in a box, computed in float32 and rounded once to ``dtype``."""
        leading, (rows, columns) = box[:-2], box[-2:]
        scales = self._read_scale(
            (*leading, _blocks(rows, self._block[0]), _blocks(columns, self._block[1]))
        ).float()
        # Block of each column, relative to the first block read.
        of_column = torch.arange(*columns) // self._block[1] - columns[0] // self._block[1]
        weight = self._read_weight(box)
        result = torch.empty(shape_of(box), dtype=dtype)
        for index in itertools.product(*map(range, shape_of(leading))):
            for number, (start, stop) in enumerate(_cuts(rows, self._block[0])):
                piece = slice(start - rows[0], stop - rows[0])
                result[index][piece] = weight[index][piece].float() * scales[index][number][of_column]
        return result


class Microscaled:
    """An MXFP4 tensor.

    Args:
        name: name for error messages.
        stored_shape: shape of the stored scales, [..., groups]; a group is ``GROUP`` values of the last
            dimension.
        read_blocks, read_scales: read the stored uint8 tensors; the blocks have a last dimension for the
            bytes of a group.
    """

    def __init__(
        self, name: str, stored_shape: tuple[int, ...], read_blocks: Read, read_scales: Read
    ) -> None:
        self.name, self.shape = name, (*stored_shape[:-1], stored_shape[-1] * GROUP)
        self._read_blocks, self._read_scales = read_blocks, read_scales

    def read(self, box: Box, dtype: torch.dtype) -> Tensor:
        """Return the values in a box, rounded once to ``dtype``.

        Raises:
            ConversionError: a scale is NaN.
        """
        leading, (start, stop) = box[:-1], box[-1]
        groups = _blocks((start, stop), GROUP)
        blocks = self._read_blocks((*leading, groups, (0, GROUP // 2))).flatten(0, -3)
        scales = self._read_scales((*leading, groups)).flatten(0, -2)
        if bool((scales == _NO_NUMBER).any()):
            raise ConversionError(
                f"{self.name} has a scale of {_NO_NUMBER}, which stands for NaN",
                "fetch the checkpoint again",
            )
        # Bit 3 is the sign: codes 8 to 15 are the negatives of 0 to 7.
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        inside = slice(start - groups[0] * GROUP, stop - groups[0] * GROUP)
        result = torch.empty(blocks.shape[0], stop - start, dtype=dtype)
        step = max(1, _PIECE_ELEMENTS // max(1, blocks[0].numel() * 2 if blocks.shape[0] else 1))
        for first in range(0, blocks.shape[0], step):
            rows = slice(first, first + step)
            # torch takes a uint8 index for a mask, so convert it.
            values = table[torch.stack((blocks[rows] & 15, blocks[rows] >> 4), dim=-1).int()].flatten(-2)
            # Same computation as transformers' convert_moe_packed_tensors. Scaling by a power of two is
            # exact; only the last rounding is not.
            values = torch.ldexp(values, (scales[rows].int() - _EXPONENT_BIAS).unsqueeze(-1))
            result[rows] = values.flatten(-2)[:, inside]
        return result.reshape(shape_of(box))


def _blocks(span: tuple[int, int], size: int) -> tuple[int, int]:
    """Return the range of blocks that a range of elements overlaps."""
    start, stop = span
    return start // size, max(start // size, -(-stop // size))


def _cuts(span: tuple[int, int], size: int) -> Iterator[tuple[int, int]]:
    """Split a range at block boundaries."""
    start, stop = span
    while start < stop:
        # The range may begin and end inside a block.
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end


KEY = "quantization_config"
FP8, MXFP4 = "fp8", "mxfp4"
# Keys about how a framework computes, or which modules are quantised, which the tensors show.
_INERT = frozenset(
    {
        "activation_scheme",
        "dequantize",
        "fmt",
        "ignored_layers",
        "modules_to_convert",
        "modules_to_not_convert",
        "quant_method",
        "scale_fmt",
    }
)
_SCALE_DTYPES = (torch.float32, torch.bfloat16)
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_FIX = f"fetch the checkpoint again; or {remedy_for_quantized({})}"


def open_dequantized(model_name: str | Path, revision: str | None = None) -> HuggingFaceSource:
    """Open a checkpoint that may be quantised. Arguments and further errors as in ``open_source``.

    Raises:
        ConversionError: the quantisation is not supported, or a scale is missing or has a wrong shape.
    """
    source = open_source(model_name, revision)
    config = (source.read_json("config.json") or {}).get(KEY)
    return source if config is None else DequantizedSource(source.directory, config)


class DequantizedSource(HuggingFaceSource):
    """A quantised checkpoint that is read in a floating-point dtype.

    Attributes:
        method: ``fp8`` or ``mxfp4``.
        dequantized_dtype: dtype of quantised tensors when read; bfloat16 by default.
    """

    def __init__(self, directory: Path, config: Any) -> None:
        super().__init__(directory)
        self.method = _method_of(config)
        self._block = _block_of(config) if self.method == FP8 else (1, GROUP)
        self.dequantized_dtype = torch.bfloat16
        self._hidden: set[str] = set()
        self._formats: dict[str, BlockScaled | Microscaled] = {}
        problems = list(self._find_blocks(self._block) if self.method == FP8 else self._find_groups())
        if problems:
            raise ConversionError(
                f"the {self.method} weights in {directory} are not complete", _FIX, problems
            )

    def is_dequantized(self, name: str) -> bool:
        """Return whether a tensor is stored quantised."""
        return name in self._formats

    def notes(self) -> dict[str, str | int]:
        """Return method and number of dequantised tensors, for the notes in a manifest."""
        return {"dequantized_from": self.method, "dequantized_tensors": len(self._formats)}

    def identity(self) -> list[list[str | int]]:
        """Return the identity of the files, with method and block size."""
        return [*super().identity(), [self.method, *self._block]]

    def names(self) -> list[str]:
        """Return the names of all tensors except scales, sorted."""
        return sorted(set(self._file_of) - self._hidden)

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor with a name."""
        return name not in self._hidden and super().__contains__(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``HuggingFaceSource``."""
        return self._formats[name].shape if name in self._formats else super().shape(name)

    def dtype_name(self, name: str) -> str:
        """See ``HuggingFaceSource``."""
        return str(self.dequantized_dtype) if name in self._formats else super().dtype_name(name)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """See ``HuggingFaceSource``."""
        if name not in self._formats:
            return super().read(name, slices)
        return self._formats[name].read(self.box(name, slices), self.dequantized_dtype)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the contents of a JSON file; ``config.json`` is returned without its quantisation entry."""
        content = super().read_json(name)
        return without_quantization(content) if content is not None and name == "config.json" else content

    def _find_blocks(self, block: tuple[int, int]) -> list[str]:
        """Register the FP8 tensors, and return the problems found."""
        problems = []
        for name in sorted(self._file_of):
            if self._file(name).stored_dtype(name) not in ("F8_E4M3", "F8_E5M2"):
                continue
            shape, scale = super().shape(name), name + _SCALE
            if len(shape) < 2:
                problems.append(f"{name} {list(shape)}: only matrices are stored in blocks")
                continue
            expected = (
                *shape[:-2],
                *(-(-size // length) for size, length in zip(shape[-2:], block, strict=True)),
            )
            faults = self._faults(
                scale, expected, _SCALE_DTYPES, f"{name} {list(shape)} in blocks of {list(block)}"
            )
            problems += faults
            if not faults:
                self._hidden.add(scale)
                self._formats[name] = BlockScaled(name, shape, block, self._reader(name), self._reader(scale))
        return problems

    def _find_groups(self) -> list[str]:
        """Register the MXFP4 tensors under the names of their blocks, and return the problems found."""
        problems = []
        for name in sorted(self._file_of):
            if not name.endswith(_BLOCKS):
                continue
            shape, dtype, scales = (
                super().shape(name),
                super().dtype(name),
                name.removesuffix(_BLOCKS) + _SCALES,
            )
            faults = []
            if len(shape) < 3 or shape[-1] != GROUP // 2 or dtype != torch.uint8:
                faults.append(
                    f"{name} is {dtype} {list(shape)}; torch.uint8 [..., rows, groups, {GROUP // 2}] is "
                    "needed"
                )
            faults += self._faults(scales, shape[:-1], (torch.uint8,), f"{name} {list(shape)}")
            problems += faults
            if not faults:
                self._hidden.add(scales)
                self._formats[name] = Microscaled(name, shape[:-1], self._reader(name), self._reader(scales))
        return problems

    def _faults(
        self, scale: str, expected: tuple[int, ...], dtypes: tuple[torch.dtype, ...], owner: str
    ) -> list[str]:
        if scale not in self._file_of:
            return [f"missing: {scale} {list(expected)}, the scales of {owner}"]
        shape, dtype = super().shape(scale), super().dtype(scale)
        if shape != expected:
            return [f"shape: {scale} is {list(shape)}, {owner} asks for {list(expected)}"]
        if dtype not in dtypes:
            return [f"dtype: {scale} is {dtype}; {' or '.join(map(str, dtypes))} is needed"]
        return []

    def _reader(self, name: str) -> Read:
        return functools.partial(self._file(name).read, name)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without its quantisation entry."""
    return {key: value for key, value in config.items() if key != KEY}


def drop_quantization(directory: Path) -> None:
    """Remove the quantisation entry from a directory's ``config.json``."""
    config = without_quantization(read_config(directory))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _method_of(config: Any) -> str:
    """Return the method of a ``quantization_config``.

    Raises:
        ConversionError: the method or another setting is not supported.
    """
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if method not in (FP8, MXFP4):
        raise ConversionError(
            f"{KEY} = {config!r}: only quant_method {FP8!r} (with weight_block_size) and {MXFP4!r} are known",
            remedy_for_quantized(config),
        )
    problems = []
    if config.get("activation_scheme", "dynamic") != "dynamic":
        problems.append(f"activation_scheme = {config['activation_scheme']!r}")
    others = sorted(set(config) - _INERT - ({"weight_block_size"} if method == FP8 else set()))
    for key in others:
        if not is_off(config[key]):
            problems.append(f"{key} = {config[key]!r}")
    if problems:
        raise ConversionError(
            f"{KEY} has settings that are not supported",
            remedy_for_quantized({}),
            problems,
        )
    return str(method)


def _block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    block = config.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise ConversionError(
            f"{KEY}.weight_block_size = {block!r}: two positive whole numbers are needed, as [128, 128]",
            remedy_for_quantized({}),
        )
    return block[0], block[1]
