"""The tool ``http``: sends each call to a remote service as an HTTP POST with the arguments as JSON."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from megarl.rollout.message_env import EnvironmentLostError

_LARGEST_REPLY = 1 << 22
_BUSY = frozenset({408, 429})
_MOVED = frozenset({301, 302, 303, 307, 308})


class _Stays(urllib.request.HTTPRedirectHandler):
    """Redirect handler that follows none, because urllib would send a GET without the call's arguments."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_Stays)


def post(url: str, timeout_s: float, **arguments: Any) -> str:
    """Send a tool call to a service and return the text of its reply.

    If the reply is a JSON object with a key ``output``, ``result`` or ``content`` (in this order), the value
    of that key is returned instead.

    Raises:
        EnvironmentLostError: the service is unreachable, overloaded, redirects, or exceeds the timeout; no
            call can cause this.
        ValueError: the service rejects this call (other 4xx statuses).
    """
    request = urllib.request.Request(
        url, json.dumps(arguments).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with _OPENER.open(request, timeout=timeout_s) as reply:
            content = reply.read(_LARGEST_REPLY)
            # http.client raises no error if a sized read ends before Content-Length, so check the remaining
            # length.
            if reply.length and len(content) < _LARGEST_REPLY:
                raise http.client.IncompleteRead(content, reply.length)
            said = content.decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        if error.code in _MOVED:
            raise EnvironmentLostError(
                f"{url} redirects to {error.headers.get('Location')}. Fix: give that address as its url"
            ) from error
        if error.code in _BUSY or error.code >= 500:
            raise EnvironmentLostError(f"{url} replied with status {error.code}") from error
        raise ValueError(f"the service refused the call (status {error.code})") from error
    # HTTPException covers connections closed in the middle of a reply, and replies that are not HTTP.
    except (OSError, http.client.HTTPException) as error:
        raise EnvironmentLostError(f"{url} does not answer: {error}") from error
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        return said
    for key in ("output", "result", "content"):
        if isinstance(found, dict) and key in found:
            found = found[key]
            break
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
