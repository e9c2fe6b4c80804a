"""What may keep a lane from being started. No I/O: facts in, refusals and notes out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuguard.core.facts import DriverFacts
from gpuguard.serving.lane import Lane
from gpuguard.serving.lint import Problem, errors_of
from gpuguard.serving.p2p_policy import P2pDecision


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a lane is not started, before anything was stopped; ``code`` is stable."""

    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightFacts:
    """What was looked at for one lane. None: it is in order, or does not apply.

    ``port_holder``: another process than the active lane listens there.
    """

    lane: Lane
    problems: tuple[Problem, ...]
    p2p: P2pDecision
    driver: DriverFacts
    engine: str | None = None
    model: str | None = None
    access: str | None = None
    disk: str | None = None
    strangers: str | None = None
    port_holder: str | None = None
    front: str | None = None


def refusals(facts: PreflightFacts) -> tuple[Refusal, ...]:
    """All reasons at once, so that one visit mends them all."""
    return tuple(_refusals(facts))


def _refusals(facts: PreflightFacts) -> Iterator[Refusal]:
    lane = facts.lane
    for problem in errors_of(facts.problems):
        yield Refusal(problem.code, problem.message, problem.remedy)
    if facts.engine is not None:
        yield Refusal("lane-engine-missing", facts.engine, _engine_remedy(lane, facts.engine))
    if facts.model is not None:
        yield Refusal(
            "lane-model-mismatch",
            facts.model,
            "put the right files back, or pin what is there: "
            f"gpuguard lane manifest {lane.model.path}",
        )
    if facts.access is not None:
        yield Refusal(
            "lane-unreadable-for-engine",
            facts.access,
            f"let the account {lane.engine.user} read and enter it, and the folders above it: "
            f"namei -l {lane.model.path} shows who may",
        )
    if facts.p2p.refusal is not None and facts.p2p.gap is not None:
        yield Refusal(
            "lane-p2p-unproven",
            f"requires.p2p is required: {facts.p2p.refusal}",
            f"{facts.p2p.gap.remedy}; requires: {{p2p: preferred}} starts without P2P",
        )
    yield from _mismatch(lane, facts.driver)
    if facts.disk is not None:
        yield Refusal("lane-disk-full", facts.disk, "make room: df -h /var/lib/gpuguard")
    if facts.strangers is not None:
        yield Refusal(
            "lane-cards-busy",
            f"the cards would not be free for any lane: {facts.strangers}",
            "end those processes (nvidia-smi names them), or wait for them; then switch",
        )
    if facts.port_holder is not None:
        yield Refusal(
            "lane-port-taken",
            facts.port_holder,
            f"end it (ss -ltnp 'sport = :{lane.port}' names it), or give the lane another port",
        )
    if facts.front is not None:
        yield Refusal(
            "front-down", facts.front, "systemctl restart gpuguard-front.service, and look why"
        )


def image_missing(image: str) -> str:
    """What is said of an image that has not been pulled."""
    return f"the image {image} is not on this machine"


def _engine_remedy(lane: Lane, problem: str) -> str:
    if lane.engine.backend == "venv":
        return f"install vLLM into {lane.engine.venv}, for the account {lane.engine.user}"
    tool = "podman" if lane.engine.backend == "quadlet" else "docker"
    pull = f"{tool} pull {lane.engine.image}"
    if problem == image_missing(lane.engine.image or ""):
        return pull
    what = "podman 4.4 or newer, with its generator for systemd"
    if tool == "docker":
        what = "docker with its compose plugin 2.24 or newer"
    return f"install {what}, and start its service if it has one; then: {pull}"


def _mismatch(lane: Lane, driver: DriverFacts) -> Iterator[Refusal]:
    if lane.engine.gpus == "none":
        return
    if driver.problem is not None:
        yield Refusal("lane-driver-unknown", driver.problem, "run as root: gpuguard status")
    elif driver.loaded is None:
        yield Refusal(
            "lane-driver-missing",
            "no NVIDIA driver is loaded, and the lane wants cards (engine.gpus is all)",
            "gpuguard doctor tells why; engine: {gpus: none} is for an engine on the CPU",
        )
    elif driver.loaded and driver.userland and driver.loaded != driver.userland:
        yield Refusal(
            "lane-reboot-pending",
            f"driver {driver.loaded} is loaded, {driver.userland} is installed: no CUDA program "
            "starts until they agree",
            "reboot (gpuguard status tells whether that is safe), or: gpuguard reload",
        )
