"""Watches what a worker does: its collectives, modules, micro-batches, cleared caches, notices. Changes
nothing of it."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.distributed.device import DeviceRuntime

COMMUNICATION = ("c10d", "_c10d_functional")
# waiting for a collective is none
WAITS = ("wait_tensor",)


class Watch(TorchDispatchMode):
    """Counts collectives by what the worker is doing when they start: ``pass`` (forward and backward) or
    ``step``, otherwise ``other``.

    Attributes:
        collectives: (phase, operation) -> how often.
        modules: class of a module -> how often it ran forward.
        tokens: shapes of what went into an embedding, in order.
        micro_batches: of each pass, (rows, length, packed) of what was given to the backend, and whether
            backward followed.
        emptied: phases in which the device's cache was emptied, in order.
        notices: what was logged at INFO and above by megarl's backends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "other"
        self.collectives: Counter[tuple[str, str]] = Counter()
        self.modules: Counter[str] = Counter()
        self.tokens: list[tuple[int, ...]] = []
        self.micro_batches: list[tuple[list[tuple[tuple[int, ...], int, bool]], bool]] = []
        self.emptied: list[str] = []
        self.notices: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        namespace, _, name = function.name().partition("::")
        if namespace in COMMUNICATION and name.split(".")[0] not in WAITS:
            self.collectives[self.phase, name.split(".")[0]] += 1
        return function(*arguments, **(keywords or {}))

    def module_runs(self, module: torch.nn.Module, arguments: Any) -> None:
        """A hook in front of every module."""
        kind = type(module).__name__
        self.modules[kind] += 1
        if (
            kind.endswith("Embedding")
            and arguments
            and isinstance(arguments[0], torch.Tensor)
            and arguments[0].dtype == torch.int64
        ):
            self.tokens.append(tuple(arguments[0].shape))

    def passes_of(self, backend: Any) -> None:
        """Watch a backend's passes and optimizer steps from now on."""
        forward_backward, apply_gradients = backend.forward_backward, backend.apply_gradients

        def watched_pass(inputs: Any, head: Any, *, backward: bool) -> Any:
            given = [
                (tuple(item.tokens.shape), item.micro_batch.length, item.micro_batch.packed)
                for item in inputs
            ]
            self.micro_batches.append((given, backward))
            with self._in_phase("pass"):
                return forward_backward(inputs, head, backward=backward)

        def watched_step(accepts: Any) -> Any:
            with self._in_phase("step"):
                return apply_gradients(accepts)

        backend.forward_backward, backend.apply_gradients = watched_pass, watched_step

    @contextlib.contextmanager
    def _in_phase(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


class _Notices(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.INFO)
        self.texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def watching(collectives: bool = False) -> Iterator[Watch]:
    """Everything inside is watched, collectives only where asked for (looking at every operation takes its
    time)."""
    watch = Watch()
    room, handler, empty_cache = (
        logging.getLogger("megarl.models"),
        _Notices(watch.notices),
        DeviceRuntime.empty_cache,
    )
    level = room.level

    def emptied(runtime: DeviceRuntime) -> None:
        watch.emptied.append(watch.phase)
        empty_cache(runtime)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(watch.module_runs)
    DeviceRuntime.empty_cache = emptied  # type: ignore[method-assign]
    room.addHandler(handler)
    room.setLevel(logging.INFO)
    try:
        with watch if collectives else contextlib.nullcontext():
            yield watch
    finally:
        room.removeHandler(handler)
        room.setLevel(level)
        DeviceRuntime.empty_cache = empty_cache  # type: ignore[method-assign]
        hook.remove()
