"""Read what identifies a kernel module: GNU build-id and the .modinfo section.

Only a few kilobytes are read, by seeking: a module may weigh hundreds of megabytes.
``modinfo`` does not print the build-id, and one run of it per file would cost more than
all the reading here. Format: elf(5); relocatable 64- or 32-bit objects of either byte order.
Out of scope: anything that is not a module.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from gpuguard.errors import ProbeError
from gpuguard.host.signature import is_signed, signer_of

_SHT_NOTE = 7
_NT_GNU_BUILD_ID = 3
_MAX_SECTIONS = 20_000  # a debug build of nvidia.ko has some 2,000
_MAX_SECTION_BYTES = 1 << 20  # .modinfo, notes and names are a few kB; more is garbage


@dataclass(frozen=True, slots=True)
class ElfModule:
    """Build-id in lower-case hex (None: no such note), .modinfo (first value of a key wins).

    ``signer`` as in ``host.signature``; None although ``signed``: it is no signature.
    """

    build_id: str | None
    modinfo: dict[str, str]
    signed: bool
    signer: str | None = None


@dataclass(frozen=True, slots=True)
class _Section:
    name: int  # offset into the section name table
    type: int
    offset: int
    size: int


def read_module(file: BinaryIO) -> ElfModule:
    """Read a module's identity from an open, uncompressed, seekable file.

    Raises:
        ProbeError: not an ELF object, truncated, or without a module's sections.
    """
    try:
        sections, names, order = _sections(file)
        return ElfModule(
            build_id=_build_id(file, sections, order),
            modinfo=_modinfo(file, sections, names),
            signed=is_signed(file),
            signer=signer_of(file),
        )
    except (struct.error, ValueError, OverflowError) as error:
        raise ProbeError(
            f"not a readable kernel module: {error}", code="module-unreadable"
        ) from error


def parse_build_id_note(note: bytes, byte_order: str = "<") -> str | None:
    """The build-id in the bytes of a note section, as in ``/sys/module/*/notes/``."""
    position = 0
    while position + 12 <= len(note):
        name_size, description_size, kind = struct.unpack_from(f"{byte_order}III", note, position)
        name_at = position + 12
        description_at = name_at + _align4(name_size)
        end = description_at + description_size
        if end > len(note):
            return None
        if kind == _NT_GNU_BUILD_ID and note[name_at : name_at + name_size] == b"GNU\0":
            return note[description_at:end].hex() or None
        position = description_at + _align4(description_size)
    return None


def _sections(file: BinaryIO) -> tuple[list[_Section], bytes, str]:
    head = _read(file, 0, 64)
    if head[:4] != b"\x7fELF":
        raise ValueError("no ELF header")
    if head[4] not in (1, 2) or head[5] not in (1, 2):
        raise ValueError("unknown ELF class or byte order")
    is_64, order = head[4] == 2, "<" if head[5] == 1 else ">"  # noqa: PLR2004 - EI_CLASS
    if is_64:
        (table,) = struct.unpack_from(f"{order}Q", head, 40)
        entry_size, count, names_index = struct.unpack_from(f"{order}HHH", head, 58)
    else:
        (table,) = struct.unpack_from(f"{order}I", head, 32)
        entry_size, count, names_index = struct.unpack_from(f"{order}HHH", head, 46)
    layout = struct.Struct(f"{order}IIQQQQ" if is_64 else f"{order}IIIIII")
    if not 0 < count <= _MAX_SECTIONS or names_index >= count or entry_size < layout.size:
        raise ValueError("no usable section table (truncated?)")
    raw = _read(file, table, entry_size * count)
    sections = []
    for index in range(count):
        name, kind, _, _, offset, size = layout.unpack_from(raw, index * entry_size)
        sections.append(_Section(name, kind, offset, size))
    return sections, _content(file, sections[names_index]), order


def _build_id(file: BinaryIO, sections: list[_Section], order: str) -> str | None:
    for section in sections:
        if section.type == _SHT_NOTE and section.size:
            found = parse_build_id_note(_content(file, section), order)
            if found:
                return found
    return None


def _modinfo(file: BinaryIO, sections: list[_Section], names: bytes) -> dict[str, str]:
    for section in sections:
        if names[section.name :].split(b"\0", 1)[0] == b".modinfo":
            return dict(reversed(list(_pairs(_content(file, section)))))
    raise ValueError("no .modinfo section")


def _pairs(content: bytes) -> Iterator[tuple[str, str]]:
    for item in content.split(b"\0"):
        key, equals, value = item.partition(b"=")
        if equals:
            yield key.decode("utf-8", "replace"), value.decode("utf-8", "replace")


def _content(file: BinaryIO, section: _Section) -> bytes:
    if section.size > _MAX_SECTION_BYTES:
        raise ValueError(f"section of {section.size} bytes")
    return _read(file, section.offset, section.size)


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"truncated: {size} bytes expected at offset {offset}, {len(data)} there")
    return data


def _align4(size: int) -> int:
    return (size + 3) & ~3
