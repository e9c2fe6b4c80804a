"""The log of one build, kept whole on disk, and the little of it that a person needs."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

from gpuguard.host import Host
from gpuguard.state import LOGS_DIR

_KEEP = 30  # logs; one has about 300 kB
_TAIL = 25
_MAX_SHOWN = 300  # characters of one line; a template error can have many thousands
_ERROR = re.compile(r"\berror:", re.IGNORECASE)  # gcc, ld, and modpost's "ERROR: modpost:"
_MAKE = re.compile(r"\*\*\* |\bError \d")
_PLACE = re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+)(?::\d+)?: +(?P<text>.*)$")
_FULL = "No space left on device"


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """The line that says why; ``place`` is file:line inside the source tree, or empty."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.place else self.text


class BuildLog:
    """Writes lines to a file and keeps the first error and the last lines of a section.

    ``line`` is called from the thread that reads a program's output, where an exception would
    be lost: a write that fails is remembered, and ``disk_full`` says so.
    """

    def __init__(self, path: Path, tree: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._file: TextIO = os.fdopen(os.open(path, flags, 0o640), "w", 1, "utf-8", "replace")
        self._tree = f"{tree}/"
        self.failure: OSError | None = None
        self.disk_full = False
        self.lines = 0
        self._last: deque[str] = deque(maxlen=_TAIL)
        self._compiler: ErrorLine | None = None
        self._make: ErrorLine | None = None

    def __enter__(self) -> BuildLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as failure:
            self.failure = self.failure or failure

    @property
    def tail(self) -> str:
        """The last 25 lines of the section."""
        return "\n".join(self._last)

    @property
    def first_error(self) -> ErrorLine | None:
        """The first line with ``error:`` of the section; without one, make's own complaint."""
        return self._compiler or self._make

    def section(self, title: str) -> None:
        """Begin a new program's output."""
        self.lines = 0
        self._last.clear()
        self._compiler = self._make = None
        self._write(f"=== {title}")

    def line(self, text: str) -> None:
        """Take one line of output."""
        self.lines += 1
        self._last.append(text[:_MAX_SHOWN])
        if _FULL in text:
            self.disk_full = True
        if self._compiler is None and _ERROR.search(text):
            self._compiler = self._error_line(text)
        elif self._make is None and _MAKE.search(text):
            self._make = self._error_line(text)
        self._write(text)

    def _error_line(self, text: str) -> ErrorLine:
        text = text.strip()[:_MAX_SHOWN].replace(self._tree, "")
        match = _PLACE.match(text)
        if match is None:
            return ErrorLine("", text)
        return ErrorLine(f"{match['file']}:{match['line']}", match["text"])

    def _write(self, text: str) -> None:
        if self.failure is not None:
            return
        try:
            self._file.write(f"{text}\n")
        except OSError as error:
            self.failure = error


def new_log(host: Host, release: str) -> tuple[str, Path]:
    """A name for a new log, inside the host and as this process opens it; old ones go."""
    folder = host.make_dir(LOGS_DIR)
    old = sorted(folder.glob("build-*.log"), key=lambda path: path.stat().st_mtime)
    for path in old[: -_KEEP + 1]:
        path.unlink(missing_ok=True)
    stem = f"build-{release}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    name, number = f"{stem}.log", 1
    while (folder / name).exists():  # two builds within one second
        name, number = f"{stem}.{number}.log", number + 1
    return f"{LOGS_DIR}/{name}", folder / name
