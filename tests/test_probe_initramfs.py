"""Compressed files, cpio archives, and what is inside an initramfs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuguard.core.facts import InitramfsFacts, InitramfsState
from gpuguard.errors import ProbeError
from gpuguard.host import LocalHost, zstd
from gpuguard.host.cache import FileCache
from gpuguard.host.cpio import Member, members
from gpuguard.host.decompress import compression_of, decompressed
from gpuguard.host.elf import read_module
from gpuguard.probes.initramfs import probe_initramfs
from tests.toys import toy_module
from tests.trees import Link, make_tree
from tests.unprivileged import as_nobody, public_dir

R = "6.8.0-90-generic"
IMAGE = f"boot/initrd.img-{R}"
DKMS = f"usr/lib/modules/{R}/updates/dkms"
#: One line per format: file name suffix, program that writes it from stdin to stdout.
TOOLS = {
    "plain": "cat", "gzip": "gzip -c", "xz": "xz -c --check=crc32", "lzma": "xz -c --format=lzma",
    "bzip2": "bzip2 -c", "zstd": "zstd -qc", "lz4": "lz4 -qc", "lz4-legacy": "lz4 -lqc",
}  # fmt: skip
HOST = LocalHost()


def packed(tool: str, content: bytes) -> bytes:
    argv = TOOLS[tool].split()
    if not HOST.has_program(argv[0]):
        pytest.skip(f"no {argv[0]} here")
    return subprocess.run(argv, input=content, stdout=subprocess.PIPE, check=True).stdout


def cpio(root: Path) -> bytes:
    names = "\n".join(str(p.relative_to(root)) for p in sorted(root.rglob("*")))
    argv = ["cpio", "--quiet", "-o", "-H", "newc"]
    return subprocess.run(
        argv, cwd=root, input=names.encode(), stdout=subprocess.PIPE, check=True
    ).stdout


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Two builds of one module: same version, other build-id."""
    folder = tmp_path_factory.mktemp("modules")
    stock, patched = (toy_module(folder / f"{seed}.ko", seed=seed) for seed in ("stock", "ok"))
    return stock.read_bytes(), patched.read_bytes()


def build_id(module: bytes, tmp_path: Path) -> str:
    (tmp_path / "one.ko").write_bytes(module)
    with (tmp_path / "one.ko").open("rb") as file:
        found = read_module(file).build_id
    assert found
    return found


def put_image(
    root: Path, files: dict[str, bytes], *, tool: str = "zstd", early: bool = False
) -> None:
    """Write an image with these files, behind an early microcode archive if wanted."""
    content = root / "content"
    make_tree(content, {"/init": "#!/bin/sh\n", **files})
    image = b""
    if early:
        make_tree(root / "early", {"/kernel/x86/microcode/GenuineIntel.bin": b"ucode" * 999})
        image = cpio(root / "early")
    make_tree(root, {IMAGE: image + packed(tool, cpio(content))})


def probe(root: Path, resolved: dict[str, str | None]) -> InitramfsFacts:
    return probe_initramfs(LocalHost(root), R, resolved)


# --- decompress -----------------------------------------------------------------------------


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("offset", [0, 1000])
@pytest.mark.parametrize("size", [1, 131072, 3 * 131072, 1_000_003])
def test_every_format(tmp_path: Path, tool: str, offset: int, size: int) -> None:
    content = bytes(i * i % 251 for i in range(997)) * (size // 997 + 1)
    content = content[:size]
    (tmp_path / "f").write_bytes(b"\0" * offset + packed(tool, content))
    with decompressed(HOST, tmp_path / "f", offset=offset) as file:
        assert file.read() == content


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool != "plain"])
def test_truncated_and_damaged(tmp_path: Path, tool: str) -> None:
    whole = packed(tool, b"".join(i.to_bytes(4, "big") for i in range(100_000)))
    damaged = whole[:2000] + b"\xff" * 64 + whole[2064:]
    for content in (whole[: len(whole) // 2], whole[:9], damaged):
        (tmp_path / "f").write_bytes(content)
        if tool == "lz4-legacy" and content is damaged:
            continue  # it has no checksum
        with pytest.raises(ProbeError, match="not readable"), decompressed(HOST, tmp_path / "f"):
            pass


def test_zstd_program_where_the_library_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zstd, "is_available", lambda: False)
    (tmp_path / "f").write_bytes(b"1234" + packed("zstd", b"content"))
    with decompressed(HOST, tmp_path / "f", offset=4) as file:
        assert file.read() == b"content"
    (tmp_path / "f").write_bytes(packed("zstd", b"content")[:-1])
    with pytest.raises(ProbeError, match="zstd"), decompressed(HOST, tmp_path / "f"):
        pass


def test_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(packed("lz4", b"content"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("gpuguard.host.local._SBIN", ())
    with pytest.raises(ProbeError, match="no program lz4"), decompressed(HOST, tmp_path / "f"):
        pass


def test_absent_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="cannot be read"), decompressed(HOST, tmp_path / "no"):
        pass
    with pytest.raises(ProbeError, match="not a regular file"), decompressed(HOST, tmp_path):
        pass


def test_errors_of_the_reader_pass_through(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"plain")
    with pytest.raises(ValueError, match="mine"), decompressed(HOST, tmp_path / "f"):
        raise ValueError("mine")


def test_magic() -> None:
    assert compression_of(b"\x7fELF") is None
    assert compression_of(b"") is None


# --- cpio -----------------------------------------------------------------------------------


def listed(content: bytes, tmp_path: Path) -> Iterator[Member]:
    (tmp_path / "archive").write_bytes(content)
    with (tmp_path / "archive").open("rb") as file:
        yield from members(file)


def test_members_of_several_archives(tmp_path: Path) -> None:
    make_tree(tmp_path / "one", {"/a": "x" * 5, "/d/empty": "", "/link": Link("a")})
    make_tree(tmp_path / "two", {"/b": "y" * 1001})
    content = cpio(tmp_path / "one") + b"\0" * 512 + cpio(tmp_path / "two") + b"\0" * 64
    found = {m.name: (m.size, m.is_file) for m in listed(content, tmp_path)}
    assert found == {
        "a": (5, True), "d": (0, False), "d/empty": (0, True), "link": (1, False),
        "b": (1001, True),
    }  # fmt: skip


def test_content(tmp_path: Path) -> None:
    make_tree(tmp_path / "one", {"/a": "first", "/b": "second"})
    (tmp_path / "archive").write_bytes(cpio(tmp_path / "one"))
    with (tmp_path / "archive").open("rb") as file, (tmp_path / "out").open("wb") as sink:
        for member in members(file):
            member.copy_to(sink)
    assert (tmp_path / "out").read_bytes() == b"firstsecond"


@pytest.mark.parametrize("cut", [1, 50, 112, 130, 300, 1000])
def test_truncated_archive(tmp_path: Path, cut: int) -> None:
    make_tree(tmp_path / "one", {"/a": "x" * 2000})
    with pytest.raises(ProbeError):
        list(listed(cpio(tmp_path / "one")[:cut], tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"070707" + b"0" * 200,
        b"070701" + b"z" * 200,
        b"070701" + b"ffffffff" * 13,
        b"070701" + b"00000000" * 13,
        b"\x7fELF" * 100,
        b"",
    ],
)
def test_archive_of_garbage(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ProbeError):
        list(listed(content, tmp_path))


# --- initramfs ------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("early", [False, True])
def test_current_and_stale(
    tmp_path: Path, modules: tuple[bytes, bytes], tool: str, early: bool
) -> None:
    stock, patched = modules
    put_image(tmp_path, {f"/{DKMS}/nvidia.ko": stock}, tool=tool, early=early)
    inside = build_id(stock, tmp_path)
    assert probe(tmp_path, {"nvidia": inside}) == InitramfsFacts(
        state=InitramfsState.CURRENT, path=f"/{IMAGE}", modules=(("nvidia", inside),)
    )
    stale = probe(tmp_path, {"nvidia": build_id(patched, tmp_path)})
    assert stale.state is InitramfsState.STALE
    assert inside in stale.reason


@pytest.mark.parametrize("tool", ["xz", "zstd", "gzip"])
def test_compressed_modules_inside_an_image(
    tmp_path: Path, modules: tuple[bytes, bytes], tool: str
) -> None:
    suffix = {"xz": ".xz", "zstd": ".zst", "gzip": ".gz"}[tool]
    name = f"/lib/modules/{R}/kernel/nvidia-580-open/nvidia-drm.ko{suffix}"
    put_image(tmp_path, {name: packed(tool, modules[0])})
    inside = build_id(modules[0], tmp_path)
    assert probe(tmp_path, {"nvidia-drm": inside}).state is InitramfsState.CURRENT


def test_modules_in_an_early_uncompressed_archive(
    tmp_path: Path, modules: tuple[bytes, bytes]
) -> None:
    # initramfs-tools since 0.143 puts what is compressed already in front, as it is
    make_tree(tmp_path / "early", {f"/{DKMS}/nvidia.ko": modules[0]})
    make_tree(tmp_path / "main", {"/init": "#!/bin/sh\n"})
    image = cpio(tmp_path / "early") + packed("zstd", cpio(tmp_path / "main"))
    make_tree(tmp_path, {IMAGE: image})
    assert probe(tmp_path, {"nvidia": build_id(modules[0], tmp_path)}).state is (
        InitramfsState.CURRENT
    )


def test_one_stale_module_of_several(tmp_path: Path, modules: tuple[bytes, bytes]) -> None:
    stock, patched = modules
    put_image(
        tmp_path,
        {f"/{DKMS}/nvidia-current-open.ko": patched, f"/{DKMS}/nvidia-current-open-drm.ko": stock},
    )
    ours = build_id(patched, tmp_path)
    facts = probe(tmp_path, {"nvidia-current-open": ours, "nvidia-current-open-drm": ours})
    assert facts.state is InitramfsState.STALE
    assert [name for name, _ in facts.modules] == [
        "nvidia-current-open", "nvidia-current-open-drm",
    ]  # fmt: skip


def test_two_copies_of_one_module(tmp_path: Path, modules: tuple[bytes, bytes]) -> None:
    stock, patched = modules
    put_image(
        tmp_path,
        {
            f"/{DKMS}/nvidia.ko": stock,
            f"/usr/lib/modules/{R}/updates/gpuguard/nvidia.ko": patched,
        },
    )
    assert probe(tmp_path, {"nvidia": build_id(patched, tmp_path)}).state is InitramfsState.STALE


def test_module_that_resolves_nowhere_is_stale(
    tmp_path: Path, modules: tuple[bytes, bytes]
) -> None:
    put_image(tmp_path, {f"/{DKMS}/nvidia.ko": modules[0]})
    assert probe(tmp_path, {}).state is InitramfsState.STALE
    assert probe(tmp_path, {"nvidia": None}).state is InitramfsState.STALE


@pytest.mark.parametrize(
    "name",
    [
        f"/usr/lib/modules/{R}/kernel/drivers/video/fbdev/nvidia/nvidiafb.ko",
        f"/usr/lib/modules/{R}/kernel/drivers/platform/x86/nvidia-wmi-ec-backlight.ko",
        "/usr/lib/modules/9.9.9/updates/dkms/nvidia.ko",
        f"/usr/lib/modules/{R}/updates/dkms/nvidia.ko.bak",
        "/etc/modprobe.d/nvidia.ko",
    ],
)
def test_files_that_are_no_nvidia_modules_of_this_kernel(tmp_path: Path, name: str) -> None:
    put_image(tmp_path, {name: b"not a module"})
    facts = probe(tmp_path, {"nvidia": "ab"})
    assert (facts.state, facts.path) == (InitramfsState.NONE, f"/{IMAGE}")


def test_no_image(tmp_path: Path) -> None:
    assert probe(tmp_path, {"nvidia": "ab"}) == InitramfsFacts(
        state=InitramfsState.NONE, reason="there is no image"
    )


def test_image_of_dracut(tmp_path: Path, modules: tuple[bytes, bytes]) -> None:
    put_image(tmp_path, {f"/{DKMS}/nvidia.ko": modules[0]})
    (tmp_path / IMAGE).rename(tmp_path / f"boot/initramfs-{R}.img")
    facts = probe(tmp_path, {})
    assert (facts.state, facts.path) == (InitramfsState.STALE, f"/boot/initramfs-{R}.img")


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 4096, b"\x7fELF" * 1000, b"\x28\xb5\x2f\xfd" + b"\xff" * 100, b"070701"],
)
def test_image_of_garbage_is_unknown(tmp_path: Path, content: bytes) -> None:
    make_tree(tmp_path, {IMAGE: content})
    facts = probe(tmp_path, {})
    assert (facts.state, facts.path) == (InitramfsState.UNKNOWN, f"/{IMAGE}")
    assert facts.reason


def test_compressed_garbage_and_cut_image_are_unknown(
    tmp_path: Path, modules: tuple[bytes, bytes]
) -> None:
    put_image(tmp_path, {f"/{DKMS}/nvidia.ko": modules[0]}, early=True)
    image = tmp_path / IMAGE
    whole = image.read_bytes()
    image.write_bytes(whole[:-10])
    assert probe(tmp_path, {}).state is InitramfsState.UNKNOWN
    image.write_bytes(packed("zstd", b"no archive"))
    assert probe(tmp_path, {}).state is InitramfsState.UNKNOWN


def test_garbage_module_inside_is_unknown_and_named(tmp_path: Path) -> None:
    put_image(tmp_path, {f"/{DKMS}/nvidia.ko": b"\x7fELF" + b"\0" * 200})
    facts = probe(tmp_path, {"nvidia": "ab"})
    assert facts.state is InitramfsState.UNKNOWN
    assert f"{DKMS}/nvidia.ko" in facts.reason


def test_closed_image_is_unknown() -> None:
    with public_dir() as root:
        make_tree(root, {IMAGE: "x"})
        (root / IMAGE).chmod(0o600)
        with as_nobody():
            facts = probe(root, {})
    assert facts.state is InitramfsState.UNKNOWN
    assert "Permission denied" in facts.reason


class CountingCache(FileCache):
    """Counts what had to be read."""

    def __init__(self) -> None:
        super().__init__(None)
        self.read = 0

    def put(self, path: Path, value: dict[str, Any]) -> None:
        self.read += 1
        super().put(path, value)


def test_an_unchanged_image_is_read_once(tmp_path: Path, modules: tuple[bytes, bytes]) -> None:
    stock, patched = modules
    put_image(tmp_path, {f"/{DKMS}/nvidia.ko": stock})
    host, cache, inside = LocalHost(tmp_path), CountingCache(), build_id(stock, tmp_path)
    first = probe_initramfs(host, R, {"nvidia": inside}, cache)
    assert probe_initramfs(host, R, {"nvidia": inside}, cache) == first
    other = {"nvidia": build_id(patched, tmp_path)}
    assert probe_initramfs(host, R, other, cache).state is InitramfsState.STALE
    assert cache.read == 1
    make_tree(tmp_path / "again", {f"/{DKMS}/nvidia.ko": patched})
    (tmp_path / IMAGE).write_bytes(packed("gzip", cpio(tmp_path / "again")))
    assert probe_initramfs(host, R, other, cache).state is InitramfsState.CURRENT
    assert cache.read == 2


def test_the_same_files_as_lsinitramfs_sees(tmp_path: Path, modules: tuple[bytes, bytes]) -> None:
    if not HOST.has_program("lsinitramfs"):
        pytest.skip("no initramfs-tools here")
    put_image(tmp_path, {f"/{DKMS}/nvidia.ko": modules[0], "/usr/bin/sh": b"x"}, early=True)
    listing = HOST.run("lsinitramfs", str(tmp_path / IMAGE), timeout=60).stdout
    with (tmp_path / IMAGE).open("rb") as file:
        early = [m.name for m in members(file)]
        offset = file.tell()
    with decompressed(HOST, tmp_path / IMAGE, offset=offset) as file:
        main = [m.name for m in members(file)]
    assert sorted(early + main) == sorted(listing.split())
