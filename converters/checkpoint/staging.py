"""Write a directory atomically, so that interrupted work can be resumed.

Files are written to ``.NAME.partial`` next to the target, with a journal of the finished pieces, and the
directory is renamed at the end. The work may be divided into parts, each done by one process on any machine
that sees the disk. Each part has a journal, and the part that finds all others complete renames the
directory. A lock serialises the start and the end of parts.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from converters.checkpoint.artifacts import HF_DIRECTORY, TEMPLATES_DIRECTORY
from converters.checkpoint.manifest import MANIFEST_FILE, changed
from converters.errors import ChangedSourceError, ConversionError
from converters.files.atomic import fsync_directory, fsync_file, fsync_tree, rename_surely, whole_file

_JOURNAL = ".journal.jsonl"
_PART_JOURNAL = ".journal-{}-of-{}.jsonl"
_DONE = {"done": True}
# Seconds between flushes. A piece is recorded only after its data are on disk, so a kill may lose the work of
# this time.
_SECONDS_BETWEEN_RECORDS = 2.0


class Staging:
    """The unfinished directory, as a context manager. ``finish`` renames it to the target.

    If the block fails, finished pieces are kept for a resume, and the error message gives their directory and
    size. Work that cannot be resumed is deleted.

    Args:
        target: the final directory.
        plan: name -> fingerprint of everything that determines the output
            (``converters.checkpoint.manifest``). Unfinished work with another plan is deleted.
        overwrite: replace an existing target at the end.
        part: (number of this part from 1, number of parts); None for all of the work.
        others_in: returns the files in an existing target that must not be replaced.

    Raises:
        ConversionError: the target exists or cannot be created, or another process is writing it.

    Attributes:
        started_anew_because_of: names of the facts that have changed since an earlier run, whose work was
            deleted.
    """

    def __init__(
        self,
        target: Path,
        plan: Mapping[str, str],
        *,
        overwrite: bool = False,
        others_in: Callable[[Path], list[str]],
        part: tuple[int, int] | None = None,
    ) -> None:
        self.target, self._part = target, part
        check_target(target, overwrite, others_in)
        self.directory = _partial(target)
        # The directory is renamed or removed while the locks are held, so they are stored next to it.
        self._lock_path = target.parent / f".{target.name}{'' if part is None else f'.part-{part[0]}'}.lock"
        self._parts_lock_path = target.parent / f".{target.name}.parts.lock"
        self._journal_name = _JOURNAL if part is None else _PART_JOURNAL.format(*part)
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self._lock_file = _lock(self._lock_path)
            try:
                with self._no_other_part_begins_or_ends():
                    # Check again: another run may have created the target while this run waited for the lock.
                    check_target(target, overwrite, others_in)
                    self.directory.mkdir(exist_ok=True)
                    self.started_anew_because_of: list[str] = []
                    self._records = self._take_up(dict(plan))
                    # Append, because a resumed run keeps the earlier records.
                    self._journal = (self.directory / self._journal_name).open("a", encoding="utf-8")
                    if not self._records:
                        self._append({"plan": dict(plan)})
            except BaseException:
                self._unlock()
                raise
        except BlockingIOError as error:
            raise ConversionError(
                f"another process is writing {target}", "wait for it, or choose another directory"
            ) from error
        except OSError as error:
            raise ConversionError(
                f"{self.directory} cannot be made ({error})", "choose a directory that you may write to"
            ) from error
        self._waiting: list[tuple[dict[str, Any], Path]] = []
        self._finished_pieces = len(self.records)
        self._recorded_at = time.monotonic()
        self._mutex = threading.Lock()

    @property
    def records(self) -> list[dict[str, Any]]:
        """Records of the pieces that an earlier run finished."""
        return self._records[1:]

    def record(self, finished: dict[str, Any], file: Path) -> None:
        """Record that a piece is finished.

        Args:
            finished: record for the journal; JSON-compatible.
            file: file with the piece, which is flushed to disk before the record is written.
        """
        with self._mutex:
            self._waiting.append((finished, file))
            self._finished_pieces += 1
            # A flush waits for the disk, so do it only from time to time.
            if time.monotonic() - self._recorded_at > _SECONDS_BETWEEN_RECORDS:
                self._flush()

    def finish(self) -> None:
        """Flush everything to disk, and rename the directory to the target."""
        self.close_journal()
        # A journal marks the directory as unfinished, so remove it before the rename.
        for journal in self.directory.glob(".journal*"):
            journal.unlink()
        fsync_tree(self.directory)
        put_in_place(self.directory, self.target)
        self._unlock()

    def close_journal(self) -> None:
        """Flush the records to disk, and close the journal."""
        with self._mutex:
            if not self._journal.closed:
                self._flush()
                self._journal.close()

    def leave(self) -> None:
        """Close the journal and release the lock, without a rename: other parts are not finished."""
        self.close_journal()
        self._unlock()

    @contextlib.contextmanager
    def all_parts_but_the_last(self) -> Iterator[dict[int, list[dict[str, Any]]] | None]:
        """Mark this part as finished, take the common lock, and yield the state of the other parts.

        Every part marks itself before it takes the lock, and only one holds it at a time. So exactly one part
        finds all of them finished, and completes the directory.

        Yields:
            Part -> its records, for the other finished parts; None if another part has renamed the directory.

        Raises:
            ConversionError: another part has a different plan.
        """
        if self._part is None:
            yield {}
            return
        with self._mutex:
            self._flush()  # The data must be on disk before the mark.
            self._append(_DONE)
        self.close_journal()
        with self._no_other_part_begins_or_ends():
            yield self._records_of_others(*self._part) if self.directory.is_dir() else None

    @contextlib.contextmanager
    def _no_other_part_begins_or_ends(self) -> Iterator[None]:
        # A separate lock, because each part holds the lock of its journal while it works.
        lock = _lock(self._parts_lock_path, waits=True)
        try:
            yield
        finally:
            self._parts_lock_path.unlink(missing_ok=True)
            lock.close()

    def _records_of_others(self, own: int, count: int) -> dict[int, list[dict[str, Any]]]:
        found = {}
        for other in range(1, count + 1):
            records = (
                _read_journal(self.directory / _PART_JOURNAL.format(other, count)) if other != own else []
            )
            if records:
                self._refuse_other_plan(records[0].get("plan"), f"part {other}")
            # The first record is the plan; the last one marks a finished part.
            if records and records[-1] == _DONE:
                found[other] = records[1:-1]
        return found

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        try:
            self.close_journal()
            # If the source has changed, finished pieces are useless: they would be mixed with pieces of the
            # new source.
            is_of_use = self._finished_pieces > 0 and not isinstance(error, ChangedSourceError)
            if not is_of_use and isinstance(error, (Exception, KeyboardInterrupt)):
                self._remove_what_is_of_no_use()
        finally:
            self._unlock()
        left = f"{self.directory} keeps {_size_on_disk(self.directory) / 1e9:.2f} GB of finished work"
        if isinstance(error, KeyboardInterrupt):
            gone = (
                f"another part has finished {self.target}"
                if is_of_use
                else "nothing was finished, and nothing is left"
            )
            error.add_note(
                f"{left}; the same command continues from there" if self.directory.is_dir() else gone
            )
        if isinstance(error, ConversionError) and is_of_use:
            raise ConversionError(
                error.what,
                f"{error.fix}. {left}; the same command continues from there, or remove the directory",
                error.details,
            ) from error

    def _remove_what_is_of_no_use(self) -> None:
        """Delete this part's journal and, unless other parts have journals there, the directory."""
        with self._no_other_part_begins_or_ends():
            (self.directory / self._journal_name).unlink(missing_ok=True)
            if not any(self.directory.glob(".journal*")):
                shutil.rmtree(self.directory, ignore_errors=True)

    def _unlock(self) -> None:
        # Delete the file while it is locked. ``_lock`` notices that the file it waited for is gone, and
        # creates a new one.
        self._lock_path.unlink(missing_ok=True)
        self._lock_file.close()

    def _flush(self) -> None:
        # Flush the data first: a journal that is ahead would list pieces that a power failure has lost.
        for path in {file for _, file in self._waiting}:
            fsync_file(path)
        for finished, _ in self._waiting:
            self._append(finished)
        self._waiting = []
        os.fsync(self._journal.fileno())
        self._recorded_at = time.monotonic()

    def _append(self, entry: dict[str, Any]) -> None:
        self._journal.write(json.dumps(entry) + "\n")
        self._journal.flush()

    def _take_up(self, plan: dict[str, str]) -> list[dict[str, Any]]:
        self._plan = plan
        path = self.directory / self._journal_name
        others = [each for each in self.directory.glob(".journal*") if each != path]
        if self._part is None and others:
            raise ConversionError(
                f"{self.directory} holds parts of this work "
                f"({', '.join(sorted(each.name for each in others))})",
                "continue with --part, or remove the directory",
            )
        records = _read_journal(path)
        if self._part is not None:
            for each in others:
                if each.name == _JOURNAL or not each.name.endswith(f"-of-{self._part[1]}.jsonl"):
                    raise ConversionError(
                        f"{self.directory} holds work that is divided differently ({each.name})",
                        "continue with the same --part i/n on every machine, or remove the directory",
                    )
                self._refuse_other_plan((_read_journal(each) or [{}])[0].get("plan"), each.name)
        if records and records[0].get("plan") == plan:
            # ``_read_journal`` has dropped an incomplete last line. Drop the end mark too, because the part
            # starts again.
            records = [record for record in records if record != _DONE]
            # Rewrite the journal atomically, because a kill during the write would lose the list of all
            # finished pieces. Remove leftovers of such a kill, which would end up in the target.
            for torn in self.directory.glob(f".{path.name}.*.tmp"):
                torn.unlink()
            with whole_file(path) as file:
                file.write("".join(json.dumps(record) + "\n" for record in records).encode())
            return records
        if records:
            self.started_anew_because_of = changed(records[0].get("plan"), plan)
        # Without other parts, delete everything. Otherwise delete only this part's journal, which alone tells
        # what it has finished.
        for entry in self.directory.iterdir() if not others else [path] if records else ():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return []

    def _refuse_other_plan(self, found: Any, who: str) -> None:
        if found is not None and found != self._plan:
            raise ConversionError(
                f"{who} was planned differently: {', '.join(changed(found, self._plan))}",
                f"give all parts the same source and options, or remove {self.directory} to start over",
            )


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the plan, followed by the records; empty if there is no journal."""
    records: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return records
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # The run was killed while it wrote this line.
            break
        if not isinstance(record, dict):
            break
        records.append(record)
    return records


def _partial(target: Path) -> Path:
    return target.parent / f".{target.name}.partial"


def _lock(path: Path, *, waits: bool = False) -> IO[str]:
    """Open and lock a file. The lock lasts until the file is closed.

    Raises:
        BlockingIOError: another process holds the lock, and ``waits`` is False.
    """
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            # The previous holder may have deleted the file, even during this check.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
        except BaseException:
            file.close()
            raise
        # This file was deleted, so other processes would lock another one: try again.
        file.close()


def check_apart(source: Path, target: Path, *, may_be_inside: bool = False) -> None:
    """Check that the target and its unfinished directory do not overlap the source.

    Args:
        source: directory to read.
        target: directory to create.
        may_be_inside: the target may be inside the source, because only top-level files of it are read.

    Raises:
        ConversionError: one directory is, or contains, the other.
    """
    one = source.resolve()
    for other in (target.resolve(), _partial(target).resolve()):
        if one == other or other in one.parents or (one in other.parents and not may_be_inside):
            raise ConversionError(f"{target} and {source} overlap", "write to a directory outside the source")


def check_target(target: Path, overwrite: bool, others_in: Callable[[Path], list[str]]) -> None:
    """Check that a target may be created or replaced. An empty directory is accepted.

    Args:
        target: directory to create.
        overwrite: an existing directory may be replaced if ``others_in`` returns nothing for it.
        others_in: returns the files in a directory that must not be replaced.

    Raises:
        ConversionError: the target may not be written.
    """
    # A link counts as no directory, so that the directory that it leads to is never removed.
    is_directory = target.is_dir() and not target.is_symlink()
    if not os.path.lexists(target) or (is_directory and not any(target.iterdir())):
        return
    if not overwrite:
        raise ConversionError(f"{target} exists", "choose another directory, or replace it with --overwrite")
    found = others_in(target) if is_directory else ["it is not a directory"]
    if found:
        raise ConversionError(
            f"{target} is not only what this command writes and will not be overwritten",
            "choose another directory, or remove this one yourself",
            found,
        )


def others_than(known: re.Pattern[str], needed: str, directory: Path) -> list[str]:
    """Return the files of a directory that a command has not written, for ``check_target``.

    Args:
        known: pattern of the paths that the command writes.
        needed: name of a file that only this command writes.
        directory: an existing directory.
    """
    if not (directory / needed).is_file():
        names = sorted(path.name for path in directory.iterdir())
        return [f"it has no {needed}, but {', '.join(names)}"]
    return sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if not known.fullmatch(path.relative_to(directory).as_posix()) and not path.is_dir()
    )


_CONVERTED = re.compile(
    rf"\.metadata|metadata\.json|common\.pt|__[^/]*\.distcp|{re.escape(MANIFEST_FILE)}"
    rf"|{HF_DIRECTORY}/({TEMPLATES_DIRECTORY}/)?[^/]+"
)
# Checkpoints of training runs have no conversion manifest, so they are never overwritten.
others_than_converted = functools.partial(others_than, _CONVERTED, MANIFEST_FILE)


def follow_umask(directory: Path, written: Path) -> None:
    """Give the files of a directory the default mode. safetensors and some tokenizers create private files.

    Args:
        directory: directory of the files.
        written: a file with the mode that the umask gives.
    """
    # The umask can only be read by changing it, which would affect other threads.
    mode = stat.S_IMODE(written.stat().st_mode)
    for path in filter(Path.is_file, directory.rglob("*")):
        path.chmod(mode)


def _size_on_disk(directory: Path) -> int:
    """Return the allocated bytes of a directory's files, which may be sparse."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


def put_in_place(partial: Path, target: Path) -> None:
    """Rename ``partial`` to ``target``. An existing target is moved aside first, and restored if the rename
    fails."""
    # Use a name in the same directory, because a rename is atomic only within a file system.
    aside = target.parent / f".{target.name}.replaced-{uuid.uuid4().hex[:12]}"
    existed = os.path.lexists(target)
    if existed:
        rename_surely(target, aside)
    try:
        rename_surely(partial, target)
    except BaseException:
        if existed:
            rename_surely(aside, target)
        raise
    fsync_directory(target.parent)
    if existed:
        # The new directory is in place, so a failure to delete the old one is harmless.
        shutil.rmtree(aside, ignore_errors=True)
