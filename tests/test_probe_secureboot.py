"""Secure Boot's state, the signing key, and whether its certificate is enrolled."""

from __future__ import annotations

import base64
import textwrap
from pathlib import Path

import pytest

from gpuguard.core.facts import SecureBootFacts, SecureBootState
from gpuguard.errors import ProbeError
from gpuguard.host import LocalHost
from gpuguard.probes.secureboot import certificate_der, parse_assignments, probe_secure_boot
from tests.trees import Link, make_tree
from tests.unprivileged import as_nobody, public_dir

VARS = "/sys/firmware/efi/efivars"
SECURE_BOOT = f"{VARS}/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
MOK_LIST = f"{VARS}/MokListRT-605dab50-e046-4300-abb6-3dd810dd8b23"
DB = f"{VARS}/db-d719b2cb-3d3a-4596-a3bc-dad00e67656f"
ATTRIBUTES = b"\6\0\0\0"
DER = b"\x30\x82\x01\x02" + bytes(range(256))
PEM = (
    b"-----BEGIN CERTIFICATE-----\n"
    + "\n".join(textwrap.wrap(base64.b64encode(DER).decode(), 64)).encode()
    + b"\n-----END CERTIFICATE-----\n"
)
DEBIAN = ("/var/lib/dkms/mok.key", "/var/lib/dkms/mok.pub")
UBUNTU = ("/var/lib/shim-signed/mok/MOK.priv", "/var/lib/shim-signed/mok/MOK.der")
Files = dict[str, str | bytes | Link | None]


def probe(tmp_path: Path, files: Files) -> SecureBootFacts:
    return probe_secure_boot(LocalHost(make_tree(tmp_path, files)))


def pair(paths: tuple[str, str], certificate: bytes = DER) -> Files:
    return {paths[0]: "key", paths[1]: certificate}


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({"/sys/firmware/acpi": None}, SecureBootState.NOT_APPLICABLE),
        ({}, SecureBootState.NOT_APPLICABLE),  # a tree without /sys has no firmware
        ({VARS: None}, SecureBootState.UNKNOWN),  # efivarfs is not mounted
        ({f"{VARS}/Boot0000-x": ATTRIBUTES}, SecureBootState.OFF),
        ({SECURE_BOOT: ATTRIBUTES + b"\1"}, SecureBootState.ON),
        ({SECURE_BOOT: ATTRIBUTES + b"\0"}, SecureBootState.OFF),
        ({SECURE_BOOT: ATTRIBUTES}, SecureBootState.UNKNOWN),
        ({SECURE_BOOT: b"\6"}, SecureBootState.UNKNOWN),
        ({SECURE_BOOT: ATTRIBUTES + b"\7"}, SecureBootState.UNKNOWN),
        ({SECURE_BOOT: None}, SecureBootState.UNKNOWN),  # a directory
    ],
)
def test_state(tmp_path: Path, files: Files, state: SecureBootState) -> None:
    assert probe(tmp_path, files).state is state


def test_unreadable_variable_is_unknown() -> None:
    with public_dir() as root:
        make_tree(root, {SECURE_BOOT: ATTRIBUTES + b"\1", MOK_LIST: ATTRIBUTES, **pair(DEBIAN)})
        for name in (SECURE_BOOT, MOK_LIST):
            (root / name.lstrip("/")).chmod(0o600)
        with as_nobody():
            facts = probe_secure_boot(LocalHost(root))
    assert facts.state is SecureBootState.UNKNOWN
    assert facts.enrolled is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (pair(DEBIAN), DEBIAN),
        (pair(UBUNTU), UBUNTU),
        ({**pair(DEBIAN), **pair(UBUNTU)}, UBUNTU),
        ({}, (None, None)),
        (
            {"/etc/dkms/framework.conf": "mok_signing_key=/k\nmok_certificate='/c c'\n"},
            ("/k", "/c c"),
        ),
        (
            {
                "/etc/dkms/framework.conf": "# mok_signing_key=/no\nmok_signing_key=/old\n",
                "/etc/dkms/framework.conf.d/a.conf": 'mok_signing_key="pkcs11:object=x"  # token\n',
                "/etc/dkms/framework.conf.d/b.conf": "mok_certificate=/c\n",
                "/etc/dkms/framework.conf.d/c.conf.dpkg-old": "mok_certificate=/no\n",
            },
            ("pkcs11:object=x", "/c"),
        ),
    ],
)
def test_key_and_certificate(
    tmp_path: Path, files: Files, expected: tuple[str | None, str | None]
) -> None:
    facts = probe(tmp_path, files)
    assert (facts.key, facts.certificate) == expected


def test_configuration_wins(tmp_path: Path) -> None:
    make_tree(tmp_path, {**pair(UBUNTU), "/etc/dkms/framework.conf": "mok_signing_key=/k\n"})
    facts = probe_secure_boot(LocalHost(tmp_path), "/our.key", "/our.der")
    assert (facts.key, facts.certificate) == ("/our.key", "/our.der")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('a="b c" # d\n  export e=f\n', {"a": "b c", "e": "f"}),
        ("a=\na='x'\n#a=y\nb=$kernelver/x\n", {"a": "x", "b": "$kernelver/x"}),
        ('a="open\nb=1\n', {"b": "1"}),
        ("if [ a = b ]; then\n", {}),
        ("\x00\xff=1", {}),
    ],
)
def test_assignments(text: str, values: dict[str, str]) -> None:
    assert parse_assignments(text) == values


def enrolled(tmp_path: Path, lists: Files, certificate: bytes = DER) -> bool | None:
    on: Files = {SECURE_BOOT: ATTRIBUTES + b"\1", **pair(DEBIAN, certificate)}
    return probe(tmp_path, {**on, **lists}).enrolled


HEADER = b"\xa1\x59\xc0\xa5" * 7


@pytest.mark.parametrize("certificate", [DER, PEM, b"junk before\n" + PEM])
@pytest.mark.parametrize("name", [MOK_LIST, DB, MOK_LIST.replace("RT-", "RT3-")])
def test_enrolled(tmp_path: Path, name: str, certificate: bytes) -> None:
    lists: Files = {name: ATTRIBUTES + HEADER + DER + HEADER}
    assert enrolled(tmp_path, lists, certificate) is True


@pytest.mark.parametrize(
    ("lists", "answer"),
    [
        ({MOK_LIST: ATTRIBUTES + HEADER}, False),
        ({DB: ATTRIBUTES + HEADER + DER[:-1]}, False),
        ({}, None),  # no list at all: nobody knows
        ({MOK_LIST.replace("MokListRT", "MokListXRT"): ATTRIBUTES + DER}, None),  # forbidden ones
    ],
)
def test_not_enrolled(tmp_path: Path, lists: Files, answer: bool | None) -> None:
    assert enrolled(tmp_path, lists) is answer


@pytest.mark.parametrize("certificate", [b"", b"text", b"-----BEGIN CERTIFICATE-----\n", b"\xff"])
def test_certificate_garbage_is_unknown(tmp_path: Path, certificate: bytes) -> None:
    assert enrolled(tmp_path, {MOK_LIST: ATTRIBUTES + HEADER}, certificate) is None
    with pytest.raises(ProbeError):
        certificate_der(certificate)


def test_real_certificate_of_openssl(tmp_path: Path) -> None:
    host = LocalHost()
    if not host.has_program("openssl"):
        pytest.skip("no openssl here")
    key, pem, der = (tmp_path / name for name in ("key", "pem", "der"))
    host.run(
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test/",
        "-keyout", str(key), "-out", str(pem), timeout=60,
    )  # fmt: skip
    host.run("openssl", "x509", "-in", str(pem), "-outform", "DER", "-out", str(der), timeout=60)
    assert certificate_der(pem.read_bytes()) == der.read_bytes()
    assert certificate_der(der.read_bytes()) == der.read_bytes()
