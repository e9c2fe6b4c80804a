"""The build that a window tries, by real kbuild against the real headers of a real kernel.

Debian's headers packages are packed again from the test cache, so no network is needed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from gpuguard.demo.headers import HeadersCache, header_paths
from gpuguard.demo.source import copy_standin
from tests.box import BUILT, SOURCE
from tests.kit import modinfo
from tests.windowbox import WindowBox, furnished, window_root

pytestmark = pytest.mark.slow
OLD = "5.10.0-1-amd64"  # a toy; older than any real one


def offer_real_headers(box: WindowBox, headers: HeadersCache, release: str) -> None:
    """The packages that Debian makes of them: the release's own, ``-common``, kbuild."""
    folders = header_paths(headers.root, release)
    names = [Path(folder).name for folder in folders]
    own = f"linux-headers-{release}"
    for name, folder in zip(names, folders, strict=True):
        others = ", ".join(other for other in names if other != own) if name == own else ""
        link = {f"usr/lib/modules/{release}/build": f"/usr/src/{own}"} if name == own else None
        trees = {folder: headers.root / folder}
        box.offer(name, "2", depends=others, trees=trees, links=link)
    box.offer("linux-headers-generic", "2", depends=own)


def compile_in_earnest(box: WindowBox) -> None:
    """Toys for the toy kernel, NVIDIA's own Makefile for every other."""
    with tempfile.TemporaryDirectory() as work:
        real = copy_standin(Path(work) / "source") / "kernel-open/Makefile"
        text = real.read_text()
    folder = box.root / SOURCE / "kernel-open"
    toys = (folder / "Makefile").read_text()
    (folder / "Makefile.real").write_text(text)
    (folder / "Makefile.toys").write_text(toys)
    (folder / "Makefile").write_text(
        f"ifneq ($(wildcard {box.root}/{BUILT}/$(KERNEL_UNAME)),)\ninclude Makefile.toys\nelse\n"
        "include Makefile.real\nendif\n"
    )


def test_the_candidates_headers_are_built_against_before_they_are_installed(
    kernel_headers: HeadersCache,
) -> None:
    release = kernel_headers.releases[-1]
    with window_root() as root:
        box = furnished(root, first=OLD, then=None)
        compile_in_earnest(box)
        box.rebuilt()  # the source is another: the old kernel's modules are made of it
        box.offer_kernel(release, "2", headers=False)
        offer_real_headers(box, kernel_headers, release)
        box.update()
        plan = box.json("upgrade", "--dry-run")
        assert plan.status == 1, plan.out + plan.err
        assert plan.document["builds"] == [
            {"release": release, "required": True, "ok": True, "problem": None}
        ]
        assert not box.path(f"/usr/src/linux-headers-{release}").exists()
        made = box.path(f"/var/cache/gpuguard/prebuilt/{release}/nvidia.ko")
        assert modinfo(made, "vermagic").split()[0] == release
        assert len(box.build_logs(release)) == 1

        answer = box.json("upgrade")
        assert answer.status == 0, answer.out + answer.err
        assert answer.document["reboot"]["next"] == release
        assert len(box.build_logs(release)) == 1  # what was tried is what is installed
        winner = box.path(box.winner(release))
        assert winner.parent.name == "gpuguard"
        assert modinfo(winner, "vermagic").split()[0] == release
        assert box.kernel(release)["ready"]
