"""The operator's source: what it is, whether it may be compiled, and a copy to work in.

Two kinds: a git clone at a ref (identity: the git tree), and a folder as it stands (identity: a
digest over its content). Neither is ever written to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuguard.build import links, products
from gpuguard.build import repository as repositories
from gpuguard.build.git import Clone, TreeItem
from gpuguard.build.records import Blocker, SourceState
from gpuguard.build.staging import Staging
from gpuguard.build.trust import Trust, owner_of, trust_in
from gpuguard.config import SourceConfig
from gpuguard.errors import BuildError, GpuguardError
from gpuguard.host import Host

_VERSION = re.compile(r"^\s*NVIDIA_VERSION\s*[:?]?=\s*(\S+)", re.MULTILINE)
_CXX = (".cc", ".cpp")
_LINK = "120000"  # mode of a symlink in a git tree
_EXPORT_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class SourceProbe:
    """What was found out about the source, and what is wrong with it."""

    state: SourceState
    blockers: tuple[Blocker, ...] = ()


class _Refused(Exception):  # noqa: N818 - carries an answer, not an error
    """The source cannot be used; there is one blocker that says why."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.blocker = Blocker(code=code, message=message, hint=hint, exit_status=os.EX_CONFIG)


def probe(host: Host, config: SourceConfig, driver_version: str | None) -> SourceProbe:
    """Look at the configured source for one driver version; reads only."""
    state = SourceState(path=config.path)
    try:
        folder, trust = _usable_folder(host, config)
        if config.ref is None:
            return _folder(folder, config, trust, driver_version)
        return _clone(host, folder, config, trust, driver_version)
    except _Refused as refused:
        return SourceProbe(state, (refused.blocker,))
    except GpuguardError as error:
        blocker = Blocker(
            code="source-unreadable",
            message=f"source: {error.message}",
            hint=error.hint or f"check it by hand: git -C {config.path} fsck",
        )
        return SourceProbe(state, (blocker,))
    except OSError as error:
        blocker = Blocker(
            code="source-unreadable",
            message=f"source {config.path} cannot be read: {error.strerror or error}",
            hint="check the path and its permissions",
        )
        return SourceProbe(state, (blocker,))


def parse_version(text: str) -> str | None:
    """NVIDIA_VERSION in the text of ``version.mk``."""
    match = _VERSION.search(text)
    return match[1] if match else None


def expand(template: str, driver_version: str | None) -> str:
    """Fill ``{driver_version}`` in; left as it is when the version is not known."""
    return template.replace("{driver_version}", driver_version or "{driver_version}")


def export(host: Host, source: SourceState, staging: Staging) -> None:
    """Put a clean copy of the source into ``staging.tree``, owned by the build user.

    A tar lies in between, so that root reads and the build user writes.

    Raises:
        BuildError: ``source-changed``: the folder is no longer what was looked at.
        CommandError: git or tar failed.
    """
    archive = staging.root / "source.tar"
    path = host.path(source.path)
    if source.commit is not None:
        _same_clone(host, path, source).archive(source.commit, archive)
    else:
        names = staging.root / "source.list"
        names.write_bytes(b"".join(os.fsencode(e.name) + b"\0" for e in products.entries(path)))
        # --mode: what is read-only for the operator must still be patched and compiled in
        host.run("tar", "--create", "--mode=u+rwX", f"--file={archive}", f"--directory={path}",
                 "--null", "--no-recursion", "--verbatim-files-from", f"--files-from={names}",
                 timeout=_EXPORT_TIMEOUT)  # fmt: skip
        names.unlink()
    archive.chmod(0o644)  # whatever the umask says: the build user unpacks it
    # --touch: a commit's date may lie in the future, and make then rebuilds for ever
    host.run("tar", "--extract", "--touch", "--no-same-owner", "--no-same-permissions",
             f"--file={archive}", f"--directory={staging.tree}",
             timeout=_EXPORT_TIMEOUT, user=staging.user)  # fmt: skip
    archive.unlink()
    if source.commit is None:
        _must_be_unchanged(source, staging.tree)
    links.must_stay_inside(staging.tree)


def _same_clone(host: Host, path: Path, source: SourceState) -> Clone:
    repository = repositories.find(path)
    if repository is None or repository.git_dir != source.git_dir:
        raise BuildError(
            f"{source.path} is no longer the clone that was looked at",
            hint="try again when nobody works in it",
            code="source-changed",
        )
    return Clone(host, repository.git_dir, repository.owner())


def _must_be_unchanged(source: SourceState, tree: Path) -> None:
    if f"sha256:{products.digest(tree, products.entries(tree))}" != source.identity:
        raise BuildError(
            f"source {source.path} changed while it was being copied",
            hint="try again when nobody works in it",
            code="source-changed",
        )


def _usable_folder(host: Host, config: SourceConfig) -> tuple[Path, Trust]:
    path = host.path(config.path)
    if not path.is_dir():
        raise _Refused(
            "source-missing", f"source {config.path} is not a folder", "set source.path to the "
            "clone or folder with NVIDIA's open kernel modules",
        )  # fmt: skip
    try:
        trust = trust_in(config.trusted_owner)
    except KeyError:
        raise _Refused(
            "source-untrusted", f"source.trusted_owner: no account {config.trusted_owner}",
            "name an existing account, or remove the setting",
        ) from None  # fmt: skip
    _must_trust(trust.problem(host, config.path), config, path)
    return path, trust


def _must_trust(problem: str | None, config: SourceConfig, path: Path) -> None:
    if problem is None:
        return
    owner = owner_of(path)
    name = owner.name if owner else "ACCOUNT"
    raise _Refused(
        "source-untrusted",
        f"root would compile what others can write: {problem}",
        f"either make it root's own: chown -R root:root {config.path} && chmod -R go-w "
        f"{config.path} (and no folder above it writable by others), or, if you trust that "
        f'account with this machine: source.trusted_owner: "{name}"',
    )


def _folder(
    folder: Path, config: SourceConfig, trust: Trust, driver_version: str | None
) -> SourceProbe:
    found = list(products.entries(folder))
    _must_trust(trust.problem_below(_folders_and_files(folder, found)), config, folder)
    outside = links.first_outside(folder, (e.name for e in found if e.is_link))
    _must_stay_inside(outside, config.path)
    items = [TreeItem("", e.status.st_size, e.name) for e in found]
    text = (folder / "version.mk").read_text("utf-8", "replace") if _has(items) else ""
    version = _version(items, text, config.path)
    state = SourceState(
        path=config.path,
        identity=f"sha256:{products.digest(folder, found)}",
        version=version,
        size_bytes=sum(item.size for item in items),
        has_cxx=_has_cxx(items),
    )
    return SourceProbe(state, tuple(_version_blockers(state, driver_version)))


def _clone(
    host: Host, folder: Path, config: SourceConfig, trust: Trust, driver_version: str | None
) -> SourceProbe:
    repository = repositories.find(folder)
    ref = expand(config.ref or "", driver_version)
    if repository is None:
        raise _Refused(
            "source-ref-missing", f"source.ref is {ref}, but {config.path} is not a git clone",
            "remove source.ref to compile the folder as it stands",
        )  # fmt: skip
    _must_trust(repository.problem(trust), config, repository.common)
    clone = Clone(host, repository.git_dir, repository.owner())
    commit, tree = _resolve(clone, ref, config.path)
    items = clone.items(tree)
    _must_stay_inside(_link_of_a_tree(clone, tree, items), f"{config.path} at {ref}")
    version = _version(
        items, clone.text(tree, "version.mk") if _has(items) else "", f"{config.path} at {ref}"
    )
    state = SourceState(
        path=config.path,
        ref=ref,
        commit=commit,
        identity=f"git:{tree}",
        version=version,
        size_bytes=sum(item.size for item in items),
        has_cxx=_has_cxx(items),
        differs_from_stock=_differs(clone, tree, config, driver_version),
        git_dir=clone.git_dir,
    )
    return SourceProbe(state, tuple(_version_blockers(state, driver_version)))


def _link_of_a_tree(clone: Clone, tree: str, items: list[TreeItem]) -> str | None:
    for item in items:
        if item.mode == _LINK and links.leaves(item.path, target := clone.text(tree, item.path)):
            return f"{item.path} -> {target}"
    return None


def _must_stay_inside(outside: str | None, where: str) -> None:
    if outside is not None:
        raise _Refused(links.CODE, f"{where} has a link out of it: {outside}", links.HINT)


def _resolve(clone: Clone, ref: str, path: str) -> tuple[str, str]:
    found = clone.resolve(ref)
    if found is None:
        near = clone.near(ref)
        raise _Refused(
            "source-ref-missing",
            f"{path} has no tag, branch or commit {ref}",
            (f"near it: {', '.join(near)}; " if near else "")
            + "fetch in the clone, or change source.ref (a branch that was never checked out "
            "is called origin/NAME in an ordinary clone)",
        )
    return found


def _differs(
    clone: Clone, tree: str, config: SourceConfig, driver_version: str | None
) -> bool | None:
    if config.stock_ref is None:
        return None
    return _resolve(clone, expand(config.stock_ref, driver_version), config.path)[1] != tree


def _has(items: list[TreeItem]) -> bool:
    return any(item.path == "version.mk" for item in items)


def _has_cxx(items: list[TreeItem]) -> bool:
    return any(i.path.startswith("src/") and i.path.endswith(_CXX) for i in items)


def _version(items: list[TreeItem], text: str, where: str) -> str:
    lacking = [] if _has(items) else ["version.mk"]
    lacking += [
        folder
        for folder in ("kernel-open", "src/nvidia")
        if not any(item.path.startswith(f"{folder}/") for item in items)
    ]
    version = parse_version(text)
    if not lacking and version is None:
        lacking = ["NVIDIA_VERSION in version.mk"]
    if lacking or version is None:
        raise _Refused(
            "source-not-a-source",
            f"{where} is not the source of NVIDIA's open kernel modules: no {', '.join(lacking)}",
            "a distribution's DKMS folder will not do, it lacks src/; take NVIDIA's "
            "open-gpu-kernel-modules at the driver's version",
        )
    return version


def _version_blockers(state: SourceState, driver_version: str | None) -> Iterator[Blocker]:
    if driver_version is None or state.version == driver_version:
        return
    yield Blocker(
        code="source-version-mismatch",
        message=f"source {state.path} is version {state.version}, the installed driver "
        f"is {driver_version}: they must be equal to the last number",
        hint=f"check out the source of {driver_version} (source.ref may hold {{driver_version}})",
    )


def _folders_and_files(
    folder: Path, found: list[products.Entry]
) -> Iterator[tuple[Path, os.stat_result]]:
    parents = {Path(entry.name).parent for entry in found}
    for parent in sorted(parents):
        yield folder / parent, (folder / parent).lstat()
    for entry in found:
        yield folder / entry.name, entry.status
