"""Patches and signatures: CASES C29 and C32, by the real program."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuguard.host.elf import read_module
from tests import toys
from tests.box import K1, K2, PATCH, SOURCE, Box, make_clone, read_only
from tests.building import needs_root
from tests.test_build_sign import make_key

POLICY = f"{SOURCE}/src/nvidia/src/p2p_policy.c"
_GUID = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
_MOK = "MokListRT-605dab50-e046-4300-abb6-3dd810dd8b23"
#: Does to a module what the kernel's tool does: PKCS #7, its size, a line of text.
SIGN_FILE = r"""#!/bin/sh
set -e
openssl cms -sign -binary -noattr -nocerts -nosmimecap -outform DER -md "$1" \
    -inkey "$2" -signer "$3" -in "$4" -out "$4.p7s"
size=$(stat -c %s "$4.p7s")
cat "$4.p7s" >> "$4"
rm "$4.p7s"
octal="\\$(printf %03o $((size / 256)))\\$(printf %03o $((size % 256)))"
printf "\\0\\0\\2\\0\\0\\0\\0\\0\\0\\0$octal" >> "$4"
printf '~Module signature appended~\n' >> "$4"
"""


def moved_context(box: Box) -> None:
    file = box.root / POLICY
    file.write_text(file.read_text().replace("static const unsigned", "static volatile unsigned"))


def needs_fuzz(box: Box) -> None:
    file = box.root / POLICY
    file.write_text(file.read_text().replace(" * consumer card", " * every consumer card"))


def apply_it(box: Box) -> None:
    command = ["patch", "-s", "-p1", "-d", str(box.root / SOURCE), "-i", str(box.root / PATCH)]
    subprocess.run(command, check=True)


def half_applied(box: Box) -> None:
    apply_it(box)
    file = box.root / SOURCE / "kernel-open/nvidia/nv-pci.c"
    file.write_text(file.read_text().replace(">= 16ull << 30", "> 1"))


def empty(box: Box) -> None:
    (box.root / PATCH).write_text("")


def an_error_page(box: Box) -> None:
    (box.root / PATCH).write_text("<html><body>404: not found</body></html>\n")


def absent(box: Box) -> None:
    (box.root / PATCH).unlink()


def writable_by_all(box: Box) -> None:
    (box.root / PATCH).chmod(0o666)


@pytest.mark.parametrize(
    ("spoil", "status", "code", "says"),
    [
        (moved_context, 65, "patch-rejected", "p2p_policy.c hunk #1"),
        (half_applied, 65, "patch-rejected", "does not apply"),
        (needs_fuzz, 65, "patch-fuzz", "p2p_policy.c"),
        (empty, 65, "patch-empty", "no hunk"),
        (an_error_page, 65, "patch-empty", "no hunk"),
        (absent, 78, "patch-missing", PATCH),
        pytest.param(writable_by_all, 78, "patch-untrusted", "go-w", marks=needs_root),
    ],
)
def test_a_patch_that_will_not_do_changes_nothing(
    box: Box, spoil: Callable[[Box], None], status: int, code: str, says: str
) -> None:
    spoil(box)
    before = box.snapshot()
    answer = box.rebuild()
    assert (answer.status, answer.error["code"]) == (status, code)
    assert says in answer.error["message"] + answer.error["hint"]
    assert answer.error["hint"]
    assert box.snapshot() == before  # the source and what would be loaded alike
    assert box.leftovers() == []
    assert not list(box.root.rglob("*.rej"))


def test_an_applied_patch_is_no_error(box: Box) -> None:
    apply_it(box)
    before = (box.root / POLICY).read_bytes()
    box.rebuilt("--kernel", K2)
    assert (box.root / POLICY).read_bytes() == before
    log = max((box.root / "var/log/gpuguard").glob(f"build-{K2}-*.log")).read_text()
    assert "p2p.patch: already applied" in log


def test_a_rejected_patch_is_not_tried_again_until_it_changes(box: Box) -> None:
    moved_context(box)
    assert box.rebuild("--kernel", K2).status == 65
    again = box.rebuild("--kernel", K2)
    assert (again.status, again.document["steps"][0]["action"]) == (1, "leave")
    text = (box.root / PATCH).read_text()
    fixed = text.replace("-static const unsigned", "-static volatile unsigned")
    (box.root / PATCH).write_text(fixed)
    box.rebuilt("--kernel", K2)


@needs_root
def test_a_source_that_is_read_only_is_no_obstacle(box: Box) -> None:
    with read_only(box.root / SOURCE):
        box.rebuilt("--kernel", K2)


@needs_root
@pytest.mark.parametrize("what", ["source", "config"])
def test_what_others_can_write_is_refused(box: Box, what: str) -> None:
    path = box.root / (POLICY if what == "source" else "etc/gpuguard/gpuguard.yaml")
    path.chmod(0o666)
    before = box.snapshot()
    answer = box.rebuild()
    assert (answer.status, answer.error["code"]) == (78, f"{what}-untrusted")
    assert path.name in answer.error["message"] + answer.error["detail"]
    assert box.snapshot() == before


def test_a_ref_that_changes_nothing_against_stock_is_refused(box: Box) -> None:
    make_clone(box)
    source = {"path": f"/{SOURCE}", "stock_ref": "{driver_version}"}
    before = toys.snapshot(box.root / "lib")
    box.configure(source={**source, "ref": "{driver_version}"})
    answer = box.rebuild("--kernel", K2)
    assert (answer.status, answer.error["code"]) == (78, "source-not-patched")
    box.configure(source={**source, "ref": "{driver_version}-p3p"})
    answer = box.rebuild("--kernel", K2)
    assert (answer.status, answer.error["code"]) == (78, "source-ref-missing")
    assert "999.10.01-p2p" in answer.error["hint"]
    assert toys.snapshot(box.root / "lib") == before
    box.configure(source={**source, "ref": "{driver_version}-p2p"})
    box.rebuilt("--kernel", K2)
    assert box.kernel(K2)["ready"] is True


# C32: Secure Boot


def efi(box: Box, *, on: bool = True, enrolled: bytes | None = None) -> None:
    folder = box.root / "sys/firmware/efi/efivars"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"SecureBoot-{_GUID}").write_bytes(b"\x06\0\0\0" + bytes([on]))
    if enrolled is not None:
        (folder / _MOK).write_bytes(b"\x06\0\0\0" + b"\xa1" * 44 + enrolled)


def mok(box: Box) -> bytes:
    """A key where Debian's DKMS keeps it, and a tool; the certificate."""
    folder = box.root / "var/lib/dkms"
    folder.mkdir(parents=True)
    _, certificate = make_key(folder)
    certificate.rename(folder / "mok.pub")
    for release in (K1, K2):
        tool = box.root / "usr/src" / f"linux-headers-{release}" / "scripts/sign-file"
        tool.write_text(SIGN_FILE)
        tool.chmod(0o755)
    return (folder / "mok.pub").read_bytes()


def is_signed(path: Path) -> bool:
    with path.open("rb") as file:
        return read_module(file).signed


def test_without_efi_signatures_do_not_matter(box: Box) -> None:
    assert box.status()["secure_boot"]["state"] == "not-applicable"
    box.rebuilt()
    assert box.status()["verdict"] == "ok"


def test_with_secure_boot_off_they_do_not_matter_either(box: Box) -> None:
    efi(box, on=False)
    box.rebuilt()
    assert box.status()["secure_boot"]["state"] == "off"
    assert box.status()["verdict"] == "ok"


def test_unsigned_modules_will_be_rejected(box: Box) -> None:
    efi(box)
    found = box.findings(K2)["secure-boot-will-reject"]
    assert found["severity"] == "critical"
    assert "not signed" in found["message"]
    before = box.snapshot()
    answer = box.rebuild("--kernel", K2)
    assert (answer.status, answer.error["code"]) == (69, "signing-key-missing")
    assert box.snapshot() == before


def test_signed_with_an_enrolled_key_is_ready(box: Box) -> None:
    efi(box, enrolled=mok(box))
    box.rebuilt("--kernel", K2)
    assert is_signed(box.tree(K2) / "updates/gpuguard/nvidia.ko")
    assert box.kernel(K2)["ready"] is True
    assert box.status()["secure_boot"]["enrolled"] is True


def test_signed_with_a_key_that_is_not_enrolled_is_said_before_the_reboot(box: Box) -> None:
    mok(box)
    efi(box, enrolled=b"another certificate")
    done = box.rebuild("--kernel", K2)
    assert done.status == 1  # it worked, but this is no kernel to boot into
    (step,) = done.document["steps"]
    assert (step["action"], step["ok"], step["ready"]) == ("rebuild", True, False)
    assert "not enrolled" in step["not_ready_because"][0]
    assert "done, but not ready" in box.run("rebuild", "--force", "--kernel", K2).out
    found = box.findings(K2)["secure-boot-key-not-enrolled"]
    assert found["severity"] == "critical"
    assert "mokutil --import /var/lib/dkms/mok.pub" in found["remedy"]
    assert box.status()["reboot"]["safe"] is False
    again = box.rebuild("--kernel", K2)  # a rebuild would not help, and no key is enrolled here
    assert (again.status, again.document["steps"][0]["action"]) == (1, "leave")


def test_a_list_of_keys_that_cannot_be_read_is_unknown(box: Box) -> None:
    mok(box)
    efi(box)
    assert box.rebuild("--kernel", K2).status == 1
    found = box.findings(K2)["secure-boot-unknown"]
    assert found["severity"] == "unknown"
    assert box.kernel(K2)["ready"] is False


@pytest.mark.parametrize("tool", ["#!/bin/sh\nexit 0\n", "#!/bin/sh\necho no key >&2; exit 1\n"])
def test_a_tool_that_does_not_sign_is_an_error(box: Box, tool: str) -> None:
    efi(box, enrolled=mok(box))
    path = box.root / "usr/src" / f"linux-headers-{K2}" / "scripts/sign-file"
    path.write_text(tool)
    before = box.snapshot()
    answer = box.rebuild("--kernel", K2)
    assert (answer.status, answer.error["code"]) == (70, "signing-failed")
    assert box.snapshot() == before


def test_without_a_tool_a_signature_cannot_be_had(box: Box, tmp_path: Path) -> None:
    efi(box, enrolled=mok(box))
    (box.root / "usr/src" / f"linux-headers-{K2}" / "scripts/sign-file").unlink()
    if shutil.which("kmodsign") and os.access("/usr/bin/kmodsign", os.X_OK):
        pytest.skip("kmodsign is installed here, and would be used")
    answer = box.rebuild("--kernel", K2)
    assert (answer.status, answer.error["code"]) == (69, "signing-tool-missing")
