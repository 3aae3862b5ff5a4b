"""The secret of a run, by which its processes prove to one another on their sockets that they belong to it.

The driver draws it, and its workers get it by Ray, in the arguments of their start. A proof is an HMAC-SHA256
of a purpose and of what is proven, so that one made for one purpose is of no use for another; the secret
itself is never sent. Without a driver of megarl, as under ``torchrun``, there is no secret: everybody can
then make a proof, and meetings are as open as those of ``torch.distributed``.
"""

from __future__ import annotations

import functools
import hmac
import secrets

from megarl import env
from megarl.redaction import learn

VARIABLE = "MEGARL_RUN_SECRET"
"""Of a worker's environment, for itself and what it starts. Its name keeps it out of what Ray shows."""


@functools.cache
def drawn_secret() -> str:
    """This process's own secret for the workers that it starts: 64 hexadecimal digits, the same ones at every
    call."""
    secret = env.text(VARIABLE) or secrets.token_hex(32)
    # From now on logs and errors of this process show it as hidden.
    learn({VARIABLE: secret})
    return secret


def own_secret() -> str:
    """That of the run which this process belongs to: of a worker by its environment, of the driver once it
    has drawn one; empty without."""
    return env.text(VARIABLE) or (drawn_secret() if drawn_secret.cache_info().currsize else "")


def proof(purpose: str, *parts: str, secret: str | None = None) -> str:
    """64 hexadecimal digits that only somebody with the secret can make.

    Args:
        purpose: what the proof is for.
        parts: what is proven; each counts by itself, so that ``("ab", "c")`` is another proof than ``("a",
            "bc")``.
        secret: None for that of this process's run.
    """
    key = own_secret() if secret is None else secret
    message = b"".join(
        len(part).to_bytes(8, "big") + part for part in (text.encode() for text in (purpose, *parts))
    )
    return hmac.new(key.encode(), message, "sha256").hexdigest()


def proves(given: object, purpose: str, *parts: str, secret: str | None = None) -> bool:
    """Return whether ``given``, which may be anything, is that proof. Takes equally long for every wrong
    one."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(), proof(purpose, *parts, secret=secret).encode()
    )
