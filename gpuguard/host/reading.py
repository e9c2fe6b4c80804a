"""Read files of a host so that "not there" and "could not look" stay apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuguard.errors import ProbeError
from gpuguard.host.port import Host

_MAX_BYTES = 64 << 20  # the longest text read here, dpkg's status, has 2 to 10 MB
_CHUNK = 1 << 18  # one read of 4 MB or more from /proc/sys fails with ENOMEM (proc_sysctl.c)


@contextmanager
def absent_is_none(absolute: str) -> Iterator[None]:
    """Turn what the system says about a path into ``FileNotFoundError`` or ``ProbeError``.

    ELOOP, EACCES, EIO, EISDIR mean "could not look"; only ENOENT and ENOTDIR mean "no".
    """
    try:
        yield
    except NotADirectoryError as error:
        raise FileNotFoundError(absolute) from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ProbeError(
            f"{absolute} cannot be read: {error.strerror or error}",
            hint="run it as root" if isinstance(error, PermissionError) else "",
        ) from error


def read_bytes(host: Host, absolute: str, *, max_bytes: int = _MAX_BYTES) -> bytes | None:
    """Content of a file inside the host, or None if there is none.

    Raises:
        ProbeError: it is there but cannot be read, or it is longer than ``max_bytes``.
    """
    try:
        with absent_is_none(absolute), host.path(absolute).open("rb") as file:
            content = bytearray()
            while len(content) <= max_bytes and (chunk := file.read(_CHUNK)):
                content += chunk
    except FileNotFoundError:
        return None
    if len(content) > max_bytes:
        raise ProbeError(f"{absolute} cannot be read: longer than {max_bytes} bytes")
    return bytes(content)


def read_text(host: Host, absolute: str) -> str | None:
    """As ``read_bytes``; bytes that are not UTF-8 become U+FFFD."""
    content = read_bytes(host, absolute)
    return None if content is None else content.decode("utf-8", "replace")


def list_dir(host: Host, absolute: str) -> tuple[str, ...]:
    """Sorted names in a directory inside the host; empty if it is not there.

    Raises:
        ProbeError: it is there but cannot be read.
    """
    try:
        with absent_is_none(absolute):
            return tuple(sorted(entry.name for entry in host.path(absolute).iterdir()))
    except FileNotFoundError:
        return ()


def real_path(host: Host, absolute: str) -> Path | None:
    """Where a path leads with all symlinks followed inside the root; None if nothing is there.

    Raises:
        ProbeError: a directory on the way cannot be searched.
    """
    try:
        with absent_is_none(absolute):
            return host.path(absolute).resolve(strict=True)
    except FileNotFoundError:
        return None
    except RuntimeError as error:  # pathlib before 3.13 says so for a symlink loop
        raise ProbeError(f"{absolute} cannot be read: {error}") from error
