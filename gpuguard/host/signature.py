"""Whose signature a module carries.

At the end of a file stand a PKCS #7 message (RFC 5652, in DER), ``struct module_signature``
(Linux, include/linux/module_signature.h) and a line of text. The message names a certificate,
either by issuer and serial number or by key identifier; the names given here are those, with
a prefix that tells which. Out of scope: is the signature right. Only the kernel finds out.
"""

from __future__ import annotations

import hashlib
import re
import struct
from typing import BinaryIO

TRAILER = b"~Module signature appended~\n"
_HEADER = struct.Struct(">2xB5xI")  # two algorithms, kind, lengths of another kind; size
_PKCS7 = 2
_MAX_BYTES = 1 << 16  # one signer without certificates: some 700 bytes
_INTEGER, _SEQUENCE, _VERSION, _KEY_ID = 0x02, 0x30, 0xA0, 0x80  # tags of X.690
#: The extension subjectKeyIdentifier: its OID, then the value as a string within a string.
_SUBJECT_KEY_ID = re.compile(rb"\x06\x03\x55\x1d\x0e\x04.\x04(.)", re.DOTALL)
_LONG_FORM = 0x80
_MAX_LENGTH_BYTES = 4


def is_signed(file: BinaryIO) -> bool:
    """True if an open module ends as a signed one does, whatever stands before that."""
    end = file.seek(0, 2)
    file.seek(max(0, end - len(TRAILER)))
    return file.read() == TRAILER


def signer_of(file: BinaryIO) -> str | None:
    """Which certificate an open module's signature names; None: there is no signature."""
    if not is_signed(file):
        return None
    end = file.seek(0, 2) - len(TRAILER) - _HEADER.size
    if end <= 0:
        return None
    file.seek(end)
    kind, size = _HEADER.unpack(file.read(_HEADER.size))
    if kind != _PKCS7 or not 0 < size <= min(end, _MAX_BYTES):
        return None
    file.seek(end - size)
    try:
        return _signer(file.read(size))
    except (ValueError, IndexError):
        return None


def names_of_certificate(der: bytes) -> tuple[str, ...]:
    """The names that signatures may call a certificate by; empty if it is none."""
    try:
        fields = _elements(_elements(_elements(der)[0][1])[0][1])
        if fields[0][0] == _VERSION:
            del fields[0]
        (kind, serial), _, (issuer_kind, issuer) = fields[:3]
    except (ValueError, IndexError):
        return ()
    if kind != _INTEGER or issuer_kind != _SEQUENCE:
        return ()
    match = _SUBJECT_KEY_ID.search(der)
    by_key = (f"key:{der[match.end() : match.end() + match[1][0]].hex()}",) if match else ()
    return (_by_issuer(issuer, serial), *by_key)


def _signer(message: bytes) -> str | None:
    _, (_, content) = _elements(_elements(message)[0][1])[:2]
    signed_data = _elements(_elements(content)[0][1])
    signer_info = _elements(_elements(signed_data[-1][1])[0][1])
    kind, name = signer_info[1]
    if kind == _KEY_ID:
        return f"key:{name.hex()}"
    if kind != _SEQUENCE:
        return None
    (_, issuer), (_, serial) = _elements(name)
    return _by_issuer(issuer, serial)


def _by_issuer(issuer: bytes, serial: bytes) -> str:
    return f"serial:{serial.hex()}:{hashlib.sha256(issuer).hexdigest()[:16]}"


def _elements(data: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each element of a row of them; tags of one byte, as in all of these."""
    found, position = [], 0
    while position < len(data):
        tag, length, begin = data[position], data[position + 1], position + 2
        if length & _LONG_FORM:
            count = length & ~_LONG_FORM
            if not 0 < count <= _MAX_LENGTH_BYTES:
                raise ValueError("a length that DER does not have")
            length = int.from_bytes(data[begin : begin + count], "big")
            begin += count
        position = begin + length
        if position > len(data):
            raise ValueError("an element ends after the data")
        found.append((tag, data[begin:position]))
    return found
