"""A Chromium without a window, for tests: it opens a page, and takes keys and clicks as from a user.

Its debugging protocol is spoken over two pipes, JSON messages that end with a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
    ),
    *("--no-first-run", "--window-size=1100,1400", "--remote-debugging-pipe", "about:blank"),
)
_CODES = {"ArrowDown": 40, "Tab": 9, "Home": 36, "Backspace": 8}
_ABOVE_OURS = 10


class Browser:
    """A page in a browser.

    Attributes:
        faults: what its console says of errors, and addresses beside the page that were asked for.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        """Args:
        to_browser, from_browser: file descriptors of the pipes.
        """
        self.faults: list[str] = []
        self._to, self._from = to_browser, from_browser
        self._sent, self._rest, self._messages = 0, b"", deque[dict[str, Any]]()
        self._session: str | None = None
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(self, page: Path) -> None:
        """Open a file and wait until it has loaded."""
        self._ask("Page.navigate", url=page.as_uri())
        self._listen(lambda message: message.get("method") == "Page.loadEventFired")
        asked = [
            each
            for each in self.faults
            if each.startswith("asks for ") and each != f"asks for {page.as_uri()}"
        ]
        self.faults = [each for each in self.faults if not each.startswith("asks for ")] + asked

    def value(self, expression: str) -> Any:
        """What an expression in the page comes to, of the types of JSON."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def look(self, width: int, scheme: str) -> None:
        """Show pages as on a screen of that many pixels across, to a user who prefers light or dark ones."""
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str, times: int = 1) -> None:
        """Press a key, in whatever has the focus."""
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self._ask(
                    "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_CODES[key]
                )

    def write(self, text: str) -> None:
        """Write a text into whatever has the focus."""
        self._ask("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click on the middle of an element, which is brought into view."""
        box = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{box}.scrollIntoView({{block: 'center'}})")
        place = self.value(
            f"(r => ({{x: r.x + r.width / 2, y: r.y + r.height / 2}}))({box}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def picture(self, path: Path) -> None:
        """Write what a user sees as a PNG."""
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The reply to a command."""
        self._sent += 1
        number = self._sent
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        reply = self._listen(lambda message: message.get("id") == number)
        assert "error" not in reply, reply
        result: dict[str, Any] = reply["result"]
        return result

    def _listen(self, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first message that is wanted; what others say of faults is kept."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                self._note(message)
                if is_wanted(message):
                    return message
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has ended"
            *whole, self._rest = (self._rest + data).split(b"\0")
            self._messages.extend(map(json.loads, whole))

    def _note(self, message: dict[str, Any]) -> None:
        method, told = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.faults.append(str(told["exceptionDetails"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.faults.append(told["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.faults.append(f"a dialog: {told['message']}")
        elif method == "Network.requestWillBeSent":
            self.faults.append(f"asks for {told['request']['url']}")


@contextlib.contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """A browser whose profile lies in a directory; it ends with the block."""
    assert CHROMIUM is not None
    (hears, to_browser), (from_browser, says) = os.pipe(), os.pipe()
    # it hears at 3 and speaks at 4: above these first, so that neither is closed by the other
    above = [fcntl.fcntl(end, fcntl.F_DUPFD, _ABOVE_OURS) for end in (hears, says)]
    command = [
        "bash",
        "-c",
        f'exec "$@" 3<&{above[0]} 4>&{above[1]}',
        "bash",
        CHROMIUM,
        f"--user-data-dir={directory}",
        *_OPTIONS,
    ]
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            pass_fds=above,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        for end in (hears, says, *above):
            os.close(end)
        yield Browser(to_browser, from_browser)
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
