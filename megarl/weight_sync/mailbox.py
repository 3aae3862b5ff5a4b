"""Mailbox: what a rank of the policy and the engine's ranks that read its weights tell each other within a refit.

It is a few pages of shared memory that a publishing rank of the policy keeps for its lifetime, one a GPU, on a CPU one a host. In it stand
the number of the refit (its ticket), where the group of either slot lies, why a refit was given up, and what each reader has read. The
policy writes a slot again when all living readers have read what was in it.

Both sides go on whatever happens to the other. A reader that failed, or whose process ended, is waited for no longer; one that only stands
still, until the patience of the policy ends. A policy that failed says why; one whose process ended is missed by its lock. So after a refit
that failed the next one finds no one waiting.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megarl.errors import RefitError
from megarl.weight_sync.ipc import PAGE, SLOTS, SharedBlock, host_identity

READERS = 62
# seconds between two looks at the mailbox, the first and the longest: a group takes milliseconds
_PAUSES = 0.0001, 0.002
# looks between two questions whether the other side lives
_LOOKS_A_LIFE = 50

_OVER = "the policy gave the refit up and has begun another one, or an old handle was used again: see its own error, and refit anew"

# int64 words of a line of the first page: the policy's (session, ticket, groups posted, whether it was given up, groups whose slots were
# taken), then those of the readers: (process, session, ticket, groups read)
_WORDS = 8
_REFUSED = -1
# in place of a session while the policy goes from one refit to the next
_NO_SESSION = -1
# in front of what a page holds: int64 length and CRC-32
_HEAD = 16
# of the policy's process; those of the readers come after it
_LIFE = 0


class Mailbox:
    """The policy's side: one publishing rank.

    Args:
        on_gpu: the weights are in memory of this process's GPU; else any process of the host can read them.
        engine_rank: number, in its engine, of the ranks that the weights are for; None where they are for all.
    """

    def __init__(self, *, on_gpu: bool, engine_rank: int | None = None) -> None:
        self._block = SharedBlock.create((2 + SLOTS) * PAGE)
        self._block.lock(_LIFE)
        self._words, self._pages = _pages_of(self._block)
        self._on_gpu, self._engine_rank = on_gpu, engine_rank
        self._before = [0] * READERS

    def handle(self) -> dict[str, Any]:
        """Handle, of plain types, by which another process opens it."""
        return {"memory": self._block.handle(), "on_gpu": self._on_gpu, "engine_rank": self._engine_rank}

    def open(self, session: int, ticket: int) -> None:
        """Begin a refit: what was posted before counts no more."""
        self._words[0, 0] = _NO_SESSION
        self._words[0, 2:] = 0
        self._words[0, 1] = ticket
        self._words[0, 0] = session
        self._before = self._words[1 : 1 + READERS, 2].tolist()

    def take(self, index: int) -> None:
        """Note that the slot of group ``index`` is written from now on."""
        self._words[0, 4] = index + 1

    def post(self, index: int, payload: Mapping[str, Any]) -> None:
        """Tell where group ``index`` of the refit lies."""
        _write(self._pages[index % SLOTS], json.dumps(without_bytes(payload)))
        self._words[0, 2] = index + 1

    def give_up(self, session: int, ticket: int, reason: str) -> None:
        """Tell the readers of a refit that no more of it comes, and why."""
        if self._words[0, :2].tolist() != [session, ticket]:
            self.open(session, ticket)
        _write(self._pages[SLOTS], reason)
        self._words[0, 3] = 1

    def has_readers(self, session: int) -> bool:
        """Whether any living rank of the engines of ``session`` reads here."""
        return bool(self._readers(session))

    def wait_until_read(self, count: int, patience: float) -> None:
        """Until every living reader has read ``count`` groups of the refit, refused it, or is in a later one.

        Raises:
            RefitError: one of them has not after ``patience`` seconds.
        """
        if count <= 0:
            return
        session, ticket = self._words[0, :2].tolist()

        def late() -> list[int]:
            return [
                process
                for number, (process, _, theirs, read) in self._readers(session)
                # between two looks it may have ended this refit and entered the next one: it has not come yet only where it is as it was
                if (_REFUSED < read < count if theirs == ticket else theirs in (0, self._before[number]))
            ]

        if not _look(lambda: not late(), patience):
            processes = ", ".join(map(str, late()))
            raise RefitError(
                f"group {count - 1} of the weights was not read by process {processes} of an engine within {patience:g} s, so that its "
                "buffer cannot be used again: see what keeps the engine, and refit anew"
            )

    def _readers(self, session: int) -> list[tuple[int, list[int]]]:
        """Numbers and lines of the living readers that belong to ``session``."""
        table = self._words[1 : 1 + READERS].tolist()
        lines = [(number, line[:4]) for number, line in enumerate(table) if line[0] and line[1] == session]
        return [(number, line) for number, line in lines if self._block.is_locked(1 + number)]

    def close(self) -> None:
        """Let go of it."""
        self._block.close()


class MailboxReader:
    """The side of an engine's rank.

    Args:
        handle: of the policy's mailbox.
        session: number of the engines that take part in a refit together.

    Raises:
        RefitError: the mailbox is gone, or has no place for one more reader.
    """

    def __init__(self, handle: Mapping[str, Any], session: int) -> None:
        self._block = SharedBlock.attach(handle["memory"])
        self._words, self._pages = _pages_of(self._block)
        self._session = session
        self._policy = handle["memory"]["process"]
        self._before = 0
        for number in range(1, 1 + READERS):
            if self._block.lock(number):
                self._line = self._words[number]
                self._line[:4] = torch.tensor([os.getpid(), session, 0, 0])
                return
        self._block.close()
        raise RefitError(f"more than {READERS} processes read the weights of one policy rank: spread the engine over more ranks or hosts")

    def enter(self, ticket: int) -> None:
        """Take part in a refit from its first group on."""
        self._before = int(self._words[0, 1])
        self._line[3] = 0
        self._line[2] = ticket

    def payload(self, ticket: int, index: int, patience: float) -> dict[str, Any]:
        """Where group ``index`` of a refit lies, when the policy has posted it.

        Raises:
            RefitError: the policy has given the refit up, is in a later one, has ended, or posts nothing for ``patience`` seconds.
        """
        found: list[dict[str, Any]] = []
        here = [self._session, ticket]

        def is_there() -> bool:
            session, now, posted, given_up = self._words[0, :4].tolist()
            if [session, now] != here:
                self._require_refit(ticket)
                return False
            if given_up:
                raise RefitError(f"the policy gave the refit up: {_read(self._pages[SLOTS]) or 'see its own error'}; refit anew")
            # what is torn, by a machine that reorders writes, is read again
            text = _read(self._pages[index % SLOTS]) if posted > index else None
            if text is not None:
                found.append(_with_bytes(json.loads(text)))
            return bool(found)

        if not _look(is_there, patience, self._require_policy):
            raise RefitError(
                f"the policy's process {self._policy} has not posted group {index} of its weights in {patience:g} s: refit anew"
            )
        return found[0]

    def require(self, ticket: int, index: int) -> None:
        """Check that the slot of group ``index`` of a refit still holds it.

        Raises:
            RefitError: it does not.
        """
        session, now, posted, _, taken = self._words[0, :5].tolist()
        if (session, now) != (self._session, ticket) or not taken - SLOTS <= index < posted:
            raise RefitError(_OVER)

    def _require_refit(self, ticket: int) -> None:
        # the policy may have given this refit up and begun the next one between two looks; of two words that it writes one after the other,
        # what is seen twice was so
        seen = [self._words[0, :2].tolist() for _ in range(2)]
        if all(session == self._session and now not in (ticket, self._before) for session, now in seen):
            raise RefitError(_OVER)

    def _require_policy(self) -> None:
        if not self._block.is_locked(_LIFE):
            raise RefitError(f"the policy's process {self._policy} ended within a refit: start a new policy, and refit anew")

    def has_read(self, count: int) -> None:
        """This rank needs the first ``count`` groups no longer."""
        self._line[3] = count

    def refuse(self, ticket: int) -> None:
        """This rank reads no more of a refit; the policy does not wait for it."""
        self._line[3] = _REFUSED
        self._line[2] = ticket

    def close(self) -> None:
        """Let go of it; the policy waits for this reader no longer."""
        if not self._block.closed:
            self._line[0] = 0
            self._block.close()


def beside(mailboxes: Mapping[str, Mapping[str, Any]], device: str, engine_rank: int = 0) -> str:
    """The device of the policy's rank from which a rank of an engine takes its weights: its own, or on a CPU one of its host that is for
    it.

    Args:
        mailboxes: handles by the identity of the policy rank's device.
        device: identity of the engine rank's device.
        engine_rank: its number in its engine.

    Raises:
        RefitError: there is none.
    """
    for_it = {name: handle for name, handle in mailboxes.items() if handle["engine_rank"] in (None, engine_rank)}
    if device in for_it:
        return device
    here = (name for name, handle in for_it.items() if not handle["on_gpu"] and handle["memory"]["host"] == host_identity())
    found = next(here, None)
    if found is None:
        devices = ", ".join(sorted(for_it)) or "none"
        raise RefitError(f"no rank of the policy shares {device} (they are on {devices}): place both on the same devices")
    return found


def mailbox_for(mailboxes: Mapping[str, Mapping[str, Any]], device: str, engine_rank: int = 0) -> Mapping[str, Any]:
    """The mailbox that a rank of an engine reads; see ``beside``."""
    return mailboxes[beside(mailboxes, device, engine_rank)]


def _pages_of(block: SharedBlock) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The table, int64 [lines, ``_WORDS``], and the pages of text: one a slot, and one of why a refit was given up."""
    first, *others = block.bytes.split(PAGE)
    return first.view(torch.int64).view(-1, _WORDS), others[: SLOTS + 1]


def _write(page: torch.Tensor, text: str) -> None:
    content = text.encode()[: PAGE - _HEAD]
    page[_HEAD : _HEAD + len(content)] = torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8)[: len(content)]
    page[:_HEAD].view(torch.int64).copy_(torch.tensor([len(content), zlib.crc32(content)]))


def _read(page: torch.Tensor) -> str | None:
    """The text of a page; None where it is not whole yet."""
    length, number = page[:_HEAD].view(torch.int64).tolist()
    content = bytes(page[_HEAD : _HEAD + length].tolist())
    return content.decode(errors="replace") if zlib.crc32(content) == number else None


def without_bytes(value: Any) -> Any:
    """Plain values with bytes in hexadecimal, as JSON takes them."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return {key: without_bytes(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _with_bytes(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return bytes.fromhex(value["hex"]) if value.keys() == {"hex"} else {key: _with_bytes(one) for key, one in value.items()}


def _look(is_so: Callable[[], bool], patience: float, check: Callable[[], None] | None = None) -> bool:
    """Look until something is so, ``patience`` seconds at most; ``check`` may end it by an error, which counts where it still is not so."""
    ends, pause, looks = time.monotonic() + patience, _PAUSES[0], 0
    while not is_so():
        if time.monotonic() > ends:
            return False
        looks += 1
        if check is not None and looks % _LOOKS_A_LIFE == 0 and not is_so():
            check()
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
    return True
