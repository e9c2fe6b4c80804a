"""A tree with the real dpkg's database, small real packages, and an archive that apt reads.

Nothing here touches the machine's own packages: dpkg is given ``--root``, and apt a configuration
file with every folder inside the tree. ``tests/live.py`` would notice.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.box import Box
from tests.trees import make_tree

TOOLS = ("dpkg", "dpkg-deb", "apt-get", "apt-mark", "apt-cache")
needs_tools = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS),
    reason="needs root, dpkg and apt: sudo apt-get install dpkg apt, then as root",
)
LEDGER = "var/lib/gpuguard/holds.json"
WITHHELD = "var/lib/gpuguard/withheld.json"


def native() -> str:
    """The architecture that this machine's dpkg was built for."""
    command = ["dpkg", "--print-architecture"]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


@dataclass(frozen=True)
class HoldBox(Box):
    """A host with packages; debs and archive lie beside its root."""

    @property
    def work(self) -> Path:
        return self.root.parent / f"{self.root.name}.work"

    def deb(
        self,
        name: str,
        version: str = "1",
        *,
        arch: str | None = None,
        depends: str = "",
        section: str = "misc",
        description: str = "a package of a test",
        conffile: bool = False,
    ) -> Path:
        """Build a package: no content, or one configuration file that outlives a removal."""
        control = {
            "Package": name,
            "Version": version,
            "Architecture": arch or native(),
            "Multi-Arch": "same" if arch not in (None, "all") or name.startswith("lib") else "no",
            "Maintainer": "Nobody <nobody@localhost>",
            "Section": section,
            "Depends": depends,
            "Description": description,
        }
        text = "".join(f"{key}: {value}\n" for key, value in control.items() if value)
        target = self.work / "debs" / f"{name}_{version}_{control['Architecture']}.deb"
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            files: dict[str, str | bytes | Any] = {"DEBIAN/control": text}
            if conffile:
                files |= {f"etc/{name}.conf": "#\n", "DEBIAN/conffiles": f"/etc/{name}.conf\n"}
            make_tree(Path(folder), files)
            Path(folder).chmod(0o755)
            command = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", folder, str(target)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return target

    def dpkg(self, *words: str | Path, text: str | None = None) -> str:
        """The real dpkg on the tree."""
        log = self.root / "var/log/dpkg.log"
        done = subprocess.run(
            ["dpkg", f"--root={self.root}", f"--log={log}", *words],
            input=text, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, name: str, version: str = "1", **more: Any) -> None:
        self.dpkg("--force-depends", "-i", self.deb(name, version, **more))

    def held(self) -> list[str]:
        """What is on hold, as dpkg itself says (with ``:arch`` for Multi-Arch same)."""
        lines = self.dpkg("--get-selections").splitlines()
        return sorted(line.split()[0] for line in lines if line.split()[1] == "hold")

    def select(self, **selections: str) -> None:
        """Somebody else's hand on selections; ``_`` in a name stands for ``-``."""
        lines = [f"{name.replace('_', '-')} {what}\n" for name, what in selections.items()]
        self.dpkg("--set-selections", text="".join(lines))

    def apt(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A program of apt with every folder inside the tree."""
        config = self.work / "apt.conf"
        config.write_text(
            f'Dir "{self.root}/";\nDir::State::status "{self.root}/var/lib/dpkg/status";\n'
            'Dir::Etc::parts "/dev/null";\nDir::Etc::main "/dev/null";\n'
            f'Dpkg::Options {{ "--root={self.root}"; "--force-depends"; '
            f'"--log={self.root}/var/log/dpkg.log"; }};\nAPT::Sandbox::User "root";\n'
        )
        environment = {**os.environ, "APT_CONFIG": str(config), "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def publish(self, suite: str, *debs: Path) -> None:
        """Put packages into an archive of the tree and fetch its lists."""
        folder = self.work / "archive/dists" / suite
        packages = folder / "main" / f"binary-{native()}" / "Packages"
        packages.parent.mkdir(parents=True, exist_ok=True)
        packages.write_text("\n".join(_stanza(deb, self.work / "archive") for deb in debs))
        digest = subprocess.run(
            ["sha256sum", packages], check=True, text=True, stdout=subprocess.PIPE
        ).stdout.split()[0]
        (folder / "Release").write_text(
            f"Origin: Debian\nSuite: {suite}\nCodename: {suite}\nArchitectures: {native()}\n"
            f"Components: main\nDate: Sun, 29 Nov 2026 12:00:00 +0000\nSHA256:\n"
            f" {digest} {packages.stat().st_size} main/binary-{native()}/Packages\n"
        )
        suites = sorted(path.name for path in folder.parent.iterdir())
        sources = [f"deb [trusted=yes] file:{self.work}/archive {name} main\n" for name in suites]
        (self.root / "etc/apt/sources.list").write_text("".join(sources))
        self.apt("apt-get", "update", "-q")

    def ledger(self) -> dict[str, Any]:
        return dict(json.loads((self.root / LEDGER).read_text()))

    def holds(self) -> dict[str, Any]:
        answer = self.json("holds")
        document = dict(answer.document)
        verdict = {"ok": 0, "warning": 1, "critical": 1, "unknown": 3}[document["verdict"]]
        assert answer.status == verdict
        return document

    def codes(self) -> set[str]:
        return {finding["code"] for finding in self.holds()["findings"]}


def _stanza(deb: Path, archive: Path) -> str:
    pool = archive / "pool"
    pool.mkdir(parents=True, exist_ok=True)
    shutil.copy(deb, pool)
    fields = subprocess.run(
        ["dpkg-deb", "-f", deb], check=True, text=True, stdout=subprocess.PIPE
    ).stdout
    digest = subprocess.run(
        ["sha256sum", deb], check=True, text=True, stdout=subprocess.PIPE
    ).stdout.split()[0]
    size = deb.stat().st_size
    return f"{fields.strip()}\nFilename: pool/{deb.name}\nSize: {size}\nSHA256: {digest}\n"


def make_hold_box(root: Path) -> HoldBox:
    """A host whose dpkg knows of itself alone, so that its architecture is known."""
    box = HoldBox(root)
    make_tree(
        root,
        dict.fromkeys(
            (
                "var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers",
                "var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/log/apt",
                "etc/apt/sources.list.d", "etc/apt/preferences.d", "etc/gpuguard",
            )
        ),
    )  # fmt: skip
    (root / "var/lib/dpkg/status").touch()
    (root / "var/lib/apt/lists/archive_InRelease").touch()  # fetched, and nothing to upgrade
    box.work.mkdir()
    box.dpkg("--add-architecture", "i386")
    box.install("dpkg")
    return box


@contextmanager
def dpkg_locked(root: Path) -> Iterator[None]:
    """Somebody else's dpkg at work: its lock, held by another process (fcntl, as dpkg's own)."""
    code = (
        "import fcntl, sys\n"
        f"file = open({str(root / 'var/lib/dpkg/lock-frontend')!r}, 'w')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    process = subprocess.Popen(
        ["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield
    finally:
        process.communicate("")
