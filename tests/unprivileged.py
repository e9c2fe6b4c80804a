"""Be an ordinary user for a while: root's tests of what others may not read."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's rights inside the block; nothing to do for one who has none."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def public_dir() -> Iterator[Path]:
    """A folder that everyone may search; pytest's own belongs to its user alone."""
    folder = Path(tempfile.mkdtemp(prefix="gpuguard-test-"))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)
