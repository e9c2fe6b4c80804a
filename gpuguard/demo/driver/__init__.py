"""The simulated driver library, ``nvml.c``: compiled into a demo tree, never installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpuguard.demo.loaded import unpacked
from gpuguard.demo.source import VERSION
from gpuguard.host import LocalHost

#: Where it goes in a tree; nvml.c counts on three folders above it. For LD_LIBRARY_PATH.
LIBRARY_DIR = "usr/lib/x86_64-linux-gnu"
_SOURCE = Path(__file__).parent / "nvml.c"
_POLICIES = "gpuguard-demo-policies"
_ANSWERS = {b"standin-p2p-policy=ok": 0, b"standin-p2p-policy=chipset-not-supported": 1}
_UNKNOWN = 6
_CORE_NAMES = ("nvidia.ko", "nvidia-current-open.ko")


def install_driver(root: Path, version: str = VERSION) -> None:
    """Put ``libnvidia-ml.so.VERSION`` and its ``.so.1`` link into a tree, and no other version."""
    folder = root / LIBRARY_DIR
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("libnvidia-ml.so.*"):
        old.unlink()
    library = folder / f"libnvidia-ml.so.{version}"
    LocalHost().run(
        "gcc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1",
        f'-DDRIVER_VERSION="{version}"', "-o", str(library), str(_SOURCE),
        timeout=60,
    )  # fmt: skip
    (folder / "libnvidia-ml.so.1").symlink_to(library.name)


def note_compressed_modules(root: Path) -> None:
    """Write down for the library, which reads plain files only, what compressed modules hold."""
    lines = [
        f"{module.stat().st_size} {int(module.stat().st_mtime)} {_answer(module)} "
        f"/{module.relative_to(root)}\n"
        for module in sorted(_compressed(root))
    ]
    (root / LIBRARY_DIR / _POLICIES).write_text("".join(lines))


def _compressed(root: Path) -> Iterator[Path]:
    for name in _CORE_NAMES:
        yield from (root / "lib" / "modules").rglob(f"{name}.*")


def _answer(module: Path) -> int:
    with unpacked(module) as plain:
        content = plain.read_bytes()
    return next((answer for text, answer in _ANSWERS.items() if text in content), _UNKNOWN)
