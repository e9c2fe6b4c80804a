"""Order of kernel releases, as dpkg orders versions.

String order is wrong: 5.15.0-101 sorts below 5.15.0-97, and ``6.12.90+deb13.1`` below
``6.12.90+deb13`` (CASES C33). The key follows deb-version(7): digits compare as numbers,
``~`` before the end, the end before letters, letters before everything else.
"""

from __future__ import annotations

import re

_PART = re.compile(r"(\d+)|(\D+)", re.ASCII)  # other scripts have digits too, dpkg has not


def release_key(release: str) -> tuple[tuple[tuple[int, ...], int], ...]:
    """A sort key: ``sorted(releases, key=release_key)`` puts the newest last.

    Shape: pairs (text before a number as character weights, the number).
    """
    key = []
    text: tuple[int, ...] = ()
    for digits, other in _PART.findall(release):
        if digits:
            key.append(((*text, 0), int(digits)))
            text = ()
        else:
            text = tuple(_weight(character) for character in other)
    key.append(((*text, 0), 0))
    return tuple(key)


def _weight(character: str) -> int:
    if character == "~":
        return -1
    return ord(character) if character.isascii() and character.isalpha() else ord(character) + 256


def flavour(release: str) -> str:
    """``generic`` of ``6.8.0-90-generic``, ``amd64`` of ``6.1.0-47-amd64``; may be empty."""
    last = release.rsplit("-", 1)[-1]
    return last if last and not last[0].isdigit() else ""
