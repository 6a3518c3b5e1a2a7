"""A real browser, driven over a pair of pipes: no driver, no socket, nothing to install beside Chromium itself."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT = 60.0
"""Timeout of an answer in seconds."""

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--no-default-browser-check", "--force-color-profile=srgb",
)  # fmt: skip

_START = """
import os, sys
spare = [os.dup(int(number)) for number in sys.argv[1:3]]  # either may be 3 or 4 itself
for spared, wanted in zip(spare, (3, 4)):
    os.dup2(spared, wanted)
    os.set_inheritable(wanted, True)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes the browser, with the pipes where it expects them."""


def find_chromium() -> str | None:
    """Path of Chromium; None if it is not installed."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if found := shutil.which(name):
            return found
    return None


class Browser:
    """One headless Chromium with one page; use it as a context."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="fedfa-chromium-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()  # Chromium reads commands from its descriptor 3 and answers on 4
        self._read, to_write = os.pipe()
        own = [f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(to_read), str(to_write), program, *FLAGS, *own],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._read)
        self._profile.cleanup()

    # -- talking ------------------------------------------------------------------------------------------------------
    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT
        while True:
            answer = self._next(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.append(answer)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium does not answer"
            piece = os.read(self._read, 1 << 20)
            assert piece, "Chromium has ended"
            self._buffer += piece
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        return message

    def wait_for(self, method: str, seconds: float = LIMIT) -> dict[str, Any]:
        """The next event of a kind that was not returned yet."""
        end = time.monotonic() + seconds
        while True:
            for place, event in enumerate(self.events):
                if event["method"] == method:
                    return self.events.pop(place)
            message = self._next(end)
            if "method" in message:
                self.events.append(message)

    # -- doing --------------------------------------------------------------------------------------------------------
    def window(
        self, width: int, height: int = 900, *, dark: bool = False, paper: bool = False, script: bool = True
    ) -> None:
        """Set size, theme and medium of the page."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", media="print" if paper else "", features=[scheme])
        self.ask("Emulation.setScriptExecutionDisabled", value=not script)

    def open(self, page: Path | str) -> None:
        """Load a page and wait until it is complete."""
        self.events.clear()
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression on the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Click on an element."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.evaluate(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def complaints(self) -> list[str]:
        """Errors and warnings of the page so far."""
        self.evaluate("0")  # events that precede the answer have arrived with it
        found = []
        for event in self.events:
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"].get("exception", parameters["exceptionDetails"])))
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(str(parameters["args"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Requested addresses, besides the page itself and its data URLs."""
        self.evaluate("0")
        sent = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [address for address in sent if not address.startswith(("data:", "file:"))]

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """A screenshot of the page."""
        options: dict[str, Any] = {"captureBeyondViewport": whole}
        if whole:
            size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", **options)["data"]))
        return path

    def pdf(self, path: Path) -> Path:
        """The page as PDF on A4."""
        answer = self.ask(
            "Page.printToPDF", paperWidth=8.27, paperHeight=11.69, preferCSSPageSize=True, printBackground=True
        )
        path.write_bytes(base64.b64decode(answer["data"]))
        return path


def scrolling(browser: Browser) -> Sequence[str]:
    """Frames that need scrolling, by name and widths; closed tables do not count."""
    found: Sequence[str] = browser.evaluate(
        """[...document.querySelectorAll('.scroll')].filter(e => !e.closest('details:not([open])')
             && e.scrollWidth > e.clientWidth + 1)
           .map(e => `${e.getAttribute('aria-label')}: ${e.scrollWidth} in ${e.clientWidth}`)"""
    )
    return found


def overflowing(browser: Browser) -> Sequence[str]:
    """Elements wider than the page, except inside scrolling frames."""
    found: Sequence[str] = browser.evaluate(
        """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll *') && e.id !== 'tip'
             && !e.closest('svg *') && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
           .map(e => e.tagName + '.' + (e.getAttribute('class') || '') + ' ' + e.textContent.slice(0, 40))"""
    )
    return found
