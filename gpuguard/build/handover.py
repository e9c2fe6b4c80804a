"""Take a file over from the build user: what root goes on with is root's own copy."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Taken:
    """What was copied."""

    sha256: str
    size: int


def take_over(source: Path, target: Path, *, mode: int = 0o644) -> Taken:
    """Copy a regular file, durably; a symlink, device or pipe in its place is refused.

    Raises:
        FileNotFoundError: there is no regular file (ELOOP for a symlink is one, too).
        FileExistsError: the target is there.
    """
    digest, size = hashlib.sha256(), 0
    with _open_regular(source) as origin, target.open("xb") as sink:
        while chunk := os.read(origin.fd, _CHUNK):
            digest.update(chunk)
            size += len(chunk)
            sink.write(chunk)
        os.fchmod(sink.fileno(), mode)
        sink.flush()
        os.fsync(sink.fileno())
    return Taken(digest.hexdigest(), size)


class _open_regular:  # noqa: N801 - reads like open()
    """A descriptor of a regular file; O_NONBLOCK, because opening a pipe would wait for ever."""

    def __init__(self, path: Path) -> None:
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path)) from error
            raise
        if not stat.S_ISREG(os.fstat(self.fd).st_mode):
            os.close(self.fd)
            raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))

    def __enter__(self) -> _open_regular:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
