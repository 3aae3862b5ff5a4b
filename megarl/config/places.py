"""The places that a configuration names answer. What lies on a mount whose server is gone would be waited for without end, and by all that
comes after; so each is looked at once, with a deadline, before anything else touches it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config.models import POLICY, model_sections
from megarl.config.nested import at
from megarl.errors import ConfigError, Violation

PATIENCE_S = 30.0
"""That a place may take to say whether it is there; a server that is only busy does so in less."""

_OF_MODELS = ("model_name", "tokenizer.name", "generation.model_name", "megatron_cfg.family_file")
_PLACES = ("data.cache_dir", "checkpointing.checkpoint_dir", "checkpointing.signing_key_file", "logger.log_dir")


def require_answers(places: Mapping[str, str], patience_s: float | None = None) -> None:
    """Look at paths, whether something is there or not.

    Args:
        places: paths by the key or the argument that gives them.
        patience_s: seconds that all of them may take together; None for ``PATIENCE_S``.

    Raises:
        ConfigError: some do not answer.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    looks = {path: _Look(path) for path in set(places.values())}
    end = time.monotonic() + patience_s
    silent = {path for path, look in looks.items() if not look.done.wait(max(end - time.monotonic(), 0.0))}
    if silent:
        bound = f"it has not answered for {patience_s:g} s, as on a mount whose server is gone"
        fix = "see df and dmesg, mount it anew (umount -l), or give another place"
        raise ConfigError([Violation(key, path, bound, fix) for key, path in places.items() if path in silent])


class _Look:
    """A look at a place by a thread of its own: one that waits for a mount can neither be interrupted nor be waited for."""

    def __init__(self, path: str) -> None:
        self.done = threading.Event()
        threading.Thread(target=self._look, args=(path,), name=f"look at {path}", daemon=True).start()

    def _look(self, path: str) -> None:
        # what is not there is told by whoever needs it
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            _stat(Path(path).expanduser())
        self.done.set()


_stat: Callable[[Path], object] = os.stat


def places_of(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Dotted keys of a configuration, valid or not, and their paths; a hub's id is one like any other name."""
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
