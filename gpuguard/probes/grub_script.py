"""The language of grub.cfg: words, statements and conditions.

A small part of a shell, as the GRUB manual's "Shell-like scripting" has it. Conditions are
three-valued: None is "only GRUB could know".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from gpuguard.errors import ProbeError

#: Stands in a word for the value of a variable that cannot be known.
UNKNOWN = "\0"
_TOKEN = re.compile(
    r"""(?P<blank>[ \t]+)
    | (?P<comment>(?<![^\s;])\#[^\n]*)
    | (?P<end>[;\n])
    | '(?P<single>[^']*)'
    | "(?P<double>(?:\\.|[^"\\])*)"
    | \\(?P<escaped>.)
    | \$\{(?P<braced>\w+)\}
    | \$(?P<variable>\w+)
    | (?P<plain>[^ \t\n;'"\\$\#]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_MAX_WORD = 1 << 14  # a kernel's command line has 2,048 bytes; variables can double
_IN_QUOTES = re.compile(r'\\(["\\$])|\$\{(\w+)\}|\$(\w+)')


def statements(text: str, lookup: Callable[[str], str]) -> Iterator[list[str]]:
    """Words of one statement after the other; variables are looked up as it goes.

    Raises:
        ProbeError: a quotation mark is not closed, or a word grows beyond all bounds.
    """
    words: list[str] = []
    word: str | None = None
    for token in _TOKEN.finditer(text + "\n"):
        kind, value = token.lastgroup or "", token[token.lastgroup or 0]
        if kind in ("blank", "end", "comment"):
            if word is not None:
                words.append(word)
            word = None
            if words and (kind == "end" or words[-1] == "{"):  # the body may be on the same line
                yield words
                words = []
        else:
            word = _extended(word, kind, value, lookup)
            if word is not None and len(word) > _MAX_WORD:
                raise ProbeError(f"a word has more than {_MAX_WORD} characters")


def _extended(word: str | None, kind: str, value: str, lookup: Callable[[str], str]) -> str | None:
    if kind in ("braced", "variable"):
        return (word or "") + expanded if (expanded := lookup(value)) else word
    if kind == "double":
        value = _IN_QUOTES.sub(lambda m: m[1] or lookup(m[2] or m[3]), value)
    elif kind == "escaped" and value == "\n":
        return word
    elif kind == "plain" and value in ("'", '"'):
        raise ProbeError("a quotation mark is not closed")
    return (word or "") + value


def _split(words: Sequence[str], separator: str) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word == separator:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def condition(words: Sequence[str], exists: Callable[[str], bool]) -> bool | None:
    """Value of what follows ``if``: ``[ … ]`` is evaluated, any other command is unknown."""
    if len(words) < 3 or words[0] != "[" or words[-1] != "]":  # noqa: PLR2004 - [ word ]
        return None
    value: bool | None = False
    for alternative in _split(words[1:-1], "-o"):
        every: bool | None = True
        for term in _split(alternative, "-a"):
            every = both(every, _term(term, exists))
        value = negate(both(negate(value), negate(every)))
    return value


def _term(words: Sequence[str], exists: Callable[[str], bool]) -> bool | None:
    if words and words[0] == "!":
        return negate(_term(words[1:], exists))
    return None if any(UNKNOWN in word for word in words) else _known_term(words, exists)


def _known_term(words: Sequence[str], exists: Callable[[str], bool]) -> bool | None:
    match words:
        case ["-f" | "-s" | "-e", path]:
            return exists(path)
        case [word] | ["-n", word]:
            return bool(word)
        case ["-z", word]:
            return not word
        case [left, "=" | "==" | "!=" as operator, right]:
            return (left == right) is (operator != "!=")
        case _:
            return None if words else False


def negate(value: bool | None) -> bool | None:  # noqa: FBT001 - three-valued logic
    """The reverse; unknown stays unknown."""
    return None if value is None else not value


def both(left: bool | None, right: bool | None) -> bool | None:  # noqa: FBT001
    """Logical and: one False decides, else one unknown does."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True
