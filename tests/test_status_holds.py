"""Holds in status: what dpkg says, told apart from ours (there are none yet)."""

from __future__ import annotations

from pathlib import Path

from gpuguard.core.assess import assess
from gpuguard.core.document import status_document
from gpuguard.core.policy import Policy
from gpuguard.host import LocalHost
from gpuguard.host.cache import FileCache
from gpuguard.probes.host import probe_host
from tests import toys
from tests.schema import check_status

RELEASE = "6.8.0-90-generic"
DPKG = """Package: linux-image-generic
Status: hold ok installed
Architecture: amd64
Version: 6.8.0-90.91

Package: bash
Status: install ok installed
Architecture: amd64
Version: 5.2

"""


def test_held_packages_are_named(tmp_path: Path) -> None:
    toys.toy_kernel(tmp_path, RELEASE)
    toys.stock_modules(tmp_path, RELEASE)
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(DPKG)
    facts = probe_host(LocalHost(tmp_path), FileCache(None))
    document = status_document(facts, assess(facts, Policy()), Policy())
    check_status(document)
    assert document["holds"]["held"] == ["linux-image-generic"]
    assert document["holds"]["foreign"] == ["linux-image-generic"]
