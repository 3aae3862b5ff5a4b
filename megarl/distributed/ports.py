"""A TCP port for a meeting that somebody else opens a little later."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Sequence
from pathlib import Path

# Ray's processes take theirs below, and the kernel above where nothing else is configured.
_QUIET = range(20_000, 32_768)
_ATTEMPTS = 100
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(address: str, ports: Sequence[int] = _QUIET) -> int:
    """A port of ``address`` out of ``ports`` that nobody listens on now, and that the kernel gives to nobody who does not ask by number.

    Between this answer and the server's bind, every connection and every bind to port 0 on this host takes a port of the kernel's range; a
    port out of that range is left alone unless somebody names it. Where the kernel's range leaves no such port of ``ports``, it is one of
    that range.

    Raises:
        OSError: the address is not one of this host, or has no free port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    candidates = _quiet_ports(ports)
    # the operating system's entropy: processes that seed ``random`` alike must not all ask for the same port
    random.SystemRandom().shuffle(candidates)
    for port in candidates[:_ATTEMPTS]:
        with contextlib.suppress(OSError):
            return _bound(family, address, port)
    return _bound(family, address, 0)


def _bound(family: int, address: str, port: int) -> int:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, port))
        return int(probe.getsockname()[1])


def _quiet_ports(ports: Sequence[int]) -> list[int]:
    try:
        first, last = map(int, _KERNELS_RANGE.read_text().split())
    except (OSError, ValueError):
        return []
    return [port for port in ports if not first <= port <= last]
