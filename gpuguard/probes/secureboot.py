"""Secure Boot: is it on, which key would sign, and does the firmware know the certificate.

Nothing is enrolled here: that needs a person at the console during boot (FACTS 2.6).
"""

from __future__ import annotations

import binascii
import re
import shlex
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from gpuguard.core.facts import SecureBootFacts, SecureBootState
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_bytes, read_text, real_path
from gpuguard.host.signature import names_of_certificate as _names
from gpuguard.probes.efivars import EFIVARS_DIR, efivar_names, read_efivar

_SECURE_BOOT = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_NO_VALIDATION = "MokSBStateRT-605dab50-e046-4300-abb6-3dd810dd8b23"
_LIST = struct.Struct("<16sIII")  # EFI_SIGNATURE_LIST: kind, size, of its header, of each entry
_X509 = bytes.fromhex("a159c0a5e494a74a87b5ab155c2bf072")  # EFI_CERT_X509_GUID
_OWNER_BYTES = 16
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
    facts = SecureBootFacts(state=state, key=key, certificate=certificate)
    if state is SecureBootState.NOT_APPLICABLE:
        return facts
    return _with_enrolled(host, facts)


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


def _validates(host: Host) -> bool:
    """False if a person told shim to let everything pass: ``mokutil --disable-validation``."""
    content = read_bytes(host, f"{EFIVARS_DIR}/{_NO_VALIDATION}", max_bytes=64) or b""
    # As the kernel's efi_get_secureboot: not if it is non-volatile, which any program can set.
    return not (len(content) > 4 and content[4] == 1 and not content[0] & 1)  # noqa: PLR2004


def _state(host: Host) -> SecureBootState:
    try:
        if real_path(host, "/sys/firmware/efi") is None:
            # CASES C32: no EFI, nothing to apply. Nor does a tree without /sys (a mounted
            # disk, an image) have a firmware of its own.
            return SecureBootState.NOT_APPLICABLE
        value = read_efivar(host, _SECURE_BOOT)
        if value == b"\1" and not _validates(host):
            value = b"\0"
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


def _with_enrolled(host: Host, facts: SecureBootFacts) -> SecureBootFacts:
    try:
        lists = list(_enrolled_lists(host))
    except ProbeError:
        return facts
    trusted = {n for content in lists for der in certificates(content) for n in _names(der)}
    own: tuple[str, ...] = ()
    enrolled = None
    with suppress(ProbeError):
        wanted = certificate_der(read_bytes(host, facts.certificate or "") or b"")
        own = _names(wanted)
        enrolled = any(wanted in content for content in lists) if lists else None
    trusted |= set(own) if enrolled else set()
    return replace(facts, enrolled=enrolled, signers=own, trusted=tuple(sorted(trusted)))


def certificates(content: bytes) -> Iterator[bytes]:
    """The certificates in the value of a variable such as ``db``: EFI_SIGNATURE_LISTs (UEFI)."""
    while len(content) >= _LIST.size:
        kind, size, header, each = _LIST.unpack_from(content)
        begin = _LIST.size + header
        if size < begin or size > len(content) or each <= _OWNER_BYTES:
            return  # nonsense: what follows cannot be told
        for place in range(begin, size - each + 1, each):
            if kind == _X509:
                yield content[place + _OWNER_BYTES : place + each]
        content = content[size:]


def _enrolled_lists(host: Host) -> Iterator[bytes]:
    for name in efivar_names(host):
        if _LISTS.fullmatch(name):
            yield read_efivar(host, name) or b""
