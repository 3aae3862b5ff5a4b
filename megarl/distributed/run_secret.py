"""The secret of a run, with which its processes prove to each other that they belong to the run.

The driver generates it, and workers get it through Ray in their start arguments. A proof is an HMAC-SHA256 of
a purpose and of the proven values, so it is useless for any other purpose. The secret itself is never sent
over the processes' own sockets. Without a megarl driver, as under ``torchrun``, the secret is empty: anybody
can compute a proof, and connections are as open as those of ``torch.distributed``.
"""

from __future__ import annotations

import functools
import hmac
import secrets

from megarl import env
from megarl.redaction import learn

VARIABLE = "MEGARL_RUN_SECRET"
"""Environment variable with the secret, for a worker and its child processes. Because its name looks like
that of a secret, Ray is not given it to show."""


@functools.cache
def drawn_secret() -> str:
    """Return the random secret that this process gives to its workers: 64 hexadecimal digits, generated at
    the first call."""
    secret = env.text(VARIABLE) or secrets.token_hex(32)
    # Redact the secret in this process's logs and errors from now on.
    learn({VARIABLE: secret})
    return secret


def own_secret() -> str:
    """Return the secret of this process's run: a worker's from its environment, the driver's if it has
    generated one, otherwise an empty string."""
    return env.text(VARIABLE) or (drawn_secret() if drawn_secret.cache_info().currsize else "")


def proof(purpose: str, *parts: str, secret: str | None = None) -> str:
    """Return 64 hexadecimal digits that can only be computed with the secret.

    Args:
        purpose: purpose of the proof, such as the name of a message.
        parts: the proven values. Their boundaries count: ``("ab", "c")`` and ``("a", "bc")`` give different
            proofs.
        secret: None for the secret of this process's run.
    """
    key = own_secret() if secret is None else secret
    message = b""
    for part in map(str.encode, (purpose, *parts)):
        message += len(part).to_bytes(8, "big") + part
    return hmac.new(key.encode(), message, "sha256").hexdigest()


def proves(given: object, purpose: str, *parts: str, secret: str | None = None) -> bool:
    """Return whether ``given`` is the ``proof`` of these values. It may be any object, and comparing takes
    the same time for every wrong proof."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(), proof(purpose, *parts, secret=secret).encode()
    )
