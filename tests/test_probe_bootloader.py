"""The kernel that comes next, as GRUB, systemd-boot and links say."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuguard.core.facts import NextKernel
from gpuguard.errors import ProbeError
from gpuguard.host import LocalHost
from gpuguard.probes.bootloader import probe_next_kernel
from gpuguard.probes.grub import default_entry, parse_grub_config, parse_grubenv
from tests.trees import Link, make_tree
from tests.unprivileged import as_nobody, public_dir

GOLDEN = Path(__file__).parent / "golden"
DEBIAN = (GOLDEN / "grub-2.06-debian12-saved.cfg").read_text()
UUID = "11111111-2222-3333-4444-555555555555"
ADVANCED = f"gnulinux-advanced-{UUID}"
OLD, NEW = "6.1.0-47-amd64", "6.1.0-50-amd64"


def probe(tmp_path: Path, files: dict[str, str | bytes | Link | None]) -> NextKernel:
    return probe_next_kernel(LocalHost(make_tree(tmp_path, files)), (OLD, NEW))


def grubenv(**variables: str) -> str:
    lines = "".join(f"{name}={value}\n" for name, value in variables.items())
    return f"# GRUB Environment Block\n{lines}".ljust(1024, "#")


@pytest.mark.parametrize(
    ("variables", "release"),
    [
        ({}, NEW),
        ({"saved_entry": "0"}, NEW),
        ({"saved_entry": "1"}, NEW),  # the submenu itself: its first entry
        ({"saved_entry": "1>2"}, OLD),
        ({"saved_entry": f"{ADVANCED}>gnulinux-{OLD}-advanced-{UUID}"}, OLD),
        (
            {
                "saved_entry": "Advanced options for Debian GNU/Linux"
                f">Debian GNU/Linux, with Linux {OLD}"
            },
            OLD,
        ),
        ({"saved_entry": f"1>gnulinux-{OLD}-recovery-{UUID}"}, OLD),
        ({"saved_entry": "0", "next_entry": "1>2"}, OLD),  # grub-reboot wins once
        ({"saved_entry": "1>2", "next_entry": ""}, OLD),
        ({"saved_entry": "1>2", "prev_saved_entry": "0"}, OLD),  # default was set before it
    ],
)
def test_grub_default_of_debian_12(tmp_path: Path, variables: dict[str, str], release: str) -> None:
    found = probe(
        tmp_path, {"/boot/grub/grub.cfg": DEBIAN, "/boot/grub/grubenv": grubenv(**variables)}
    )
    assert (found.release, found.source) == (release, "grub")


@pytest.mark.parametrize("default", ["gnulinux-gone", "9", "1>9", "1>gone", f"{ADVANCED}>gone"])
def test_grub_falls_back_to_the_first_entry_as_grub_does(tmp_path: Path, default: str) -> None:
    found = probe(
        tmp_path,
        {"/boot/grub/grub.cfg": DEBIAN, "/boot/grub/grubenv": grubenv(saved_entry=default)},
    )
    assert found.release == NEW
    assert "names no entry" in found.reason


@pytest.mark.parametrize(
    ("variables", "release"),
    [
        ({}, "6.8.0-90-generic"),
        ({"next_entry": "0"}, "6.8.0-100-generic"),
        ({"recordfail": "1"}, "6.8.0-90-generic"),
        ({"initrdfail": "1", "prev_entry": "gnulinux-simple-5d1f"}, "6.8.0-100-generic"),
    ],
)
def test_grub_in_the_shape_of_ubuntu_with_its_own_boot_partition(
    tmp_path: Path, variables: dict[str, str], release: str
) -> None:
    config = (GOLDEN / "grub-ubuntu-24.04-shape.cfg").read_text()
    found = probe(
        tmp_path,
        {
            "/boot/grub/grub.cfg": config,
            "/boot/grub/grubenv": grubenv(**variables),
            "/boot/grub/gfxblacklist.txt": "v10de*\n",
        },
    )
    assert (found.release, found.source) == (release, "grub")


def test_grub_without_grubenv_file(tmp_path: Path) -> None:
    assert probe(tmp_path, {"/boot/grub/grub.cfg": DEBIAN}).release == NEW


def test_real_grubenv_of_grub_editenv_2_06() -> None:
    variables = parse_grubenv((GOLDEN / "grub-2.06-grubenv.txt").read_text())
    assert variables == {"saved_entry": "gnulinux-advanced-1>gnulinux-6.1", "odd": r"a\b"}


@pytest.mark.parametrize(
    "kernel",
    [
        f"/boot/vmlinuz-{OLD}", f"/vmlinuz-{OLD}", f"/@/boot/vmlinuz-{OLD}",
        f"($root)/boot/vmlinuz-{OLD}", f'"/boot/vmlinuz-{OLD}"',
        f"/ROOT/debian@/boot/vmlinuz-{OLD}", f"/boot/vmlinuz-{OLD}.efi.signed",
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["linux", "linuxefi", "linux16"])
def test_grub_kernel_paths(tmp_path: Path, kernel: str, command: str) -> None:
    config = f'menuentry "It\'s mine" --id=a {{\n\t{command}\t{kernel} root=/dev/vda1 ro\n}}\n'
    assert probe(tmp_path, {"/boot/grub/grub.cfg": config}).release == OLD


def test_grub_kernel_link_is_followed_in_the_host(tmp_path: Path) -> None:
    found = probe(
        tmp_path,
        {
            "/boot/grub2/grub.cfg": "menuentry x { linux /boot/vmlinuz quiet\n }",
            "/boot/vmlinuz": Link(f"/boot/vmlinuz-{OLD}"),
            f"/boot/vmlinuz-{OLD}": "image",
        },
    )
    assert found.release == OLD


def test_grub_entry_of_a_kernel_that_is_gone_is_reported_all_the_same(tmp_path: Path) -> None:
    config = "menuentry x {\n linux /boot/vmlinuz-9.9.9-1-amd64\n}"
    assert probe(tmp_path, {"/boot/grub/grub.cfg": config}).release == "9.9.9-1-amd64"


def test_grub_entry_that_starts_no_linux(tmp_path: Path) -> None:
    config = "menuentry 'Windows Boot Manager' {\n chainloader /EFI/Microsoft/bootmgfw.efi\n}"
    found = probe(tmp_path, {"/boot/grub/grub.cfg": config, "/vmlinuz": Link("boot/vmlinuz-1.2.3")})
    assert found.release is None
    assert "Windows Boot Manager" in found.reason


def test_grub_xen_entry_takes_the_linux_module(tmp_path: Path) -> None:
    config = (
        f"menuentry x {{\n multiboot2 /boot/xen-4.17.gz\n module2 /boot/vmlinuz-{OLD} placeholder\n"
        " module2 --nounzip /boot/initrd.img\n}"
    )
    assert probe(tmp_path, {"/boot/grub/grub.cfg": config}).release == OLD


@pytest.mark.parametrize(
    ("script", "default"),
    [
        ("set default=2", "2"),
        ("default=2", "2"),
        ('set default="a b>c"', "a b>c"),
        ("set default='x\"y'", 'x"y'),
        ("set a=1; set default=${a}$a", "11"),
        ("if [ x = y ]; then set default=1; else set default=2; fi", "2"),
        ("if [ x = y ]; then set default=1\nelif [ -n z -a ! -z z ]; then set default=2\nfi", "2"),
        ("if [ -z '' -o x = y ] ; then\n set default=1 # comment\nelse\n set default=2\nfi", "1"),
        ("if [ -f $prefix/custom.cfg ]; then source $prefix/custom.cfg; fi", "custom"),
        ("function f {\n set default=7\n}\n", "0"),
        ('if [ "${feature_menuentry_id}" = y ]; then set default=1; fi', "1"),
        ("set default=1 \\\n", "1"),
        ("", "0"),
        ("if loadfont unicode; then set gfxmode=auto; fi\nset default=3", "3"),
        ("if loadfont unicode; then set default=3; fi", None),
        ('if [ "$grub_platform" = efi ]; then set default=1; else set default=2; fi', None),
        ("while true; do set default=1; done", None),
    ],
)
def test_grub_script(script: str, default: str | None) -> None:
    files = {"/boot/grub/custom.cfg": "set default=custom\n"}
    assert parse_grub_config(script, files.get).default == default


@pytest.mark.parametrize(
    "script",
    ["menuentry 'x {", "}", "fi", "else", "elif [ a ]", "source $prefix/custom.cfg"],
)
def test_broken_grub_script_is_an_error(script: str) -> None:
    files = {"/boot/grub/custom.cfg": "source $prefix/custom.cfg\n"}
    with pytest.raises(ProbeError):
        parse_grub_config(script, files.get)


def test_grub_index_past_a_conditional_entry_is_unknown() -> None:
    config = (
        "if [ $grub_platform = efi ]; then\nmenuentry firmware {\n fwsetup\n}\nfi\n"
        "menuentry a --id a {\n linux /vmlinuz-1.2.3-a\n}\n"
    )
    with pytest.raises(ProbeError, match="condition"):
        default_entry(parse_grub_config("set default=1\n" + config, lambda _: None))
    with pytest.raises(ProbeError, match="condition"):
        default_entry(parse_grub_config("set default=a\n" + config, lambda _: None))


def test_grub_with_blscfg_is_unknown_and_says_so(tmp_path: Path) -> None:
    found = probe(tmp_path, {"/boot/grub2/grub.cfg": 'set default="${saved_entry}"\nblscfg\n'})
    assert found.release is None
    assert "blscfg" in found.reason


@pytest.mark.parametrize("content", [b"", b"\x00\xff\x7fELF" * 50, b"'", b"}\n" * 5])
def test_grub_garbage_is_unknown(tmp_path: Path, content: bytes) -> None:
    found = probe(tmp_path, {"/boot/grub/grub.cfg": content, "/vmlinuz": Link("vmlinuz-1.2.3")})
    assert (found.release, found.source) == (None, "grub")
    assert "/boot/grub/grub.cfg" in found.reason


@pytest.mark.parametrize(
    ("closed", "mode"),
    [("boot/grub/grub.cfg", 0o600), ("boot/grub/grubenv", 0o600), ("boot/grub", 0o700)],
)
def test_unreadable_grub_is_unknown_not_the_link(closed: str, mode: int) -> None:
    with public_dir() as root:
        files = {"/boot/grub/grub.cfg": DEBIAN, "/boot/grub/grubenv": grubenv(saved_entry="0")}
        make_tree(root, {**files, "/vmlinuz": Link(f"boot/vmlinuz-{OLD}")})
        (root / closed).chmod(mode)
        with as_nobody():
            found = probe_next_kernel(LocalHost(root), (OLD, NEW))
    assert found.release is None
    assert "cannot be read: Permission denied" in found.reason
    assert closed.rpartition("/")[2] in found.reason


def test_default_file_alone_is_no_evidence(tmp_path: Path) -> None:
    found = probe(tmp_path, {"/etc/default/grub": 'GRUB_DEFAULT="1>2"\n'})
    assert (found.release, found.source) == (None, "none")


@pytest.mark.parametrize("link", ["/vmlinuz", "/boot/vmlinuz"])
@pytest.mark.parametrize("target", [f"boot/vmlinuz-{OLD}", f"/boot/vmlinuz-{OLD}"])
def test_link(tmp_path: Path, link: str, target: str) -> None:
    target = target if link == "/vmlinuz" or target.startswith("/") else f"vmlinuz-{OLD}"
    found = probe(tmp_path, {link: Link(target), f"/boot/vmlinuz-{OLD}": "image"})
    assert (found.release, found.source) == (OLD, "/vmlinuz")


def entry(release: str, **keys: str) -> str:
    lines = {"title": "Debian", "version": release, "linux": f"/m/{release}/linux", **keys}
    return "".join(f"{key.replace('_', '-')}    {value}\n" for key, value in lines.items())


def esp(folder: str = "/boot/efi", **entries: str) -> dict[str, str | bytes | Link | None]:
    files: dict[str, str | bytes | Link | None] = {}
    for name, text in entries.items():
        files[f"{folder}/loader/entries/{name}.conf"] = text
        files[f"{folder}/m/{name.removeprefix('m-').split('+')[0]}/linux"] = "image"
    return files


@pytest.mark.parametrize("folder", ["/efi", "/boot", "/boot/efi"])
def test_systemd_boot_newest_first(tmp_path: Path, folder: str) -> None:
    entries = {f"m-{r}": entry(r) for r in ("6.8.0-9-generic", "6.8.0-100-generic")}
    found = probe(tmp_path, esp(folder, **entries))
    assert (found.release, found.source) == ("6.8.0-100-generic", "systemd-boot")


@pytest.mark.parametrize(
    ("config", "release"),
    [
        (f"default m-{OLD}.conf\n", OLD),
        (f"default m-{OLD}\n", OLD),
        ("timeout 3\ndefault *-47-*\n", OLD),
        ("# default m-6.1.0-47*\n", NEW),
        ("default gone-*\n", NEW),
        ("default @saved\n", NEW),
    ],
)
def test_systemd_boot_default(tmp_path: Path, config: str, release: str) -> None:
    files = esp(**{f"m-{OLD}": entry(OLD), f"m-{NEW}": entry(NEW)})
    assert probe(tmp_path, {**files, "/boot/efi/loader/loader.conf": config}).release == release


def test_systemd_boot_sort_key_counters_and_missing_images(tmp_path: Path) -> None:
    files = esp(
        **{
            f"m-{OLD}": entry(OLD, sort_key="a"),
            f"m-{NEW}": entry(NEW, sort_key="b"),
            "m-6.1.0-99-amd64+0-3": entry("6.1.0-99-amd64", sort_key="a"),  # tried and failed
            "m-7.0.0-1-amd64": entry("7.0.0-1-amd64"),  # no sort-key: after the others
        }
    )
    files["/boot/efi/loader/entries/m-8.0.0-1.conf"] = entry("8.0.0-1", sort_key="a")  # no image
    assert probe(tmp_path, files).release == OLD


def loader_variable(name: str, value: str) -> dict[str, str | bytes | Link | None]:
    path = f"/sys/firmware/efi/efivars/{name}-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
    return {path: b"\7\0\0\0" + f"{value}\0".encode("utf-16-le")}


@pytest.mark.parametrize("name", ["LoaderEntryOneShot", "LoaderEntryDefault"])
def test_systemd_boot_efi_variables_win(tmp_path: Path, name: str) -> None:
    files = esp(**{f"m-{OLD}": entry(OLD), f"m-{NEW}": entry(NEW)})
    files |= {"/boot/efi/loader/loader.conf": f"default m-{NEW}.conf\n"}
    assert probe(tmp_path, {**files, **loader_variable(name, f"m-{OLD}.conf")}).release == OLD


def test_systemd_boot_into_firmware_is_no_kernel(tmp_path: Path) -> None:
    files = esp(**{f"m-{OLD}": entry(OLD)})
    firmware = loader_variable("LoaderEntryOneShot", "auto-reboot-to-firmware-setup")
    found = probe(tmp_path, {**files, **firmware})
    assert found.release is None
    assert "auto-reboot-to-firmware-setup" in found.reason


def test_the_loader_that_started_this_system_is_asked_first(tmp_path: Path) -> None:
    files = esp(**{f"m-{OLD}": entry(OLD)})
    files["/boot/grub/grub.cfg"] = DEBIAN
    assert probe(tmp_path, files).source == "grub"
    started = loader_variable("LoaderInfo", "systemd-boot 252.39-1")
    assert probe(tmp_path, started).source == "systemd-boot"


def test_systemd_boot_reads_the_image_where_no_name_tells(tmp_path: Path) -> None:
    header = bytearray(0x400)
    header[0x202:0x206], header[0x20E:0x210] = b"HdrS", (0x100).to_bytes(2, "little")
    header[0x300:] = b"6.9.3-76060903-generic (buildd@x) #1\0"
    found = probe(
        tmp_path,
        {
            "/boot/efi/loader/entries/Pop_OS-current.conf": "linux /EFI/Pop_OS/vmlinuz.efi\n",
            "/boot/efi/EFI/Pop_OS/vmlinuz.efi": bytes(header),
        },
    )
    assert found.release == "6.9.3-76060903-generic"


def test_unified_kernel_images(tmp_path: Path) -> None:
    images = {f"/efi/EFI/Linux/debian-{r}.efi": "uki" for r in (OLD, NEW)}
    assert probe(tmp_path, {**images}).release == NEW
    mixed = esp("/efi", **{f"m-{OLD}": entry(OLD)})
    assert probe(tmp_path, mixed).release is None  # their order is in the images
    named = probe(tmp_path, {"/efi/loader/loader.conf": f"default m-{OLD}.conf\n"})
    assert named.release == OLD


def test_closed_esp_is_unknown_not_the_link() -> None:
    with public_dir() as root:
        files = esp(**{f"m-{OLD}": entry(OLD)})
        make_tree(root, {**files, "/vmlinuz": Link(f"boot/vmlinuz-{OLD}")})
        (root / "boot/efi").chmod(0o700)
        with as_nobody():
            found = probe_next_kernel(LocalHost(root), (OLD,))
    assert found.release is None
    assert "/boot/efi/loader/entries" in found.reason
