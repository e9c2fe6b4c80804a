"""Install what stands around the lanes: the proxy's unit, and who starts and mends them."""

from __future__ import annotations

import os
from importlib import resources

from gpuguard.host import Host
from gpuguard.host.reading import read_text
from gpuguard.serving.front_config import UNIT, Route, parse_route, render_front
from gpuguard.serving.lane import DEFAULT_PORT
from gpuguard.serving.lanes import active_release
from gpuguard.serving.render import UNITS
from gpuguard.state import FRONT_FILE, LANES_DIR

BOOT_UNIT = "gpuguard-lane.service"
RESUME_UNIT = "gpuguard-lane-resume.service"
RESUME_PATH = "gpuguard-lane-resume.path"
OUR_UNITS = (UNIT, BOOT_UNIT, RESUME_PATH, RESUME_UNIT)
#: Started at boot, and by whom. The path starts its service.
_WANTED_BY = {
    UNIT: "multi-user.target",
    BOOT_UNIT: "multi-user.target",
    RESUME_PATH: "paths.target",
}
#: The same path as in the unit.
HAPROXY = "/usr/sbin/haproxy"
TO_START = tuple(_WANTED_BY)
_LINKS = {f"{UNITS}/{target}.wants/{name}": name for name, target in _WANTED_BY.items()}


def wanted_files(host: Host, listen: str, retry_after: int, program: str) -> dict[str, str]:
    """Path -> content of everything that should be there."""
    files = {f"{UNITS}/{name}": _template(name, program) for name in OUR_UNITS}
    route = parse_route(read_text(host, FRONT_FILE) or "")
    release = active_release(host)
    if route is None:
        port = DEFAULT_PORT if release is None else release.lane.port
        route = Route(port, is_open=release is not None)
    files[FRONT_FILE] = render_front(listen, retry_after, route)
    return files


def differing(host: Host, files: dict[str, str]) -> tuple[str, ...]:
    """Paths that have to be written, and links that have to be made."""
    changed = [path for path, text in files.items() if read_text(host, path) != text]
    changed += [link for link in _LINKS if not host.path(link, follow=False).is_symlink()]
    return tuple(changed)


def install(host: Host, files: dict[str, str], changed: tuple[str, ...]) -> None:
    """Write them, and have them started at boot.

    Raises:
        OSError: one cannot be written.
    """
    host.make_dir(LANES_DIR)
    for path in changed:
        if path in files:
            host.replace_file(path, files[path].encode())
        else:
            link = host.path(path, follow=False)
            host.make_dir(path.rpartition("/")[0])
            link.unlink(missing_ok=True)
            link.symlink_to(f"../{_LINKS[path]}")


def removable(host: Host) -> tuple[str, ...]:
    """What of it is there."""
    paths = [
        *_LINKS,
        *(f"{UNITS}/{name}" for name in OUR_UNITS),
        FRONT_FILE,
    ]
    there = (path for path in paths if os.path.lexists(host.path(path, follow=False)))
    return tuple(there)


def notes(host: Host) -> tuple[str, ...]:
    """What the front and the start at boot need, and is not there."""
    if os.access(host.path(HAPROXY), os.X_OK):
        return ()
    what = f"{HAPROXY} is not there: {UNIT} cannot start, and a switch is refused"
    return (f"{what}; run: apt-get install haproxy",)


def _template(name: str, program: str) -> str:
    text = resources.files("gpuguard").joinpath(f"resources/lanes/{name}").read_text()
    return text.replace("@PROGRAM@", program)
