"""Look into a unified kernel image: kernel, initrd and command line as one program for EFI.

Format: PE/COFF (Microsoft's specification); which sections there are: the UAPI Group's
"Unified Kernel Image" specification. Only section headers and the section asked for are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gpuguard.errors import ProbeError
from gpuguard.host.decompress import path_of, temporary_file
from gpuguard.host.port import Host
from gpuguard.host.reading import absent_is_none

_DOS = struct.Struct("<2s58xI")  # "MZ", …, offset of the PE header
_PE = struct.Struct("<4s2xH12xH2x")  # "PE\0\0", number of sections, size of optional header
_SECTION = struct.Struct("<8sIIII16x")  # name, virtual size, address, raw size, raw offset
_MAX_SECTIONS = 96  # Windows' own limit; a unified image has about ten
_MAX_TEXT = 1 << 16
_CHUNK = 1 << 20


def is_unified(path: Path) -> bool:
    """True if a file is a program for EFI, by its first bytes."""
    with path.open("rb") as file:
        return file.read(2) == b"MZ"


def read_section(host: Host, image: str, name: str) -> str | None:
    """Text of a small section (``.uname``, ``.cmdline``), None if there is no such section.

    Raises:
        ProbeError: no unified image, damaged, or it cannot be read.
    """
    try:
        with absent_is_none(image), host.path(image).open("rb") as file:
            found = _find(file, image, name)
            if found is None:
                return None
            file.seek(found[0])
            content = file.read(min(found[1], _MAX_TEXT))
    except FileNotFoundError as error:
        raise ProbeError(f"{image} is not there") from error
    return content.rstrip(b"\0").decode("utf-8", "replace").strip()


@contextmanager
def initrd_inside(path: Path, image: str) -> Iterator[Path | None]:
    """A file with the initrd of a unified image as long as the context lasts; None: without.

    Raises:
        ProbeError: no unified image, damaged, or it cannot be read.
    """
    with absent_is_none(image), path.open("rb") as file:
        found = _find(file, image, ".initrd")
        if found is None:
            yield None
            return
        with temporary_file() as copy:
            file.seek(found[0])
            left = found[1]
            while left and (chunk := file.read(min(left, _CHUNK))):
                copy.write(chunk)
                left -= len(chunk)
            if left:
                raise ProbeError(f"{image} ends within its initrd")
            copy.flush()
            yield path_of(copy)


def _find(file: BinaryIO, image: str, name: str) -> tuple[int, int] | None:
    """Offset and size of a section's content."""
    try:
        magic, offset = _DOS.unpack(file.read(_DOS.size))
        file.seek(offset)
        signature, count, optional = _PE.unpack(file.read(_PE.size))
        if magic != b"MZ" or signature != b"PE\0\0" or count > _MAX_SECTIONS:
            raise ProbeError(f"{image} is not a readable unified kernel image")
        file.seek(optional, 1)
        headers = [_SECTION.unpack(file.read(_SECTION.size)) for _ in range(count)]
    except struct.error as error:
        raise ProbeError(f"{image} is not a readable unified kernel image: {error}") from error
    for raw_name, virtual_size, _, raw_size, raw_offset in headers:
        if raw_name.rstrip(b"\0") == name.encode():
            return raw_offset, min(virtual_size or raw_size, raw_size)
    return None
