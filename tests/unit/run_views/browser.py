"""A headless Chromium, driven by the DevTools protocol over a pipe: no driver, no port and no other package."""

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """The path of a Chromium on this machine; CHROMIUM names another one."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a browser.

    Attributes:
        events: Events of the browser so far: requests, console messages and errors of the page.
    """

    def __init__(self, process: subprocess.Popen[bytes], read: int, write: int) -> None:
        self._process, self._read, self._write = process, read, write
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found["error"]
                return found.get("result", {})
            self.events.append(found)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> None:
        """Open a file in a window of a size, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        self._wait_for("Page.loadEventFired")

    def eval(self, script: str) -> Any:
        """Evaluate JavaScript in the page, which its policy does not hinder, and return the value."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press a key, such as ArrowLeft."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def requests(self) -> list[str]:
        """The addresses that the page requested, beside those of its own file and its own data."""
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith(("file:", "data:"))]

    def problems(self) -> list[str]:
        """Errors of scripts, refused content and messages on the console."""
        kinds = (
            "Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled", "Page.javascriptDialogOpening",
        )  # fmt: skip
        return [json.dumps(event["params"])[:500] for event in self.events if event.get("method") in kinds]

    def _clip(self, is_whole: bool) -> dict[str, Any]:
        if not is_whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            content = os.read(self._read, 1 << 20)
            assert content, "the browser has ended"
            self._buffer += content
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Run a Chromium whose files are in a folder."""
    program = find_chromium()
    assert program is not None
    to_read, to_write = os.pipe(), os.pipe()

    def use_pipes() -> None:
        # The protocol reads descriptor 3 and writes descriptor 4. Copies first: the pipes may have these numbers.
        read, write = os.dup(to_read[0]), os.dup(to_write[1])
        read, write = (os.dup(each) if each in (3, 4) else each for each in (read, write))
        os.dup2(read, 3)
        os.dup2(write, 4)

    arguments = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--disable-dev-shm-usage",
    ]  # fmt: skip
    arguments += [f"--user-data-dir={folder}", "--no-first-run", "--disable-background-networking", "about:blank"]
    process = subprocess.Popen(
        [program, *arguments], close_fds=False, preexec_fn=use_pipes, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.close(to_read[0])
    os.close(to_write[1])
    try:
        yield Page(process, to_write[0], to_read[1])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_write[0])
        os.close(to_read[1])
