"""A real browser, spoken to through pipes (the DevTools protocol), without any network."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: Everything in it that would call home is off.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--no-proxy-server", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One page; ``said`` has what it wrote to its console."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.said: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def open(self, url: str, *, width: int, height: int = 900) -> None:
        """Load a page as wide as that; returns when it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.call("Page.navigate", url=url)
        while (event := self._next()).get("method") != "Page.loadEventFired":
            self._note(event)

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def screenshot(self, file: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = self._answers.read(65536)
            assert data, "the browser has gone"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Log.entryAdded":
            self.said.append(event["params"]["entry"]["text"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is missing; apt-get install chromium")
    its_commands, commands = os.pipe()
    answers, its_answers = os.pipe()
    script = f'exec "$@" 3<&{its_commands} 4>&{its_answers}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", program, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(its_commands, its_answers), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(its_commands)
    os.close(its_answers)
    try:
        yield Browser(commands, answers)
    finally:
        process.kill()
        process.wait()
