"""Look at the host for a lane: what ``lint`` and ``preflight`` want to know."""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from typing import Any

from gpuguard.core.facts import DriverFacts
from gpuguard.errors import CommandError, CommandNotFoundError, ProbeError, StateError
from gpuguard.host import Host
from gpuguard.host.reading import read_text
from gpuguard.probes.driver import probe_driver
from gpuguard.probes.kernels import probe_running
from gpuguard.probes.p2p import probe_pci_gpus
from gpuguard.proof import Proof, read_deep_proof, read_proof
from gpuguard.serving.access import access_problem
from gpuguard.serving.alignment import ModelShape, parse_shape
from gpuguard.serving.containers import image_id
from gpuguard.serving.front_config import parse_listen
from gpuguard.serving.lane import Lane
from gpuguard.serving.lane_file import lane_names
from gpuguard.serving.lint import Problem, Surroundings, lint
from gpuguard.serving.lint_checks import loopback_port
from gpuguard.serving.manifest import model_problem
from gpuguard.serving.p2p_policy import P2pDecision, Proofs, decide
from gpuguard.serving.preflight import PreflightFacts, image_missing
from gpuguard.state import FRONT_FILE, LANE_STATE_DIR

_TOOL_SECONDS = 60.0
_VERSION = re.compile(r"\b(\d{1,4})\.(\d{1,4})(?:\.\d+)?")
_PODMAN = (4, 4)
_COMPOSE = (2, 24)
_GENERATORS = (
    "/run/systemd/system-generators",
    "/etc/systemd/system-generators",
    "/usr/local/lib/systemd/system-generators",
    "/usr/lib/systemd/system-generators",
    "/lib/systemd/system-generators",
)
_SNAPSHOT_BYTES = 16 << 20


def known_flags() -> frozenset[str]:
    """Flags of ``vllm serve`` that this gpuguard has heard of."""
    text = resources.files("gpuguard").joinpath("resources/lanes/vllm-flags.txt").read_text()
    return frozenset(line for line in text.split("\n") if line and not line.startswith("#"))


def surroundings(host: Host, lane: Lane, history: tuple[dict[str, Any], ...]) -> Surroundings:
    """What the linter may hold a lane against."""
    proof = proof_of(host)
    cards: int | None = None
    with suppress(ProbeError):
        cards = len(probe_pci_gpus(host)) if host.path("/sys/bus/pci").exists() else None
    if proof is not None:
        cards = len(proof.cards)
    pools = [e.get("kv_tokens") for e in history if e.get("serving") == lane.lane_id]
    known = [pool for pool in pools if isinstance(pool, int)]
    return Surroundings(
        cards=cards,
        pool_tokens=known[-1] if known else None,
        flags=known_flags(),
        lanes=frozenset(lane_names(host)),
        shape=_shape(host, lane),
        front_port=_front_port(host),
    )


def _front_port(host: Host) -> int | None:
    with suppress(ProbeError):
        listen = parse_listen(read_text(host, FRONT_FILE) or "")
        return None if listen is None else loopback_port(listen)
    return None


def check_lane(
    host: Host,
    lane: Lane,
    history: tuple[dict[str, Any], ...],
    also: frozenset[str] = frozenset(),
) -> tuple[Problem, ...]:
    """All that is wrong with a lane on this host; ``also``: lanes that will be declared, too."""
    known = surroundings(host, lane, history)
    return lint(lane, replace(known, lanes=(known.lanes or frozenset()) | also))


def _shape(host: Host, lane: Lane) -> ModelShape | None:
    try:
        config = json.loads(read_text(host, f"{lane.model.path}/config.json") or "null")
    except (ProbeError, ValueError):
        return None
    return parse_shape(config) if isinstance(config, dict) else None


def proof_of(host: Host) -> Proof | None:
    """The proof of this boot; one that cannot be read proves nothing."""
    try:
        return read_proof(host)
    except (ProbeError, StateError):
        return None


def proofs_of(host: Host) -> Proofs:
    """Both proofs of this boot, and why one that is there cannot be believed."""
    found = Proofs()
    try:
        found = replace(found, grant=read_proof(host))
    except (ProbeError, StateError) as error:
        found = replace(found, grant_problem=error.message)
    try:
        return replace(found, deep=read_deep_proof(host))
    except (ProbeError, StateError) as error:
        return replace(found, deep_problem=error.message)


def driver_of(host: Host) -> DriverFacts:
    """Versions of the driver; ``problem`` where they cannot be looked at."""
    try:
        return probe_driver(host)
    except ProbeError as error:
        return DriverFacts(problem=error.message)


def p2p_of(host: Host, lane: Lane) -> P2pDecision:
    """What the lane's P2P requirement means now."""
    return decide(lane, proofs_of(host), probe_running(host), driver_of(host))


def look_before(
    host: Host,
    lane: Lane,
    problems: tuple[Problem, ...],
    *,
    own_ports: frozenset[int],
    front: str | None,
    progress: Callable[[str], None] = lambda _: None,
) -> PreflightFacts:
    """Everything that may keep a lane from being started.

    Args:
        host: where.
        lane: who wants to start.
        problems: of the linter.
        own_ports: ports that lanes of ours listen on now.
        front: why the proxy cannot be told where to send traffic.
        progress: what takes long.
    """
    driver = driver_of(host) if lane.engine.gpus == "all" else DriverFacts()
    return PreflightFacts(
        lane=lane,
        problems=problems,
        p2p=p2p_of(host, lane),
        driver=driver,
        engine=engine_problem(host, lane),
        model=model_problem(host, lane, progress),
        access=access_problem(host, lane),
        disk=disk_problem(host),
        port_holder=None if lane.port in own_ports else port_problem(lane.port),
        front=front,
    )


def engine_problem(host: Host, lane: Lane) -> str | None:
    """Why the engine cannot be started: image not here, no such environment or account."""
    if lane.engine.image is not None:
        tool = "podman" if lane.engine.backend == "quadlet" else "docker"
        try:
            return backend_problem(host, lane.engine.backend) or _image_problem(
                host, tool, lane.engine.image
            )
        except CommandNotFoundError:
            return f"{tool} is not installed"
        except CommandError as error:
            return f"whether {tool} can run the image is not known: {error.message}"
    program = host.path(f"{lane.engine.venv}/bin/vllm")
    if not os.access(program, os.X_OK):
        return f"there is no {program}"
    try:
        pwd.getpwnam(lane.engine.user)
    except KeyError:
        return f"there is no account {lane.engine.user}"
    return None


def _image_problem(host: Host, tool: str, image: str) -> str | None:
    known = image_id(host, tool, image)
    return image_missing(image) if known is None else None


def backend_problem(host: Host, backend: str) -> str | None:
    """Why systemd could not run what is rendered for this backend.

    Raises:
        CommandError: the tool cannot be asked; CommandNotFoundError: there is none.
    """
    if backend == "compose":
        return _compose_problem(host)
    done = host.run("podman", "--version", timeout=_TOOL_SECONDS, ok=None)
    match = _VERSION.search(done.stdout)
    if match is None:
        return f"podman does not tell its version: {done.stdout.strip()[:60] or done.stderr[:60]}"
    if (int(match[1]), int(match[2])) < _PODMAN:
        return f"podman {match[0]} has no quadlets; {_PODMAN[0]}.{_PODMAN[1]} or newer has"
    places = (f"{folder}/podman-system-generator" for folder in _GENERATORS)
    if not any(os.access(host.path(place), os.X_OK) for place in places):
        return "podman's generator for systemd (podman-system-generator) is not installed"
    return None


def _compose_problem(host: Host) -> str | None:
    done = host.run("docker", "compose", "version", "--short", timeout=_TOOL_SECONDS, ok=None)
    if done.exit_status != 0:
        return "docker has no compose: docker compose version"
    match = _VERSION.match(done.stdout.strip().removeprefix("v"))
    if match is None:
        return f"docker compose does not tell its version: {done.stdout.strip()[:60]}"
    if (int(match[1]), int(match[2])) < _COMPOSE:
        return (
            f"docker compose {match[0]} knows no files of variables that may be missing; "
            f"{_COMPOSE[0]}.{_COMPOSE[1]} or newer does"
        )
    return None


def disk_problem(host: Host) -> str | None:
    """Why a snapshot could not be written."""
    folder = host.path(LANE_STATE_DIR)
    while not folder.exists():
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder}: how much is free cannot be told: {error.strerror}"
    if free < _SNAPSHOT_BYTES:
        return f"{folder} has {free >> 20} MiB free, a snapshot needs {_SNAPSHOT_BYTES >> 20}"
    return None


def port_problem(port: int) -> str | None:
    """Who keeps an engine from listening; None: nobody."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            what = "is taken by another process" if error.errno == errno.EADDRINUSE else str(error)
            return f"port {port} of 127.0.0.1 {what}"
    return None
