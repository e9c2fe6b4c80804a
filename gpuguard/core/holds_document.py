"""The object ``holds`` of ``status``, and what ``gpuguard holds --json`` prints of it."""

from __future__ import annotations

from typing import Any

from gpuguard.core.holds import HoldState, Withheld


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


def _withheld(upgrade: Withheld) -> dict[str, Any]:
    return {
        "name": upgrade.name,
        "installed": upgrade.installed,
        "candidate": upgrade.candidate,
        "security": upgrade.security,
        "since": upgrade.since,
        "security_since": upgrade.security_since,
    }
