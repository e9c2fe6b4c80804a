"""Put the files of a release where systemd reads them."""

from __future__ import annotations

import os

from gpuguard.host import Host
from gpuguard.host.reading import read_text
from gpuguard.serving.lane import unit_of
from gpuguard.serving.render import QUADLETS, UNITS
from gpuguard.serving.store import Release
from gpuguard.state import LANE_RENDERED_DIR


def own_files(name: str) -> tuple[str, ...]:
    """Every file that a lane of this name may have, whatever its backend."""
    return (
        f"{UNITS}/{unit_of(name)}",
        f"{QUADLETS}/lane-{name}.container",
        f"{LANE_RENDERED_DIR}/lane-{name}.compose.yaml",
    )


def install_release(host: Host, release: Release) -> bool:
    """Write what differs, remove what another backend had; True if systemd must read anew."""
    wanted = {file.path: file.text for file in release.files}
    changed = False
    for path in own_files(release.lane.name):
        if path in wanted:
            if read_text(host, path) != wanted[path]:
                host.replace_file(path, wanted[path].encode())
                changed = True
        elif os.path.lexists(host.path(path, follow=False)):
            host.remove_file(path)  # a unit file would win over the one that Quadlet generates
            changed = True
    return changed


def installed_text(host: Host, release: Release) -> str | None:
    """What stands where systemd, or its generator, reads the release's unit from."""
    return read_text(host, release.files[-1].path)


def altered_files(host: Host, release: Release) -> tuple[str, ...]:
    """Files of a release that are not as they were written; also those that are gone.

    Raises:
        ProbeError: one cannot be read.
    """
    return tuple(f.path for f in release.files if read_text(host, f.path) != f.text)
