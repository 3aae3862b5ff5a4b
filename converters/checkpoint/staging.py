"""A directory that appears whole or not at all, and whose unfinished work can be taken up again.

Work is done in ``.NAME.partial`` beside the target, with a journal of what is finished; at the end the directory is renamed. One process at
a time may work on it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from converters.checkpoint.manifest import changed
from converters.errors import ChangedSourceError, ConversionError

_JOURNAL = ".journal.jsonl"
# what a kill may cost: records wait so long for the data that they vouch for to be on disk
_SECONDS_BETWEEN_RECORDS = 2.0


class Staging:
    """The unfinished directory, as a context: ``finish`` gives it its name. If the block fails instead, finished work stays, to be
    taken up again, and the error says where and how much; none stays where no second run could go on with it.

    Args:
        target: the directory to be.
        plan: fingerprints of the work by the name of what decides about it (an option, a file of the source). A journal of other work
            is thrown away with its files (``converters.checkpoint.manifest``).
        overwrite: replace an existing target, at the end.
        is_ours: says of an existing directory whether it is of the kind that may be replaced.

    Raises:
        ConversionError: the target exists, cannot be made, or another process is at work on it.

    Attributes:
        started_anew_because_of: names of what has changed since an earlier run, whose work was thrown away for it.
    """

    def __init__(self, target: Path, plan: Mapping[str, str], *, overwrite: bool = False, is_ours: Callable[[Path], bool]) -> None:
        self.target = target
        check_target(target, overwrite, is_ours)
        self.directory = _partial(target)
        self._lock_path = target.parent / f".{target.name}.lock"
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self._lock_file = _lock(self._lock_path)
            self.directory.mkdir(exist_ok=True)
        except BlockingIOError as error:
            raise ConversionError(f"another process is writing {target}", "wait for it, or choose another directory") from error
        except OSError as error:
            raise ConversionError(f"{self.directory} cannot be made ({error})", "choose a directory that you may write to") from error
        try:
            # another run may have made the target while this one waited for nothing but its turn
            check_target(target, overwrite, is_ours)
            self.started_anew_because_of: list[str] = []
            self._records = self._take_up(dict(plan))
            self._journal = (self.directory / _JOURNAL).open("a", encoding="utf-8")
            if not self._records:
                self._append({"plan": dict(plan)})
        except BaseException:
            self._unlock()
            raise
        self._waiting: list[tuple[dict[str, Any], Path]] = []
        self._finished_pieces = len(self.records)
        self._recorded_at = time.monotonic()
        self._mutex = threading.Lock()

    @property
    def records(self) -> list[dict[str, Any]]:
        """Return what an earlier run finished, as it was given to ``record``."""
        return self._records[1:]

    def record(self, finished: dict[str, Any], file: Path) -> None:
        """Note that a piece of work in ``file`` is done. The journal says so once the file is on disk."""
        with self._mutex:
            self._waiting.append((finished, file))
            self._finished_pieces += 1
            if time.monotonic() - self._recorded_at > _SECONDS_BETWEEN_RECORDS:
                self._flush()

    def finish(self) -> None:
        """Force everything to disk and give the directory its name."""
        with self._mutex:
            self._flush()
        self._journal.close()
        (self.directory / _JOURNAL).unlink()
        flush_to_disk(self.directory)
        put_in_place(self.directory, self.target)
        self._unlock()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            return
        try:
            with self._mutex:
                if not self._journal.closed:
                    self._flush()
                    self._journal.close()
            is_of_use = self._finished_pieces > 0 and not isinstance(error, ChangedSourceError)
            if isinstance(error, Exception) and not is_of_use:
                shutil.rmtree(self.directory, ignore_errors=True)
        finally:
            self._unlock()
        if isinstance(error, ConversionError) and is_of_use:
            left = f"{self.directory} keeps {_size_on_disk(self.directory) / 1e9:.2f} GB of finished work"
            raise ConversionError(
                error.what, f"{error.fix}. {left}, with which the same command goes on; remove it otherwise", error.details
            ) from error

    def _unlock(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        self._lock_file.close()

    def _flush(self) -> None:
        for path in {file for _, file in self._waiting}:
            _sync(path)
        for finished, _ in self._waiting:
            self._append(finished)
        self._waiting = []
        os.fsync(self._journal.fileno())
        self._recorded_at = time.monotonic()

    def _append(self, entry: dict[str, Any]) -> None:
        self._journal.write(json.dumps(entry) + "\n")
        self._journal.flush()

    def _take_up(self, plan: dict[str, str]) -> list[dict[str, Any]]:
        path = self.directory / _JOURNAL
        records = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except ValueError:  # the line that was being written when the run ended
                    break
                if not isinstance(record, dict):
                    break
                records.append(record)
        if records and records[0].get("plan") == plan:
            # without the torn line that may be at the end
            path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
            return records
        if records:
            self.started_anew_because_of = changed(records[0].get("plan"), plan)
        for entry in self.directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return []


def _partial(target: Path) -> Path:
    return target.parent / f".{target.name}.partial"


def _lock(path: Path) -> IO[str]:
    """The locked file, which has to stay open.

    Raises:
        BlockingIOError: another process has it.
    """
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # who had it before removed it: what is locked is no longer what others will meet


def check_apart(source: Path, target: Path, *, may_be_inside: bool = False) -> None:
    """Refuse to write into what is being read, or to replace it; both by the target and by the unfinished directory beside it.

    Args:
        source: directory that is read.
        target: directory to be.
        may_be_inside: the target may lie in the source, of which only files at the top are read.

    Raises:
        ConversionError: one directory is, or lies in, the other.
    """
    one = source.resolve()
    for other in (target.resolve(), _partial(target).resolve()):
        if one == other or other in one.parents or (one in other.parents and not may_be_inside):
            raise ConversionError(f"{target} and {source} overlap", "write to a directory outside the source")


def check_target(target: Path, overwrite: bool, is_ours: Callable[[Path], bool]) -> None:
    """Refuse a target that may not be made, or not be replaced. An empty directory is taken.

    Args:
        target: directory to be.
        overwrite: it may replace one that is there, but of no other kind.
        is_ours: says of an existing directory, which is not empty, whether it is of that kind.

    Raises:
        ConversionError: it may not.
    """
    is_directory = target.is_dir() and not target.is_symlink()
    if not os.path.lexists(target) or (is_directory and not any(target.iterdir())):
        return
    if not overwrite:
        raise ConversionError(f"{target} exists", "choose another directory, or overwrite it (--overwrite, overwrite=True)")
    if not (is_directory and is_ours(target)):
        raise ConversionError(f"{target} is not a checkpoint directory and will not be overwritten", "choose another directory")


def follow_umask(directory: Path, written: Path) -> None:
    """Give the files of a directory the mode of one that was opened as usual; safetensors keeps its files from all other users.

    Args:
        directory: of the files.
        written: a file that the umask gave its mode.
    """
    mode = stat.S_IMODE(written.stat().st_mode)
    for path in filter(Path.is_file, directory.iterdir()):
        path.chmod(mode)


def flush_to_disk(directory: Path) -> None:
    """Force every file below a directory, and the directories themselves, to disk."""
    for root, _, files in os.walk(directory):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _size_on_disk(directory: Path) -> int:
    """Bytes that a directory takes; files may have holes."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(partial: Path, target: Path) -> None:
    """Rename; an existing target steps aside first and comes back if the rename fails."""
    aside = target.parent / f".{target.name}.replaced-{uuid.uuid4().hex[:12]}"
    existed = os.path.lexists(target)
    if existed:
        os.rename(target, aside)
    try:
        os.rename(partial, target)
    except BaseException:
        if existed:
            os.rename(aside, target)
        raise
    _sync(target.parent)
    if existed:
        shutil.rmtree(aside, ignore_errors=True)
