"""Streaming Zstandard through the system's ``libzstd.so.1``.

On Debian and Ubuntu dpkg itself needs that library, so it is there where the ``zstd``
program may not be; and 50 modules (Ubuntu's ``.ko.zst``, ten kernels) take 0.1 s instead of
50 starts of a program at 15 ms. Python has no binding of its own before 3.14.
Source: zstd.h, the streaming API, stable since 1.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import IO

_CHUNK = 1 << 17  # ZSTD_DStreamInSize and OutSize are near this
_WINDOW_LOG_MAX = (100, 30)  # parameter ZSTD_d_windowLogMax: allow --long=30, 1 GiB


class ZstdError(Exception):
    """Not Zstandard data, corrupt, or truncated."""


class _Buffer(ctypes.Structure):
    """ZSTD_inBuffer and ZSTD_outBuffer."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("pos", ctypes.c_size_t))


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libzstd.so.1")
    except OSError:
        return None
    library.ZSTD_createDStream.restype = ctypes.c_void_p
    library.ZSTD_freeDStream.argtypes = (ctypes.c_void_p,)
    library.ZSTD_DCtx_setParameter.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    library.ZSTD_decompressStream.restype = ctypes.c_size_t
    library.ZSTD_decompressStream.argtypes = (
        ctypes.c_void_p, ctypes.POINTER(_Buffer), ctypes.POINTER(_Buffer)
    )  # fmt: skip
    library.ZSTD_isError.argtypes = (ctypes.c_size_t,)
    library.ZSTD_getErrorName.argtypes = (ctypes.c_size_t,)
    library.ZSTD_getErrorName.restype = ctypes.c_char_p
    return library


def is_available() -> bool:
    """True if the library can be loaded."""
    return _library() is not None


def chunks(source: IO[bytes]) -> Iterator[bytes]:
    """Decompress from where the file stands to its end; frames may follow one another.

    Raises:
        ZstdError: what is there is not whole, sound Zstandard data.
    """
    library = _library()
    if library is None:
        raise ZstdError("libzstd.so.1 cannot be loaded")
    with _stream(library) as stream:
        room = ctypes.create_string_buffer(_CHUNK)
        expected = 1  # what the decoder still waits for; 0 at the end of a frame
        while data := source.read(_CHUNK):
            keep = ctypes.c_char_p(data)
            given = _Buffer(ctypes.cast(keep, ctypes.c_void_p), len(data), 0)
            full = True  # the last call filled the room: there may be more inside
            while given.pos < given.size or full:
                out = _Buffer(ctypes.addressof(room), _CHUNK, 0)
                expected = library.ZSTD_decompressStream(
                    stream, ctypes.byref(out), ctypes.byref(given)
                )
                if library.ZSTD_isError(expected):
                    raise ZstdError(library.ZSTD_getErrorName(expected).decode())
                full = out.pos == _CHUNK and expected != 0  # 0: the frame is out, all of it
                yield ctypes.string_at(room, out.pos)
        if expected:
            raise ZstdError("truncated")


@contextmanager
def _stream(library: ctypes.CDLL) -> Iterator[int]:
    stream: int = library.ZSTD_createDStream()
    try:
        library.ZSTD_DCtx_setParameter(stream, *_WINDOW_LOG_MAX)
        yield stream
    finally:
        library.ZSTD_freeDStream(stream)
