"""Watches a program and all its Python processes for pickles that are read where none should be: put this
directory on ``PYTHONPATH``.

Python imports a module of this name when it starts. From then on every class or function that a pickle names
is looked at: whoever reads the pickle has to be Ray, which carries calls and results, or ``multiprocessing``,
which tells children what to do; in a process group only what ``ALLOWED_IN_GROUP`` lists may be read. All else
is written, with the stack, into the directory that ``MEGARL_TEST_PICKLES`` names, as ``unpickled-PID``;
``watched-PID`` says that a process was watched.

Where ``MEGARL_TEST_SAID`` names another variable, every worker says its value, in its log and without one, as
careless code would.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

DIRECTORY = os.environ.get("MEGARL_TEST_PICKLES", "")

CHANNELS = ("/site-packages/ray/", "/dist-packages/ray/", f"{os.path.dirname(os.__file__)}/multiprocessing/")
"""Packages that read what Ray or a parent process has sent; not every directory of such a name."""

BETWEEN = (
    "/pickle.py",
    "/copyreg.py",
    "/torch/storage.py",
    "/torch/serialization.py",
    "/torch/_utils.py",
    "/numpy/",
    "/cloudpickle/",
)
"""Files that read for somebody else, who decides."""

GROUP = "/torch/distributed/distributed_c10d.py"
"""Reads objects that ranks of one process group send one another; they have proven to belong to it."""

ALLOWED_IN_GROUP = (
    "megatron.core.dist_checkpointing.mapping.",
    "pathlib.PosixPath",
    "torch.Size",
    "torch.bfloat16",
    "torch.distributed.checkpoint.",
    "torch.float",
    "torch.int",
    "torch.serialization._get_layout",
    "torch.uint8",
)
"""Starts of ``module.name`` that are read there: ranks tell one another what each of them saves, and the
first one the index of it."""


FSDP = "/torch/distributed/fsdp/_optim_utils.py"
"""Has the ranks of FSDP1 tell one another of their optimizer's state, numbers of it as tensors."""

ALLOWED_IN_FSDP = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor",
    "torch.distributed.fsdp.",
    "torch.storage._load_from_bytes",
)
"""The same of what is read for it alone."""


def look(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook."""
    if event != "pickle.find_class":
        return
    found = unexpected(f"{arguments[0]}.{arguments[1]}", sys._getframe(1))
    if found:
        write(f"unpickled-{os.getpid()}", found)


def unexpected(name: str, reader: FrameType | None) -> str:
    """What a pickle names, with the stack, where nobody should read one; else ""."""
    while reader is not None and any(part in reader.f_code.co_filename for part in BETWEEN):
        reader = reader.f_back
    path = "" if reader is None else reader.f_code.co_filename
    if path.endswith(GROUP):
        asker = reader
        while asker is not None and asker.f_code.co_filename.endswith(
            (GROUP, "/torch/distributed/c10d_logger.py")
        ):
            asker = asker.f_back
        of_fsdp = asker is not None and asker.f_code.co_filename.endswith(FSDP)
        expected = name.startswith(ALLOWED_IN_GROUP + (ALLOWED_IN_FSDP if of_fsdp else ()))
    else:
        expected = any(part in path for part in CHANNELS)
    return "" if expected else f"{name}{stack_of(reader)}\n"


def stack_of(frame: FrameType | None) -> str:
    """Files, lines and functions, innermost first."""
    lines = ""
    while frame is not None:
        lines += f"\n  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return lines


def write(name: str, text: str) -> None:
    """A line into the directory; by descriptors, as the process may be in the middle of anything."""
    descriptor = os.open(os.path.join(DIRECTORY, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def say(name: str) -> None:
    """In a thread: once this process has become a worker."""
    while "RANK" not in os.environ:
        time.sleep(0.01)
    logging.getLogger("careless").warning("logged: %s=%s", name, os.environ[name])
    print(f"printed: {os.environ[name]}", flush=True)


if os.environ.get("MEGARL_TEST_SAID"):
    threading.Thread(target=say, args=(os.environ["MEGARL_TEST_SAID"],), daemon=True).start()

if DIRECTORY:
    write(f"watched-{os.getpid()}", " ".join(sys.orig_argv) + "\n")
    sys.addaudithook(look)
