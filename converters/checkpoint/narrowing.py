"""Requested dtype conversions, and the largest error that they cause."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from converters.checkpoint.exact import cast, unequal
from converters.checkpoint.manifest import dtype_name
from converters.errors import ConversionError
from converters.mapping.rule import HuggingFaceTensor

_SLICE = 2**20


def kept_dtype(tensor: HuggingFaceTensor, stored: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is written.

    Args:
        tensor: the tensor; some must stay float32.
        stored: its dtype in the source.
        asked: requested dtype; None keeps ``stored``.
    """
    if asked is None:
        return stored
    return torch.promote_types(asked, torch.float32) if tensor.stays_float32 else asked


def main_dtype(tensors: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """Return the dtype with the most bytes, from (dtype, bytes) pairs; on a tie the one seen first."""
    sizes: Counter[torch.dtype] = Counter()
    for dtype, size in tensors:
        sizes[dtype] += size
    return max(sizes, key=lambda dtype: sizes[dtype])


class Narrowing:
    """Casts tensors and records the rounding errors. Thread-safe.

    Args:
        asked: a dtype was requested, so values may change. Otherwise every cast must be exact.
    """

    def __init__(self, asked: bool) -> None:
        self._asked = asked
        self._errors: dict[str, float] = {}
        self._lock = threading.Lock()

    def cast(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert a tensor to a dtype; returns the tensor itself if it has that dtype.

        Raises:
            ConversionError: a finite value becomes infinite, or a value changes although no dtype was
                requested.
        """
        if tensor.dtype == dtype:
            return tensor
        result = cast(tensor, dtype)
        if torch.promote_types(tensor.dtype, dtype) == dtype:
            return result  # Widening is exact.
        # Slice by slice, to limit the memory for temporary tensors.
        slices = zip(tensor.reshape(-1).split(_SLICE), result.reshape(-1).split(_SLICE), strict=True)
        largest = max((self._error(name, *pair) for pair in slices), default=0.0)
        if not self._asked and bool(unequal(cast(result, tensor.dtype), tensor).any()):
            raise ConversionError(
                f"{name} was {dtype_name(dtype)} before it was imported, and now holds values that need "
                f"{dtype_name(tensor.dtype)}",
                (
                    f"pass --dtype {dtype_name(tensor.dtype)} to keep them, or --dtype {dtype_name(dtype)} "
                    "to "
                    "round them"
                ),
            )
        with self._lock:
            self._errors[name] = max(self._errors.get(name, 0.0), largest)
        return result

    @staticmethod
    def _error(name: str, before: Tensor, after: Tensor) -> float:
        """Return the largest absolute error of a slice. Work on slices, because the computation in float64
        needs several times the slice's memory."""
        if bool((after.isinf() & before.isfinite()).any()):
            worst, dtype = float(before[before.isfinite()].abs().max()), dtype_name(after.dtype)
            raise ConversionError(
                f"{name}: {worst:.6g} is too large for {dtype}", "choose bfloat16 or a wider dtype"
            )
        return (
            # inf - inf and NaN - NaN are NaN, although nothing was lost.
            float((before.double() - after.double()).abs().nan_to_num(0.0).max()) if before.numel() else 0.0
        )

    def error_of(self, names: Iterable[str]) -> dict[str, float]:
        """Return name -> largest absolute error, for those of the tensors that were narrowed."""
        with self._lock:
            return {name: self._errors[name] for name in names if name in self._errors}

    def recall(self, errors: Mapping[str, float]) -> None:
        """Add errors that an earlier, interrupted run recorded."""
        with self._lock:
            self._errors.update(errors)

    def summary(self) -> dict[str, float | int | str]:
        """Return the number of narrowed tensors, the largest absolute error and its tensor; empty if none was
        narrowed."""
        if not self._errors:
            return {}
        # Sort, so that the result does not depend on the order of the threads.
        worst = max(sorted(self._errors), key=lambda name: self._errors[name])
        return {
            "narrowed_tensors": len(self._errors),
            "largest_error": self._errors[worst],
            "largest_error_in": worst,
        }
