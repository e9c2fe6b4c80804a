"""Carry actions out so that a host is never left in between.

The undo of a step reaches the disk before the step starts. Any failure, signal or
``kill -9`` ends, at once or at the next start, in exactly the old state or, once the
commit mark is on disk, in exactly the new one.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from gpuguard.apply.actions import (
    PACKAGES_FOLDERS,
    Action,
    CheckInitramfs,
    CheckNextKernel,
    CheckResolved,
    Depmod,
    PutFile,
    PutLink,
    RebuildInitramfs,
    RemoveFile,
    UpdateBootMenu,
)
from gpuguard.apply.boot_menu import menu_files
from gpuguard.apply.execute import DEPMOD_OUTPUTS, execute
from gpuguard.apply.initramfs import side_files
from gpuguard.apply.inputs import depmod_inputs, is_gone, packages
from gpuguard.apply.journal import Journal
from gpuguard.apply.objects import ObjectStore
from gpuguard.apply.recovery import finish, recover
from gpuguard.apply.undo import (
    FolderBefore,
    ImageBefore,
    MenuBefore,
    NoFolderBefore,
    Sweep,
    TreeBefore,
    Undo,
    Wrote,
    look,
    state_before,
    state_of,
    wrote,
)
from gpuguard.errors import StateError
from gpuguard.host import Host
from gpuguard.host.signals import HeldSignals
from gpuguard.state import module_tree


def apply(
    actions: Sequence[Action],
    host: Host,
    *,
    verb: str,
    release: str,
    started: str,
    backup: str | None,
) -> None:
    """Carry out the actions in order; on any failure put back what was begun.

    Raises:
        GpuguardError: what the failing action said; the host is as before.
        RollbackError: it failed, and so did putting back; the journal stays.
    """
    journal, store = Journal(host), ObjectStore(host)
    begun: list[Action] = []
    with HeldSignals() as held:
        journal.begin(verb, release, started, backup)
        try:
            held.let_go()
            # Before the first step: what the tools go by, and what they have made of it so far.
            _push(
                journal, (u for a in actions if _runs_a_tool(a) for u in undos_of(a, host, store))
            )
            for action in actions:
                if not _runs_a_tool(action):
                    _push(journal, undos_of(action, host, store))
                begun.append(action)
                execute(action, host)
                _push(journal, made_by(action, host))
            with HeldSignals():
                journal.commit()
        except BaseException as error:
            with HeldSignals():  # people press Ctrl-C twice
                made = _made_half(begun[-1:], host)
                recover(host, made=made, is_committed=journal.is_committed)
            if isinstance(error, OSError):
                raise StateError(
                    f"{error.filename or 'writing'}: {error.strerror}",
                    code="disk-full" if error.errno == errno.ENOSPC else "write-failed",
                    hint="the host is as it was before; mend the disk and try again",
                ) from error
            raise
    with HeldSignals():
        finish(host, journal)


def undos_of(action: Action, host: Host, store: ObjectStore) -> Iterator[Undo]:
    """How everything that an action may touch looks now, and what it will be if that is known."""
    match action:
        case PutFile():
            yield wrote(action.path, action.source)
            yield from _missing_folders(action.path, host)
            yield Sweep(path=str(PurePosixPath(action.path).parent))
            yield look(action.path, host, store)
        case PutLink():
            yield Wrote(path=action.path, state=f"link {action.target}")
            yield from _missing_folders(action.path, host)
            yield Sweep(path=str(PurePosixPath(action.path).parent))
            yield look(action.path, host, store)
        case RemoveFile():
            yield wrote(action.path, None)
            yield from _folder(str(PurePosixPath(action.path).parent), host)
            yield Sweep(path=str(PurePosixPath(action.path).parent))
            yield look(action.path, host, store)
        case Depmod():
            tree = module_tree(action.release)
            yield from _tree(action.release, host)
            yield Sweep(path=tree)
            for name in DEPMOD_OUTPUTS:
                yield look(f"{tree}/{name}", host, store)
        case RebuildInitramfs():
            yield from _tree(action.release, host)
            yield from _image(action, host, store)
        case UpdateBootMenu():
            yield MenuBefore(path=action.path)
            yield Sweep(path=str(PurePosixPath(action.path).parent))
            for path in menu_files(action.path):
                yield look(path, host, store)
        case CheckResolved() | CheckInitramfs() | CheckNextKernel():
            pass


def made_by(action: Action, host: Host) -> Iterator[Wrote]:
    """What a tool has made, once it has: nobody can tell before."""
    if isinstance(action, RebuildInitramfs):
        for path in _image_paths(action, host):
            yield Wrote(path=path, state=state_of(path, host))
    elif isinstance(action, UpdateBootMenu):
        yield Wrote(path=action.path, state=state_of(action.path, host))


def _made_half(begun: Sequence[Action], host: Host) -> tuple[Wrote, ...]:
    # What the step that failed leaves is its own: nobody else has had the time.
    with suppress(OSError):
        return tuple(made for action in begun for made in made_by(action, host))
    return ()


def _push(journal: Journal, undos: Iterable[Undo]) -> None:
    for undo in undos:
        journal.push(undo)


def _runs_a_tool(action: Action) -> bool:
    return isinstance(action, Depmod | RebuildInitramfs | UpdateBootMenu)


def _tree(release: str, host: Host) -> Iterator[TreeBefore]:
    if not is_gone(host, release):
        fingerprint = depmod_inputs(host, release)
        yield TreeBefore(path=module_tree(release), release=release, fingerprint=fingerprint)


def _image(action: RebuildInitramfs, host: Host, store: ObjectStore) -> Iterator[Undo]:
    yield ImageBefore(
        path=action.path,
        release=action.release,
        content=_content(action.path, host),
        packages=packages(host),
    )
    for folder in dict.fromkeys(str(PurePosixPath(p).parent) for p in _image_paths(action, host)):
        yield Sweep(path=folder)
    looks = {path: look(path, host, store) for path in _image_paths(action, host)}
    # update-initramfs keeps the old one
    kept = state_before(looks[_content(action.path, host)])
    yield Wrote(path=side_files(action.path)[1], state=kept)
    yield from looks.values()


def _image_paths(action: RebuildInitramfs, host: Host) -> tuple[str, ...]:
    content = _content(action.path, host)
    return tuple(dict.fromkeys((action.path, content, *side_files(action.path))))


def _content(path: str, host: Host) -> str:
    # Tools write through a link (cp -f) or replace it: both have to come back.
    with suppress(OSError, ValueError):
        if host.path(path, follow=False).is_symlink():
            return host.inside(host.path(path).resolve())
    return path


def _folder(folder: str, host: Host) -> Iterator[FolderBefore]:
    if folder not in PACKAGES_FOLDERS:
        with suppress(FileNotFoundError, NotADirectoryError):
            status = host.path(folder).stat()
            mode = stat.S_IMODE(status.st_mode)
            yield FolderBefore(path=folder, mode=mode, uid=status.st_uid, gid=status.st_gid)


def _missing_folders(path: str, host: Host) -> Iterator[NoFolderBefore]:
    parents = [str(parent) for parent in PurePosixPath(path).parents]
    for parent in reversed(parents):  # outermost first, so that undoing removes it last
        if not host.path(parent).exists():
            yield NoFolderBefore(path=parent)
