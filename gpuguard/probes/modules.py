"""Which NVIDIA module files would be loaded for a kernel, and which compete.

The authority is modprobe itself, run on the host's tree: it knows depmod's search order
and overrides (through modules.dep.bin), aliases, and Debian's ``install`` redirections.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from gpuguard.core.facts import MODULE_NAMES, Identity, ModuleFile, ResolvedModule
from gpuguard.errors import GpuguardError, ProbeError
from gpuguard.host import Host
from gpuguard.host.cache import FileCache
from gpuguard.host.decompress import decompressed
from gpuguard.host.elf import read_module
from gpuguard.probes.folders import folders_of
from gpuguard.probes.modules_config import MODPROBE_DIRS, config_options
from gpuguard.state import module_tree

_TIMEOUT = 20.0
#: nvidia.ko, nvidia-current-open-drm.ko.xz, nvidia_uvm.ko.zst, nvidia-580-open.ko; not
#: nvidiafb, nvidia-wmi-ec-backlight or i2c-nvidia-gpu, which the kernel brings itself.
_FILE_NAME = re.compile(
    r"^(?P<base>nvidia(?:[-_](?:current|legacy|tesla|server|open|\d+(?:xx)?))*"
    r"(?P<part>[-_](?:uvm|modeset|drm|peermem|vgpu[-_]vfio))?)\.ko(?P<suffix>\.(?:xz|zst|gz))?$"
)


def canonical_name(file_name: str) -> str | None:
    """``nvidia-drm`` for ``nvidia-current-open-drm.ko.xz``; None if it is no NVIDIA module."""
    match = _FILE_NAME.match(file_name)
    if match is None:
        return None
    return "nvidia" + (match["part"] or "").replace("_", "-")


def base_name(file_name: str) -> str:
    """File name without ``.ko`` and compression suffix."""
    return file_name.split(".ko", 1)[0]


def parse_show_depends(text: str) -> tuple[list[str], list[str]]:
    """Parse ``modprobe --show-depends``: paths of ``insmod`` lines, commands of ``install`` lines.

    Source: modprobe(8); a line is ``insmod PATH [options]`` or ``install COMMAND``.
    """
    paths, commands = [], []
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "insmod" and rest:
            paths.append(rest.split(" ", 1)[0])
        elif word == "install" and rest:
            commands.append(rest.strip())
    return paths, commands


def redirected_name(command: str) -> str | None:
    """The module that an ``install`` command loads in the end.

    Debian: ``install nvidia-drm modprobe nvidia-modeset ; modprobe -i nvidia-current-open-drm
    $CMDLINE_OPTS``: the name after the last ``modprobe -i``. None: it loads something that
    cannot be told without running it (``/bin/false``).
    """
    try:
        words = shlex.split(command, comments=False)
    except ValueError:
        return None
    name = None
    for index, word in enumerate(words):
        if Path(word).name != "modprobe":
            continue
        rest = words[index + 1 :]
        if rest and rest[0] in ("-i", "--ignore-install"):
            name = next((w for w in rest[1:] if not w.startswith(("-", "$"))), name)
    return name


def resolve_paths(host: Host, release: str) -> dict[str, str | None]:
    """Canonical module name -> path of the file that modprobe would load (None: none).

    Raises:
        ProbeError: modprobe itself could not be asked.
    """
    found = dict.fromkeys(MODULE_NAMES) | _ask_modprobe(host, release, MODULE_NAMES)
    if missing := [name for name in MODULE_NAMES if found[name] is None]:
        # No alias leads there; on Debian the PCI aliases of the file itself do.
        bases = {base_name(Path(p).name) for p in competing_files(host, release)}
        wanted = [base for base in sorted(bases) if canonical_name(f"{base}.ko") in missing]
        if set(wanted) - set(missing):
            found |= _ask_modprobe(host, release, wanted)
    return found


def _ask_modprobe(host: Host, release: str, names: Iterable[str]) -> dict[str, str | None]:
    paths, commands = _show_depends(host, release, names, ignore_install=False)
    redirects = [name for command in commands if (name := redirected_name(command))]
    if redirects:
        more, _ = _show_depends(host, release, redirects, ignore_install=True)
        paths += more
    found: dict[str, str | None] = {}
    for path in paths:
        inside = host.inside(Path(path))
        if (name := canonical_name(Path(path).name)) in MODULE_NAMES:
            found[name] = inside
    return found


def _show_depends(
    host: Host, release: str, names: Iterable[str], *, ignore_install: bool
) -> tuple[list[str], list[str]]:
    index = host.path(f"{module_tree(release)}/modules.dep.bin")
    if index.exists() and not os.access(index, os.R_OK):  # modprobe takes it for an empty one
        raise ProbeError(f"{host.inside(index)} cannot be read", code="modules-dep-unreadable")
    options: list[str] = []
    if not host.is_live:
        options += ["-d", str(host.root), *config_options(host, MODPROBE_DIRS)]
    if ignore_install:
        options.append("-i")
    done = host.run(
        "modprobe", *options, "-S", release, "-a", "--show-depends", *names,
        timeout=_TIMEOUT, ok=(0, 1),
    )  # fmt: skip
    if "could not open moddep file" in done.stderr or "FATAL" in done.stderr:
        raise ProbeError(
            f"modprobe cannot resolve modules for {release}: {done.stderr.strip()}",
            code="modules-dep-unreadable",
            hint=f"run depmod {release}",
        )
    return parse_show_depends(done.stdout)


def competing_files(host: Host, release: str) -> list[str]:
    """Every file below the module tree that is an NVIDIA module by its name, sorted.

    modules.dep names only the winner (CASES C15), so the tree itself is walked.

    Raises:
        ProbeError: a folder of the tree cannot be read: what is in it may compete.
    """
    top = host.path(module_tree(release))
    found = []
    for folder, files in folders_of(host, top):
        names = (name for name in files if name.startswith("nvidia") and _FILE_NAME.match(name))
        found += [f"{folder}/{name}" for name in names]  # no Path: 4,000 files a kernel
    return sorted(host.inside(Path(path)) for path in found)


def read_module_file(host: Host, path: str, cache: FileCache) -> ModuleFile:
    """What one module file is; a file that cannot be read says so in ``problem``."""
    real = host.path(path)
    name = base_name(Path(path).name)
    try:
        known = cache.get(real)
        if known is None or ("build_id" in known and "signer" not in known):  # of an older version
            known = _read(host, real)
            cache.put(real, known)
    except OSError as error:
        known = {"problem": f"cannot be read: {error.strerror}"}
    except GpuguardError as error:
        known = {"problem": error.message}
    return ModuleFile(path=path, base_name=name, **known)


def _read(host: Host, real: Path) -> dict[str, object]:
    try:
        with decompressed(host, real) as file:
            module = read_module(file)
    except ProbeError as error:
        if error.code != "module-unreadable":
            raise
        return {"problem": error.message}
    info = module.modinfo
    return {
        "build_id": module.build_id,
        "vermagic": info.get("vermagic", "").strip() or None,
        "version": info.get("version"),
        "srcversion": info.get("srcversion"),
        "signed": module.signed,
        "signer": module.signer,
        "problem": None if module.build_id else "has no GNU build-id",
    }


def identity_of(file: ModuleFile | None, ours: Mapping[str, str]) -> Identity:
    """``ours`` maps build-id to canonical name, for this release only."""
    if file is None:
        return Identity.MISSING
    if file.build_id is not None and file.build_id in ours:
        return Identity.PATCHED
    return Identity.STOCK


def probe_modules(
    host: Host, release: str, ours: Mapping[str, str], cache: FileCache
) -> tuple[ResolvedModule, ...]:
    """Resolve the five modules of one kernel, in the order of ``MODULE_NAMES``.

    Raises:
        ProbeError: modprobe could not be asked.
    """
    files = [read_module_file(host, path, cache) for path in competing_files(host, release)]
    files = _mark_packaged(host, files)
    by_path = {file.path: file for file in files}
    winners = resolve_paths(host, release) if files else dict.fromkeys(MODULE_NAMES)
    found = [_resolved(host, name, winners[name], by_path, ours, cache) for name in MODULE_NAMES]
    return tuple(
        replace(module, blocked=_blocked_by(host, release, module.name))
        if module.file is None and module.others
        else module
        for module in found
    )


def _blocked_by(host: Host, release: str, name: str) -> str | None:
    """The ``install`` line that keeps modprobe from loading a module that is there."""
    _, commands = _show_depends(host, release, [name], ignore_install=False)
    return f"install {name} {commands[-1]}" if commands else None


def _mark_packaged(host: Host, files: list[ModuleFile]) -> list[ModuleFile]:
    """Say which files below updates/ dpkg put there: those are never ours to move away.

    Asked only about folders where neither DKMS nor we install: there is rarely one.
    """
    asked = [f.path for f in files if re.search(r"/updates/(?!dkms/|gpuguard/).+/", f.path)]
    if not asked:
        return files
    admin = host.path("/var/lib/dpkg")
    done = host.run("dpkg-query", f"--admindir={admin}", "-S", *asked, timeout=_TIMEOUT, ok=(0, 1))
    owned = {line.split(": ", 1)[1] for line in done.stdout.splitlines() if ": " in line}
    return [replace(file, packaged=file.path in owned) for file in files]


def _resolved(
    host: Host,
    name: str,
    path: str | None,
    files: dict[str, ModuleFile],
    ours: Mapping[str, str],
    cache: FileCache,
) -> ResolvedModule:
    winner = None
    if path is not None:
        same = (file for file in files.values() if _same_file(host, file.path, path))
        winner = files.get(path) or next(same, None) or read_module_file(host, path, cache)
    others = tuple(
        file
        for file in files.values()
        if canonical_name(Path(file.path).name) == name and file is not winner
    )
    return ResolvedModule(name=name, file=winner, identity=identity_of(winner, ours), others=others)


def _same_file(host: Host, one: str, other: str) -> bool:
    # /lib/modules and /usr/lib/modules are one place on a merged-/usr system
    return Path(one).name == Path(other).name and host.path(one) == host.path(other)


def iter_build_ids(modules: Iterable[ResolvedModule]) -> Iterator[tuple[str, str | None]]:
    """Pairs (base name, build-id) of what resolves now."""
    for module in modules:
        if module.file is not None:
            yield module.file.base_name, module.file.build_id
