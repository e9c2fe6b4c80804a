"""Look at the lanes: which one serves, whether it does, and what is not as it should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpuguard.errors import CommandError, ConfigError, ProbeError
from gpuguard.host import Host
from gpuguard.host.reading import read_text
from gpuguard.serving import store
from gpuguard.serving.engine import Engine
from gpuguard.serving.front import Front, FrontError
from gpuguard.serving.front_config import Route, ServerState
from gpuguard.serving.install import installed_text
from gpuguard.serving.lane import POLICY_VARIABLE
from gpuguard.serving.lane_file import lane_names, read_lane
from gpuguard.serving.lanes import active_release, is_edited
from gpuguard.serving.machine import Switch
from gpuguard.serving.p2p_policy import P2pDecision
from gpuguard.serving.readiness import served
from gpuguard.serving.reading import Load, parse_load
from gpuguard.serving.render import env_file
from gpuguard.serving.sight import p2p_of
from gpuguard.serving.store import Active, Release
from gpuguard.serving.systemd import Systemd, UnitState

_OK = 200


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing that is not as it should be; ``severity``: warning, critical, unknown."""

    code: str
    severity: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesStatus:
    """Everything that ``gpuguard lane status`` tells."""

    active: Active
    release: Release | None
    switch: Switch | None
    is_switching: bool | None
    unit: UnitState | None
    ready: bool | None
    load: Load
    route: Route | None
    server: ServerState | None
    listen: str | None
    notices: tuple[Notice, ...]
    p2p: P2pDecision | None = None  # of the active lane, as it would be decided now
    p2p_is_off: bool | None = None  # since its last start; None: it had none since the boot

    @property
    def verdict(self) -> str:
        """``ok``, or the worst notice."""
        ranks = ("warning", "unknown", "critical")
        worst = max((ranks.index(n.severity) for n in self.notices), default=-1)
        return "ok" if worst < 0 else ranks[worst]

    @property
    def exit_status(self) -> int:
        """0 fine, 1 not, 3 could not look."""
        return {"ok": 0, "warning": 1, "critical": 1, "unknown": 3}[self.verdict]


def look_at_lanes(host: Host) -> LanesStatus:
    """Look; needs no root, though without it some answers are unknown.

    Raises:
        ProbeError, StateError: what is recorded cannot be read.
    """
    active = store.read_active(host)
    release = active_release(host)
    unit, unit_problem = _unit(host, release)
    front = Front(host, 0)
    server, front_problem = _server(front)
    ready, load = _engine(release) if unit is not None and unit.is_running else (False, Load())
    switch = store.read_switch(host)
    is_switching = store.is_switching(host) if switch is not None else False
    looked = LanesStatus(
        active=active,
        release=release,
        switch=switch,
        is_switching=is_switching,
        unit=unit,
        ready=ready if unit_problem is None else None,
        load=load,
        route=front.route(),
        server=server,
        listen=front.listen(),
        notices=(),
        p2p=None if release is None else p2p_of(host, release.lane),
        p2p_is_off=None if release is None else _is_off(host, release.lane.name),
    )
    found = list(_notices(host, looked, unit_problem, front_problem))
    fields = {name: getattr(looked, name) for name in LanesStatus.__dataclass_fields__}
    return LanesStatus(**{**fields, "notices": tuple(found)})


def _unit(host: Host, release: Release | None) -> tuple[UnitState | None, str | None]:
    if release is None:
        return None, None
    if not host.is_live:
        return None, "this is not the running system: nobody can be asked"
    try:
        return Systemd(host).show(release.lane.unit), None
    except CommandError as error:
        return None, error.message


def _server(front: Front) -> tuple[ServerState | None, str | None]:
    if not front.is_installed():
        return None, None
    try:
        return front.state(), None
    except FrontError as error:
        return None, error.message


def _engine(release: Release | None) -> tuple[bool, Load]:
    if release is None:
        return False, Load()
    engine = Engine(release.lane.port)
    models = engine.get("/v1/models")
    ready = (
        engine.get("/health").status == _OK
        and served(models.document, release.lane.model.served_name) is not None
    )
    return ready, parse_load(engine.get("/metrics").text) if ready else Load()


def _notices(
    host: Host, seen: LanesStatus, unit_problem: str | None, front_problem: str | None
) -> Iterator[Notice]:
    if seen.switch is not None and not seen.is_switching:
        yield Notice(
            "lane-switch-interrupted",
            "critical" if seen.is_switching is False else "unknown",
            f"the switch to {seen.switch.new} was interrupted in {seen.switch.step}"
            if seen.is_switching is False
            else f"a switch to {seen.switch.new} is recorded in {seen.switch.step}",
            "gpuguard lane resume brings it to its end",
        )
    if seen.is_switching:
        return
    yield from _serving(seen, unit_problem)
    yield from _front(seen, front_problem)
    if seen.release is not None:
        yield from _files(host, seen.release)
        yield from _p2p(seen.release, seen)


def _serving(seen: LanesStatus, unit_problem: str | None) -> Iterator[Notice]:
    if seen.active.lane_id is None:
        if seen.active.last_good is not None:
            last = seen.active.last_good
            yield Notice(
                "lane-none-active",
                "critical",
                f"no lane is active since the last switch failed; the last good one was {last}",
                "gpuguard lane history tells why; gpuguard lane rollback starts the last good one",
            )
        return
    if seen.release is None:
        yield Notice(
            "lane-release-missing",
            "critical",
            f"the record of the active lane {seen.active.lane_id} is gone",
            "gpuguard lane switch NAME",
        )
    elif unit_problem is not None:
        yield Notice("lane-unknown", "unknown", unit_problem, "run it on the host itself, as root")
    elif not seen.ready:
        unit = seen.unit
        how = f"{unit.active}, {unit.sub}" if unit is not None else "unknown"
        yield Notice(
            "lane-down",
            "critical",
            f"{seen.release.lane.unit} is {how}, and the lane does not answer",
            f"journalctl -u {seen.release.lane.unit}; systemctl start {seen.release.lane.unit}",
        )


def _front(seen: LanesStatus, problem: str | None) -> Iterator[Notice]:
    if problem is not None:
        yield Notice("front-down", "critical", problem, "systemctl restart gpuguard-front.service")
        return
    lane = None if seen.release is None else seen.release.lane
    if seen.server is not None and lane is not None:
        wrong = seen.server.in_maintenance or seen.server.port != lane.port
        if wrong:
            yield Notice(
                "front-elsewhere",
                "critical",
                "the front does not send traffic to the active lane",
                "gpuguard lane resume",
            )


def _files(host: Host, release: Release) -> Iterator[Notice]:
    lane = release.lane
    edited = is_edited(host, lane)
    if edited is not False:
        what = "was changed" if edited else "is gone, or is none any more"
        yield Notice(
            "lane-edited",
            "warning",
            f"the file of the active lane {lane.name} {what}; what runs is {lane.lane_id}",
            f"gpuguard lane switch {lane.name} takes the change over, or put the file back",
        )
    if installed_text(host, release) != release.files[-1].text:
        yield Notice(
            "lane-unit-edited",
            "warning",
            f"{release.files[-1].path} is not as gpuguard wrote it",
            "gpuguard lane resume writes it anew; put own settings into the lane file",
        )


def _p2p(release: Release, seen: LanesStatus) -> Iterator[Notice]:
    lane = release.lane
    gap = None if seen.p2p is None else seen.p2p.gap
    if gap is not None:
        yield Notice(
            "lane-p2p-unproven",
            "warning",
            f"requires.p2p is {lane.requires.p2p}: {gap.problem}",
            gap.remedy,
        )
    elif lane.wants_p2p and seen.p2p_is_off:
        yield Notice(
            "lane-p2p-off",
            "warning",
            f"{lane.lane_id} was started with P2P off, before it was proven",
            f"systemctl restart {lane.unit}, after gpuguard lane drain",
        )


def _is_off(host: Host, name: str) -> bool | None:
    """By what ``lane prepare`` wrote for its last start."""
    try:
        text = read_text(host, env_file(name))
    except ProbeError:
        return None
    return None if text is None else f"{POLICY_VARIABLE}=1" in text.splitlines()


def lane_rows(host: Host) -> tuple[dict[str, Any], ...]:
    """Every declared lane, and the active one even if its file is gone."""
    active = store.read_active(host)
    rows = []
    for name in lane_names(host):
        row: dict[str, Any] = {"name": name, "lane_id": None, "problem": None}
        try:
            lane = read_lane(host, name)
            row |= {
                "lane_id": lane.lane_id,
                "backend": lane.engine.backend,
                "model": lane.model.served_name,
                "max_model_len": lane.max_model_len,
                "p2p": lane.requires.p2p,
            }
        except ConfigError as error:
            row["problem"] = error.message
        row["state"] = _state_of(active, name)
        rows.append(row)
    return tuple(rows)


def _state_of(active: Active, name: str) -> str:
    def is_it(lane_id: str | None) -> bool:
        return lane_id is not None and lane_id.rpartition("-")[0] == name

    if is_it(active.lane_id):
        return "active"
    return "previous" if is_it(active.rollback_target) else ""
