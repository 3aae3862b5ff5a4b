"""What a rank does with a checkpoint in which somebody has put code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megarl import env
from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import MegarlError
from tests.dist.refit_jobs import build
from tests.unpickling.sitecustomize import unexpected


def save(config: Mapping[str, Any], batch: Mapping[str, Any], directory: str) -> None:
    """A checkpoint after one step."""
    worker = build(config)
    groups = worker.backend.groups
    worker.train(
        data=BatchedDataDict(batch).shard_by_batch_size(groups.data_size)[groups.data_rank], loss_fn=NLLLoss()
    )
    worker.save_checkpoint(f"{directory}/weights", f"{directory}/optimizer")
    worker.backend.close()


_pickles: list[str] = []
_watches: list[bool] = []


def note_pickles(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook, which stays in the process; see ``tests/unpickling``."""
    if event == "pickle.find_class" and _watches and _watches[-1]:
        found = unexpected(f"{arguments[0]}.{arguments[1]}", sys._getframe(1))
        if found:
            _pickles.append(found)


def pickles_of_a_resume(config: Mapping[str, Any], batch: Mapping[str, Any], directory: str) -> list[str]:
    """What is unpickled, and by whom, where that is nobody who may, while a worker trains, saves and
    loads."""
    if not _watches:
        sys.addaudithook(note_pickles)
    _pickles.clear()
    _watches.append(True)
    try:
        save(config, batch, directory)
        assert load(config, [directory]) == [("", 0, "")]
    finally:
        _watches.append(False)
    return list(_pickles)


def load(config: Mapping[str, Any], directories: list[str]) -> list[tuple[str, int, str]]:
    """For each checkpoint: the error's class, its exit code and text; the last of them shall load.

    In an environment by which torch would unpickle whatever nobody has told it not to.
    """
    worker = build(config)
    told = []
    with env.variables(dict.fromkeys(env.UNSAFE, "1")):
        for directory in directories:
            try:
                worker.load_checkpoint(f"{directory}/weights", f"{directory}/optimizer")
                told.append(("", 0, ""))
            except MegarlError as error:
                told.append((type(error).__name__, error.exit_code, str(error)))
    worker.backend.close()
    return told
