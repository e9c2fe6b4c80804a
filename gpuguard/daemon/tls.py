"""From a web configuration to what the server needs: a TLS context, a check of passwords."""

from __future__ import annotations

import base64
import binascii
import ctypes
import ctypes.util
import hashlib
import hmac
import ssl
import threading
from collections.abc import Mapping
from typing import Any

from gpuguard.errors import ConfigError

_VERIFY = {
    "NoClientCert": ssl.CERT_NONE,
    "RequestClientCert": ssl.CERT_NONE,  # asking without looking proves nothing
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_REMEMBERED = 64
#: A hash for names that do not exist, so that they take as long as those that do.
_NOBODY = "$2b$10$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW"


def server_context(tls: Mapping[str, Any]) -> ssl.SSLContext:
    """A context for the server's side.

    Raises:
        ConfigError: certificate and key cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[tls["min_version"]]
    context.maximum_version = _VERSIONS[tls["max_version"]]
    try:
        context.load_cert_chain(tls["cert_file"], tls["key_file"])
        if tls["client_ca_file"] is not None:
            context.load_verify_locations(tls["client_ca_file"])
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"certificate or key cannot be used: {error}",
            code="tls-unusable",
            hint=f"see {tls['cert_file']} and {tls['key_file']}",
        ) from error
    context.verify_mode = _VERIFY[tls["client_auth_type"]]
    return context


class Passwords:
    """Names and bcrypt hashes; ``check`` is slow on purpose, once for each password."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = dict(users)
        self._good: set[bytes] = set()
        self._lock = threading.Lock()

    def knows(self, header: str) -> bool:
        """Whether this very header was checked before, and was right."""
        return _digest(header) in self._good

    def check(self, header: str) -> bool:
        """Whether an ``Authorization`` header has a name with its password; 0.1 s of work."""
        kind, _, code = header.partition(" ")
        try:
            name, colon, password = base64.b64decode(code, validate=True).partition(b":")
            hashed = self._users.get(name.decode("utf-8"))
        except (binascii.Error, ValueError):
            return False
        if kind.lower() != "basic" or not colon:
            return False
        with self._lock:  # crypt(3) has one static result
            is_right = _bcrypt_is(password, hashed or _NOBODY) and hashed is not None
        if is_right:
            if len(self._good) >= _REMEMBERED:
                self._good.clear()
            self._good.add(_digest(header))
        return is_right


def _digest(header: str) -> bytes:
    return hashlib.sha256(header.encode("utf-8", "surrogateescape")).digest()


def _bcrypt_is(password: bytes, hashed: str) -> bool:
    """Through libxcrypt, which every Debian and Ubuntu has for its own passwords."""
    if b"\0" in password:
        return False
    made = _crypt()(password, hashed.encode())
    return made is not None and hmac.compare_digest(made, hashed.encode())


def _crypt() -> Any:
    library = ctypes.CDLL("libcrypt.so.1")
    library.crypt.restype = ctypes.c_char_p
    library.crypt.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    return library.crypt


def can_check_passwords() -> bool:
    """Whether this system's libcrypt is there and knows bcrypt."""
    try:
        made = _crypt()(b"", _NOBODY.encode())
    except OSError:
        return False
    return made is not None and made.startswith(b"$2b$")
