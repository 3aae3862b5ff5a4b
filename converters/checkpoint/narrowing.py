"""Changes of dtype that were asked for, with the largest error they made."""

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
    """Return what a tensor is written in: the dtype that was asked for, but at least float32 where it has to
    stay so; else what it was stored in, if none was asked for."""
    if asked is None:
        return stored
    return torch.promote_types(asked, torch.float32) if tensor.stays_float32 else asked


def main_dtype(tensors: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """Return the dtype that most bytes have, of tensors given by dtype and bytes; of a tie, the one seen
    first."""
    sizes: Counter[torch.dtype] = Counter()
    for dtype, size in tensors:
        sizes[dtype] += size
    return max(sizes, key=lambda dtype: sizes[dtype])


class Narrowing:
    """Casts tensors and keeps account. Safe to be used from several threads.

    Args:
        asked: whether values may change. False for the way back from a dtype that a tensor was widened to,
            which has to be exact.
    """

    def __init__(self, asked: bool) -> None:
        self._asked = asked
        self._errors: dict[str, float] = {}
        self._lock = threading.Lock()

    def cast(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor in ``dtype``; the tensor itself when it has it.

        Raises:
            ConversionError: a finite value becomes infinite, or a value changes though nobody asked for
                another dtype.
        """
        if tensor.dtype == dtype:
            return tensor
        result = cast(tensor, dtype)
        if torch.promote_types(tensor.dtype, dtype) == dtype:
            return result  # exact
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
        """Return the largest error of a slice; in slices, since float64 takes several times the memory of
        what is measured."""
        if bool((after.isinf() & before.isfinite()).any()):
            worst, dtype = float(before[before.isfinite()].abs().max()), dtype_name(after.dtype)
            raise ConversionError(
                f"{name}: {worst:.6g} is too large for {dtype}", "choose bfloat16 or a wider dtype"
            )
        return (
            # inf - inf and NaN - NaN are NaN, though nothing is lost there.
            float((before.double() - after.double()).abs().nan_to_num(0.0).max()) if before.numel() else 0.0
        )

    def error_of(self, names: Iterable[str]) -> dict[str, float]:
        """Return the largest error of each of these tensors that was narrowed."""
        with self._lock:
            return {name: self._errors[name] for name in names if name in self._errors}

    def recall(self, errors: Mapping[str, float]) -> None:
        """Take in the errors of an earlier run."""
        with self._lock:
            self._errors.update(errors)

    def summary(self) -> dict[str, float | int | str]:
        """Return how many tensors were narrowed, and the largest absolute error with the tensor it is of;
        empty when none was."""
        if not self._errors:
            return {}
        # Sorted, so that of equal errors the same tensor is named whichever thread was first.
        worst = max(sorted(self._errors), key=lambda name: self._errors[name])
        return {
            "narrowed_tensors": len(self._errors),
            "largest_error": self._errors[worst],
            "largest_error_in": worst,
        }
