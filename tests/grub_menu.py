"""What GRUB would start, read from the menu that grub-mkconfig wrote."""

from __future__ import annotations

import re
from pathlib import Path


def grub_environment(root: Path) -> dict[str, str]:
    block = root / "boot/grub/grubenv"
    lines = block.read_text().splitlines() if block.exists() else []
    return dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")


def started_by_grub(menu: str, once: str, saved: str) -> str:
    """A second reader of what grub-mkconfig writes: simple, and independent of gpuguard's."""
    stated = re.findall(r'^ +set default="(.*)"$', menu, re.MULTILINE)[-1]
    default = once or stated.replace("${saved_entry}", saved) or "0"
    entries: list[tuple[int, set[str], str]] = []  # depth, its names, release
    positions = [-1, -1]
    for line in menu.splitlines():
        if head := re.match(r"(\t?)(menuentry|submenu) '([^']*)'.* '([^']*)' \{", line):
            depth = len(head[1])
            positions = [positions[0], positions[1] + 1] if depth else [positions[0] + 1, -1]
            entries.append((depth, {head[3], head[4], str(positions[depth])}, ""))
        elif kernel := re.match(r"\t+linux\s+\S*/vmlinuz-(\S+)", line):
            entries[-1] = (*entries[-1][:2], kernel[1])
    wanted = default.split(">")
    start = next((i for i, e in enumerate(entries) if e[0] == 0 and wanted[0] in e[1]), 0)
    below = entries[start + 1 :] if len(wanted) > 1 else []
    found = next((e for e in below if e[0] == 1 and wanted[1] in e[1]), entries[start])
    return found[2]
