"""Standard output and error that cannot end a change half-way: a full disk, ``| head``, ``>&-``.

An error of writing is remembered, not raised: what a rebuild says between two kernels must not
decide whether the second one is built. At the end it becomes the exit status.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import TYPE_CHECKING, TextIO

import typer

from gpuguard.errors import GpuguardError

if TYPE_CHECKING:
    from typing_extensions import Buffer


class _Stream(io.FileIO):
    """A descriptor that swallows what it cannot write, and keeps the first reason."""

    error: OSError | None = None

    def write(self, data: Buffer) -> int:
        """Say that all was written."""
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


class OutputError(GpuguardError):
    """What was asked for could not be printed; printed to stderr, never raised."""

    code = "output-failed"
    exit_status = os.EX_IOERR


class Output:
    """The two streams of this process; ``has_acted``: something on the host may be changed."""

    def __init__(self) -> None:
        self.has_acted = False
        self._stdout: _Stream | None = None

    def take_over(self) -> None:
        """Put streams that do not fail in the place of Python's."""
        if sys.stdin is None:  # closed: the next file that is opened would be it, for children too
            os.open(os.devnull, os.O_RDONLY)
        self._stdout = _stream_for(sys.stdout)
        sys.stdout = _text(self._stdout, sys.stdout, "strict")
        sys.stderr = _text(_stream_for(sys.stderr), sys.stderr, "backslashreplace")

    def conclude(self, status: int) -> int:
        """The exit status, if what was to be printed could not be."""
        sys.stdout.flush()
        error = None if self._stdout is None else self._stdout.error
        if error is None:
            return status
        what = f"standard output could not be written: {error.strerror}"
        if self.has_acted:
            done = "the change was made, as asked" if status == 0 else "see gpuguard status"
            typer.echo(f"gpuguard: {done}; {what}", err=True)
            return status
        if error.errno == errno.EPIPE:
            return 128 + signal.SIGPIPE  # the reader (head, a pager) had enough: nothing is wrong
        typer.echo(f"gpuguard: {what} [{OutputError.code}]", err=True)
        return OutputError.exit_status


def _stream_for(stream: TextIO | None) -> _Stream:
    if stream is None:  # closed; not writable, so that the first line fails as it should
        return _Stream(os.open(os.devnull, os.O_RDONLY), "w", closefd=False)
    return _Stream(stream.fileno(), "w", closefd=False)


def _text(raw: _Stream, before: TextIO | None, errors: str) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if before is None else before.encoding,
        errors=errors if before is None else before.errors,
        line_buffering=True,
    )
