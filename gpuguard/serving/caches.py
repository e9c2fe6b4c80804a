"""The folder in which a lane's engine keeps its compiled kernels: made, given away, removed.

It goes with the release that filled it: as long as that can be gone back to, a start finds its
kernels.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpuguard.errors import CommandError
from gpuguard.host import Host
from gpuguard.host.reading import list_dir
from gpuguard.serving.containers import image_user, tool_of
from gpuguard.serving.lane import Lane
from gpuguard.serving.render import cache_dir
from gpuguard.serving.store import RELEASES_DIR, WARM_DIR, is_warm
from gpuguard.state import LANE_CACHE_DIR, LANE_STATE_DIR

FINGERPRINTS = f"{LANE_STATE_DIR}/fingerprints"  # <lane id>.json: of its last start
_LANE_ID = re.compile(r"[a-z0-9][a-z0-9-]*-[0-9a-f]{12}")
_ROOT = ("", "root", "0")


def make_cache(host: Host, lane: Lane) -> tuple[Path, tuple[str, ...]]:
    """Make the folder for the account that the engine runs as; what is to be told of it."""
    if not is_warm(host, lane.lane_id):  # somebody removed it: kernels are compiled once more
        host.remove_file(f"{WARM_DIR}/{lane.lane_id}")
    folder = host.make_dir(cache_dir(lane.lane_id))
    if os.geteuid() != 0:
        return folder, ()
    tool = tool_of(lane)
    if tool is None:
        with suppress(KeyError):
            account = pwd.getpwnam(lane.engine.user)
            os.chown(folder, account.pw_uid, account.pw_gid)
        return folder, ()
    return folder, tuple(_give(host, tool, str(lane.engine.image), folder))


def _give(host: Host, tool: str, image: str, folder: Path) -> Iterator[str]:
    # Only Podman's and Docker's plain case, in which numbers inside are those outside.
    try:
        user = image_user(host, tool, image).partition(":")[0]
    except (CommandError, ValueError, TypeError, AttributeError) as error:
        yield f"as whom the image runs is not known, {folder} is left as it is: {error}"
        return
    if user.isdecimal():
        try:
            os.chown(folder, int(user), -1)
        except (OSError, OverflowError) as error:
            yield f"{folder} cannot be given to {user}, as whom the image runs: {error}"
    elif user not in _ROOT and folder.stat().st_uid == 0:
        yield (
            f"the image runs as {user}, whose number only the image knows, and {folder} is root's: "
            "kernels may not be kept there (chown it to that number)"
        )


def prune_caches(host: Host, keep: frozenset[str]) -> tuple[str, ...]:
    """Remove caches whose release is gone; what could not be removed.

    Args:
        host: where.
        keep: lane ids whose cache stays, whatever is known of their releases.

    Raises:
        ProbeError: which releases there are cannot be read.
    """
    kept = keep | {name.removesuffix(".json") for name in list_dir(host, RELEASES_DIR)}
    caches = list_dir(host, LANE_CACHE_DIR)
    notes = []
    for lane_id in caches:
        if lane_id in kept or not _LANE_ID.fullmatch(lane_id):
            continue
        try:
            host.remove_file(f"{WARM_DIR}/{lane_id}")
            host.remove_file(f"{FINGERPRINTS}/{lane_id}.json")
            shutil.rmtree(host.path(cache_dir(lane_id), follow=False))
        except OSError as error:
            why = error.strerror or error
            notes.append(f"{cache_dir(lane_id)} is not needed any more, and stays: {why}")
    return tuple(notes)
