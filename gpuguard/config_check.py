"""Merge what the files say and check it against the records; all problems at once."""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

from gpuguard.config import Config
from gpuguard.config_yaml import Document, KeyPath, Origin, Problem, key_text

if typing.TYPE_CHECKING:
    from pydantic_core import ErrorDetails

KeyTree = dict[str, "KeyTree | None"]

# Reported by _unknown_keys, which sees every file and not only the value that wins.
UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")
_SHOWN_LENGTH = 40
_SHOULD = re.compile(r"[A-Z][a-z]+ should ")
_KINDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid array": "a list",
    "a valid tuple": "a list",
    "a valid list": "a list",
    "a valid dictionary": "a mapping of keys",
}


def key_tree(record: type = Config) -> KeyTree:
    """The known keys: section name to its keys, other names to None."""
    hints = typing.get_type_hints(record)
    return {
        each.name: key_tree(hints[each.name]) if is_dataclass(hints[each.name]) else None
        for each in fields(record)
    }


def leaf_keys() -> tuple[KeyPath, ...]:
    """Every key that holds a value, as a path, in the order of the records."""
    return tuple(_leaves(key_tree(), ()))


def _leaves(tree: KeyTree, prefix: KeyPath) -> Iterator[KeyPath]:
    for name, below in tree.items():
        if below is None:
            yield (*prefix, name)
        else:
            yield from _leaves(below, (*prefix, name))


def validate(documents: Sequence[Document], main: str) -> tuple[Config | None, list[Problem]]:
    """The configuration that the files make together, or None, and what is wrong with them.

    Args:
        documents: in the order in which they apply.
        main: short name of the main file, which missing required keys are charged to.
    """
    problems = [problem for document in documents for problem in _unknown_keys(document)]
    if any(document.data is None and document.problems for document in documents):
        return None, problems  # what an unread file would have set is not "missing"
    from pydantic import TypeAdapter, ValidationError

    origins = merged_origins(documents)
    merged = _with_sections(_merged(documents), key_tree())
    try:
        # Strict in JSON mode: "4" is no number and True no 1, yet a list may be a tuple.
        return TypeAdapter(Config).validate_json(json.dumps(merged), strict=True), problems
    except ValidationError as error:
        details = error.errors(include_url=False)
    empty = documents[0].file != main or documents[0].data is None
    found = [
        _value_problem(detail, origins, main, main_is_empty=empty)
        for detail in details
        if detail["type"] not in UNKNOWN_KEY
    ]
    # What could not even be read as a value was named already, in better words.
    named = {(each.file, each.key) for document in documents for each in document.problems}
    return None, problems + [each for each in found if (each.file, each.key) not in named]


def _merged(documents: Sequence[Document]) -> dict[str, object]:
    merged: dict[str, object] = {}
    for document in documents:
        _merge_into(merged, document.data or {})
    return merged


def _merge_into(target: dict[str, object], new: Mapping[str, object]) -> None:
    for key, value in new.items():
        old = target.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge_into(old, value)
        elif not (isinstance(old, dict) and value is None):  # `build:` alone says nothing
            target[key] = dict(value) if isinstance(value, dict) else value


def merged_origins(documents: Sequence[Document]) -> dict[KeyPath, Origin]:
    """Where each value that counts was written; lists count as one value."""
    origins: dict[KeyPath, Origin] = {}
    for document in documents:
        origins |= document.origins
    return origins


def _with_sections(data: dict[str, object], tree: KeyTree) -> dict[str, object]:
    """Data with every section there, so that ``source.path`` is reported, not ``source``."""
    sections: dict[str, object] = {
        name: {} for name, below in tree.items() if below is not None and data.get(name) is None
    }
    return {**data, **sections}


def _unknown_keys(document: Document) -> Iterator[Problem]:
    yield from _unknown_in(document.data or {}, key_tree(), (), document.file)


def _unknown_in(
    data: Mapping[str, object], tree: KeyTree, at: KeyPath, file: str
) -> Iterator[Problem]:
    for key, value in data.items():
        if key not in tree:
            said = unknown_key(key, at, tree, leaf_keys())
            yield Problem(file, key_text((*at, key)), said)
        elif (below := tree[key]) is not None and isinstance(value, dict):
            yield from _unknown_in(value, below, (*at, key), file)


def unknown_key(key: str, at: KeyPath, known: Iterable[str], everywhere: Iterable[KeyPath]) -> str:
    """What is said of a key that is none, with the one that was probably meant.

    Args:
        key: it.
        at: what it stands in.
        known: keys that may stand there.
        everywhere: all keys there are; one is suggested that belongs elsewhere.
    """
    known = list(known)
    if near := difflib.get_close_matches(key, known, n=1):
        return f"unknown key; did you mean {key_text((*at, near[0]))}?"
    elsewhere = {str(path[-1]): path for path in reversed(list(everywhere))}
    if near := difflib.get_close_matches(key, elsewhere, n=1):
        return f"unknown key; did you mean {key_text(elsewhere[near[0]])}?"
    return f"unknown key; known here: {', '.join(known)}"


def _value_problem(
    detail: ErrorDetails, origins: Mapping[KeyPath, Origin], main: str, *, main_is_empty: bool
) -> Problem:
    path = detail["loc"]
    if detail["type"] == "missing":
        remark = " (the file sets nothing)" if main_is_empty else ""
        return Problem(main, key_text(path), f"{value_words(detail, None)}{remark}")
    origin = origin_of(path, origins)
    return Problem(origin.file if origin else main, key_text(path), value_words(detail, origin))


def origin_of(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> Origin | None:
    """Where a value was written, or the nearest one around it."""
    return next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), None)


def value_words(detail: ErrorDetails, origin: Origin | None) -> str:
    """What is wrong with a value, in words for whoever wrote the file."""
    kind = detail["type"]
    if kind == "missing":
        return "required key is missing"
    if kind == "dataclass_type":
        return f"must be a mapping of keys, not {_shown(detail, origin)}"
    own, said = kind == "value_error", detail["msg"]
    if own:
        said = said.removeprefix("Value error, ")
    else:
        said = _SHOULD.sub("must ", said, count=1)
        for theirs, ours in _KINDS.items():
            if said.startswith(f"must be {theirs}"):  # and how it was tried, after a comma
                said = f"must be {ours}"
    if own and not isinstance(detail["input"], str | int | float | list | None):
        return said  # of a whole section
    quotes_help = kind == "string_type" and isinstance(detail["input"], int | float)
    advice = "; put it in quotes" if quotes_help else ""
    return f"{said} (got {_shown(detail, origin)}{advice})"


def _shown(detail: ErrorDetails, origin: Origin | None) -> str:
    """The offending value as the file spells it: 535.10, where YAML made it 535.1."""
    value = detail["input"]
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = origin.text if origin else str(value)
    if len(text) > _SHOWN_LENGTH:
        text = text[:_SHOWN_LENGTH] + "…"
    return repr(text) if isinstance(value, str) else text or "nothing"
