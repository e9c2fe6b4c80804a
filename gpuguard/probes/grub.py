"""What GRUB 2 will start: its menu, and which entry is the default.

``grub.cfg`` is a script. The few statements that decide are evaluated (``if``, ``set``,
``load_env``, ``source``, ``menuentry``, ``submenu``) with three-valued logic: what depends
on something that only GRUB knows, such as whether a font loads, is *unknown*, and a default
that depends on it is an error, never a guess. Out of scope: ``blscfg`` (Fedora).

Sources: GRUB manual, "Writing full configuration files directly"; the default entry as in
``grub-core/normal/menu.c`` (``get_entry_number``); samples from grub-mkconfig 2.06.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gpuguard.errors import ProbeError
from gpuguard.probes.grub_script import UNKNOWN, both, condition, negate, statements

#: Text of a file in GRUB's folder, None if there is none; ProbeError if it cannot be read.
ReadFile = Callable[[str], str | None]

_INITRD = ("initrd", "initrdefi", "initrd16")
_LINUX = ("linux", "linuxefi", "linux16", "module", "module2")  # module: the kernel under Xen
_MAX_SOURCE_DEPTH = 8


@dataclass(slots=True)
class Entry:
    """A menu entry or, with ``children``, a submenu.

    ``kernel`` is the path given to ``linux``, ``initrds`` those given to ``initrd``, as GRUB
    sees them. ``is_certain`` is False if the entry exists only under a condition that cannot be
    evaluated here.
    """

    title: str
    identifier: str = ""
    kernel: str | None = None
    arguments: tuple[str, ...] = ()
    initrds: tuple[str, ...] = ()
    children: list[Entry] | None = None
    is_certain: bool = True


@dataclass(slots=True)
class Menu:
    """What a grub.cfg defines; ``default`` is None if it depends on something unknown."""

    entries: list[Entry]
    default: str | None
    problem: str = ""


def parse_grub_config(text: str, read_file: ReadFile, *, folder: str = "/boot/grub") -> Menu:
    """Evaluate a grub.cfg.

    Args:
        text: the script.
        read_file: for ``load_env`` and ``source``; is given paths below ``folder``.
        folder: GRUB's ``$prefix``.

    Raises:
        ProbeError: it is not a GRUB script.
    """
    script = _Script(read_file, folder)
    script.run(text)
    default = script.variables.get("default", "") or "0"
    return Menu(script.entries, None if UNKNOWN in default else default, script.problem)


def parse_grubenv(text: str) -> dict[str, str]:
    r"""Variables of a GRUB environment block: ``NAME=VALUE``, ``\`` escapes, padded by ``#``."""
    return {
        name: re.sub(r"\\(.)", r"\1", value)
        for name, equals, value in (line.partition("=") for line in text.splitlines())
        if equals and not name.startswith("#")
    }


def default_entry(menu: Menu) -> tuple[Entry, str]:
    """The entry that GRUB starts without a key press, and a note if it is not the one asked for.

    An index, title or id selects; ``>`` goes down a submenu, whose own default is its first
    entry. A default that names nothing, such as the saved entry of a removed kernel, falls
    back to the first entry, as GRUB does.

    Raises:
        ProbeError: it cannot be told.
    """
    if menu.default is None or (menu.problem and not menu.entries):
        raise ProbeError(menu.problem or "its default depends on a condition that GRUB evaluates")
    entries, rest, note = menu.entries, menu.default, ""
    while True:
        if not entries:
            raise ProbeError("its menu has no entries")
        step, rest = _split_default(rest)
        index = _index_of(entries, step)
        if index is None:
            index, rest = 0, ""
            note = f"default '{menu.default}' names no entry, GRUB takes the first"
        if not all(entry.is_certain for entry in entries[: index + 1]):
            raise ProbeError("its entries depend on a condition that GRUB evaluates")
        if entries[index].children is None:
            return entries[index], note
        entries = entries[index].children or []


def _split_default(default: str) -> tuple[str, str]:
    # ">>" is a literal ">" in a title (menuentry_eq in menu.c).
    parts = re.split(r"(?<!>)>(?!>)", default, maxsplit=1)
    return parts[0].replace(">>", ">"), parts[1] if len(parts) > 1 else ""


def _index_of(entries: Sequence[Entry], step: str) -> int | None:
    if not step:
        return 0
    if number := re.match(r"\s*(0x[0-9a-fA-F]+|\d+)(?=\s|$)", step):  # strtoul, then a blank
        index = int(number[1], 0) if number[1].startswith("0x") else int(number[1])
        return index if index < len(entries) else None
    return next((i for i, e in enumerate(entries) if step in (e.title, e.identifier)), None)


@dataclass(slots=True)
class _Branch:
    """An open ``if`` or loop: does this branch run, and has an earlier one run."""

    live: bool | None
    taken: bool | None


@dataclass(slots=True)
class _Block:
    """An open ``{``: an entry, a submenu, or (``entry`` None) a function."""

    entry: Entry | None


@dataclass(slots=True)
class _Script:
    """The state of one evaluation."""

    read_file: ReadFile
    folder: str
    variables: dict[str, str] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    problem: str = ""
    _stack: list[_Branch | _Block] = field(default_factory=list)
    _depth: int = 0

    def __post_init__(self) -> None:
        self.variables |= {"prefix": self.folder, "config_directory": self.folder}

    def run(self, text: str) -> None:
        for words in statements(text, self._lookup):
            self._statement(words)

    def _lookup(self, name: str) -> str:
        if name.startswith("feature_"):
            return "y"  # every feature_* is set in GRUB 2.02 and later
        if name == "grub_platform":
            return UNKNOWN  # "pc" or "efi"
        return self.variables.get(name, UNKNOWN if self.problem else "")

    def _statement(self, words: list[str]) -> None:
        while words and words[0] in ("then", "else", "fi", "do", "done", "}"):
            self._close_or_turn(words.pop(0))
        if not words:
            return
        head, rest = words[0], words[1:]
        if head in ("if", "elif"):
            self._condition(head, rest)
        elif head in ("while", "until", "for"):
            self._stack.append(_Branch(live=None, taken=None))
        elif words[-1] == "{":
            self._open_block(head, rest[:-1])
        elif (block := self._block()) is not None and block.entry is None:
            pass  # the body of a function, which runs only when called
        elif block is not None and block.entry and block.entry.children is None:
            self._in_entry(block.entry, head, rest)
        else:
            self._command(head, rest)

    def _close_or_turn(self, keyword: str) -> None:
        wanted = _Block if keyword == "}" else _Branch
        if keyword in ("then", "do"):
            return
        if not self._stack or not isinstance(self._stack[-1], wanted):
            raise ProbeError(f"'{keyword}' without a beginning")
        if keyword == "else":
            branch = self._stack[-1]
            if isinstance(branch, _Branch):
                branch.live = None if branch.taken is None else not branch.taken
        else:
            self._stack.pop()

    def _condition(self, keyword: str, words: list[str]) -> None:
        value = condition(words, self._exists)
        if keyword == "if":
            self._stack.append(_Branch(live=value, taken=value))
            return
        branch = self._stack[-1] if self._stack else None
        if not isinstance(branch, _Branch):
            raise ProbeError("'elif' without 'if'")
        branch.live = False if branch.taken else both(negate(branch.taken), value)
        branch.taken = negate(both(negate(branch.taken), negate(value)))

    def _live(self) -> bool | None:
        live: bool | None = True
        for frame in self._stack:
            if isinstance(frame, _Branch):
                live = both(live, frame.live)
        return live

    def _block(self) -> _Block | None:
        return next((f for f in reversed(self._stack) if isinstance(f, _Block)), None)

    def _open_block(self, head: str, words: list[str]) -> None:
        if head not in ("menuentry", "submenu") or not words:
            self._stack.append(_Block(None))
            return
        identifier = next((b for a, b in pairwise(words) if a == "--id"), "")
        identifier = identifier or next((w[5:] for w in words if w.startswith("--id=")), "")
        live = self._live()
        entry = Entry(words[0], identifier, is_certain=live is True)
        if head == "submenu":
            entry.children = []
        if live is not False:
            outer = self._block()
            parent = outer.entry if outer else None
            siblings = self.entries if parent is None else parent.children
            if siblings is not None:
                siblings.append(entry)
        self._stack.append(_Block(entry))

    def _in_entry(self, entry: Entry, head: str, words: list[str]) -> None:
        path = next((w for w in words if not w.startswith("-")), None)
        if head in _INITRD:
            entry.initrds += tuple(word for word in words if not word.startswith("-"))
        is_xen_part = head.startswith("module") and "vmlinu" not in (path or "")
        if head in _LINUX and entry.kernel is None and path and not is_xen_part:
            entry.kernel = path
            entry.arguments = tuple(words[words.index(path) + 1 :])
        elif head in ("module", "module2") and is_xen_part and entry.kernel and path:
            entry.initrds += (path,)

    def _command(self, head: str, words: list[str]) -> None:
        live = self._live()
        if live is False:
            return
        if head == "set" and words:
            head = words[0]
        name, equals, value = head.partition("=")
        if equals and name.isidentifier():
            self.variables[name] = value if live else UNKNOWN
        elif head == "load_env":
            self._load_env(words)
        elif head in ("source", ".") and words:
            self._source(words[0])
        elif head == "blscfg":
            self.problem = "its entries come from 'blscfg', which gpuguard does not evaluate"
            self.variables["default"] = UNKNOWN

    def _load_env(self, words: list[str]) -> None:
        path = f"{self.folder}/grubenv"
        if "-f" in words[:-1]:
            path = words[words.index("-f") + 1]
        try:
            self.variables |= parse_grubenv(self._read(path) or "")
        except ProbeError as error:
            self.problem = error.message  # from here on an unset variable is an unknown one

    def _source(self, path: str) -> None:
        if self._depth >= _MAX_SOURCE_DEPTH:
            raise ProbeError(f"{path} sources itself")
        self._depth += 1
        self.run(self._read(path) or "")
        self._depth -= 1

    def _read(self, path: str) -> str | None:
        return self.read_file(re.sub(r"^\([^)]*\)", "", path))

    def _exists(self, path: str) -> bool:
        try:
            return self._read(path) is not None
        except ProbeError:
            return True  # there, but not for us to read
