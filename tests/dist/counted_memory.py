"""Memory that is counted tensor by tensor: what autograd keeps for the backward pass, and what operations
allocate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MEBIBYTE = 1024 * 1024


class Saved:
    """What autograd keeps for the backward pass; each storage counts once, and parameters, which are there
    anyway, do not.

    Attributes:
        peak: MiB at the worst moment.
    """

    def __init__(self) -> None:
        self.peak = 0.0
        self._held: dict[int, int] = {}
        self._bytes = 0

    def hold(self, tensor: Tensor) -> _Held:
        """Count ``tensor`` until what this returns is gone."""
        held = _Held(self, tensor)
        if held.place is not None:
            if not self._held.get(held.place):
                self._bytes += held.size
                self.peak = max(self.peak, self._bytes / MEBIBYTE)
            self._held[held.place] = self._held.get(held.place, 0) + 1
        return held

    def release(self, held: _Held) -> None:
        """One holder less."""
        if held.place is not None:
            self._held[held.place] -= 1
            if not self._held[held.place]:
                self._bytes -= held.size


class _Held:
    """Stands for a tensor in the graph. ``place`` is the address of its memory, None for a parameter."""

    def __init__(self, owner: Saved, tensor: Tensor) -> None:
        self.owner = owner
        self.tensor = tensor
        whole = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        self.place = None if isinstance(whole, torch.nn.Parameter) else storage.data_ptr()
        self.size = storage.nbytes()

    def __del__(self) -> None:
        self.owner.release(self)


@contextlib.contextmanager
def saved_for_backward() -> Iterator[Saved]:
    """Inside, every tensor that autograd saves is counted for as long as it is saved."""
    saved = Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.hold, lambda held: held.tensor):
        yield saved


class Allocations(TorchDispatchMode):
    """Counts the memory of floating-point tensors that operations of this thread make inside; each storage
    counts once, for as long as it is there. Numbers of other types, such as objects on their way between
    ranks, grow with the number of tensors and not with their sizes.

    Attributes:
        peak: bytes at the worst moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((arguments, keywords))}
        result = function(*arguments, **(keywords or {}))
        self._alive = {key: reference for key, reference in self._alive.items() if not reference.expired()}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and tensor.is_floating_point() and not tensor.is_meta:
                self._alive[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, sum(map(_size_of, self._alive.values())))
        return result


def _size_of(reference: StorageWeakRef) -> int:
    """Bytes that a storage has now."""
    return int(torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes())


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Tensors with memory of their own among arguments or results; one that wraps others has none."""
    return (leaf for leaf in tree_leaves(tree) if type(leaf) in (Tensor, torch.nn.Parameter))
