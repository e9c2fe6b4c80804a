"""The object ``holds`` of ``status``, and what ``gpuguard holds --json`` prints of it."""

from __future__ import annotations

from typing import Any

from gpuguard.core.holds import HoldFacts, HoldState, Withheld


def holds_document(state: HoldState) -> dict[str, Any]:
    """Names by what is the matter with them; lists are empty where holds are not known."""
    return {
        "active": state.active,
        "held": list(state.held),
        "missing": list(state.missing),
        "ineffective": [hold.name for hold in state.ineffective],
        "foreign": list(state.foreign),
        "drifted": list(state.drifted),
        "lifted": list(state.lifted),
        "stepped_over": [
            {"name": one.name, "recorded": one.recorded, "version": one.version}
            for one in state.stepped_over
        ],
        "exempt": list(state.exempt),
        "withheld": None if state.withheld is None else [_withheld(w) for w in state.withheld],
        "problem": state.problem,
    }


def packages_document(facts: HoldFacts, state: HoldState) -> list[dict[str, Any]]:
    """One object a package that is on hold or should be; ``owner``: whose hold it is or was."""
    names = {*state.held, *state.missing, *state.drifted, *state.lifted}
    return [
        {
            "name": name,
            "version": facts.packages[name].version,
            "held": name in state.held,
            "owner": owner_of(name, facts, state),
            "since": entry.since if (entry := facts.book.packages.get(name)) else None,
            "asked": entry is not None and entry.asked,
            "problem": problem_of(name, state),
        }
        for name in sorted(names)
    ]


def owner_of(name: str, facts: HoldFacts, state: HoldState) -> str | None:
    """``gpuguard``, ``other``, or None: nobody holds it."""
    if name in facts.book.packages:
        return "gpuguard"
    return "other" if name in state.held else None


def problem_of(name: str, state: HoldState) -> str | None:
    """In one word what is wrong with the hold of a package."""
    kinds = {
        "lifted": state.lifted,
        "drifted": state.drifted,
        "missing": state.missing,
        "stepped-over": [one.name for one in state.stepped_over],
        "ineffective": [hold.name for hold in state.ineffective],
    }
    return next((kind for kind, names in kinds.items() if name in names), None)


def _withheld(upgrade: Withheld) -> dict[str, Any]:
    return {
        "name": upgrade.name,
        "installed": upgrade.installed,
        "candidate": upgrade.candidate,
        "security": upgrade.security,
        "since": upgrade.since,
        "security_since": upgrade.security_since,
    }
