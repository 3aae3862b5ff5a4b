"""A recorder of operations on a CPU that does what a CUDA graph does: it runs the same operations on the same
memory, and no Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

NOT_COPIED = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})
"""Operations whose results say nothing."""


class Tape(TorchDispatchMode):
    """Keeps the operations of a block, to run them again on the tensors of then."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        # views stay views of what is computed again
        if not function.is_view:
            self.operations.append((function, arguments, options or {}, tree_leaves(result)))
        return result

    def replay(self) -> None:
        """Results go where they were; nobody who counts operations sees these."""
        with _disable_current_modes(), torch.no_grad():
            for function, arguments, options, results in self.operations:
                for old, new in zip(results, tree_leaves(function(*arguments, **options)), strict=True):
                    if not isinstance(old, Tensor):
                        wait_for(new)
                    elif old.data_ptr() != new.data_ptr() and name_of(function) not in NOT_COPIED:
                        old.copy_(new)

    def spoil(self) -> None:
        """Let nothing be right that is not computed again."""
        for function, _, _, results in self.operations:
            for result in results:
                if isinstance(result, Tensor) and not function._schema.is_mutable:
                    result.fill_(-1)


def name_of(function: Any) -> str:
    """``mul`` of ``aten::mul.Tensor``."""
    return str(function.name()).split("::")[1].split(".")[0]


def wait_for(work: Any) -> None:
    """Wait for a collective."""
    if hasattr(work, "wait"):
        work.wait()


@contextlib.contextmanager
def values_unknown() -> Iterator[None]:
    """Inside, tensors have no values: what reads one, or makes a shape of one, raises RuntimeError. There are
    no collectives."""

    def refuse(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("a value is read")

    # these read memory by no operation that a mode sees
    reading = ("tolist", "numpy", "cpu", "__array__")
    with contextlib.ExitStack() as stack:
        for name in reading:
            stack.enter_context(mock.patch.object(Tensor, name, refuse))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


class TapeCapture:
    """See ``megarl.models.engine.graphs.Capture``.

    Args:
        checked: run each function once with ``values_unknown``.
    """

    def __init__(self, *, checked: bool = True) -> None:
        self._checked = checked
        self.recorded = 0
        self.replayed = 0

    def warm_up(self, function: Callable[[], Tensor]) -> Tensor:
        """See ``Capture``."""
        return function()

    def record(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See ``Capture``."""
        tape = Tape()
        with _disable_current_modes():
            if self._checked:
                with values_unknown():
                    function()
            with tape:
                result = function()
            tape.spoil()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return replay, result


class OperationCount(TorchDispatchMode):
    """Counts operations that compute or copy; views are none.

    Attributes:
        count: of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += not (function.is_view or name_of(function) in NOT_COPIED | {"_unsafe_view"})
        return function(*arguments, **(options or {}))
