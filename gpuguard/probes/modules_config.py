"""The configuration that decides which module file wins: depmod.d(5) and modprobe.d(5)."""

from __future__ import annotations

import hashlib

from gpuguard.host import Host

_PLACES = ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
#: In kmod's order of precedence; a file name in an earlier folder hides it in a later one.
DEPMOD_DIRS = tuple(f"{place}/depmod.d" for place in _PLACES)
MODPROBE_DIRS = tuple(f"{place}/modprobe.d" for place in _PLACES)


def modules_config_fingerprint(host: Host) -> str:
    """SHA-256 over names, sizes and times of these files; our own depmod lines left out.

    Cheap on purpose: it only has to change when an operator changes something, so that a
    build that lost to another copy is tried again then, and not before.
    """
    digest = hashlib.sha256()
    for folder in (*DEPMOD_DIRS, *MODPROBE_DIRS):
        real = host.path(folder)
        if not real.is_dir():
            continue
        for entry in sorted(real.iterdir()):
            if entry.name.startswith("zz-gpuguard-"):
                continue
            status = entry.lstat()
            line = f"{folder}/{entry.name} {status.st_size} {status.st_mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def depmod_options(host: Host) -> list[str]:
    """Options that make depmod work on another root with that root's own configuration.

    Without ``-C`` depmod would read the live one; with ``-C /etc/depmod.d`` alone it would
    miss what the root's packages put into /usr/lib/depmod.d, and its own next run would not.
    """
    if host.is_live:
        return []
    host.make_dir(DEPMOD_DIRS[0])
    return ["-b", str(host.root), *config_options(host, DEPMOD_DIRS)]


def config_options(host: Host, folders: tuple[str, ...]) -> list[str]:
    """``-C FOLDER`` for each of these folders that is there, each place once.

    The first is named also if it is absent: kmod takes that for no configuration, and no
    ``-C`` at all for the live machine's. /lib and /usr/lib are one place on a merged /usr.
    """
    places = dict.fromkeys(host.path(folder) for folder in folders)
    first = next(iter(places))
    used = [place for place in places if place == first or place.is_dir()]
    return [word for place in used for word in ("-C", str(place))]
