"""Checks that the paths of a configuration respond. Access to a mount whose server is gone hangs
indefinitely, so each path is checked once with a time limit before anything else reads it. Later reads can
have a time limit too."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.models import POLICY, model_sections
from megarl.config.nested import at
from megarl.errors import ConfigError, DataError, Violation

T = TypeVar("T")

PATIENCE_S = 30.0
"""Time limit in seconds for a path to respond. A server that is merely busy is faster."""

_LOOK_S = 1.0
# CPU seconds between two checks above which the read makes progress. The checks themselves use less.
_BUSY_S = 0.001

_FIX = "check df and dmesg, remount it (umount -l first), or give another path"
_OF_MODELS = ("model_name", "tokenizer.name", "generation.model_name", "megatron_cfg.family_file")
_PLACES = (
    "data.cache_dir",
    "checkpointing.checkpoint_dir",
    "checkpointing.signing_key_file",
    "logger.log_dir",
)


def require_answers(places: Mapping[str, str], patience_s: float | None = None) -> None:
    """Check that paths respond in time; they need not exist.

    Args:
        places: paths, by the key or argument that sets them.
        patience_s: time limit in seconds for all paths together; None for ``PATIENCE_S``.

    Raises:
        ConfigError: some paths do not respond; it has one violation for each.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    # Start all checks before waiting for any, so that several dead mounts cost the time limit only once.
    looks = {path: _Look(path) for path in set(places.values())}
    end = time.monotonic() + patience_s
    silent = {path for path, look in looks.items() if not look.done.wait(max(end - time.monotonic(), 0.0))}
    if silent:
        bound = f"it has not answered for {patience_s:g} s, as on a mount whose server is gone"
        raise ConfigError(
            [Violation(key, path, bound, _FIX) for key, path in places.items() if path in silent]
        )


def read_in_time(read: Callable[[], T], place: str, patience_s: float | None = None) -> T:
    """Return the result of ``read``, or abandon it if it hangs. A slow read may take any time as long as the
    process uses the CPU.

    A path that responds may contain links to paths that do not, and a network file system's client may answer
    from its cache although the server is gone.

    Args:
        read: function without side effects. It runs in a thread of its own, which is abandoned if it hangs.
        place: path that is read, for the message.
        patience_s: seconds without CPU use of this process after which the read counts as hanging; None for
            ``PATIENCE_S``.

    Raises:
        DataError: the read hangs.
        Exception: any error of ``read``.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    reading = _Reading(read)
    busy, moved = _busy_s(), time.monotonic()
    while not reading.done.wait(min(_LOOK_S, patience_s)):
        now, used = time.monotonic(), _busy_s()
        if used > busy + _BUSY_S:
            busy, moved = used, now
        elif now - moved >= patience_s:
            raise DataError(
                f"{place}: it, or the target of its link, has not answered for {patience_s:g} s, "
                f"as on a mount whose server is gone. Fix: {_FIX}"
            )
    return reading.result()


def _busy_s() -> float:
    """Return the CPU seconds that all other threads of this process have used."""
    # Subtract this thread, which does nothing but these checks.
    return time.process_time() - time.thread_time()


class _Reading:
    """A function call in a daemon thread of its own, which does not keep the program from exiting."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self._read = read
        self._value: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="reads", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._read()
        # Catch every error: if the thread ended without setting ``done``, the read would seem to hang.
        except BaseException as error:
            self._error = error
        self.done.set()

    def result(self) -> Any:
        """Return the result of the finished call, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._value


class _Look:
    """Check of one path in a thread of its own. A thread that waits for a dead mount can be neither
    interrupted nor joined."""

    def __init__(self, path: str) -> None:
        self.done = threading.Event()
        threading.Thread(target=self._look, args=(path,), name=f"look at {path}", daemon=True).start()

    def _look(self, path: str) -> None:
        # A missing path has responded, too; the code that needs it reports it.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            _stat(Path(path).expanduser())
        self.done.set()


# A name in this module, which tests replace without patching os for all other code.
_stat: Callable[[Path], object] = os.stat


def places_of(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, path) for each key of a configuration that may hold a path; Hugging Face ids are
    included. The configuration need not be valid."""
    of_models = [f"{path}.{key}" for path in (POLICY, *model_sections(config)) for key in _OF_MODELS]
    for key in ("run_dir", *of_models, *_PLACES):
        value = at(config, key)
        if isinstance(value, str):
            yield key, value
    data = config.get("data")
    for name in ("train", "validation"):
        sources = data.get(name) if isinstance(data, Mapping) else None
        for place, source in enumerate(sources if isinstance(sources, list) else [sources]):
            if isinstance(source, Mapping) and isinstance(source.get("path"), str):
                yield f"data.{name}{f'.{place}' if isinstance(sources, list) else ''}.path", source["path"]


def nearest_directory(path: Path) -> Path:
    """Return ``path`` if it exists, else its nearest existing parent.

    Raises:
        OSError: the result is not a directory, or cannot be accessed.
    """
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return path
