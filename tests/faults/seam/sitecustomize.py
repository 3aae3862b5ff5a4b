"""Faults that nobody can cause from outside of a process, in every Python process of a run: put this
directory on ``PYTHONPATH``.

Python imports a module of this name when it starts. Without ``MEGARL_TEST_FAULTS`` in the environment it does
nothing. With it, a file in the directory that the variable names is an order, and goes when it was carried
out:

* ``nan-RANK``, ``oom-RANK``, ``stuck-RANK``: the next layer that is trained on that rank gives NaN, has no
  memory, or waits for ever in a loop; by torch's own hook on all modules;
* ``eio-RANK`` or ``eio-driver`` with the lines mode (``read`` or ``write``), count and path: so many times
  that somebody opens a file below the path fails with EIO; by Python's own audit hook. A count of 99 lasts as
  long as the file. ``refused-eio-RANK`` gets a byte each time.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from typing import Any

DIRECTORY = os.environ.get("MEGARL_TEST_FAULTS", "")
LASTING = 99
_LOOK_SECONDS = 0.01
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_opening = threading.local()


def order(kind: str) -> str:
    """Path of the file that orders a fault of this process, which may have learned its rank since it
    began."""
    return os.path.join(DIRECTORY, f"{kind}-{os.environ.get('RANK', 'driver')}")


def take(path: str) -> bool:
    """Whether the order was there; nobody else carries it out."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def await_order_of_layers() -> None:
    """In a thread: put a hook on all modules once there is an order, so that without one no module is looked
    at."""
    while True:
        time.sleep(_LOOK_SECONDS)
        for kind in ("nan", "oom", "stuck"):
            if "RANK" in os.environ and os.path.exists(order(kind)):
                spoil_a_layer(kind)


def spoil_a_layer(kind: str) -> None:
    """Let the next layer fail that computes for a gradient, and wait until one has."""
    import torch

    done = threading.Event()

    def spoil(module: Any, arguments: Any, output: Any) -> Any:
        found = output if isinstance(output, torch.Tensor) else None
        if (
            done.is_set()
            or not torch.is_grad_enabled()
            or found is None
            or not found.requires_grad
            or not found.is_floating_point()
        ):
            return None
        if not take(order(kind)):
            return None
        done.set()
        while kind == "stuck":
            time.sleep(_LOOK_SECONDS)
        if kind == "oom":
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 MiB (ordered by a test)."
            )
        return found * float("nan")

    handle = torch.nn.modules.module.register_module_forward_hook(spoil)
    while not done.wait(_LOOK_SECONDS) and os.path.exists(order(kind)):
        pass
    handle.remove()


def refuse_to_open(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook."""
    if event != "open" or getattr(_opening, "looks", False):
        return
    path, _, flags = arguments
    if isinstance(path, int) or path is None:
        return
    _opening.looks = True
    try:
        fail = is_refused(os.fsdecode(path), flags)
    finally:
        _opening.looks = False
    if fail:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def is_refused(path: str, flags: int) -> bool:
    """Whether an order forbids to open this file now; counts it."""
    ordered = order("eio")
    try:
        with open(ordered) as stream:
            mode, count, below = stream.read().splitlines()
    except (OSError, ValueError):
        return False
    if not os.path.abspath(path).startswith(below) or bool(flags & _WRITES) != (mode == "write"):
        return False
    note_refusal(ordered)
    left = int(count)
    if left <= 1:
        return take(ordered)
    if left < LASTING:
        with open(ordered, "w") as stream:
            stream.write(f"{mode}\n{left - 1}\n{below}\n")
    return True


def note_refusal(ordered: str) -> None:
    """So that it is seen from outside that an order was carried out, and how often."""
    with open(os.path.join(DIRECTORY, f"refused-{os.path.basename(ordered)}"), "ab") as stream:
        stream.write(b".")


if DIRECTORY:
    threading.Thread(target=await_order_of_layers, name="ordered faults", daemon=True).start()
    sys.addaudithook(refuse_to_open)
