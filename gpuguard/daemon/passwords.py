"""Basic authentication with bcrypt: checked one at a time, few at once, remembered for a while."""

from __future__ import annotations

import base64
import binascii
import ctypes
import hashlib
import hmac
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

MAX_CHECKS = 8  # under way and waiting
MAX_CHECKS_OF_ONE = 4  # client: one that tries passwords leaves room for others
_REMEMBERED = 64
_WRONG_REMEMBERED = 256
_WRONG_SECONDS = 10.0
_SALT = "CCCCCCCCCCCCCCCCCCCCC."
_CRYPT_DATA = 1 << 18  # bytes
LEAST_COST, MOST_COST = 4, 14  # 14 is a second of a core


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found: true for as long as the user has this hash."""

    name: str
    hashed: str | None
    until: float = float("inf")


class Passwords:
    """Names and bcrypt hashes. Only ``_check`` runs in a thread: it is slow on purpose."""

    def __init__(self) -> None:
        self._users: dict[str, str] = {}
        self._right: dict[bytes, _Known] = {}
        self._wrong: dict[bytes, _Known] = {}
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()  # checks under way, by client
        # One thread: one core is enough.
        self._pool = ThreadPoolExecutor(1, "passwords")

    def use(self, users: Mapping[str, str]) -> None:
        """From now on; what is known of those that have not changed stays known."""
        self._users = dict(users)

    def knows(self, header: str) -> bool | None:
        """At once, if this very header was checked before or is none; else None."""
        if _parsed(header) is None:
            return False
        digest = _digest(header)
        for found, answer in ((self._right, True), (self._wrong, False)):
            known = found.get(digest)
            if known is not None and time.monotonic() < known.until and self._is_valid(known):
                return answer
        return None

    def submit(self, header: str, client: str) -> Future[bool] | None:
        """Check an ``Authorization`` header, 0.1 s of work and more; None: too many wait."""
        with self._lock:
            if self._asked.total() >= MAX_CHECKS or self._asked[client] >= MAX_CHECKS_OF_ONE:
                return None
            self._asked[client] += 1
        work = self._pool.submit(self._check, header)
        work.add_done_callback(lambda _: self._done(client))
        return work

    def close(self) -> None:
        """Begin no check any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, client: str) -> None:
        with self._lock:
            self._asked[client] -= 1
            if not self._asked[client]:
                del self._asked[client]

    def _is_valid(self, known: _Known) -> bool:
        return self._users.get(known.name) == known.hashed

    def _check(self, header: str) -> bool:
        parsed = _parsed(header)
        if parsed is None:
            return False
        name, password = parsed
        users = self._users
        hashed = users.get(name)
        most = max(map(cost_of, users.values()), default=LEAST_COST)
        if hashed is not None and _bcrypt_is(password, hashed):
            _remember(self._right, _REMEMBERED, header, _Known(name, hashed))
            return True
        # Every no takes as long as with the highest cost: 2^c + 2^c + 2^(c+1) + ... = 2^most.
        spent = [most] if hashed is None else range(cost_of(hashed), most)
        for cost in spent:
            _bcrypt_is(password, f"$2b${cost:02d}${_SALT}")
        known = _Known(name, hashed, time.monotonic() + _WRONG_SECONDS)
        _remember(self._wrong, _WRONG_REMEMBERED, header, known)
        return False


def cost_of(hashed: str) -> int:
    """Of a bcrypt hash: the work is 2 to the power of it."""
    return int(hashed.split("$")[2])


def _remember(where: dict[bytes, _Known], most: int, header: str, known: _Known) -> None:
    where.pop(digest := _digest(header), None)
    while len(where) >= most:
        del where[next(iter(where))]
    where[digest] = known


def _parsed(header: str) -> tuple[str, bytes] | None:
    """Name and password; None: that is no basic authentication, or cannot be right."""
    kind, _, code = header.partition(" ")
    try:
        name, colon, password = base64.b64decode(code, validate=True).partition(b":")
        user = name.decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    is_one = kind.lower() == "basic" and colon and b"\0" not in password
    return (user, password) if is_one else None


def _digest(header: str) -> bytes:
    return hashlib.sha256(header.encode("utf-8", "surrogateescape")).digest()


def _bcrypt_is(password: bytes, hashed: str) -> bool:
    """Through libxcrypt, which every Debian and Ubuntu has for its own passwords."""
    made = _crypt(password, hashed.encode())
    return made is not None and hmac.compare_digest(made, hashed.encode())


def _crypt(password: bytes, setting: bytes) -> bytes | None:
    # Not crypt(3): it works in one place for all threads, and a reload looks whether passwords can
    # be checked while one is. libxcrypt's struct crypt_data has 32 KiB, glibc's had 128.
    work = ctypes.create_string_buffer(_CRYPT_DATA)
    crypt_r = ctypes.CDLL("libcrypt.so.1").crypt_r
    crypt_r.restype = ctypes.c_char_p
    crypt_r.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
    made: bytes | None = crypt_r(password, setting, work)
    return made


def can_check_passwords() -> bool:
    """Whether this system's libcrypt is there and knows bcrypt."""
    try:
        made = _crypt(b"", f"$2b${LEAST_COST:02d}${_SALT}".encode())
    except OSError:
        return False
    return made is not None and made.startswith(b"$2b$")
