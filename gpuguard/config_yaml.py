"""One YAML file read strictly: every problem with its place, nothing guessed.

``yaml.safe_load`` alone takes the last of two equal keys without a word, expands aliases
without limit and turns dates into objects; none of that belongs in a configuration.
Out of scope: which keys exist and what they may hold (``config``, ``config_file``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

KeyPath = tuple[str | int, ...]

_MAX_NODES = 10_000  # aliases count each time they are used: a "billion laughs" file stops here
_MAX_DEPTH = 20
_TAG_PREFIX = "tag:yaml.org,2002:"
_TAGS = frozenset(("map", "seq", "str", "int", "float", "bool", "null", "timestamp"))


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong: in which file, at which key (may be empty), and what."""

    file: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.key, self.message) if part)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: the file, and the scalar as spelled there (``535.10``)."""

    file: str
    text: str


@dataclass(slots=True)
class Document:
    """What one file says; ``data`` None: it holds nothing but comments."""

    file: str
    data: dict[str, object] | None = None
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def key_text(path: KeyPath) -> str:
    """``source.patches[1]`` for ``("source", "patches", 1)``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def parse_document(text: str, file: str) -> Document:
    """What a file says, and everything that is wrong with it as YAML.

    Args:
        text: the file's content.
        file: how messages call the file.
    """
    document = Document(file)
    try:
        _Reader(document, text).read()
    except yaml.MarkedYAMLError as error:
        document.problems.append(_syntax_problem(error, text, file))
    except yaml.reader.ReaderError as error:
        place = f"{file}:{text[: error.position].count(chr(10)) + 1}"
        document.problems.append(Problem(place, "", f"not text: character U+{error.character:04X}"))
    except _TooMuchError as error:
        document.problems.append(Problem(file, "", str(error)))
    except RecursionError:
        document.problems.append(Problem(file, "", f"nested deeper than {_MAX_DEPTH} levels"))
    return document


class _TooMuchError(Exception):
    """The file wants more memory or stack than a configuration may."""


class _Reader:
    """Turns nodes into plain values, and remembers where each came from."""

    def __init__(self, document: Document, text: str) -> None:
        self._document = document
        self._loader = yaml.SafeLoader(text)
        self._nodes = 0

    def read(self) -> None:
        """Fill the document.

        Raises:
            yaml.YAMLError: the text is not YAML.
        """
        try:
            node = self._loader.get_single_node()
        finally:
            self._loader.dispose()
        value = None if node is None else self._value(node, ())
        if isinstance(value, dict):
            self._document.data = value
        elif value is not None:
            self._problem((), f"must be a mapping of keys, not {_kind(value)}")

    def _value(self, node: yaml.Node, path: KeyPath) -> object:
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise _TooMuchError(f"more than {_MAX_NODES} values, aliases expanded")
        if len(path) > _MAX_DEPTH:  # also where an alias holds itself: &a [*a]
            raise _TooMuchError(f"nested deeper than {_MAX_DEPTH} levels")
        self._document.origins[path] = Origin(self._document.file, _spelled(node))
        if node.tag.removeprefix(_TAG_PREFIX) not in _TAGS:
            self._problem(path, f"tag {_short_tag(node)} is not allowed")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, place)) for place, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        lines: dict[str, int] = {}
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(path, f"line {_line(key_node)}: a key must be one word")
                continue
            # The key as spelled: `yes: 1` is the key "yes", not True.
            key = str(key_node.value)
            if key in lines:
                given = f"given twice, in lines {lines[key]} and {_line(key_node)}"
                self._problem((*path, key), given)
                continue
            lines[key] = _line(key_node)
            mapping[key] = self._value(value_node, (*path, key))
        return mapping

    def _scalar(self, node: yaml.Node, path: KeyPath) -> object:
        text = str(node.value)
        if node.tag == f"{_TAG_PREFIX}timestamp":
            return text  # a date is text here
        try:
            value: object = self._loader.construct_object(node)
        except (ValueError, yaml.YAMLError):
            self._problem(path, f"{text[:40]!r} is not a value of type {_short_tag(node)}")
            return None
        if isinstance(value, float) and not math.isfinite(value):
            self._problem(path, f"{text} is not a finite number")
        elif isinstance(value, str) and value and not value.isprintable():
            self._problem(path, "holds a line break or another control character")
            return value.encode("utf-8", "replace").decode()  # no lone surrogates further on
        return value

    def _problem(self, path: KeyPath, message: str) -> None:
        self._document.problems.append(Problem(self._document.file, key_text(path), message))


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else f"the single value {value}"


def _spelled(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""


def _short_tag(node: yaml.Node) -> str:
    return str(node.tag).replace(_TAG_PREFIX, "!!", 1)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _syntax_problem(error: yaml.MarkedYAMLError, text: str, file: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    message = error.problem or error.context or "not YAML"
    if message.startswith("but ") and error.context:
        message = f"{error.context}, {message}"
    if mark is None:
        return Problem(file, "", message)
    place = f"{file}:{mark.line + 1}:{mark.column + 1}"
    return Problem(place, "", message + "".join(_advice(message, text, mark.line)))


def _advice(message: str, text: str, line: int) -> Iterator[str]:
    lines = text.splitlines()
    shown = lines[line] if line < len(lines) else ""
    if "\\t" in message:
        yield " (a tab: indent with spaces)"
    elif ": {" in shown or "- {" in shown:
        yield " (a value that begins with { must be in quotes)"
