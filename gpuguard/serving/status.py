"""Look at the lanes: which one serves, whether it does, and what is not as it should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpuguard.errors import CommandError, ConfigError, ProbeError, StateError
from gpuguard.host import Host
from gpuguard.serving import store
from gpuguard.serving.containers import tool_of
from gpuguard.serving.engine import Engine
from gpuguard.serving.front import Front, FrontError, FrontUnknownError
from gpuguard.serving.front_config import Route, ServerState
from gpuguard.serving.install import altered_files
from gpuguard.serving.keeping import missing_images
from gpuguard.serving.lane import Lane, unit_of
from gpuguard.serving.lane_file import lane_file, lane_names, read_lane
from gpuguard.serving.lanes import is_edited
from gpuguard.serving.machine import Outcome, Switch
from gpuguard.serving.observed import started_without_p2p
from gpuguard.serving.p2p_policy import P2pDecision
from gpuguard.serving.readiness import served
from gpuguard.serving.reading import Load, parse_load
from gpuguard.serving.sight import p2p_of
from gpuguard.serving.store import Active, Release
from gpuguard.serving.systemd import Systemd, UnitState

_OK = 200
#: Also after three starts in an hour, from when on systemctl start is refused.
_START = "gpuguard lane resume"


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
    front = Front(host, 0)
    route = front.route()
    release, release_problem = _release(host, active)
    unit, unit_problem = _unit(host, active)
    server, front_trouble = _server(front)
    ready, load = (None, Load()) if unit_problem is not None else _engine(unit, release, route)
    switch = store.read_switch(host)
    looked = LanesStatus(
        active=active,
        release=release,
        switch=switch,
        is_switching=store.is_switching(host) if switch is not None else False,
        unit=unit,
        ready=ready,
        load=load,
        route=route,
        server=server,
        listen=front.listen(),
        notices=(),
        p2p=None if release is None else p2p_of(host, release.lane),
        p2p_is_off=None if release is None else started_without_p2p(host, release.lane.name),
    )
    blind = _Blind(release_problem, unit_problem, front_trouble)
    found = list(_notices(host, looked, blind))
    fields = {name: getattr(looked, name) for name in LanesStatus.__dataclass_fields__}
    return LanesStatus(**{**fields, "notices": tuple(found)})


@dataclass(frozen=True, slots=True)
class _Blind:
    """What could not be looked at, and why; None: it could."""

    release: str | None
    unit: str | None
    front: FrontError | None


def _release(host: Host, active: Active) -> tuple[Release | None, str | None]:
    if active.lane_id is None:
        return None, None
    try:
        return store.read_release(host, active.lane_id), None
    except StateError:
        return None, None  # it is gone
    except ProbeError as error:  # it is root's alone
        return None, error.message


def _unit(host: Host, active: Active) -> tuple[UnitState | None, str | None]:
    if active.lane_id is None:
        return None, None
    if not host.is_live:
        return None, "this is not the running system: nobody can be asked"
    try:
        return Systemd(host).show(unit_of(active.lane_id.rpartition("-")[0])), None
    except CommandError as error:
        return None, error.message


def _server(front: Front) -> tuple[ServerState | None, FrontError | None]:
    if not front.is_installed():
        return None, None
    try:
        return front.state(), None
    except FrontError as error:
        return None, error


def _engine(
    unit: UnitState | None, release: Release | None, route: Route | None
) -> tuple[bool | None, Load]:
    """Whether the lane answers; where its release cannot be read, who the front leads to."""
    if unit is None or not unit.is_running:
        return False, Load()
    if release is not None:
        port = release.lane.port
    elif route is not None:
        port = route.port
    else:
        return None, Load()
    engine = Engine(port)
    ready = engine.get("/health").status == _OK
    if release is not None:
        models = engine.get("/v1/models")
        ready = ready and served(models.document, release.lane.model.served_name) is not None
    return ready, parse_load(engine.get("/metrics").text) if ready else Load()


def _notices(host: Host, seen: LanesStatus, blind: _Blind) -> Iterator[Notice]:
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
    yield from _serving(host, seen, blind)
    yield from _front(seen, blind.front)
    if seen.release is not None:
        yield from _files(host, seen.release)
        yield from _p2p(seen.release, seen)
    if blind.release is None:
        yield from _images(host, seen.active)


def _serving(host: Host, seen: LanesStatus, blind: _Blind) -> Iterator[Notice]:
    if seen.active.lane_id is None:
        yield from _none_active(host, seen.active.last_good)
        return
    if seen.release is None and blind.release is None:
        yield Notice(
            "lane-release-missing",
            "critical",
            f"the record of the active lane {seen.active.lane_id} is gone",
            "gpuguard lane switch NAME",
        )
        return
    for problem in (blind.release, blind.unit):
        if problem is not None:
            yield Notice("lane-unknown", "unknown", problem, "run it on the host itself, as root")
    if seen.unit is not None and seen.ready is False:
        unit = seen.unit
        yield Notice(
            "lane-down",
            "critical",
            f"{unit.name} is {unit.active}, {unit.sub}, and the lane does not answer",
            f"journalctl -u {unit.name}; {_START}",
        )


def _none_active(host: Host, last_good: str | None) -> Iterator[Notice]:
    """Nothing, where nobody has switched yet: a host that is being set up is in order."""
    if running := tuple(_running(host)):
        yield Notice(
            "lane-unrecorded",
            "critical",
            f"{' and '.join(running)} runs, and no record says that it serves",
            "gpuguard lane switch NAME stops it, and starts the lane that is to serve",
        )
        return
    tried = store.read_history(host)
    if last_good is None and not (tried and tried[-1].get("outcome") == Outcome.FAILED):
        return
    text = "no lane is active since the last switch failed"
    remedy = "gpuguard lane history tells why; gpuguard lane "
    if last_good is None:
        yield Notice(
            "lane-none-active", "critical", f"{text}; none was before", f"{remedy}switch NAME"
        )
        return
    text = f"{text}; the last good one was {last_good}"
    yield Notice("lane-none-active", "critical", text, f"{remedy}rollback starts the last good one")


def _running(host: Host) -> Iterator[str]:
    """Units of known lanes that run; none where nobody can be asked, which is said elsewhere."""
    with suppress(CommandError, ProbeError):
        names = {one.rpartition("-")[0] for one in store.release_ids(host)}
        for unit in map(unit_of, sorted(names)) if host.is_live else ():
            if Systemd(host).show(unit).is_running:
                yield unit


def _front(seen: LanesStatus, trouble: FrontError | None) -> Iterator[Notice]:
    if isinstance(trouble, FrontUnknownError):
        yield Notice("front-unknown", "unknown", trouble.message, trouble.hint)
        return
    if trouble is not None:
        restart = "systemctl restart gpuguard-front.service"
        yield Notice("front-down", "critical", trouble.message, restart)
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
        back = f"put {lane_file(lane.name)} back"
        yield Notice(
            "lane-edited",
            "warning",
            f"the file of the active lane {lane.name} {what}; what runs is {lane.lane_id}",
            f"gpuguard lane switch {lane.name} takes the change over, or {back}"
            if edited
            else f"{back} (gpuguard lane validate {lane.name}), or switch to another lane",
        )
    if altered := altered_files(host, release):
        yield Notice(
            "lane-unit-edited",
            "warning",
            f"{', '.join(altered)} is not as gpuguard wrote it",
            "gpuguard lane resume writes it anew; put own settings into the lane file",
        )


def _images(host: Host, active: Active) -> Iterator[Notice]:
    if not host.is_live:  # nobody can be asked; that is said of the unit
        return
    as_root = "run it on the host itself, as root"
    try:
        found = tuple(missing_images(host))
    except ProbeError as error:
        yield Notice("lane-image-unknown", "unknown", error.message, as_root)
        return
    for lane, unseen in found:
        if unseen is not None:
            what = f"whether the image of {lane.lane_id} is here is not known: {unseen}"
            yield Notice("lane-image-unknown", "unknown", what, as_root)
            continue
        is_active = lane.lane_id == active.lane_id
        what = "the active lane" if is_active else "a lane to go back to"
        yield Notice(
            "lane-image-gone",
            "critical" if is_active else "warning",
            f"{lane.lane_id}, {what}, cannot be started again: its image is not here any more",
            f"{tool_of(lane)} pull {lane.engine.image}",
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
            f"gpuguard lane drain; systemctl stop {lane.unit}; {_START}",
        )


def lane_rows(host: Host) -> tuple[dict[str, Any], ...]:
    """Every declared lane, and the active one even if its file is gone."""
    active = store.read_active(host)
    rows = []
    for name in lane_names(host):
        row: dict[str, Any] = {"name": name, "lane_id": None, "problem": None}
        try:
            row |= _row_of(read_lane(host, name))
        except ConfigError as error:
            row["problem"] = error.message
        row["state"] = _state_of(active, name)
        rows.append(row)
    if active.lane_id is not None and "active" not in [row["state"] for row in rows]:
        rows.append(_row_without_file(host, active.lane_id))
    return tuple(rows)


def _row_of(lane: Lane) -> dict[str, Any]:
    return {
        "lane_id": lane.lane_id,
        "backend": lane.engine.backend,
        "model": lane.model.served_name,
        "max_model_len": lane.max_model_len,
        "p2p": lane.requires.p2p,
    }


def _row_without_file(host: Host, lane_id: str) -> dict[str, Any]:
    """The active lane, as its record has it."""
    name = _name_of(lane_id)
    problem = f"{lane_file(name)} is gone: put it back, or switch to another lane"
    row: dict[str, Any] = {"name": name, "lane_id": lane_id, "problem": problem}
    try:
        row |= _row_of(store.read_release(host, lane_id).lane)
    except (ProbeError, StateError) as error:
        row["problem"] = f"{problem}; {error.message}"
    return {**row, "state": "active"}


def _state_of(active: Active, name: str) -> str:
    if active.lane_id is not None and _name_of(active.lane_id) == name:
        return "active"
    target = active.rollback_target
    return "previous" if target is not None and _name_of(target) == name else ""


def _name_of(lane_id: str) -> str:
    return lane_id.rpartition("-")[0]
