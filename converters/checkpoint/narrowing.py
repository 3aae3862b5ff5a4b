"""Requested changes of dtype, and the largest error that they cause."""

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
    """Return the dtype in which a tensor is written: the requested dtype, or the stored dtype if none is
    requested. A tensor that must stay float32 gets at least float32."""
    if asked is None:
        return stored
    return torch.promote_types(asked, torch.float32) if tensor.stays_float32 else asked


def main_dtype(tensors: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """Return the dtype that has the most bytes, given pairs of dtype and bytes. On a tie, the dtype seen
    first is returned."""
    sizes: Counter[torch.dtype] = Counter()
    for dtype, size in tensors:
        sizes[dtype] += size
    return max(sizes, key=lambda dtype: sizes[dtype])


class Narrowing:
    """Casts of tensors, with a record of the errors. Several threads may use it at once.

    Args:
        asked: whether values may change. False means that casts back from a widened dtype have to be exact.
    """

    def __init__(self, asked: bool) -> None:
        self._asked = asked
        self._errors: dict[str, float] = {}
        self._lock = threading.Lock()

    def cast(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor in ``dtype``, or the tensor itself if it has that dtype.

        Raises:
            ConversionError: a finite value becomes infinite, or a value changes although no other dtype was
                requested.
        """
        if tensor.dtype == dtype:
            return tensor
        result = cast(tensor, dtype)
        if torch.promote_types(tensor.dtype, dtype) == dtype:
            return result  # The cast lost nothing.
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
        """Return the largest error of a slice. Slices limit memory, because float64 takes several times the
        memory of the slice."""
        if bool((after.isinf() & before.isfinite()).any()):
            worst, dtype = float(before[before.isfinite()].abs().max()), dtype_name(after.dtype)
            raise ConversionError(
                f"{name}: {worst:.6g} is too large for {dtype}", "choose bfloat16 or a wider dtype"
            )
        return (
            # Count NaN as 0: inf - inf and NaN - NaN are NaN, although nothing is lost there.
            float((before.double() - after.double()).abs().nan_to_num(0.0).max()) if before.numel() else 0.0
        )

    def error_of(self, names: Iterable[str]) -> dict[str, float]:
        """Return the largest error of each of these tensors, if it was narrowed."""
        with self._lock:
            return {name: self._errors[name] for name in names if name in self._errors}

    def recall(self, errors: Mapping[str, float]) -> None:
        """Add the errors that an earlier run recorded."""
        with self._lock:
            self._errors.update(errors)

    def summary(self) -> dict[str, float | int | str]:
        """Return the number of narrowed tensors, the largest absolute error and its tensor; empty if none was
        narrowed."""
        if not self._errors:
            return {}
        # Sort the names, so that among equal errors the same tensor is named, whichever thread came first.
        worst = max(sorted(self._errors), key=lambda name: self._errors[name])
        return {
            "narrowed_tensors": len(self._errors),
            "largest_error": self._errors[worst],
            "largest_error_in": worst,
        }
