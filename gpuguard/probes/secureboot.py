"""Secure Boot: is it on, which key would sign, and does the firmware know the certificate.

Nothing is enrolled here: that needs a person at the console during boot (FACTS 2.6).
"""

from __future__ import annotations

import binascii
import re
import shlex
from collections.abc import Iterator

from gpuguard.core.facts import SecureBootFacts, SecureBootState
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_bytes, read_text, real_path
from gpuguard.probes.efivars import efivar_names, read_efivar

_SECURE_BOOT = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
#: Certificates that the kernel accepts modules from: shim's own list (in parts where it is
#: long: MokListRT1, …) and the firmware's.
_LISTS = re.compile(
    r"MokListRT\d*-605dab50-e046-4300-abb6-3dd810dd8b23|db-d719b2cb-3d3a-4596-a3bc-dad00e67656f"
)
#: Ubuntu, Debian; DKMS takes the first that is there.
_PAIRS = (
    ("/var/lib/shim-signed/mok/MOK.priv", "/var/lib/shim-signed/mok/MOK.der"),
    ("/var/lib/dkms/mok.key", "/var/lib/dkms/mok.pub"),
)
_DKMS_CONFIG = "/etc/dkms/framework.conf"
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$", re.MULTILINE)
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----\s*(.+?)\s*-----END CERTIFICATE-----", re.DOTALL)


def probe_secure_boot(
    host: Host, config_key: str | None = None, config_certificate: str | None = None
) -> SecureBootFacts:
    """State, signing key, certificate, and whether the certificate is enrolled.

    Args:
        host: where to look.
        config_key: key named by gpuguard's configuration; wins.
        config_certificate: its certificate; wins.
    """
    key, certificate = _key_and_certificate(host, config_key, config_certificate)
    state = _state(host)
    may_matter = state is not SecureBootState.NOT_APPLICABLE
    return SecureBootFacts(
        state=state,
        key=key,
        certificate=certificate,
        enrolled=_is_enrolled(host, certificate) if certificate and may_matter else None,
    )


def parse_assignments(text: str) -> dict[str, str]:
    """``name=value`` lines of a bash file; quotation marks go, expansions stay as written."""
    values = {}
    for name, raw in _ASSIGNMENT.findall(text):
        try:
            words = shlex.split(raw, comments=True)
        except ValueError:
            continue  # an open quotation mark: bash would not take it either
        values[name] = words[0] if words else ""
    return values


def certificate_der(content: bytes) -> bytes:
    """A certificate as DER, given DER or PEM.

    Raises:
        ProbeError: it is neither.
    """
    if match := _PEM.search(content):
        try:
            content = binascii.a2b_base64(match[1])
        except binascii.Error as error:
            raise ProbeError(f"damaged PEM certificate: {error}") from error
    if content[:1] != b"\x30":  # SEQUENCE, X.690
        raise ProbeError("neither a DER nor a PEM certificate")
    return content


def _state(host: Host) -> SecureBootState:
    try:
        if real_path(host, "/sys/firmware/efi") is None:
            # CASES C32: no EFI, nothing to apply. Nor does a tree without /sys (a mounted
            # disk, an image) have a firmware of its own.
            return SecureBootState.NOT_APPLICABLE
        value = read_efivar(host, _SECURE_BOOT)
    except ProbeError:
        return SecureBootState.UNKNOWN
    match value:
        case b"\1":
            return SecureBootState.ON
        case b"\0":
            return SecureBootState.OFF
        case None if efivar_names(host):
            return SecureBootState.OFF  # firmware without Secure Boot has no such variable
        case _:
            return SecureBootState.UNKNOWN  # efivarfs is not mounted, or nonsense


def _key_and_certificate(
    host: Host, key: str | None, certificate: str | None
) -> tuple[str | None, str | None]:
    if not (key and certificate):
        named = _dkms_settings(host)
        key = key or named.get("mok_signing_key") or None
        certificate = certificate or named.get("mok_certificate") or None
    if not (key or certificate):
        return next((pair for pair in _PAIRS if _may_exist(host, pair[1])), (None, None))
    return key, certificate


def _dkms_settings(host: Host) -> dict[str, str]:
    dropins = f"{_DKMS_CONFIG}.d"
    values: dict[str, str] = {}
    try:
        names = [n for n in list_dir(host, dropins) if n.endswith(".conf")]
        for path in (_DKMS_CONFIG, *(f"{dropins}/{name}" for name in names)):
            values |= parse_assignments(read_text(host, path) or "")
    except ProbeError:
        return {}  # root's own affair; the defaults are looked at
    return values


def _may_exist(host: Host, path: str) -> bool:
    try:
        return real_path(host, path) is not None
    except ProbeError:
        return True  # its folder is closed to us: better named than denied


def _is_enrolled(host: Host, certificate: str) -> bool | None:
    try:
        wanted = certificate_der(read_bytes(host, certificate) or b"")
        lists = list(_enrolled_lists(host))
    except ProbeError:
        return None
    if any(wanted in content for content in lists):
        return True
    return False if lists else None


def _enrolled_lists(host: Host) -> Iterator[bytes]:
    for name in efivar_names(host):
        if _LISTS.fullmatch(name):
            yield read_efivar(host, name) or b""
