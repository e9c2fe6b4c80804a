"""From a web configuration to what the server needs: a TLS context."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuguard.errors import ConfigError

_VERIFY = {
    "NoClientCert": ssl.CERT_NONE,
    "RequestClientCert": ssl.CERT_NONE,  # asking without looking proves nothing
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


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
        raise _unusable(tls, error) from error
    context.verify_mode = _VERIFY[tls["client_auth_type"]]
    return context


def identity(tls: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What a context is made from, files by what is in them: equal where nothing has changed.

    Raises:
        ConfigError: one cannot be read.
    """
    if tls is None:
        return None
    try:
        return {key: _contents(key, value) for key, value in tls.items()}
    except OSError as error:
        raise _unusable(tls, error) from error


def _contents(key: str, value: Any) -> Any:
    if not key.endswith("_file") or value is None:
        return value
    return hashlib.sha256(Path(value).read_bytes()).hexdigest()


def _unusable(tls: Mapping[str, Any], error: OSError) -> ConfigError:
    names = ", ".join(tls[key] for key in tls if key.endswith("_file") and tls[key] is not None)
    return ConfigError(
        f"certificate or key cannot be used: {error}", code="tls-unusable", hint=f"see {names}"
    )
