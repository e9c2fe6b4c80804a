"""Real Debian packages of a driver that drives nothing, and a small apt repository of them.

Named and laid out as Debian's: a DKMS package whose maintainer scripts are those that dh_dkms
writes, a library package with the simulated NVML, kernel metas. What they hold is the
stand-in of ``gpuguard demo``, so dpkg, apt and dkms do all that they do with the real ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpuguard.demo.dkms import install_stock_source
from gpuguard.demo.driver import install_driver
from gpuguard.demo.source import P2P_PATCH, copy_standin
from tests.building import git

#: Driver versions in the order of their release. The operator's clone has no tag for the last.
VERSIONS = ("999.10.01", "999.20.01", "999.30.01")
UNPATCHED = "999.40.01"
DKMS_PACKAGE = "nvidia-open-kernel-dkms"
LIBRARY_PACKAGE = "libnvidia-ml1"
META_PACKAGE = "nvidia-driver"
DRIVER_PACKAGES = (META_PACKAGE, DKMS_PACKAGE, LIBRARY_PACKAGE)
#: A DKMS module that is none of ours and compiles nowhere.
BROKEN_PACKAGE = "othercard-dkms"

# What dh_dkms adds, debhelper's autoscripts/{postinst,prerm}-dkms.
_POSTINST = """\
#!/bin/sh
set -e
case "$1" in
configure)
    /usr/lib/dkms/common.postinst {name} {version} /usr/share/{package} "" "$2"
    ;;
esac
"""
_PRERM = """\
#!/bin/sh
set -e
case "$1" in
remove|upgrade|deconfigure)
    if [ "$(dkms status -m {name} -v {version})" ]; then
        dkms remove -m {name} -v {version} --all
    fi
    ;;
esac
"""
_BROKEN_CONF = """\
PACKAGE_NAME="othercard"
PACKAGE_VERSION="1.0"
AUTOINSTALL="yes"
MAKE[0]="env make -C $kernel_source_dir M=$dkms_tree/$PACKAGE_NAME/$PACKAGE_VERSION/build modules"
BUILT_MODULE_NAME[0]="othercard"
DEST_MODULE_LOCATION[0]="/updates/dkms"
"""


def make_driver(folder: Path, version: str) -> list[Path]:
    """The driver's packages of one version."""
    exact = f"(= {version}-1)"
    return [
        _dkms_package(folder, version),
        _package(folder, META_PACKAGE, f"{version}-1",
                 depends=f"{DKMS_PACKAGE} {exact}, {LIBRARY_PACKAGE} {exact}"),
        _library_package(folder, version),
    ]  # fmt: skip


def make_kernel_metas(folder: Path, release: str, version: str) -> list[Path]:
    """What pulls in the newest kernel, as ``linux-image-amd64`` does."""
    return [
        _package(folder, f"linux-{kind}-cloud-amd64", version, depends=f"linux-{kind}-{release}")
        for kind in ("image", "headers")
    ]


def make_broken_dkms(folder: Path) -> Path:
    """Somebody else's DKMS package; its module does not compile for any kernel."""
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "usr/src/othercard-1.0"
        source.mkdir(parents=True)
        (source / "Makefile").write_text("obj-m := othercard.o\n")
        (source / "othercard.c").write_text(
            '#error "othercard needs a kernel of the last decade"\n'
        )
        (source / "dkms.conf").write_text(_BROKEN_CONF)
        # added, not built: on the host where it was installed it once compiled
        scripts = {
            "postinst": "#!/bin/sh\nset -e\ndkms add othercard/1.0\n",
            "prerm": _PRERM.format(name="othercard", version="1.0"),
        }
        return _build(folder, Path(work), BROKEN_PACKAGE, "1.0-1", "dkms", scripts)


def write_index(archive: Path, published: Iterable[Path]) -> None:
    """``Packages`` of a flat repository: what apt is to see of the files that lie there."""
    stanzas = []
    for deb in sorted(published):
        content = deb.read_bytes()
        fields = subprocess.run(
            ["dpkg-deb", "-f", deb], check=True, text=True, stdout=subprocess.PIPE
        ).stdout
        digest = hashlib.sha256(content).hexdigest()
        stanzas.append(
            f"{fields.strip()}\nFilename: ./{deb.name}\nSize: {len(content)}\nSHA256: {digest}\n"
        )
    (archive / "Packages").write_text("\n".join(stanzas))


def make_clone(target: Path, versions: Iterable[str] = VERSIONS) -> Path:
    """The operator's clone: one tag per driver version, not patched; the patch lies elsewhere."""
    target.mkdir(parents=True)
    git(target, "init", "--quiet")
    for version in versions:
        with tempfile.TemporaryDirectory() as work:
            source = copy_standin(Path(work) / "source", version=version)
            shutil.copytree(source, target, dirs_exist_ok=True)
        git(target, "add", "--all")
        git(target, "commit", "--quiet", f"--message={version}")
        git(target, "tag", version)
    return target


def install_patch(root: Path, place: str = "/etc/gpuguard/patches/p2p.patch") -> str:
    """The operator's patch; the path inside the root."""
    file = root / place.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(P2P_PATCH, file)
    file.chmod(0o644)
    return place


def _dkms_package(folder: Path, version: str) -> Path:
    names = {"name": "nvidia", "version": version, "package": DKMS_PACKAGE}
    scripts = {"postinst": _POSTINST.format(**names), "prerm": _PRERM.format(**names)}
    with tempfile.TemporaryDirectory() as work:
        install_stock_source(Path(work), version)
        return _build(folder, Path(work), DKMS_PACKAGE, f"{version}-1", "dkms", scripts)


def _library_package(folder: Path, version: str) -> Path:
    with tempfile.TemporaryDirectory() as work:
        install_driver(Path(work), version)
        return _build(folder, Path(work), LIBRARY_PACKAGE, f"{version}-1", "", {})


def _package(folder: Path, name: str, version: str, *, depends: str) -> Path:
    with tempfile.TemporaryDirectory() as work:
        return _build(folder, Path(work), name, version, depends, {})


def _build(
    folder: Path, tree: Path, name: str, version: str, depends: str, scripts: Mapping[str, str]
) -> Path:
    control = tree / "DEBIAN"
    control.mkdir()
    fields = {
        "Package": name, "Version": version, "Architecture": "amd64", "Section": "non-free/kernel",
        "Priority": "optional", "Maintainer": "gpuguard tests <tests@localhost>",
        "Depends": depends, "Description": "stand-in that gpuguard's tests install",
    }  # fmt: skip
    lines = [f"{key}: {value}\n" for key, value in fields.items() if value]
    (control / "control").write_text("".join(lines))
    for script, text in scripts.items():
        (control / script).write_text(text)
        (control / script).chmod(0o755)
    os.chmod(tree, 0o755)  # noqa: PTH101 - a temporary folder is private, / must not become so
    folder.mkdir(parents=True, exist_ok=True)
    deb = folder / f"{name}_{version}_amd64.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "-b", str(tree), str(deb)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return deb
