"""What a kernel of a demo tree would load under the driver's names, by ``modules.dep``."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuguard.core.facts import MODULE_NAMES
from gpuguard.host import LocalHost
from gpuguard.host.elf import ElfModule, read_module

_DEBIAN_PREFIX = "nvidia-current-open"  # nvidia-current-open-drm.ko is loaded as nvidia-drm
_NT_GNU_BUILD_ID = 3
_UNPACK = {".xz": ("xz", "-dc"), ".zst": ("zstd", "-dcq")}


@dataclass(frozen=True, slots=True)
class LoadedModule:
    """A module as ``/sys/module`` shows it; ``build_id_note`` is the raw ELF note."""

    path: Path
    version: str
    srcversion: str
    build_id_note: bytes


def loadable_modules(root: Path, release: str) -> dict[str, LoadedModule]:
    """The driver's modules that would load for a kernel, by canonical name."""
    found = {}
    for name, path in _resolved(root, release).items():
        with unpacked(path) as plain, plain.open("rb") as file:
            module = read_module(file)
        # the kernel compares the first word and refuses others, kernel/module/version.c
        if module.modinfo.get("vermagic", "").split(" ")[0] == release:
            found[name] = _as_loaded(path, module)
    return found


@contextmanager
def unpacked(module: Path) -> Iterator[Path]:
    """A module as a plain file: itself, or a temporary one with what is compressed in it."""
    if module.suffix == ".ko":
        yield module
        return
    with tempfile.TemporaryDirectory() as work:
        plain = Path(work) / module.stem
        LocalHost().run(*_UNPACK[module.suffix], str(module), stdout=plain, timeout=60)
        yield plain


def _as_loaded(path: Path, module: ElfModule) -> LoadedModule:
    build_id = bytes.fromhex(module.build_id or "")
    header = struct.pack("<III4s", 4, len(build_id), _NT_GNU_BUILD_ID, b"GNU")
    return LoadedModule(
        path,
        module.modinfo.get("version", ""),
        module.modinfo.get("srcversion", ""),
        header + build_id,
    )


def _resolved(root: Path, release: str) -> dict[str, Path]:
    tree = root / "lib" / "modules" / release
    dependencies = tree / "modules.dep"
    if not dependencies.exists():
        return {}
    paths = [line.split(":")[0] for line in dependencies.read_text().splitlines()]
    by_name = {_canonical(path): tree / path for path in paths}
    return {name: by_name[name] for name in MODULE_NAMES if name in by_name}


def _canonical(path: str) -> str:
    base = Path(path).name.split(".ko")[0]
    if base == _DEBIAN_PREFIX or base.startswith(f"{_DEBIAN_PREFIX}-"):
        return "nvidia" + base.removeprefix(_DEBIAN_PREFIX)
    return base
