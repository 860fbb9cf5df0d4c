"""A headless Chromium, driven through the DevTools protocol over two pipes: no package, no port, no network."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars", "--disable-gpu"),
    *("--no-sandbox", "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking"),
)
PATIENCE = 60  # seconds for one answer


def found() -> str | None:
    """The path of a browser on this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. `errors` and `requests` collect what it says and asks for since it was opened.

    errors: exceptions that no one caught, what was written to the console as an error, and refusals of the content
        security policy. requests: URLs, without `data:` and `blob:`.
    """

    def __init__(self, executable: str, profile: Path):
        reads, browser_writes = os.pipe()
        browser_reads, writes = os.pipe()
        # The protocol is spoken on the descriptors 3 and 4.
        command = f'exec "$@" 3<&{browser_reads} 4>&{browser_writes}'
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", command, "browser", executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(browser_reads, browser_writes),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(browser_reads)
        os.close(browser_writes)
        self.reads, self.writes, self.rest, self.count = reads, writes, b"", 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        self.session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        os.close(self.writes)
        os.close(self.reads)
        os.killpg(self.process.pid, signal.SIGKILL)  # its own group: the browser and its helpers
        self.process.wait()

    def open(self, path: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Opens a file and waits until its pictures are drawn."""
        self.errors, self.requests, self.loaded = [], [], False
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until("document.documentElement.dataset.drawn === 'yes' || !document.getElementById('not-drawn').hidden")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Waits until an expression holds. It may fail while the page loads."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.evaluate(f"(() => {{ try {{ return !!({expression}) }} catch {{ return false }} }})()"):
                return
            time.sleep(0.05)
        raise AssertionError(f"still not so: {expression}; errors of the page: {self.errors}")

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; events that arrive before it are noted."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._next()
            if heard.get("id") == self.count:
                assert "error" not in heard, f"{method}: {heard['error']}"
                return heard["result"]
            self._note(heard.get("method", ""), heard.get("params", {}))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.reads], [], [], PATIENCE)
            data = os.read(self.reads, 1 << 20) if ready else b""
            assert data, f"the browser said nothing for {PATIENCE} s, or ended (exit code {self.process.poll()})"
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, details: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            thrown = details["exceptionDetails"]
            self.errors.append(thrown.get("exception", {}).get("description", thrown["text"]))
        elif event == "Runtime.consoleAPICalled" and details["type"] in ("error", "assert"):
            self.errors.append(str([each.get("description", each.get("value")) for each in details["args"]]))
        elif event == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.errors.append(details["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            url = details["request"]["url"]
            self.requests += [] if url.startswith(("data:", "blob:")) else [url]
