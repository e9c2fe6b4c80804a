"""An initramfs tool that a tree can have of its own: a static program, run through chroot."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.box import Box

#: Notes how it was called, then puts /srv/new-image, if that is there, over the image. With
#: /srv/tool-fails it fails half-way, with /srv/tool-waits it never comes back.
TOOL = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int copy(const char *from, const char *to)
{
    char buffer[65536];
    size_t count;
    FILE *in = fopen(from, "rb"), *out;

    if (!in)
        return 0;
    if (!(out = fopen(to, "wb")))
        return 1;
    while ((count = fread(buffer, 1, sizeof(buffer), in)) > 0)
        if (fwrite(buffer, 1, count, out) != count)
            return 1;
    fclose(in);
    return fclose(out);
}

int main(int argc, char **argv)
{
    char image[4096], beside[4200];
    FILE *log = fopen("/srv/tool.log", "a");

    for (int i = 0; i < argc; i++)
        fprintf(log, "%s%c", argv[i], i + 1 < argc ? ' ' : '\n');
    fclose(log);
    snprintf(image, sizeof(image), "/boot/initrd.img-%s", argv[argc - 1]);
    snprintf(beside, sizeof(beside), "%s.new", image);
    if (!access("/srv/tool-waits", F_OK)) {
        copy("/srv/new-image", image);
        copy("/srv/new-image", beside);
        pause();
    }
    if (!access("/srv/tool-fails", F_OK)) {
        copy("/srv/new-image", beside);
        fputs("E: mkinitramfs failure cpio 141 zstd 1\n", stderr);
        return 1;
    }
    return copy("/srv/new-image", image);
}
"""


@pytest.fixture(scope="session")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tool")
    (folder / "tool.c").write_text(TOOL)
    program = folder / "tool"
    subprocess.run(["gcc", "-static", "-o", program, folder / "tool.c"], check=True)
    return program


@pytest.fixture
def install_tool(tool: Path, box: Box) -> Callable[..., None]:
    """``install_tool("usr/sbin/update-initramfs", makes=image)``."""

    def install(name: str = "usr/sbin/update-initramfs", makes: Path | None = None) -> None:
        target = box.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tool, target)
        if makes is not None:
            makes.rename(box.root / "srv/new-image")

    return install
