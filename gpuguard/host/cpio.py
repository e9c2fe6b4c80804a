"""Stream through cpio archives in the "newc" format, the one that initramfs images use.

Format: the kernel's ``Documentation/driver-api/early-userspace/buffer-format.rst``: an
image is a row of archives, each plain or compressed, zero bytes between them. Only names,
types and content are given; links, owners and times are out of scope.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from gpuguard.errors import ProbeError

MAGICS = (b"070701", b"070702")  # without and with a checksum per file
_HEADER_BYTES = 110
_FIELDS = 13
_MODE, _SIZE, _NAME_SIZE = 1, 6, 11
_TRAILER = "TRAILER!!!"
_MAX_NAME = 4096
_MAX_MEMBERS = 1_000_000
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of an archive; its content, at byte ``begin``, while the file is open."""

    name: str
    mode: int
    size: int
    begin: int
    _file: IO[bytes]

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    def copy_to(self, sink: IO[bytes]) -> None:
        """Write the content to a file.

        Raises:
            ProbeError: the archive ends first.
        """
        self._file.seek(self.begin)
        left = self.size
        while left:
            chunk = self._file.read(min(left, _CHUNK))
            if not chunk:
                raise ProbeError(f"archive ends within '{self.name}'")
            sink.write(chunk)
            left -= len(chunk)


def members(file: IO[bytes]) -> Iterator[Member]:
    """Entries of all plain archives from where the file stands, in order.

    Ends at the end of the file or at the first byte that begins neither an archive nor
    padding; there the file then stands. Content is skipped by seeking, so the cost is one
    read per entry, whatever they weigh.

    Raises:
        ProbeError: not an archive, damaged, or truncated.
    """
    position = file.tell()
    total = file.seek(0, 2)
    for _ in range(_MAX_MEMBERS):
        file.seek(position)
        member = _read_member(file, position)
        end = member.begin + member.size
        if member.size and end > total:
            raise ProbeError(f"archive ends within '{member.name}'")
        position = _align4(end)
        if member.name != _TRAILER:
            yield member
            continue
        position = _skip_padding(file, position)
        if not is_archive(file):
            return
    raise ProbeError(f"archive has more than {_MAX_MEMBERS} entries")


def is_archive(file: IO[bytes]) -> bool:
    """True if a plain archive begins where the file stands; it stays there."""
    position = file.tell()
    head = file.read(len(MAGICS[0]))
    file.seek(position)
    return head in MAGICS


def _read_member(file: IO[bytes], position: int) -> Member:
    header = file.read(_HEADER_BYTES)
    if header[:6] not in MAGICS or len(header) != _HEADER_BYTES:
        raise ProbeError(f"no cpio entry at byte {position}")
    try:
        fields = [int(header[6 + 8 * i : 14 + 8 * i], 16) for i in range(_FIELDS)]
    except ValueError as error:
        raise ProbeError(f"damaged cpio entry at byte {position}") from error
    if not 0 < fields[_NAME_SIZE] <= _MAX_NAME:
        raise ProbeError(f"cpio entry at byte {position} has a name of {fields[_NAME_SIZE]} bytes")
    name = file.read(fields[_NAME_SIZE])
    if len(name) != fields[_NAME_SIZE]:
        raise ProbeError(f"archive ends within the entry at byte {position}")
    begin = _align4(position + _HEADER_BYTES + len(name))
    text = name.rstrip(b"\0").decode("utf-8", "replace")
    return Member(text, fields[_MODE], fields[_SIZE], begin, file)


def _skip_padding(file: IO[bytes], position: int) -> int:
    """Position of the first byte that is not zero, where the file then stands."""
    file.seek(position)
    while chunk := file.read(4096):
        rest = chunk.lstrip(b"\0")
        position += len(chunk) - len(rest)
        if rest:
            break
    return file.seek(position)


def _align4(position: int) -> int:
    # Alignment counts from the start of an archive, and archives start at multiples of 4.
    return (position + 3) & ~3
