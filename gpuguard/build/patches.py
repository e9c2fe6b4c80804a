"""Apply patches to an export, all or nothing, with no guessing.

GNU patch does the work, as for dkms, with ``--fuzz=0``: a hunk that only fits when context is
ignored may land in the wrong function. Each patch is tried on a copy of the files it touches,
because ``--dry-run`` forgets: two diffs of one file in one patch (``git format-patch``) would
fail there. Only what fits in the trial is applied to the export.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpuguard.build.records import PatchFile
from gpuguard.build.staging import Staging, remove_tree
from gpuguard.errors import PatchRejectedError
from gpuguard.host import Completed, Host
from gpuguard.host.files import sha256_file

_TIMEOUT = 120.0
_HEADER = re.compile(rb"^(?:---|\+\+\+|rename from|rename to|copy from) (.+?)(?:\t.*)?\r?\n?$")
_FILE = re.compile(r"^(?:checking|patching) file (?P<file>\S+)")
_HUNK = re.compile(r"^(?:Hunk #(?P<hunk>\d+) (?:FAILED|ignored)|(?P<other>.*already exists!))")
_NO_FILE = re.compile(r"^(?:can't find file to patch|No file to patch)")


_COMPILED = ("src/", "kernel-open/")


class Outcome(StrEnum):
    """What became of a patch that was accepted."""

    APPLIED = "applied"
    ALREADY = "already applied"


@dataclass(frozen=True, slots=True)
class Applied:
    """One accepted patch; ``notes`` are patch's own remarks (offsets)."""

    patch: PatchFile
    outcome: Outcome
    notes: tuple[str, ...] = ()


def apply_all(
    host: Host,
    patches: Sequence[PatchFile],
    staging: Staging,
    *,
    source_differs: bool | None,
    log: Callable[[str], None],
) -> tuple[Applied, ...]:
    """Apply the patches one after the other to the export.

    Args:
        host: runs ``patch``.
        patches: in order; each may build on the one before.
        staging: its tree is changed, as the build user.
        source_differs: the source itself differs from the stock ref (None: not known).
        log: receives each line that patch prints.

    Raises:
        PatchRejectedError: ``patch-rejected``, ``patch-fuzz``, ``patch-changed`` (the file is
            not what was looked at), ``patch-changes-nothing``.
    """
    before: dict[str, str] = {}
    results = []
    for number, patch in enumerate(patches):
        copy = _own_copy(host, patch, staging, number)
        touched = _touched(copy)
        for name in touched:
            before.setdefault(name, _state(staging.tree, name))
        results.append(_Trial(host, patch, copy, touched, staging, log).apply())
    changed = any(
        _state(staging.tree, name) != state
        for name, state in before.items()
        if name.startswith(_COMPILED)  # a patch of the README alone makes no other module
    )
    if patches and not changed and not source_differs:
        _refuse_unchanged(results, source_differs=source_differs)
    return tuple(results)


def _refuse_unchanged(results: Sequence[Applied], *, source_differs: bool | None) -> None:
    # Nothing to compare with, and every patch is in: an operator's own patched tree (C29)
    if source_differs is None and all(r.outcome is Outcome.ALREADY for r in results):
        return
    raise PatchRejectedError(
        "the patches change nothing: what would be compiled is the stock source",
        hint="check source.patches; a patch may have been merged, or undo another",
        code="patch-changes-nothing",
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    host: Host
    patch: PatchFile
    copy: Path
    touched: tuple[str, ...]
    staging: Staging
    log: Callable[[str], None]

    def apply(self) -> Applied:
        """Apply to the export what fits in a trial; refuse the rest and say why."""
        answer = self._try("--fuzz=0")
        if answer.exit_status == 0:
            self._patch(self.staging.tree, "--fuzz=0", ok=(0,))
            return Applied(self.patch, Outcome.APPLIED, _notes(answer.stdout))
        if self._try("--fuzz=0", "--reverse").exit_status == 0:
            return Applied(self.patch, Outcome.ALREADY)
        name, where = Path(self.patch.path).name, _first_failure(_said(answer))
        if self._try("--fuzz=2").exit_status == 0:
            raise PatchRejectedError(
                f"patch {name} applies only with fuzz, at {where}",
                hint="the source has changed around it: refresh the patch for this version",
                code="patch-fuzz", detail=_said(answer),
            )  # fmt: skip
        raise PatchRejectedError(
            f"patch {name} does not apply: {where}",
            hint="take the patch for exactly this driver version; a half-applied tree is refused",
            detail=_said(answer),
        )

    def _try(self, *options: str) -> Completed:
        folder = self.staging.own_folder("trial", owner=self.staging.user)
        try:
            for name in self.touched:
                _copy_into(self.staging.tree, folder, name, self.staging)
            answer = self._patch(folder, *options, ok=None)
        finally:
            remove_tree(folder)
        for line in _said(answer).splitlines():
            self.log(line)
        return answer

    def _patch(self, folder: Path, *options: str, ok: tuple[int, ...] | None) -> Completed:
        return self.host.run(
            "patch", "--strip=1", "--force", "--no-backup-if-mismatch", "--reject-file=-",
            *options, f"--directory={folder}", f"--input={self.copy}",
            timeout=_TIMEOUT, env={"LC_ALL": "C", "TMPDIR": str(self.staging.tmp)},
            user=self.staging.user, ok=ok,
        )  # fmt: skip


def _own_copy(host: Host, patch: PatchFile, staging: Staging, number: int) -> Path:
    # The build user may not be able to read the original, and nobody can change the copy
    copy = staging.root / "patches" / f"{number:02}.patch"
    shutil.copyfile(host.path(patch.path), copy)
    copy.chmod(0o644)
    if sha256_file(copy) != patch.sha256:
        raise PatchRejectedError(
            f"patch {patch.path} changed while the build started",
            hint="try again",
            code="patch-changed",
        )
    return copy


def _touched(patch: Path) -> tuple[str, ...]:
    """Relative paths, without their first component, that a patch names; some may not exist."""
    names: dict[str, None] = {}
    with patch.open("rb") as file:
        for line in file:
            match = _HEADER.match(line)
            if match is not None:
                names.update(dict.fromkeys(_stripped(line, os.fsdecode(match[1]))))
    return tuple(names)


def _stripped(line: bytes, name: str) -> Iterator[str]:
    if not line.startswith((b"rename", b"copy")):
        name = name.partition("/")[2]
    if name and not name.startswith("/") and ".." not in name.split("/"):
        yield name


def _copy_into(tree: Path, folder: Path, name: str, staging: Staging) -> None:
    source, target = tree / name, folder / name
    # As root: a folder in the name that is a link must not lead us out of the tree
    if not source.is_file() or _has_a_link(tree, name):
        return
    for parent in reversed(target.relative_to(folder).parents):
        place = folder / parent
        if not place.is_dir():
            place.mkdir()
            _give(place, staging)
    shutil.copy(source, target)
    _give(target, staging)


def _has_a_link(tree: Path, name: str) -> bool:
    path = Path(name)
    return any((tree / step).is_symlink() for step in (path, *path.parents) if step.name)


def _give(path: Path, staging: Staging) -> None:
    if staging.user is not None:
        os.chown(path, staging.user.uid, staging.user.gid)


def _state(tree: Path, name: str) -> str:
    path = tree / name
    if not path.is_file() or _has_a_link(tree, name):
        return "absent"
    return f"{path.stat().st_mode & 0o100:o} {sha256_file(path)}"


def _first_failure(output: str) -> str:
    file = "unknown file"
    for line in output.splitlines():
        if match := _FILE.match(line):
            file = match["file"]
        elif match := _HUNK.match(line):
            return f"{file} hunk #{match['hunk']}" if match["hunk"] else match["other"]
        elif _NO_FILE.match(line):
            return f"it patches a file that is not there ({line})"
    return output.splitlines()[-1] if output else "patch said nothing"


def _said(answer: Completed) -> str:
    return f"{answer.stdout}\n{answer.stderr}".strip()


def _notes(output: str) -> tuple[str, ...]:
    return tuple(line for line in output.splitlines() if line.startswith("Hunk #"))
