"""The real ``dkms`` at work on a demo tree, with the stand-in as its stock source.

Every tree has its own DKMS database, source and module folders, signing key and lock, so
nothing of the live machine is written. What dkms reads of it all the same: /etc/dkms (a
``nvidia.conf`` there is refused, see ``refuse_overrides``) and /etc/os-release. It decides
about compression by the *live* /lib/modules, so modules in a tree come out plain.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from gpuguard.demo.headers import header_paths
from gpuguard.demo.kernels import run_depmod
from gpuguard.demo.source import CORE_OBJECTS, VERSION, build_core, copy_standin
from gpuguard.errors import CommandError, CommandNotFoundError, PreflightError
from gpuguard.host import Completed, LocalHost

PACKAGE = "nvidia"
_BUILD_SECONDS = 900.0
_QUERY_SECONDS = 60.0

# Own text; the form of a distribution's NVIDIA package. Debian keeps a kernel's sources apart
# from its output tree, whose Makefile names them by absolute path; they lie side by side, also
# where the tree is not the machine's root.
_CONF = """\
PACKAGE_NAME="{package}"
PACKAGE_VERSION="{version}"
AUTOINSTALL="yes"
CLEAN="true"

sysout="$(readlink -f "$kernel_source_dir")"
common="$(sed -n 's,^include .*/\\(linux-headers-[^/]*\\)/Makefile$,\\1,p' "$sysout/Makefile")"
syssrc="${{sysout%/*}}/$common"
[ -n "$common" ] || syssrc="$sysout"
# not "make" as the first word: dkms would add KERNELRELEASE=, which is kbuild's own sign
MAKE[0]="env make -j$parallel_jobs modules KERNEL_UNAME=$kernelver SYSSRC=$syssrc SYSOUT=$sysout"
"""
_CONF_MODULE = """
BUILT_MODULE_NAME[{index}]="{module}"
DEST_MODULE_LOCATION[{index}]="/updates/dkms"
"""
_MODULES = ("nvidia", "nvidia-modeset", "nvidia-drm", "nvidia-uvm", "nvidia-peermem")


def install_stock_source(root: Path, version: str = VERSION) -> Path:
    """Put the stock source where a distribution's package would: ``/usr/src/nvidia-VERSION``.

    It has the DKMS form: kernel-open alone, the core objects prebuilt as ``*.o_binary``.
    """
    target = root / "usr" / "src" / f"{PACKAGE}-{version}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".standin-") as work:
        source = copy_standin(Path(work) / "source", version=version)
        build_core(source)
        flattened = source / "kernel-open"
        for module, core in CORE_OBJECTS.items():
            shutil.copyfile(source / core, flattened / module / f"{Path(core).name}_binary")
        (flattened / "dkms.conf").write_text(dkms_conf(version))
        flattened.rename(target)
    return target


def dkms_conf(version: str) -> str:
    """The ``dkms.conf`` of the stock source, dkms(8)."""
    modules = [
        _CONF_MODULE.format(index=index, module=module) for index, module in enumerate(_MODULES)
    ]
    return _CONF.format(package=PACKAGE, version=version) + "".join(modules)


def dkms_add(root: Path, version: str = VERSION) -> None:
    """Register the stock source."""
    _dkms(root, "add", f"{PACKAGE}/{version}")
    # dkms links to it by absolute path; a tree must still hold together when it is copied,
    # and when it is looked at as a root
    link = root / "var/lib/dkms" / PACKAGE / version / "source"
    link.unlink()
    link.symlink_to(f"../../../../../usr/src/{PACKAGE}-{version}")


def dkms_install(
    root: Path, release: str, version: str = VERSION, *, force: bool = False
) -> Completed:
    """Build (if it is not built) and install the stock modules for one kernel, then depmod.

    Raises:
        CommandError: dkms's own message; its make.log is below ``/var/lib/dkms``.
    """
    extra = ("--force",) if force else ()
    done = _dkms(root, "install", f"{PACKAGE}/{version}", *extra, release=release)
    run_depmod(root, release)
    return done


def dkms_autoinstall(root: Path, release: str) -> Completed:
    """What ``/etc/kernel/postinst.d/dkms`` does when a kernel arrives, then depmod."""
    done = _dkms(root, "autoinstall", release=release)
    run_depmod(root, release)
    return done


def dkms_build(root: Path, release: str, version: str = VERSION) -> Completed:
    """Build the stock modules for one kernel without installing them."""
    return _dkms(root, "build", f"{PACKAGE}/{version}", release=release)


def dkms_uninstall(root: Path, release: str, version: str = VERSION) -> None:
    """Back to the state "built" for one kernel, then depmod."""
    _dkms(root, "uninstall", f"{PACKAGE}/{version}", release=release)
    run_depmod(root, release)


def dkms_remove(root: Path, release: str, version: str = VERSION) -> None:
    """Forget one kernel's build, uninstalling it first, then depmod."""
    _dkms(root, "remove", f"{PACKAGE}/{version}", release=release)
    run_depmod(root, release)


def dkms_status(root: Path) -> str:
    """The lines of ``dkms status``."""
    return LocalHost().run("dkms", "status", *_tree_options(root), timeout=_QUERY_SECONDS).stdout


def _tree_options(root: Path) -> tuple[str, ...]:
    return (
        "--dkmstree", str(root / "var/lib/dkms"),
        "--sourcetree", str(root / "usr/src"),
        "--installtree", str(root / "lib/modules"),
    )  # fmt: skip


def _dkms(root: Path, action: str, *arguments: str, release: str | None = None) -> Completed:
    refuse_overrides()
    for folder in ("var/lib/dkms", "tmp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    # dkms insists on root, though a tree that belongs to the user needs none
    as_root = () if os.geteuid() == 0 else ("fakeroot", "--")
    kernel: tuple[str, ...] = ()
    if release is not None:
        headers = root / "usr/src" / f"linux-headers-{release}"
        kernel = ("-k", release, "--kernelsourcedir", str(headers))
    try:
        return LocalHost().run(
            *as_root, "dkms", action, *arguments, *kernel, *_tree_options(root),
            "--no-depmod",  # it would run for the live machine; run_depmod() follows
            env={"TMPDIR": str(root / "tmp"), **_signing(root, release)},
            timeout=_BUILD_SECONDS,
        )  # fmt: skip
    except CommandNotFoundError:
        raise
    except CommandError as error:
        error.detail += _log_tail(root)
        raise


def _log_tail(root: Path, lines: int = 25) -> str:
    """The end of the newest make.log, which dkms only names."""
    logs = (root / "var/lib/dkms").rglob("make.log")
    newest = max(logs, key=lambda log: log.stat().st_mtime, default=None)
    if newest is None:
        return ""
    return "\n".join(["", *newest.read_text(errors="replace").splitlines()[-lines:]])


def _signing(root: Path, release: str | None) -> dict[str, str]:
    """Make dkms sign as on a real machine, but with a key that it makes inside the tree.

    By default it would make one in the live /var/lib/dkms. No command-line option says
    otherwise; a DKMS_DIRECTIVE variable wins over /etc/dkms/framework.conf, and the plain
    one serves where there is no such file (dkms 3.0.10: safe_source, prepare_signing).
    """
    sign_file = root / "sign-file-is-not-there"
    if release is not None:
        found = [root / path / "scripts/sign-file" for path in header_paths(root, release)]
        sign_file = next((path for path in found if path.is_file()), sign_file)
    settings = {
        "sign_file": str(sign_file),
        "mok_signing_key": str(root / "var/lib/dkms/mok.key"),
        "mok_certificate": str(root / "var/lib/dkms/mok.pub"),
    }
    directives = {f"DKMS_DIRECTIVE_{name}": f"{name}={path}" for name, path in settings.items()}
    return settings | directives


def refuse_overrides(folder: Path = Path("/etc/dkms")) -> None:
    """Stop where the live machine changes how dkms treats a package of this name.

    dkms sources ``/etc/dkms/nvidia*.conf`` whatever tree it works on, and hooks named there
    would run.
    """
    if found := sorted(folder.glob(f"{PACKAGE}*")):
        raise PreflightError(
            f"{found[0]} would change what dkms does in the demo",
            hint="run the demo on a machine without it, or in a container",
            code="dkms-override",
        )
