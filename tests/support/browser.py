"""A headless Chromium, driven by the DevTools protocol over a pipe: JSON messages, each ended by a zero byte."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
    "--host-resolver-rules=MAP *.example 127.0.0.1",  # names of sites, hostile ones among them
)
_PATIENCE_SECONDS = 60.0


class Browser:
    """One page. complaints: its console errors and uncaught exceptions, as text."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run one command of the protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def run(self, script: str) -> Any:
        """Run JavaScript and return its value, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = _PATIENCE_SECONDS) -> None:
        """Run a script until its value is true."""
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < deadline, f"{condition}: {self.run('document.body.innerText')}"
            time.sleep(0.05)

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size, in pixels."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        failure = self.call("Page.navigate", url=url).get("errorText")
        assert failure is None, failure
        self.wait("document.readyState === 'complete'")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            poll = select.poll()  # select() takes no descriptor above 1,023
            poll.register(self._answers, select.POLLIN)
            readable = poll.poll(1000 * _PATIENCE_SECONDS)
            assert readable, f"the browser said nothing for {_PATIENCE_SECONDS:g} s"
            data = os.read(self._answers, 2**16)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        details = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(details["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.complaints.append(details["entry"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled" and details["type"] in ("error", "assert"):
            self.complaints.append(json.dumps(details["args"]))


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """Start the browser with the profile folder `profile`; end it with the block."""
    assert PROGRAM is not None
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()
    # The browser reads commands from file 3 and answers on file 4.
    shell = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", PROGRAM, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(to_read, to_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)  # the browser ends when the pipe is closed
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)
