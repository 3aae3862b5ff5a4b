"""The places that a configuration names answer. What is on a mount whose server is gone would be waited for
without end, and by all that comes after; so each is looked at once, with a deadline, before anything else
touches it. What only reads can be given up later, too."""

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
"""That a place may take to say whether it is there; a server that is only busy does so in less."""

_LOOK_S = 1.0
# Of processor time between two looks, by which something is read; what the looks themselves take is less.
_BUSY_S = 0.001

_FIX = "see df and dmesg, mount it anew (umount -l), or give another place"
_OF_MODELS = ("model_name", "tokenizer.name", "generation.model_name", "megatron_cfg.family_file")
_PLACES = (
    "data.cache_dir",
    "checkpointing.checkpoint_dir",
    "checkpointing.signing_key_file",
    "logger.log_dir",
)


def require_answers(places: Mapping[str, str], patience_s: float | None = None) -> None:
    """Look at paths, whether something is there or not.

    Args:
        places: paths by the key or the argument that gives them.
        patience_s: seconds that all of them may take together; None for ``PATIENCE_S``.

    Raises:
        ConfigError: some do not answer.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    # All looks begin before the first is waited for: several dead mounts cost the patience once.
    looks = {path: _Look(path) for path in set(places.values())}
    end = time.monotonic() + patience_s
    silent = {path for path, look in looks.items() if not look.done.wait(max(end - time.monotonic(), 0.0))}
    if silent:
        bound = f"it has not answered for {patience_s:g} s, as on a mount whose server is gone"
        raise ConfigError(
            [Violation(key, path, bound, _FIX) for key, path in places.items() if path in silent]
        )


def read_in_time(read: Callable[[], T], place: str, patience_s: float | None = None) -> T:
    """Return what ``read`` returns, however long that takes, unless it stands still.

    A place that answers may lead to others that do not, and a client of a network file system may answer from
    memory what its server would not say.

    Args:
        read: only reads; called by a thread of its own, which is left to itself where it stands still.
        place: that it reads, for the message.
        patience_s: seconds without use of the processor, by this process, after which it is given up; None
            for ``PATIENCE_S``.

    Raises:
        DataError: it stands still. All that ``read`` raises is raised as well.
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
                f"{place}: it, or what it leads to, has not answered for {patience_s:g} s, as on a mount "
                f"whose server is gone. Fix: {_FIX}"
            )
    return reading.result()


def _busy_s() -> float:
    """Processor time of the other threads of this process."""
    return time.process_time() - time.thread_time()


class _Reading:
    """A call by a thread of its own, which does not keep the program from ending."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self._read = read
        self._value: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="reads", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._read()
        # Of any kind: without ``done`` the end of the thread would pass for a mount that is gone.
        except BaseException as error:
            self._error = error
        self.done.set()

    def result(self) -> Any:
        """Return or raise what it returned or raised."""
        if self._error is not None:
            raise self._error
        return self._value


class _Look:
    """A look at a place by a thread of its own: one that waits for a mount can neither be interrupted nor be
    waited for."""

    def __init__(self, path: str) -> None:
        self.done = threading.Event()
        threading.Thread(target=self._look, args=(path,), name=f"look at {path}", daemon=True).start()

    def _look(self, path: str) -> None:
        # a path that does not exist is reported by whoever needs it
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            _stat(Path(path).expanduser())
        self.done.set()


# A name of this module, which a test can replace without changing os for everybody.
_stat: Callable[[Path], object] = os.stat


def places_of(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield dotted keys of a configuration, valid or not, and their paths; a hub's id is one like any other
    name."""
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
    """Return the directory itself or the one above it that exists.

    Raises:
        OSError: it is a file, or below one.
    """
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return path
