"""CASES C32: will the kernel take these signatures. Made by openssl, in the form of sign-file."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuguard.host.signature import TRAILER, names_of_certificate, signer_of
from gpuguard.probes.secureboot import certificates
from tests import toys
from tests.box import K1, K2, Box, add_headers
from tests.patched import patched
from tests.test_build_sign import make_key
from tests.test_cases_patches import SIGN_FILE, efi, mok
from tests.trees import make_tree

MOK_STATE = "sys/firmware/efi/efivars/MokSBStateRT-605dab50-e046-4300-abb6-3dd810dd8b23"
X509 = bytes.fromhex("a159c0a5e494a74a87b5ab155c2bf072")
Key = tuple[Path, Path]


def sign(file: Path, key: Key) -> None:
    subprocess.run(["sh", "-c", SIGN_FILE, "sh", "sha256", *key, file], check=True)


def signature_list(*entries: bytes, kind: bytes = X509) -> bytes:
    """An EFI_SIGNATURE_LIST; all entries are of one size."""
    each = 16 + len(entries[0])
    return struct.pack("<16sIII", kind, 28 + each * len(entries), 0, each) + b"".join(
        b"\x11" * 16 + entry for entry in entries
    )


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Key, Key]:
    folder = tmp_path_factory.mktemp("keys")
    return make_key(folder, "ours"), make_key(folder, "other")


@pytest.fixture
def ours(box: Box, keys: tuple[Key, Key]) -> Box:
    """Both kernels are ready, unsigned; our key lies where Debian's DKMS keeps it."""
    patched(box, K1, K2)
    make_tree(box.root, {"var/lib/dkms/mok.key": "", "var/lib/dkms/mok.pub": ""})
    for source, name in zip(keys[0], ("mok.key", "mok.pub"), strict=True):
        shutil.copy(source, box.root / "var/lib/dkms" / name)
    assert box.kernel(K2)["ready"] is True
    return box


def sign_all(box: Box, key: Key) -> None:
    for name in toys.NAMES:
        sign(box.dkms_copy(K2, name), key)


def not_ready(box: Box, code: str) -> dict[str, Any]:
    found = box.findings(K2)
    assert code in found
    assert box.kernel(K2)["ready"] is False
    assert box.status()["reboot"]["safe"] is False
    return found[code]


def test_a_signature_by_the_enrolled_key_is_good(ours: Box, keys: tuple[Key, Key]) -> None:
    efi(ours, enrolled=keys[0][1].read_bytes())
    sign_all(ours, keys[0])
    assert ours.kernel(K2)["ready"] is True


def test_a_signature_by_another_key_is_not(ours: Box, keys: tuple[Key, Key]) -> None:
    efi(ours, enrolled=keys[0][1].read_bytes())
    sign_all(ours, keys[1])
    found = not_ready(ours, "secure-boot-will-reject")
    assert "neither the firmware nor shim knows" in found["message"]


def test_any_enrolled_key_will_do(ours: Box, keys: tuple[Key, Key]) -> None:
    efi(ours)
    both = signature_list(keys[0][1].read_bytes()) + signature_list(keys[1][1].read_bytes())
    name = MOK_STATE.replace("MokSBStateRT", "MokListRT")
    make_tree(ours.root, {name: b"\6\0\0\0" + both})
    sign_all(ours, keys[1])
    assert ours.kernel(K2)["ready"] is True


@pytest.mark.parametrize("signature", [b"by nobody" * 20, b"", bytes(4) + b"\2" + bytes(7)])
def test_a_line_of_text_is_no_signature(ours: Box, keys: tuple[Key, Key], signature: bytes) -> None:
    efi(ours, enrolled=keys[0][1].read_bytes())
    sign_all(ours, keys[0])
    file = ours.dkms_copy(K2)
    file.write_bytes(file.read_bytes() + signature + TRAILER)
    assert "damaged signature" in not_ready(ours, "secure-boot-will-reject")["message"]


def test_one_unsigned_module_among_signed_ones_counts(ours: Box, keys: tuple[Key, Key]) -> None:
    efi(ours, enrolled=keys[0][1].read_bytes())
    for name in toys.NAMES[1:]:
        sign(ours.dkms_copy(K2, name), keys[0])
    assert "nvidia.ko is not signed" in not_ready(ours, "secure-boot-will-reject")["message"]


def test_secure_boot_that_cannot_be_read_and_unsigned_modules_are_unknown(ours: Box) -> None:
    make_tree(ours.root, {"sys/firmware/efi": None})  # efivarfs is not mounted
    assert not_ready(ours, "secure-boot-unknown")["severity"] == "unknown"


@pytest.mark.parametrize(
    ("value", "state"),
    [(b"\6\0\0\0\1", "off"), (b"\6\0\0\0\0", "on"), (b"\7\0\0\0\1", "on"), (b"\6", "on")],
)
def test_validation_that_shim_leaves_out(ours: Box, value: bytes, state: str) -> None:
    efi(ours)
    make_tree(ours.root, {MOK_STATE: value})  # non-volatile: not shim's own word
    assert ours.status()["secure_boot"]["state"] == state
    assert ours.kernel(K2)["ready"] is (state == "off")


@pytest.mark.parametrize(
    "option", ["CONFIG_MODULE_SIG_FORCE", "CONFIG_LOCK_DOWN_KERNEL_FORCE_INTEGRITY"]
)
@pytest.mark.parametrize("place", ["headers", "boot"])
def test_a_kernel_may_enforce_signatures_by_itself(ours: Box, option: str, place: str) -> None:
    if place == "headers":
        add_headers(ours.root, K2, **{option: "y"})
    else:
        make_tree(ours.root, {f"boot/config-{K2}": f"CONFIG_A=y\n{option}=y\n"})
    found = not_ready(ours, "signature-enforced")
    assert option in found["message"]
    assert "signing.mode" in found["remedy"]


def test_its_own_configuration_counts_more_than_that_of_the_headers(ours: Box) -> None:
    add_headers(ours.root, K2, CONFIG_MODULE_SIG_FORCE="y")
    make_tree(ours.root, {f"boot/config-{K2}": "# CONFIG_MODULE_SIG_FORCE is not set\n"})
    assert ours.kernel(K2)["ready"] is True


@pytest.mark.parametrize(
    ("word", "ready"),
    [
        ("module.sig_enforce", False),
        ("module.sig_enforce=1", False),
        ("module.sig_enforce=0", True),
        ("lockdown=integrity", False),
        ("quiet", True),
    ],
)
def test_the_command_line_may_enforce_them(ours: Box, word: str, ready: bool) -> None:
    config = f"menuentry x {{\n linux /boot/vmlinuz-{K2} ro {word}\n}}\n"
    make_tree(ours.root, {"boot/grub/grub.cfg": config})
    assert ours.kernel(K2)["ready"] is ready
    assert ours.kernel(K1)["ready"] is True  # it does not boot next


def test_enforced_and_signed_by_a_key_that_nobody_can_look_up_is_unknown(
    ours: Box, keys: tuple[Key, Key]
) -> None:
    add_headers(ours.root, K2, CONFIG_MODULE_SIG_FORCE="y")
    sign_all(ours, keys[0])
    assert not_ready(ours, "signature-unknown")["severity"] == "unknown"
    efi(ours, on=False, enrolled=keys[0][1].read_bytes())
    assert ours.kernel(K2)["ready"] is True


# --- the reading of signatures --------------------------------------------------------------


def signed(tmp_path: Path, key: Key) -> bytes:
    file = tmp_path / "module"
    file.write_bytes(b"content")
    sign(file, key)
    return file.read_bytes()


def test_a_signature_names_its_certificate(tmp_path: Path, keys: tuple[Key, Key]) -> None:
    found = [signer_of(io.BytesIO(signed(tmp_path, key))) for key in keys]
    names = [names_of_certificate(key[1].read_bytes()) for key in keys]
    assert [found[0] in names[0], found[1] in names[1]] == [True, True]
    assert found[0] not in names[1]


def test_a_signature_may_name_the_key(tmp_path: Path, keys: tuple[Key, Key]) -> None:
    script = SIGN_FILE.replace("cms -sign", "cms -sign -keyid")
    file = tmp_path / "module"
    file.write_bytes(b"content")
    subprocess.run(["sh", "-c", script, "sh", "sha256", *keys[0], file], check=True)
    name = signer_of(io.BytesIO(file.read_bytes()))
    assert name is not None
    assert name.startswith("key:")
    assert name in names_of_certificate(keys[0][1].read_bytes())


def test_damage_is_no_signature_and_no_crash(tmp_path: Path, keys: tuple[Key, Key]) -> None:
    whole = signed(tmp_path, keys[0])
    certificate = keys[0][1].read_bytes()
    for at in range(len(b"content"), len(whole)):
        signer_of(io.BytesIO(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]))
        assert signer_of(io.BytesIO(whole[:at])) is None
    for at in range(0, len(certificate), 7):
        names_of_certificate(certificate[:at])
    assert names_of_certificate(b"") == names_of_certificate(b"\x30\x82\x01\x00junk") == ()


def test_lists_of_certificates() -> None:
    hashes = signature_list(b"h" * 32, kind=b"sha256 and others")
    content = hashes + signature_list(b"one", b"two") + signature_list(b"three")
    assert list(certificates(content)) == [b"one", b"two", b"three"]
    assert list(certificates(content[: len(hashes) + 40])) == []
    assert list(certificates(b"\xa1" * 100)) == []


def test_mok_is_a_real_certificate(box: Box) -> None:
    assert names_of_certificate(mok(box))
