"""How a switch that meets a fault must end."""

from __future__ import annotations

from pathlib import Path

from tests.lanekit import LaneHost


def refused(host: LaneHost, name: str) -> list[str]:
    """Switch to a lane that must be refused: codes; nothing was stopped."""
    before = (host.serving(), host.unit("lane-a.service")["MainPID"], host.state("active"))
    done = host.switch(name)
    assert (done["status"], done["outcome"]) == (69, "refused"), done
    now = (host.serving(), host.unit("lane-a.service")["MainPID"], host.state("active"))
    assert now == before
    assert host.front() == 200
    assert host.history()[-1]["reasons"] == done["reasons"] != []
    assert host.state("switch") is None
    return [refusal["code"] for refusal in done["refusals"]]


def rolled_back(host: LaneHost, name: str) -> str:
    """Switch to a lane that must not stay: why; the old one serves again."""
    before = host.serving()
    done = host.switch(name)
    assert (done["status"], done["outcome"]) == (70, "rolled-back"), done
    assert (host.serving(), host.front()) == (before, 200)
    assert host.history()[-1]["outcome"] == "rolled-back"
    assert host.state("switch") is None
    return " ".join(done["reasons"])


def environment(host: LaneHost, name: str) -> dict[str, str]:
    pid = host.unit(f"lane-{name}.service")["MainPID"]
    text = Path(f"/proc/{pid}/environ").read_text()
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
