"""Connections on which nothing is ever said: each ends with the process on its other side, and so tells that it is gone.

gloo does not tell in every case. An operation whose bytes are on their way while its peer dies waits until its own time is over, on
either side, and neither ``abort`` nor the peer's closed connection ends it (torch 2.13).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
import select
import socket
import time
from typing import Any

from megarl.distributed.run_secret import proof, proves

_HELLO_SECONDS = 5.0
_PROOF_BYTES, _NUMBER_BYTES = 64, 4
# a host that vanished without a word is missed after about half a minute; so often a connection shows a firewall that it is used
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class Liveness:
    """Those of one rank.

    Args:
        lines: connection by number of the member on its other side.
    """

    def __init__(self, lines: dict[int, socket.socket]) -> None:
        self._lines = lines
        for line in lines.values():
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                line.setsockopt(socket.IPPROTO_TCP, option, value)

    @classmethod
    def keep(cls, store: Any, name: str, ip: str, port: int, count: int, left: datetime.timedelta) -> Liveness:
        """A sender's: wait for one of each of ``count`` others.

        Args:
            store: where they read the address.
            name: of this sender in the store.
            ip, port: of the store, to which the others found their way.
            count: of those that come.
            left: longest time until all are there.

        Raises:
            OSError: they were not.
        """
        ends = time.monotonic() + left.total_seconds()
        word = secrets.token_hex(16)
        family, own = _own_address(ip, port)
        lines: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as unfinished, socket.create_server((own, 0), family=family, backlog=count) as server:
            store.set(name, json.dumps([own, server.getsockname()[1], word]))
            while len(lines) < count:
                server.settimeout(max(0.01, ends - time.monotonic()))
                line, _ = server.accept()
                unfinished.enter_context(line)
                line.settimeout(_HELLO_SECONDS)
                said = _received(line, _PROOF_BYTES + _NUMBER_BYTES)
                number = int.from_bytes(said[_PROOF_BYTES:], "big")
                if proves(said[:_PROOF_BYTES].decode(errors="replace"), "lifeline", word, name, str(number)):
                    lines[number] = line
                else:
                    # another program
                    line.close()
            unfinished.pop_all()
        return cls(lines)

    @classmethod
    def hold(cls, store: Any, names: dict[int, str], number: int, left: datetime.timedelta) -> Liveness:
        """An engine rank's: one to each sender.

        Args:
            store: has the senders' addresses.
            names: of the senders in the store, by their numbers.
            number: of this rank.
            left: longest time until all are connected.

        Raises:
            OSError, RuntimeError: one is not there.
        """
        store.wait(list(names.values()), left)
        lines: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as unfinished:
            for sender, name in names.items():
                ip, port, word = json.loads(store.get(name))
                line = socket.create_connection((ip, port), timeout=left.total_seconds())
                lines[sender] = unfinished.enter_context(line)
                line.sendall(proof("lifeline", word, name, str(number)).encode() + number.to_bytes(_NUMBER_BYTES, "big"))
            unfinished.pop_all()
        return cls(lines)

    def lost(self) -> list[int]:
        """Numbers of the members that are gone."""
        numbers = {line.fileno(): number for number, line in self._lines.items()}
        # not select(), which takes no descriptor above 1,023
        poll = select.poll()
        for descriptor in numbers:
            poll.register(descriptor, select.POLLIN)
        # nobody says anything: what can be read is the end
        return sorted(numbers[descriptor] for descriptor, _ in poll.poll(0))

    def close(self) -> None:
        """Tell the others that this rank is gone."""
        for line in self._lines.values():
            # to close it says nothing while a forked process has it too
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        self._lines = {}


def _own_address(ip: str, port: int) -> tuple[socket.AddressFamily, str]:
    """That this host has on the way to another one."""
    family, kind, _, _, address = socket.getaddrinfo(ip, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return family, str(probe.getsockname()[0])


def _received(line: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer from one that has no more to say."""
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < count and (more := line.recv(count - len(said))):
            said += more
    return said
