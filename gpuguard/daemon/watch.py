"""Notice changes of a few folders: inotify(7) through libc, for Python has no binding of its own.

A trigger only: what has changed is found out by looking. Without inotify (or where a folder is
not there yet) the interval does it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# <sys/inotify.h>: closed after writing, moved in or out, made, removed, attributes
_CLOSE_WRITE, _MOVED, _CREATE, _DELETE = 0x8, 0xC0, 0x100, 0x200
_MASK = _CLOSE_WRITE | _MOVED | _CREATE | _DELETE
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_EVENT = struct.Struct("iIII")
_BUFFER = 1 << 16
#: Taken and dropped by those who look themselves: no news.
_IGNORED = (b"lock", b"lock-frontend", b"probe-outstanding.json")


class Watch:
    """An inotify descriptor over folders; ``descriptor`` None: there is none."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        descriptor = self._libc.inotify_init1(_FLAGS)
        self.descriptor: int | None = descriptor if descriptor >= 0 else None
        self._whole: set[int] = set()  # watches in which every name counts
        self._awaited: dict[int, set[bytes]] = {}  # watch -> the only names in it that count

    def follow(self, folders: Iterable[Path]) -> None:
        """Watch these folders, or for one that is not there yet that it comes; again is fine."""
        for folder in folders:
            if (watch := self._add(folder)) is not None:
                self._whole.add(watch)
                self._awaited.pop(watch, None)
            elif (watch := self._add(folder.parent)) is not None and watch not in self._whole:
                self._awaited.setdefault(watch, set()).add(os.fsencode(folder.name))

    def has_news(self) -> bool:
        """Empty the queue; True if something in it counts."""
        news = False
        with suppress(BlockingIOError, OSError):
            while self.descriptor is not None and (data := os.read(self.descriptor, _BUFFER)):
                news = self._counts(data) or news
        return news

    def close(self) -> None:
        """Watch nothing any more."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _add(self, folder: Path) -> int | None:
        if self.descriptor is None:
            return None
        watch = self._libc.inotify_add_watch(self.descriptor, os.fsencode(folder), _MASK)
        return int(watch) if watch >= 0 else None

    def _counts(self, data: bytes) -> bool:
        offset = 0
        while offset + _EVENT.size <= len(data):
            watch, _, _, length = _EVENT.unpack_from(data, offset)
            name = data[offset + _EVENT.size : offset + _EVENT.size + length].rstrip(b"\0")
            awaited = self._awaited.get(watch)
            if awaited is not None:
                if name in awaited:
                    return True
            elif not name.endswith(_IGNORED) and b".gpuguard-new" not in name:
                return True
            offset += _EVENT.size + length
        return False
