"""Verbs that are imported when they are asked for: each brings 0.1 s of imports of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

_Commands = dict[str, Any]


def lazy_group(verbs: Mapping[str, str], *, hidden: Collection[str] = ()) -> type[TyperGroup]:
    """A group whose verbs are functions or typer apps, by name -> ``module:attribute``.

    Those that are ``hidden`` are not listed: other programs call them.
    """

    class Group(TyperGroup):
        """The verbs; none is imported yet."""

        def __init__(self, **attributes: Any) -> None:
            super().__init__(**{**attributes, "commands": _LazyCommands(verbs, hidden)})

    return Group


class _LazyCommands(_Commands):
    """name -> command; the value is made at the first access."""

    def __init__(self, verbs: Mapping[str, str], hidden: Collection[str]) -> None:
        super().__init__(dict.fromkeys(verbs))
        self._verbs = verbs
        self._hidden = hidden

    def __getitem__(self, name: str) -> Any:
        if super().__getitem__(name) is None:
            self[name] = _load(name, self._verbs[name], hidden=name in self._hidden)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - it would not load

    def items(self) -> Any:
        return {name: self[name] for name in self}.items()


def _load(name: str, place: str, *, hidden: bool) -> Any:
    module, _, attribute = place.partition(":")
    verb = getattr(import_module(module), attribute)
    parent = typer.Typer(add_completion=False, rich_markup_mode=None)
    parent.callback()(_nothing)
    if isinstance(verb, typer.Typer):
        parent.add_typer(verb, name=name)
    else:
        parent.command(name=name, hidden=hidden)(verb)
    return get_group(parent).commands[name]


def _nothing() -> None:
    """The group of a verb has no options of its own."""
