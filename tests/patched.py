"""A tree whose modules are ours without a build: a record says so."""

from __future__ import annotations

import json
from pathlib import Path

from tests import toys
from tests.box import Box, build_id_of
from tests.trees import make_tree


def record(box: Box, release: str, *modules: Path, created: str = "2026-01-01T00:00:00Z") -> None:
    """A build record that says: these are ours."""
    document = {
        "schema": 1,
        "release": release,
        "driver_version": toys.VERSION,
        "build_ids": {path.name.split(".ko")[0]: build_id_of(path) for path in modules},
        "created": created,
    }
    name = f"var/lib/gpuguard/builds/{release}/{created.replace(':', '')}.json"
    make_tree(box.root, {name: json.dumps(document)})


def patched(box: Box, *releases: str, names: tuple[str, ...] = toys.NAMES) -> Box:
    """What DKMS installed is ours: these kernels are ready."""
    for release in releases:
        record(box, release, *(box.dkms_copy(release, name) for name in names))
    return box
