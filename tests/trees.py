"""Directory trees that stand for a host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Link:
    """A symlink; an absolute target stays inside the tree when read through a Host."""

    target: str


def make_tree(root: Path, files: Mapping[str, str | bytes | Link | None]) -> Path:
    """Make files, links and (for None) empty directories below root; returns root."""
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        match content:
            case None:
                path.mkdir(exist_ok=True)
            case Link(target):
                path.symlink_to(target)
            case bytes():
                path.write_bytes(content)
            case _:
                path.write_text(content)
    return root
