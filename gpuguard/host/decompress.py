"""Open a file that may be compressed, as plain bytes one can seek in.

Content goes through an unlinked temporary file, never through memory: a module weighs up
to hundreds of megabytes. gzip, xz, lzma and bzip2 come from the standard library, Zstandard
from the system's library, or its program where that is missing, LZ4 from its program.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, cast

from gpuguard.errors import CommandError, ProbeError
from gpuguard.host import zstd
from gpuguard.host.port import Host

_CHUNK = 1 << 20
_TIMEOUT = 120.0
#: An initramfs with all of NVIDIA's firmware and modules has 0.6 GB; beyond is a bomb.
_MAX_BYTES = 4 << 30

#: First bytes -> format. ``5d 00 00`` is lzma_alone with its usual properties; LZ4 is here
#: in the frame format and in the legacy one, which the kernel's initramfs needs (lz4 -l).
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\0": "xz",
    b"\x5d\0\0": "lzma",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x02\x21\x4c\x18": "lz4",
}
_TOOLS = {
    "zstd": ("zstd", "-dc", "-q", "--memory=1024MB"),
    "lz4": ("lz4", "-dc", "-q"),
}


def compression_of(head: bytes) -> str | None:
    """Name of the format that a file's first bytes show, None for plain content."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


@contextmanager
def decompressed(host: Host, path: Path, *, offset: int = 0) -> Iterator[BinaryIO]:
    """Open a file for reading and seeking, decompressed if its first bytes say so.

    The content decides, not the name, as in libkmod: a ``.ko.xz`` may hold plain ELF.

    Args:
        host: runs the tool, where one is needed.
        path: file that this process can open.
        offset: where the content begins; the file given has it at 0 if it was compressed,
            and stands at ``offset`` if it was not.

    Raises:
        ProbeError: unreadable, corrupt, truncated, too large, or the tool is missing.
    """
    with _errors_of(path):
        file = _open_regular(path)
    with file:
        with _errors_of(path):
            file.seek(offset)
            name = compression_of(file.read(8))
            file.seek(offset)
        if name is None:
            yield file
            return
        with temporary_file() as sink:
            with _errors_of(path):
                _decompress(host, name, file, path, sink)
                sink.seek(0)
            yield cast("BinaryIO", sink)


def _open_regular(path: Path) -> BinaryIO:
    # Without O_NONBLOCK, opening a pipe waits for somebody to write into it
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ProbeError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def _decompress(host: Host, name: str, file: BinaryIO, path: Path, sink: IO[bytes]) -> None:
    if name == "lz4" or (name == "zstd" and not zstd.is_available()):
        _run_tool(host, name, file, path, sink)
        return
    import lzma

    try:
        _write(zstd.chunks(file) if name == "zstd" else _standard_chunks(name, file), sink)
    except (EOFError, OSError, lzma.LZMAError, zlib.error, zstd.ZstdError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the data; gzip and bz2 use a bare OSError for bad data
        raise ProbeError(f"{path} is not readable {name} data: {error}") from error


def _standard_chunks(name: str, file: BinaryIO) -> Iterator[bytes]:
    # Imported here: together 8 ms, and most hosts need none of them.
    import bz2
    import gzip
    import lzma

    source: gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile
    if name == "gzip":
        source = gzip.GzipFile(fileobj=file)
    elif name == "bzip2":
        source = bz2.BZ2File(file)
    else:
        source = lzma.LZMAFile(file)  # noqa: SIM115 - closed below
    with source:
        while chunk := source.read(_CHUNK):
            yield chunk


def _write(chunks: Iterator[bytes], sink: IO[bytes]) -> None:
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > _MAX_BYTES:
            raise ProbeError(f"decompressed content is larger than {_MAX_BYTES >> 30} GiB")
        sink.write(chunk)


def _run_tool(host: Host, name: str, file: BinaryIO, path: Path, sink: IO[bytes]) -> None:
    tool = _TOOLS[name]
    if not host.has_program(tool[0]):
        raise ProbeError(
            f"{path} is compressed with {name}, and there is no program {tool[0]}",
            hint=f"install {tool[0]}",
            code="decompressor-missing",
        )
    limit = ("prlimit", f"--fsize={_MAX_BYTES}") if host.has_program("prlimit") else ()
    with _source_for_tool(file, path) as source:
        try:
            host.run(*limit, *tool, stdin=source, stdout=path_of(sink), timeout=_TIMEOUT)
        except CommandError as error:
            raise ProbeError(
                f"{path} is not readable {name} data: {error.message}", detail=error.detail
            ) from error


@contextmanager
def _source_for_tool(file: BinaryIO, path: Path) -> Iterator[Path]:
    """The compressed content as a file of its own: programs start reading at 0."""
    if file.tell() == 0:
        yield path
        return
    with temporary_file() as tail:
        shutil.copyfileobj(file, tail, _CHUNK)
        tail.flush()
        yield path_of(tail)


def path_of(file: IO[bytes]) -> Path:
    """A name for an open, unlinked file, for this process and for ``Host.run``."""
    # Opening the link opens the unlinked file anew, at position 0 (proc(5)).
    return Path(f"/proc/self/fd/{file.fileno()}")


def temporary_file() -> IO[bytes]:
    """A new unlinked file for something large."""
    # file-hierarchy(7): large files go to /var/tmp, /tmp may be memory. TMPDIR wins.
    directory = None if os.environ.get("TMPDIR") else "/var/tmp"  # noqa: S108
    with suppress(OSError):
        return tempfile.TemporaryFile(dir=directory)
    return tempfile.TemporaryFile()


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProbeError(f"{path} cannot be read: {error.strerror or error}") from error
