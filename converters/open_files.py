"""Files that are used again and again, of which only a few stay open: a checkpoint may have more than a process may open."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from converters.errors import ConversionError
from converters.regular_file import require_regular

_MOST = 16


@dataclass(slots=True)
class _Open:
    descriptor: int
    users: int = 0


class OpenFiles:
    """A pool of open files. Safe to be used from several threads.

    Args:
        writing: open the files for reading and writing; they have to exist.
        most: as many stay open when nobody uses them. A file in use is never closed.
    """

    def __init__(self, writing: bool = False, most: int = _MOST) -> None:
        self._flags, self._most = (os.O_RDWR if writing else os.O_RDONLY) | os.O_CLOEXEC, most
        # the one used last is the last
        self._open: OrderedDict[Path, _Open] = OrderedDict()
        self._identities: dict[Path, tuple[int, int]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def use(self, path: Path) -> Iterator[int]:
        """The descriptor of a file, open as long as the ``with`` block lasts; its position belongs to nobody.

        Raises:
            ConversionError: it cannot be opened, or is another file than it was at its first use.
        """
        with self._lock:
            entry = self._open.get(path) or self._opened(path)
            entry.users += 1
            self._open.move_to_end(path)
            self._close_down_to(self._most)
        try:
            yield entry.descriptor
        finally:
            with self._lock:
                entry.users -= 1
                self._close_down_to(self._most)

    def close(self) -> None:
        """Close every file that is not in use; a later use opens it again."""
        with self._lock:
            self._close_down_to(0)

    def __del__(self) -> None:
        for entry in getattr(self, "_open", {}).values():
            with suppress(OSError):
                os.close(entry.descriptor)

    def _opened(self, path: Path) -> _Open:
        try:
            descriptor = os.open(require_regular(path), self._flags)
        except OSError as error:
            raise ConversionError(f"{path} cannot be read ({error})", "check the file and its permissions, or fetch it again") from error
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        if self._identities.setdefault(path, identity) != identity:
            os.close(descriptor)
            raise ConversionError(f"{path} has changed while it was in use", "run it again, and leave the checkpoint alone meanwhile")
        self._open[path] = _Open(descriptor)
        return self._open[path]

    def _close_down_to(self, most: int) -> None:
        """Close what was not used for longest, and is not in use, until no more than ``most`` are open."""
        for path in list(self._open):
            if len(self._open) <= most:
                return
            if self._open[path].users == 0:
                os.close(self._open.pop(path).descriptor)
