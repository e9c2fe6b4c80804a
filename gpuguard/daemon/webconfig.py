"""TLS and basic authentication: the web configuration file that Prometheus' exporters share.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md; what is not
known here is refused, so that nobody believes in a setting that does nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gpuguard.daemon.passwords import LEAST_COST, MOST_COST, cost_of
from gpuguard.errors import ConfigError
from gpuguard.host import Host
from gpuguard.host.files import writable_by_others

_TLS_KEYS = (
    "cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", "max_version",
)  # fmt: skip
CLIENT_AUTH = (
    "NoClientCert", "RequestClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert",
)  # fmt: skip
_VERSIONS = ("TLS12", "TLS13")
_BCRYPT = re.compile(r"\$2[abxy]\$\d\d\$[./A-Za-z0-9]{53}")
_HINT = "keys: tls_server_config, basic_auth_users; as exporters of Prometheus have them"


def read_web_config(host: Host, file: str) -> dict[str, Any]:
    """``{"tls": {...} or None, "users": {name: bcrypt}, "file": ...}``; paths can be opened.

    Raises:
        ConfigError: it cannot be read, is not to be trusted, or is wrong.
    """
    path = host.path(file)
    try:
        reason = writable_by_others(path, frozenset({0, os.geteuid()}), root=host.root)
        document = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise _wrong(file, error.strerror or str(error), code="web-config-unreadable") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _wrong(file, " ".join(str(error).split())) from error
    if reason is not None:
        raise _wrong(file, reason, code="web-config-untrusted")
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise _wrong(file, "must be a mapping")
    _known(file, "", document, ("tls_server_config", "basic_auth_users"))
    tls = document.get("tls_server_config")
    users = document.get("basic_auth_users") or {}
    if not isinstance(users, dict):
        raise _wrong(file, "basic_auth_users must be a mapping of names to bcrypt hashes")
    for name, secret in users.items():
        if not (isinstance(name, str) and isinstance(secret, str) and _BCRYPT.fullmatch(secret)):
            raise _wrong(
                file, f"basic_auth_users: {name}: must be a bcrypt hash (htpasswd -nBC 10)"
            )
        if not LEAST_COST <= cost_of(secret) <= MOST_COST:
            raise _wrong(
                file,
                f"basic_auth_users: {name}: the hash has cost {cost_of(secret)}, and may have "
                f"{LEAST_COST} to {MOST_COST}: each more doubles the work of who asks for a page",
            )
    return {"file": file, "tls": None if tls is None else _tls(host, file, tls), "users": users}


def _tls(host: Host, file: str, tls: Any) -> dict[str, Any]:
    if not isinstance(tls, dict):
        raise _wrong(file, "tls_server_config must be a mapping")
    _known(file, "tls_server_config.", tls, _TLS_KEYS)
    found: dict[str, Any] = dict.fromkeys(_TLS_KEYS)
    for key in ("cert_file", "key_file", "client_ca_file"):
        if (name := tls.get(key)) is not None:
            path = host.path(str(Path(file).parent / str(name)))
            if not path.is_file():
                raise _wrong(file, f"tls_server_config.{key}: there is no file {name}")
            found[key] = str(path)
    for key in ("cert_file", "key_file"):
        if found[key] is None:
            raise _wrong(file, f"tls_server_config.{key} is missing")
    choices = {
        "client_auth_type": ("NoClientCert", CLIENT_AUTH),
        "min_version": ("TLS12", _VERSIONS),
        "max_version": ("TLS13", _VERSIONS),
    }
    for key, (default, allowed) in choices.items():
        found[key] = tls.get(key, default)
        if found[key] not in allowed:
            raise _wrong(file, f"tls_server_config.{key}: must be one of {', '.join(allowed)}")
    if found["client_auth_type"] in CLIENT_AUTH[2:] and found["client_ca_file"] is None:
        raise _wrong(file, f"{found['client_auth_type']} needs client_ca_file")
    return found


def _known(file: str, where: str, found: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in found:
        if key not in keys:
            raise _wrong(file, f"{where}{key} is not known here; known are {', '.join(keys)}")


def _wrong(file: str, message: str, *, code: str = "web-config-invalid") -> ConfigError:
    return ConfigError(f"{file}: {message}", code=code, hint=_HINT)
