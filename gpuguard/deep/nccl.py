"""NCCL by ctypes: what one process with several cards needs for an all-reduce.

Types and numbers from nccl.h (2.x). The library comes from the loader's path or from the
wheel ``nvidia-nccl-cu12`` or ``-cu13``.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SONAME = "libnccl.so.2"
_UINT64, _SUM = 5, 0


class NcclError(Exception):
    """A call failed, or there is no library."""


class NcclMissingError(NcclError):
    """There is no library to load."""


def load() -> ctypes.CDLL:
    """The library.

    Raises:
        NcclMissingError: neither the loader nor an installed wheel has it, or the wheel that
            Python would take has one that cannot be loaded.
    """
    with suppress(OSError):
        return ctypes.CDLL(_SONAME)
    wheels = (Path(folder) / "nvidia/nccl/lib" / _SONAME for folder in sys.path if folder)
    found = next((path for path in wheels if path.exists()), None)
    if found is None:
        raise NcclMissingError(
            f"{_SONAME} is neither in the loader's path nor in an installed wheel"
        )
    try:
        return ctypes.CDLL(str(found))
    except OSError as error:
        raise NcclMissingError(f"{_SONAME} cannot be loaded: {error}") from error


class Communicators:
    """One communicator for each card, all in this process."""

    def __init__(self, library: ctypes.CDLL, cards: Sequence[int]) -> None:
        self._library = library
        library.ncclGetErrorString.restype = ctypes.c_char_p
        self._handles = (ctypes.c_void_p * len(cards))()
        devices = (ctypes.c_int * len(cards))(*cards)
        self._call("ncclCommInitAll", self._handles, len(cards), devices)

    @property
    def version(self) -> str:
        """``2.28.9``."""
        number = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def all_reduce(self, buffers: Sequence[tuple[int, int, int]], words: int) -> None:
        """Queue one sum of 64-bit words over all cards.

        Args:
            buffers: for each card address sent from, address received at, stream.
            words: how many.
        """
        self._call("ncclGroupStart")
        for handle, (send, receive, stream) in zip(self._handles, buffers, strict=True):
            self._call(
                "ncclAllReduce", ctypes.c_void_p(send), ctypes.c_void_p(receive),
                ctypes.c_size_t(words), _UINT64, _SUM, ctypes.c_void_p(handle),
                ctypes.c_void_p(stream),
            )  # fmt: skip
        self._call("ncclGroupEnd")

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = self._library.ncclGetErrorString(status).decode("utf-8", "replace")
            raise NcclError(f"{name}: {text}")
