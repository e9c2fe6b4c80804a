"""One lane file, three ways to run it: the files for systemd. No I/O.

All three are plain units for whoever switches: ``lane-NAME.service`` can be started, stopped and
asked. They share what matters at a switch: what is made of P2P is decided by ``gpuguard lane
prepare`` before each start and read from a file, the engine gets time to finish its requests,
and an engine that ends with status 0 because its worker died is started again.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

import yaml

from gpuguard.serving.lane import RESERVED_ENV, Lane, arguments
from gpuguard.state import LANE_CACHE_DIR, LANE_RENDERED_DIR, LANE_RUN_DIR, SECRETS_DIR

UNITS = "/etc/systemd/system"
QUADLETS = "/etc/containers/systemd"
_INNER_PORT = 8000
_INNER_MODELS = "/models"
_INNER_CACHE = "/cache"
_START_PER_HOUR = 3
_AFTER_SHUTDOWN = 20.0  # between the engine's own limit and systemd's SIGKILL
_AROUND_PROOF = 60.0  # what was killed takes seconds to leave the cards
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_HEALTH = (
    "import urllib.request; "
    f"urllib.request.urlopen('http://127.0.0.1:{_INNER_PORT}/health', timeout=10)"
)


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """A file to install."""

    path: str
    text: str


def render(lane: Lane, program: tuple[str, ...]) -> tuple[RenderedFile, ...]:
    """The files of a lane; the last one is what systemd or its generator reads.

    Args:
        lane: what to run.
        program: the words that start gpuguard, the first one an absolute path.
    """
    if lane.engine.backend == "venv":
        return (_venv(lane, program),)
    if lane.engine.backend == "quadlet":
        return (_quadlet(lane, program),)
    return _compose(lane, program)


def cache_dir(lane_id: str) -> str:
    """Compiled kernels of one lane: another image never uses them, a rollback finds them warm."""
    return f"{LANE_CACHE_DIR}/{lane_id}"


def env_file(name: str) -> str:
    """What ``lane prepare`` writes before each start."""
    return f"{LANE_RUN_DIR}/{name}.env"


def secrets_file(name: str) -> str:
    """Variables of a compose engine that others must not read; root's own, need not be there."""
    return f"{SECRETS_DIR}/{name}.env"


def command(lane: Lane) -> tuple[str, ...]:
    """What a venv engine is started with."""
    return (
        f"{lane.engine.venv}/bin/vllm", "serve", lane.model.path,
        "--served-model-name", lane.model.served_name,
        "--host", "127.0.0.1", "--port", str(lane.port),
        *arguments(lane),
    )  # fmt: skip


def unit_word(word: str) -> str:
    """One word of ``ExecStart=`` or ``Environment=``: systemd gets exactly this text."""
    escaped = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(escaped):
        return escaped
    return '"' + escaped.replace('"', '\\"') + '"'


def _words(words: tuple[str, ...]) -> str:
    return " ".join(map(unit_word, words))


def _assignment(key: str, value: str) -> str:
    # no $ is expanded in Environment=, see systemd.exec(5)
    escaped = value.replace("\\", "\\\\").replace("%", "%%").replace('"', '\\"')
    return f'Environment="{key}={escaped}"'


def _head(lane: Lane) -> str:
    return (
        f"# Made by gpuguard from /etc/gpuguard/lanes/{lane.name}.yaml ({lane.lane_id}).\n"
        "# Do not edit: gpuguard lane switch writes it anew.\n"
    )


def _unit_section(lane: Lane, *more: str) -> str:
    # Wants and not Requires: running the gate again would stop the lane. What the gate proved is
    # looked at by ExecStartPre before every start, which refuses where P2P is required. An engine
    # on the CPU has nothing to wait for.
    on_cards = lane.engine.gpus == "all"
    gate = ("gpuguard-verify.service",) if on_cards else ()
    wants = "Wants=gpuguard-verify.service\n" if on_cards else ""
    after = " ".join(("network.target", *gate, *more))
    return f"""[Unit]
Description=vLLM lane {lane.name} ({lane.lane_id})
Documentation=man:gpuguard(1)
{wants}After={after}
StartLimitIntervalSec=3600
StartLimitBurst={_START_PER_HOUR}
"""


def _restart(lane: Lane) -> str:
    # always: an engine that died leaves with status 0. mixed: only the server gets SIGTERM, so
    # that it can finish what its workers are doing.
    return f"""Restart=always
RestartSec=15
TimeoutStartSec={_start_limit(lane):g}
TimeoutStopSec={lane.timeouts.stop + _AFTER_SHUTDOWN:g}
KillMode=mixed
"""


def _start_limit(lane: Lane) -> float:
    # lane prepare may have to wait for free cards, and then to move bytes over them
    proving = lane.timeouts.memory + lane.timeouts.prove + _AROUND_PROOF
    is_proving = lane.wants_p2p and lane.requires.proof == "bytes"
    return lane.timeouts.first_start + (proving if is_proving else 0.0)


def _variables(lane: Lane, cache: str) -> dict[str, str]:
    fixed = {"VLLM_CACHE_ROOT": cache, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    # what is passed to a container by itself wins over the file that the policy writes
    return fixed | {key: value for key, value in lane.env.items() if key not in RESERVED_ENV}


def _venv(lane: Lane, program: tuple[str, ...]) -> RenderedFile:
    cache = cache_dir(lane.lane_id)
    values = {"HOME": cache, **_variables(lane, cache)}
    environment = "\n".join(_assignment(key, value) for key, value in values.items())
    # EnvironmentFile=-: systemd reads it before ExecStartPre=, too, which writes it and fails if
    # it cannot
    text = f"""{_head(lane)}{_unit_section(lane, "nvidia-persistenced.service")}
[Service]
Type=exec
User={lane.engine.user}
ExecStartPre=+{_words(program)} lane prepare {lane.name}
ExecStart={_words(command(lane))}
{environment}
EnvironmentFile=-{env_file(lane.name)}
{_restart(lane)}NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=full
RestrictSUIDSGID=yes
"""
    return RenderedFile(f"{UNITS}/{lane.unit}", text)


def inner_command(lane: Lane) -> tuple[str, ...]:
    """Arguments of an image whose entry point is ``vllm serve``."""
    return (
        _INNER_MODELS, "--served-model-name", lane.model.served_name,
        "--host", "0.0.0.0", "--port", str(_INNER_PORT),  # noqa: S104 - inside the container
        *arguments(lane),
    )  # fmt: skip


def _quadlet(lane: Lane, program: tuple[str, ...]) -> RenderedFile:
    """Keys of Podman 4.4 alone; what came later goes through PodmanArgs."""
    stop = lane.timeouts.stop
    values = _variables(lane, _INNER_CACHE)
    # these become words of ExecStart=, where a $ is expanded
    environment = "\n".join(
        _assignment(key, value.replace("$", "$$")) for key, value in values.items()
    )
    extra = (
        "--pull=never", "--ipc=host", f"--stop-timeout={stop:.0f}",
        "--log-driver=passthrough",
        f"--health-cmd=python3 -c {shlex.quote(_HEALTH)}",
        "--health-interval=15s", "--health-timeout=15s", "--health-retries=4",
        f"--health-start-period={lane.timeouts.first_start:.0f}s", "--health-on-failure=kill",
    )  # fmt: skip
    device = "AddDevice=nvidia.com/gpu=all\n" if lane.engine.gpus == "all" else ""
    text = f"""{_head(lane)}{_unit_section(lane, "nvidia-cdi-refresh.service")}
[Container]
ContainerName=lane-{lane.name}
Image={lane.engine.image}
{device}Volume={lane.model.path}:{_INNER_MODELS}:ro
Volume={cache_dir(lane.lane_id)}:{_INNER_CACHE}
PublishPort=127.0.0.1:{lane.port}:{_INNER_PORT}
{environment}
EnvironmentFile={env_file(lane.name)}
PodmanArgs={_words(extra)}
Exec={_words(inner_command(lane))}

[Service]
ExecStartPre={_words(program)} lane prepare {lane.name}
{_restart(lane)}"""
    return RenderedFile(f"{QUADLETS}/lane-{lane.name}.container", text)


def _compose(lane: Lane, program: tuple[str, ...]) -> tuple[RenderedFile, RenderedFile]:
    file = f"{LANE_RENDERED_DIR}/lane-{lane.name}.compose.yaml"
    docker = f"docker compose --progress quiet -p lane-{lane.name} -f {file}"
    stop = f"{lane.timeouts.stop:.0f}"
    # Docker runs the container, not systemd: whatever becomes of compose, it must not stay
    away = f"-/usr/bin/{docker} down --timeout 10 --remove-orphans"
    text = f"""{_head(lane)}{_unit_section(lane, "docker.service")}
[Service]
Type=exec
ExecStartPre={_words(program)} lane prepare {lane.name}
ExecStartPre={away}
ExecStart=/usr/bin/{docker} up --no-log-prefix --abort-on-container-exit
ExecStop=/usr/bin/{docker} down --timeout {stop}
ExecStopPost={away}
{_restart(lane)}"""
    body = yaml.safe_dump(_project(lane), sort_keys=False, width=120, allow_unicode=True)
    return (
        RenderedFile(file, f"{_head(lane)}{body}"),
        RenderedFile(f"{UNITS}/{lane.unit}", text),
    )


def _project(lane: Lane) -> dict[str, object]:
    values = _variables(lane, _INNER_CACHE)
    service: dict[str, object] = {
        "image": lane.engine.image,
        "pull_policy": "never",
        "container_name": f"lane-{lane.name}",
        "restart": "no",  # systemd's business
        "ipc": "host",
        "init": True,
        "command": [_for_compose(word) for word in inner_command(lane)],
        "environment": {key: _for_compose(value) for key, value in values.items()},
        # the last one wins: what lane prepare writes about P2P
        "env_file": [
            {"path": secrets_file(lane.name), "required": False},
            env_file(lane.name),
        ],
        "ports": [f"127.0.0.1:{lane.port}:{_INNER_PORT}"],
        "volumes": [
            f"{lane.model.path}:{_INNER_MODELS}:ro",
            f"{cache_dir(lane.lane_id)}:{_INNER_CACHE}",
        ],
        "stop_grace_period": f"{lane.timeouts.stop:.0f}s",
    }
    if lane.engine.gpus == "all":
        device = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return {"name": f"lane-{lane.name}", "services": {"vllm": service}}


def _for_compose(text: str) -> str:
    return text.replace("$", "$$")
