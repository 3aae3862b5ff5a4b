"""The secret of a run, with which its processes prove to one another on their sockets that they belong to it.

The driver generates it, and its workers get it through Ray, in the arguments of their start. A proof is an
HMAC-SHA256 of a purpose and of the proven parts, so that a proof for one purpose is useless for another; the
secret itself is never sent. Without a driver of megarl, as under ``torchrun``, there is no secret: everybody
can then make a proof, and connections are as open as those of ``torch.distributed``.
"""

from __future__ import annotations

import functools
import hmac
import secrets

from megarl import env
from megarl.redaction import learn

VARIABLE = "MEGARL_RUN_SECRET"
"""Environment variable of a worker, for itself and its children. Its name keeps it out of what Ray shows."""


@functools.cache
def drawn_secret() -> str:
    """Return this process's own random secret for the workers that it starts: 64 hexadecimal digits, the same
    at every call."""
    secret = env.text(VARIABLE) or secrets.token_hex(32)
    # From now on logs and errors of this process hide the secret.
    learn({VARIABLE: secret})
    return secret


def own_secret() -> str:
    """Return the secret of this process's run: a worker's from its environment, the driver's once it has
    generated one; else empty."""
    return env.text(VARIABLE) or (drawn_secret() if drawn_secret.cache_info().currsize else "")


def proof(purpose: str, *parts: str, secret: str | None = None) -> str:
    """Return 64 hexadecimal digits that only a holder of the secret can compute.

    Args:
        purpose: what the proof is for.
        parts: the proven parts, which count separately: ``("ab", "c")`` gives another proof than ``("a",
            "bc")``.
        secret: None for that of this process's run.
    """
    key = own_secret() if secret is None else secret
    message = b""
    for part in map(str.encode, (purpose, *parts)):
        message += len(part).to_bytes(8, "big") + part
    return hmac.new(key.encode(), message, "sha256").hexdigest()


def proves(given: object, purpose: str, *parts: str, secret: str | None = None) -> bool:
    """Return whether ``given``, which may be anything, is that proof. Every wrong proof takes the
    same time."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(), proof(purpose, *parts, secret=secret).encode()
    )
