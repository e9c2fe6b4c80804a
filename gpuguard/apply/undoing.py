"""Carry out the undo of a journal on a host that others may have changed since."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from gpuguard.apply.boot_menu import menu_files, update_boot_menu
from gpuguard.apply.execute import DEPMOD_OUTPUTS, run_depmod
from gpuguard.apply.initramfs import (
    TOOL_SECONDS,
    initramfs_command,
    rebuild_initramfs,
    side_files,
)
from gpuguard.apply.inputs import depmod_inputs, is_gone, packages
from gpuguard.apply.journal import JournalState
from gpuguard.apply.objects import ObjectStore
from gpuguard.apply.undo import (
    FileBefore,
    FileUndo,
    ImageBefore,
    LinkBefore,
    MenuBefore,
    NothingBefore,
    Sweep,
    TreeBefore,
    Wrote,
    is_back,
    put_back,
    state_before,
    state_of,
    sweep,
)
from gpuguard.core.facts import InitramfsState
from gpuguard.errors import GpuguardError, PreflightError, RollbackError
from gpuguard.host import Host
from gpuguard.host.cache import FileCache
from gpuguard.probes.initramfs import probe_initramfs
from gpuguard.probes.modules import iter_build_ids, probe_modules
from gpuguard.state import JOURNAL_FILE

_CLOCK_TICK = 0.02  # the kernel's clock of files is a coarse one


def undo_all(state: JournalState, host: Host, made: Iterable[Wrote]) -> tuple[str, ...]:
    """Undo a change; ``made`` adds to what the journal says of its doing.

    The answer: what is not as before, because others have changed it.

    Raises:
        RollbackError: something stays that the change has made.
    """
    undoing = _Undoing(state, host, made)
    undoing.run()
    if undoing.problems:
        raise RollbackError(
            f"the {state.verb} of {state.release} was interrupted and cannot be undone",
            hint="mend the cause below and run gpuguard again: the journal is kept",
            detail="\n".join(dict.fromkeys(undoing.problems)),
        )
    return tuple(dict.fromkeys(undoing.notes))


class _Undoing:
    """First the files themselves, then what depmod and the initramfs tool make of them."""

    def __init__(self, state: JournalState, host: Host, made: Iterable[Wrote]) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._host, self._store, self._undos = host, ObjectStore(host), state.undos
        self._restored: list[FileUndo] = []
        # A path that several actions touch is back when it looks as before the first of them.
        self._files: dict[str, FileUndo] = {}
        self._trees: dict[str, TreeBefore] = {}
        self._images: dict[str, ImageBefore] = {}
        self._menus: dict[str, MenuBefore] = {}
        self._made: dict[str, set[str]] = defaultdict(set)
        for undo in (*state.undos, *made):
            match undo:
                case FileBefore() | LinkBefore() | NothingBefore():
                    self._files.setdefault(undo.path, undo)
                case TreeBefore():
                    self._trees.setdefault(undo.release, undo)
                case ImageBefore():
                    self._images.setdefault(undo.path, undo)
                case MenuBefore():
                    self._menus.setdefault(undo.path, undo)
                case Wrote():
                    self._made[undo.path].add(undo.state)
        self._gone = {release for release in self._trees if is_gone(host, release)}
        self._derived = {p for tree in self._trees.values() for p in _outputs(tree)}
        self._derived |= {p for image in self._images.values() for p in _paths(image)}
        self._derived |= {p for menu in self._menus for p in menu_files(menu)}

    def run(self) -> None:
        """Idempotent, and in an order that a kill between any two steps does not harm."""
        self._make_room()
        for undo in reversed(self._undos):
            with self._noting(undo.path):
                if not isinstance(undo, FileBefore | LinkBefore | NothingBefore):
                    put_back(undo, self._host, self._store)
                elif undo is self._files[undo.path] and undo.path not in self._derived:
                    self._file(undo)
        for tree in self._trees.values():
            with self._noting(tree.path):
                self._tree(tree)
        for image in self._images.values():
            with self._noting(image.path):
                self._image(image)
        for menu in self._menus.values():
            with self._noting(menu.path):
                self._menu(menu)
        for file in self._restored:
            if not is_back(file, self._host):
                self.problems.append(f"{file.path}: not as before")

    def _make_room(self) -> None:
        # What only takes away comes first, and again in its turn: on a full disk it makes the
        # room that putting back needs.
        for undo in reversed(self._undos):
            with suppress(OSError):
                if isinstance(undo, Sweep):
                    sweep(undo, self._host)
                elif isinstance(undo, NothingBefore) and undo.path not in self._derived:
                    self._file(self._files[undo.path])

    @contextmanager
    def _noting(self, path: str) -> Iterator[None]:
        try:
            yield
        except (GpuguardError, OSError) as error:
            self.problems.append(f"{path}: {error}")

    def _file(self, before: FileUndo) -> None:
        path = before.path
        now = state_of(path, self._host)
        # Without a word of what was made of it (an older journal) all is taken for ours.
        if now not in {state_before(before), *self._made.get(path, {now})}:
            self.notes.append(f"{path} has been changed since and stays so")
        elif isinstance(before, NothingBefore) or not self._is_in_gone_tree(path):
            self._restore(before)

    def _restore(self, before: FileUndo) -> None:
        put_back(before, self._host, self._store)
        self._restored.append(before)

    def _is_in_gone_tree(self, path: str) -> bool:
        return any(path.startswith(f"{self._trees[release].path}/") for release in self._gone)

    def _tree(self, tree: TreeBefore) -> None:
        if tree.release in self._gone:
            self.notes.append(f"{tree.release} is not installed any more: nothing is put back")
            return
        outputs = [self._files[path] for path in _outputs(tree) if path in self._files]
        if not outputs:
            return
        if depmod_inputs(self._host, tree.release) == tree.fingerprint:
            for before in outputs:
                self._restore(before)
            return
        run_depmod(tree.release, self._host)
        self.notes.append(f"the modules of {tree.release} have been changed since: ran depmod")

    def _image(self, image: ImageBefore) -> None:
        if image.release in self._gone:
            return
        link, beside, backup = image.path, *side_files(image.path)
        befores = {path: self._files[path] for path in _paths(image) if path in self._files}
        if isinstance(temporary := befores.pop(beside, None), NothingBefore):
            self._restore(temporary)
        for path in {link, image.content, backup} & befores.keys():
            before, now = befores[path], state_of(path, self._host)
            if now == state_before(before) or now in self._made[path]:
                self._restore(before)
            elif path == image.content:
                self._unknown_image(image, before)
            else:
                self.notes.append(f"{path} has been changed since and stays so")

    def _menu(self, menu: MenuBefore) -> None:
        _, beside = menu_files(menu.path)
        if isinstance(temporary := self._files.get(beside), NothingBefore):
            self._restore(temporary)
        before = self._files.get(menu.path)
        if before is None:
            return
        now = state_of(menu.path, self._host)
        if now == state_before(before) or now in self._made[menu.path]:
            self._restore(before)
        else:  # killed within its tool, or a kernel came since: of the files as they are again
            update_boot_menu(menu.path, self._host)

    def _unknown_image(self, image: ImageBefore, before: FileUndo) -> None:
        """Killed in the middle of the tool: is what is there the tool's, or somebody else's?"""
        fits = self._fits(image.release)
        if fits is not InitramfsState.UNKNOWN and self._is_by_our_tool(image):
            self._restore(before)
        elif fits in (InitramfsState.CURRENT, InitramfsState.NONE):
            self.notes.append(f"{image.content} has been made anew since and stays so")
        else:  # with modules of ours, or half-written
            self._make_anew(image)

    def _make_anew(self, image: ImageBefore) -> None:
        try:
            initramfs_command(image.release, image.path, self._host)
        except PreflightError as error:
            self.notes.append(f"{image.content} has been changed since; make it anew: {error.hint}")
            return
        rebuild_initramfs(image.release, image.path, self._host)
        self.notes.append(f"{image.content} was not as before the change: made anew")

    def _is_by_our_tool(self, image: ImageBefore) -> bool:
        """True if it dates from when the tool ran, and nobody else was at work since."""
        tree = self._trees.get(image.release)
        began = self._host.path(JOURNAL_FILE).stat().st_mtime  # its last line comes before the tool
        made = self._host.path(image.content).stat().st_mtime
        return (
            began - _CLOCK_TICK <= made <= began + TOOL_SECONDS
            and packages(self._host) == image.packages
            and (tree is None or depmod_inputs(self._host, tree.release) == tree.fingerprint)
        )

    def _fits(self, release: str) -> InitramfsState:
        modules = probe_modules(self._host, release, {}, FileCache(None))
        return probe_initramfs(self._host, release, dict(iter_build_ids(modules))).state


def _outputs(tree: TreeBefore) -> tuple[str, ...]:
    return tuple(f"{tree.path}/{name}" for name in DEPMOD_OUTPUTS)


def _paths(image: ImageBefore) -> tuple[str, ...]:
    return (image.path, image.content, *side_files(image.path))
