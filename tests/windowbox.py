"""A box whose packages are real: apt and dpkg of this machine, on a root of the test's own.

The root sees this machine's ``/usr`` through an overlay, so ``chroot ROOT apt-get`` is the real
program within milliseconds; packages come from a ``file:`` repository made in the test. Kernels,
headers and the driver's library are toys. Needs root and overlay mounts.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import toys
from tests.box import BUILT, K1, K2, Box, furnish
from tests.building import gcc_text

NEW_DRIVER = "999.20.01"
_FOLDERS = (
    "etc/apt/apt.conf.d", "etc/apt/preferences.d", "etc/apt/sources.list.d",
    "etc/apt/trusted.gpg.d", "etc/default/grub.d", "dev", "tmp", "run", "boot/grub",
    "var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/log/apt",
    "var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers", "srv/repo",
)  # fmt: skip
_FROM_HERE = ("etc/passwd", "etc/group", "etc/nsswitch.conf", "etc/ld.so.cache", "etc/alternatives")
_APT_CONF = 'APT::Sandbox::User "root";\nAPT::Install-Recommends "false";\n'
#: As grub-mkconfig does it, as far as anything here looks: defaults, then the newest, then all.
_UPDATE_GRUB = """\
#!/bin/sh
set -e
GRUB_DEFAULT=0
for file in /etc/default/grub /etc/default/grub.d/*.cfg; do [ ! -e "$file" ] || . "$file"; done
entry() {
    printf "menuentry 'Toy, with Linux %s' $menuentry_id_option '%s' {\\n" "$1" "$2"
    printf "linux /boot/vmlinuz-%s root=UUID=0a1b ro\\n}\\n" "$1"
}
kernels=$(ls /boot/vmlinuz-* | sed 's|/boot/vmlinuz-||' | sort -rV)
{
    printf 'menuentry_id_option="--id"\\nset default="%s"\\n' "$GRUB_DEFAULT"
    for kernel in $kernels; do entry "$kernel" gnulinux-simple-0a1b; break; done
    printf "submenu 'Advanced options for Toy' \\$menuentry_id_option 'gnulinux-advanced-0a1b' {\\n"
    for kernel in $kernels; do entry "$kernel" "gnulinux-$kernel-advanced-0a1b"; done
    printf '}\\n'
} >/boot/grub/grub.cfg.new
mv /boot/grub/grub.cfg.new /boot/grub/grub.cfg
"""
_KERNEL_POSTINST = "#!/bin/sh\nset -e\ndepmod {release}\nupdate-grub\n"


@dataclass(frozen=True)
class WindowBox(Box):
    """A box with apt; ``offer`` puts packages into its repository."""

    offered: dict[str, str] = field(default_factory=dict)

    def offer(
        self,
        name: str,
        version: str,
        *,
        depends: str = "",
        conflicts: str = "",
        provides: str = "",
        files: Mapping[str, str | bytes | Path] | None = None,
        links: Mapping[str, str] | None = None,
        trees: Mapping[str, Path] | None = None,
        scripts: Mapping[str, str] | None = None,
    ) -> None:
        """Make a real package; ``files`` are contents, or files to copy; ``trees`` folders."""
        work = self.root.parent / "package"
        shutil.rmtree(work, ignore_errors=True)
        control = work / "DEBIAN"
        control.mkdir(parents=True)
        fields = {
            "Package": name, "Version": version, "Architecture": _architecture(),
            "Maintainer": "test <test@example.invalid>", "Description": "toy",
            "Installed-Size": "10", "Depends": depends, "Conflicts": conflicts,
            "Provides": provides,
        }  # fmt: skip
        (control / "control").write_text("".join(f"{k}: {v}\n" for k, v in fields.items() if v))
        for script, text in (scripts or {}).items():
            (control / script).write_text(text)
            (control / script).chmod(0o755)
        for path, content in (files or {}).items():
            target = work / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, target)
            else:
                target.write_bytes(content.encode() if isinstance(content, str) else content)
        for path, goal in (links or {}).items():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).symlink_to(goal)
        for path, tree in (trees or {}).items():
            shutil.copytree(tree, work / path, symlinks=True)
        file = self.root / "srv/repo" / f"{name}_{version.replace(':', '%3a')}.deb"
        _quietly("dpkg-deb", "-Znone", "--root-owner-group", "-b", str(work), str(file))
        self.offered[f"{name}={version}"] = file.name

    def offer_kernel(
        self, release: str, version: str, *, headers: bool = True, **scripts: str
    ) -> None:
        """Image, headers and metas of one kernel; DKMS has built its stock modules.

        ``scripts`` are the image's maintainer scripts, besides what they do anyway.
        """
        series = "linux-kbuild-6.8"
        made = self.root.parent / "stock" / release
        files: dict[str, str | bytes | Path] = {
            f"boot/vmlinuz-{release}": "placeholder kernel image",
            f"usr/lib/modules/{release}/modules.order": "kernel/net/dummy.ko\n",
            f"usr/lib/modules/{release}/modules.builtin": "",
            f"usr/lib/modules/{release}/kernel/net/dummy.ko": toys.toy_module(
                made / "dummy.ko", name="dummy", release=release
            ),
        }
        for name in toys.NAMES:
            files[f"usr/lib/modules/{release}/updates/dkms/{name}.ko"] = toys.toy_module(
                made / f"{name}.ko", name=name, release=release, seed=f"stock {name}"
            )
        usual = {
            "postinst": _KERNEL_POSTINST.format(release=release),
            "postrm": "#!/bin/sh\ncase $1 in abort-*) exit 0; esac\n"
            f"rm -rf /lib/modules/{release}\n"
            "update-grub\n",
        }
        self.offer(f"linux-image-{release}", version, files=files, scripts=usual | scripts)
        self.offer("linux-image-generic", version, depends=f"linux-image-{release}")
        self.offer(series, version, files={f"usr/lib/{series}/scripts/note": version})
        if headers:
            folder = f"usr/src/linux-headers-{release}"
            self.offer(
                f"linux-headers-{release}", version, depends=f"{series} (>= {version})",
                files={f"{folder}/{name}": text for name, text in _headers(release).items()},
                links={f"usr/lib/modules/{release}/build": f"/{folder}"},
            )  # fmt: skip
            self.offer("linux-headers-generic", version, depends=f"linux-headers-{release}")

    def offer_driver(self, version: str) -> None:
        """The userland of one driver version."""
        folder = "usr/lib/x86_64-linux-gnu"
        self.offer(
            "libnvidia-ml1", f"{version}-1", files={f"{folder}/libnvidia-ml.so.{version}": ""},
            links={f"{folder}/libnvidia-ml.so.1": f"libnvidia-ml.so.{version}"},
        )  # fmt: skip
        self.offer("nvidia-driver", f"{version}-1", depends=f"libnvidia-ml1 (= {version}-1)")

    def update(self) -> None:
        """Index the repository and let apt read it."""
        stanzas = []
        for name in self.offered.values():
            file = self.root / "srv/repo" / name
            control = _quietly("dpkg-deb", "-f", str(file))
            digest = _quietly("sha256sum", str(file)).split()[0]
            size = file.stat().st_size
            stanzas.append(f"{control}Filename: ./{name}\nSize: {size}\nSHA256: {digest}\n")
        (self.root / "srv/repo/Packages").write_text("\n".join(stanzas))
        self.inside("apt-get", "update", "-q")

    def inside(self, *argv: str, check: bool = True) -> str:
        """A program of the root."""
        done = subprocess.run(
            ["chroot", self.root, *argv],
            env={"PATH": "/usr/sbin:/usr/bin", "DEBIAN_FRONTEND": "noninteractive"},
            text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{argv}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def install(self, *words: str) -> None:
        self.inside("apt-get", "install", "-y", "-q", *words)

    def installed(self) -> dict[str, str]:
        """Package -> version, of those that are installed."""
        text = self.inside("dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\n")
        words = [line.split() for line in text.splitlines()]
        return {name: version for state, name, version in words if state == "installed"}

    def held(self) -> set[str]:
        return set(self.inside("apt-mark", "showhold").split())

    def selections(self) -> str:
        return self.inside("dpkg", "--get-selections", "*")

    def window(self) -> dict[str, Any] | None:
        """The record of the window that is open or waits for its boot."""
        file = self.path("/var/lib/gpuguard/window.json")
        return json.loads(file.read_text()) if file.exists() else None

    def windows(self) -> list[dict[str, Any]]:
        """All windows, as ``upgrade --history`` tells them."""
        return list(self.json("upgrade", "--history").document["windows"])

    def packages(self) -> tuple[dict[str, str], str]:
        """What a refused upgrade must leave as it is."""
        return self.installed(), self.selections()

    def break_build(self, release: str) -> None:
        """The patched modules do not compile for this kernel from now on."""
        self.path(f"/{BUILT}/{release}").rename(self.path(f"/{BUILT}/{release}.away"))

    def mend_build(self, release: str) -> None:
        self.path(f"/{BUILT}/{release}.away").rename(self.path(f"/{BUILT}/{release}"))

    def build_logs(self, release: str) -> list[str]:
        """One for each time that something was compiled for a kernel."""
        return sorted(p.name for p in self.path("/var/log/gpuguard").glob(f"build-{release}-*"))

    def reboot(self, release: str) -> None:
        """As if the machine had come up with this kernel."""
        toys.set_running(self.root, release)
        boot_id = self.path("/proc/sys/kernel/random/boot_id")
        boot_id.parent.mkdir(parents=True, exist_ok=True)
        boot_id.write_text(f"{os.urandom(8).hex()}\n")


def _headers(release: str) -> dict[str, str]:
    """All files that kbuild needs, none of which works."""
    return {
        "Makefile": "# kbuild\n",
        ".config": f'CONFIG_X86_64=y\nCONFIG_CC_VERSION_TEXT="{gcc_text()}"\n',
        "Module.symvers": f"0x01\tmodule_layout\tvmlinux\tEXPORT_SYMBOL\t{release}\n",
        "include/config/auto.conf": "",
        "include/generated/autoconf.h": "",
        "include/generated/utsrelease.h": f'#define UTS_RELEASE "{release}"\n',
        "scripts/basic/fixdep": "",
        "scripts/mod/modpost": "",
    }


@pytest.fixture
def window_box() -> Iterator[WindowBox]:
    """K1 is installed and patched, runs, and is on hold with the driver; K2 is offered."""
    with window_root() as root:
        yield furnished(root)


@contextmanager
def window_root() -> Iterator[Path]:
    """A mounted root, in memory: dpkg and gpuguard sync every file."""
    if os.geteuid() != 0:
        pytest.skip("needs root: chroot and mount")
    folder = Path(tempfile.mkdtemp(prefix="gpuguard-test-"))
    try:
        _mount("-t", "tmpfs", "-o", "size=2g,mode=755", "tmpfs", str(folder))
        try:
            with mounted_root(folder / "host"):
                yield folder / "host"
        finally:
            _quietly("umount", "-l", str(folder))
    finally:
        folder.rmdir()


class mounted_root:  # noqa: N801 - reads like open()
    """A root with this machine's programs, and nothing of its packages."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> None:
        root, upper, scratch = (self.root, self.root.parent / "upper", self.root.parent / "scratch")
        for folder in (root / "usr", root / "dev", upper / "lib", upper / "sbin", scratch):
            folder.mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
            os.mknod(root / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
            (root / "dev" / name).chmod(0o666)
        options = f"lowerdir=/usr,upperdir={upper},workdir={scratch}"
        _mount("-t", "overlay", "overlay", "-o", options, str(root / "usr"))
        for path in (root / "usr/lib/modules", root / "usr/src"):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        for path in (root / "usr/lib").glob("*/libnvidia*"):
            path.unlink()

    def __exit__(self, *_: object) -> None:
        _quietly("umount", "-l", str(self.root / "usr"))


def _mount(*argv: str) -> None:
    done = subprocess.run(["mount", *argv], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


def furnished(root: Path, *, first: str = K1, then: str | None = K2) -> WindowBox:
    """One kernel installed, patched and on hold; another one offered."""
    furnish(root)
    box = WindowBox(root)
    for folder in _FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    for name in _FROM_HERE:
        source, target = Path("/", name), root / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        elif source.exists():
            shutil.copyfile(source, target)
    (root / "etc/apt/apt.conf.d/00toys").write_text(_APT_CONF)
    (root / "etc/apt/sources.list").write_text("deb [trusted=yes] file:/srv/repo ./\n")
    (root / "var/lib/dpkg/status").touch()
    script = root / "usr/sbin/update-grub"
    script.write_text(textwrap.dedent(_UPDATE_GRUB))
    script.chmod(0o755)
    for old in (root / "usr/lib/x86_64-linux-gnu").glob("libnvidia-ml*"):
        old.unlink()
    box.offer_kernel(first, "1")
    box.offer_driver(toys.VERSION)
    box.update()
    box.install("linux-image-generic", "linux-headers-generic", "nvidia-driver")
    for release in filter(None, (first, then)):
        box.compile_to(release)
    box.reboot(first)
    box.rebuilt()
    assert box.run("hold").status == 0
    if then is not None:
        box.offer_kernel(then, "2")
        box.update()
    return box


def _architecture() -> str:
    return _quietly("dpkg", "--print-architecture").strip()


def _quietly(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout
