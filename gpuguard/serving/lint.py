"""What is wrong with a lane before anything is stopped for it. No I/O.

Errors keep a lane from being started; warnings are said. What cannot be known here (how many
cards there are) is no reason to refuse, and is said, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gpuguard.core.doctor_serving import parse_level
from gpuguard.serving.alignment import ModelShape, aligned_block
from gpuguard.serving.lane import POLICY_VARIABLE, RESERVED_ARGS, RESERVED_ENV, Lane
from gpuguard.serving.lint_checks import place_of_secrets, utilization_problem
from gpuguard.serving.p2p_policy import LOG_VARIABLES, crosses_cards, tells_transport

_DIGEST = re.compile(r"[^@\s]+@sha256:(?P<hex>[0-9a-f]{64})")
_PLACEHOLDER = "0" * 64
_READY_VARIABLE = "VLLM_ENGINE_READY_TIMEOUT_S"
_ENGINE_READY_SECONDS = 600.0  # vLLM's default
_ALL_REDUCE_CARDS = 2  # more PCIe cards than that, and vLLM turns its own all-reduce off
_SECRET_ARGS = frozenset({"api-key", "hf-token"})
_SECRET_ENV = re.compile(r"_(?:KEY|KEYS|TOKEN|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
_TRUE = ("1", "true", "True")
_DUMMY = "dummy"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_ORDER, _BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a lane."""

    code: str
    severity: str  # "error", "warning"
    message: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is known besides the lane file. None: it is not known.

    ``pool_tokens``: KV tokens that the engine reported the last time. ``nvlink``: every pair of
    cards has it. ``level``: NCCL_P2P_LEVEL that the cards' distance asks for. ``front_port``: the
    proxy has this port of loopback.
    """

    cards: int | None = None
    front_port: int | None = None
    pool_tokens: int | None = None
    nvlink: bool | None = None
    level: str | None = None
    flags: frozenset[str] = frozenset()
    lanes: frozenset[str] | None = None
    shape: ModelShape | None = None


def lint(lane: Lane, known: Surroundings) -> tuple[Problem, ...]:
    """Errors first, in the order of the checks."""
    found = [
        *_engine(lane),
        *_arguments(lane, known),
        *_variables(lane),
        *_which_cards(lane),
        *_timeouts(lane),
        *_cards(lane, known),
        *_cache(lane, known),
        *_p2p(lane, known),
        *_others(lane, known),
    ]
    return tuple(sorted(found, key=lambda problem: problem.severity != "error"))


def errors_of(problems: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """Those that keep the lane from being started."""
    return tuple(problem for problem in problems if problem.severity == "error")


def _error(code: str, message: str, remedy: str) -> Problem:
    return Problem(code, "error", message, remedy)


def _warning(code: str, message: str, remedy: str) -> Problem:
    return Problem(code, "warning", message, remedy)


def _engine(lane: Lane) -> Iterator[Problem]:
    image = lane.engine.image
    if image is None:
        return
    match = _DIGEST.fullmatch(image)
    if match is None:
        yield _error(
            "lane-image-floating",
            f"engine.image {image} has no digest: the same name is another engine tomorrow",
            "name it by digest: REPOSITORY@sha256:…, as podman image inspect shows it",
        )
    elif match["hex"] == _PLACEHOLDER:
        yield _error(
            "lane-image-placeholder",
            "engine.image is the placeholder of the preset",
            "put the digest of your image there",
        )


def _arguments(lane: Lane, known: Surroundings) -> Iterator[Problem]:
    if str(lane.args.get("load-format")).strip().lower() == _DUMMY:
        yield _error(
            "lane-dummy-weights",
            "load-format: dummy serves random weights; a test with them tests nothing",
            "leave load-format out",
        )
    for flag in sorted(set(RESERVED_ARGS) & lane.args.keys()):
        yield _error(
            "lane-argument-reserved",
            f"args.{flag} is set by gpuguard itself",
            "use port, model.path and model.served_name of the lane",
        )
    for flag in sorted(_SECRET_ARGS & lane.args.keys()):
        yield _error(
            "lane-secret",
            f"args.{flag} can be read by everybody in the process list",
            "let the proxy in front ask for the key",
        )
    share = utilization_problem(lane)
    if share is not None:
        yield _error("lane-memory-utilization", share, "args: {gpu-memory-utilization: 0.9}")
    for flag in lane.args:
        if known.flags and flag not in RESERVED_ARGS:
            yield from _unknown(flag, known.flags)


def _unknown(flag: str, flags: frozenset[str]) -> Iterator[Problem]:
    plain = flag.removeprefix("no-").split(".")[0]
    if {flag, plain} & flags:
        return
    # vLLM takes every beginning that is of one flag alone: load-form is load-format
    meant = sorted(
        one for one in flags | set(RESERVED_ARGS) | _SECRET_ARGS if one.startswith(plain)
    )
    if meant:
        yield _error(
            "lane-flag-short",
            f"args.{flag} may be short for {' or '.join(meant[:3])}: nothing would check its value",
            "write the flag out",
        )
        return
    yield _warning(
        "lane-flag-unknown",
        f"args.{flag} is not known to this gpuguard",
        "check its spelling against vllm serve --help=all of the lane's own engine",
    )


def _variables(lane: Lane) -> Iterator[Problem]:
    for name in sorted(set(RESERVED_ENV) - {POLICY_VARIABLE}):
        if name in lane.env:
            yield _error(
                "lane-variable-reserved",
                f"env.{name} is set by gpuguard itself: each lane has a cache of its own, so that "
                "no other image's kernels are used",
                f"leave {name} out",
            )
    for name in lane.env:
        if _SECRET_ENV.search(name):
            yield _error(
                "lane-secret",
                f"env.{name} looks like a secret, and would be in a unit file that everybody can "
                "read",
                "let the proxy in front ask for the key; what the engine itself needs goes "
                f"{place_of_secrets(lane)}",
            )


def _which_cards(lane: Lane) -> Iterator[Problem]:
    """What lets the engine see other cards than those that are counted and proven."""
    if lane.engine.gpus == "none":
        return
    say = _error if lane.wants_p2p else _warning
    for name in _VISIBLE:
        if name in lane.env and lane.env[name] != "all":
            yield say(
                "lane-visible-cards",
                f"env.{name} picks cards: how many there are, and what is proven between them, is "
                "known of all of them and of the first ones on the PCI bus",
                f"leave {name} out: the engine takes the first cards, as many as it needs",
            )
    order = lane.env.get(_ORDER, _BUS)
    if order != _BUS and crosses_cards(lane):
        yield _error(
            "lane-visible-cards",
            f"env.{_ORDER} is {order}: the engine would count cards otherwise than the proof of "
            "P2P does",
            f"leave {_ORDER} out, or env: {{{_ORDER}: {_BUS}}}",
        )


def _timeouts(lane: Lane) -> Iterator[Problem]:
    shutdown = lane.number("shutdown-timeout")
    if not shutdown or shutdown <= 0:
        which = f"shutdown-timeout is {lane.args.get('shutdown-timeout')}"
        if lane.args.get("shutdown-timeout") is None:
            which = "shutdown-timeout is not given, and vLLM's default is 0"
        yield _error(
            "lane-shutdown-timeout",
            f"{which}: with a request in flight vLLM kills its engine and then "
            "waits for the client without limit",
            "args: {shutdown-timeout: 120}",
        )
    elif lane.timeouts.stop <= shutdown:
        yield _error(
            "lane-stop-timeout",
            f"timeouts.stop ({lane.timeouts.stop:g} s) is not above shutdown-timeout "
            f"({shutdown:g} s): requests would be cut off",
            f"timeouts: {{stop: {shutdown + 30:g}}}",
        )
    given = lane.env.get(_READY_VARIABLE)
    if given is not None and not given.isdecimal():
        yield _error(
            "lane-engine-timeout",
            f"env.{_READY_VARIABLE} is {given}: vLLM takes whole seconds only, and ends at once",
            f"env: {{{_READY_VARIABLE}: 1800}}",
        )
        return
    ready = _ENGINE_READY_SECONDS if given is None else float(given)
    if lane.timeouts.first_start < ready:
        yield _error(
            "lane-start-timeout",
            f"timeouts.first_start ({lane.timeouts.first_start:g} s) is under the engine's own "
            f"limit ({_READY_VARIABLE}, {ready:g} s): it is killed while it still may come up",
            f"timeouts: {{first_start: {ready + 60:g}}}, or a lower {_READY_VARIABLE} in env",
        )
    elif given is None and lane.timeouts.first_start > _ENGINE_READY_SECONDS:
        yield _warning(
            "lane-engine-timeout",
            f"the engine gives up after {_ENGINE_READY_SECONDS:g} s, before "
            f"timeouts.first_start ({lane.timeouts.first_start:g} s)",
            f"env: {{{_READY_VARIABLE}: {max(600, lane.timeouts.first_start - 60):g}}}",
        )


def _cards(lane: Lane, known: Surroundings) -> Iterator[Problem]:
    parallel, needed = lane.tensor_parallel, lane.cards_needed
    if lane.engine.gpus == "none":
        return
    if known.cards is None:
        yield _warning(
            "lane-cards-unknown",
            "how many cards there are could not be found out",
            "run: gpuguard verify",
        )
    elif needed > known.cards:
        which = f"tensor-parallel-size is {parallel}"
        if needed != parallel:
            which += f", with the other parallel sizes {needed} cards are needed"
        yield _error(
            "lane-too-few-cards",
            f"{which}, and there are {known.cards} cards",
            "gpuguard doctor tells why a card is missing; else lower tensor-parallel-size",
        )
    if parallel == _ALL_REDUCE_CARDS and not _has_no_all_reduce(lane):
        # the one case in which vLLM uses it on PCIe; NCCL_P2P_DISABLE does not reach it
        say = _warning if lane.requires.p2p == "required" else _error
        yield say(
            "lane-custom-all-reduce",
            "vLLM's custom all-reduce copies from card to card by itself on two cards, whatever "
            f"NCCL is told, and requires.p2p is {lane.requires.p2p}",
            "args: {disable-custom-all-reduce: true}",
        )
    if parallel > _ALL_REDUCE_CARDS and not known.nvlink and not _has_no_all_reduce(lane):
        yield _warning(
            "lane-custom-all-reduce",
            f"vLLM's custom all-reduce is off on {parallel} cards without NVLink, with or without "
            "P2P; left to decide, some builds die in graph capture",
            "args: {disable-custom-all-reduce: true}",
        )


def _has_no_all_reduce(lane: Lane) -> bool:
    return lane.args.get("disable-custom-all-reduce") is True


def _cache(lane: Lane, known: Surroundings) -> Iterator[Problem]:
    length = lane.max_model_len
    for tokens, source in ((lane.expect.kv_tokens, "expect.kv_tokens"),
                           (known.pool_tokens, "what the engine reported last")):  # fmt: skip
        if length is not None and tokens is not None and tokens < length:
            yield _error(
                "lane-model-len",
                f"max-model-len {length} does not fit into the KV pool: {tokens} ({source})",
                f"args: {{max-model-len: {tokens}}}, or more memory for the pool",
            )
            return
    block = lane.number("block-size")
    if known.shape is None:
        return
    size = aligned_block(
        known.shape,
        tensor_parallel=lane.tensor_parallel,
        kv_dtype=str(lane.args.get("kv-cache-dtype", "auto")),
        state_dtype=str(lane.args.get("mamba-ssm-cache-dtype", "auto")),
        block_size=None if block is None else int(block),
    )
    if block is not None and size is not None and size > block:
        yield _warning(
            "lane-block-size",
            f"block-size {block:g} is smaller than a state page: vLLM would run {size}",
            f"args: {{block-size: {size}}}",
        )


def _p2p(lane: Lane, known: Surroundings) -> Iterator[Problem]:
    wants = lane.requires.p2p != "none"
    level = lane.env.get("NCCL_P2P_LEVEL")
    if POLICY_VARIABLE in lane.env:
        yield _error(
            "lane-p2p-disabled",
            f"env sets {POLICY_VARIABLE}={lane.env[POLICY_VARIABLE]}, and requires.p2p is "
            f"{lane.requires.p2p}: gpuguard alone sets it, by what is known at each start",
            f"leave {POLICY_VARIABLE} out; requires: {{p2p: none}} switches P2P off",
        )
    if wants and lane.engine.gpus == "none":
        yield _error(
            "lane-p2p-without-cards",
            f"requires.p2p is {lane.requires.p2p}, and engine.gpus is none",
            "requires: {p2p: none}",
        )
    if level is not None and parse_level(level) is None:
        yield _warning(
            "lane-nccl-level",
            f"NCCL does not know NCCL_P2P_LEVEL={level}, and ignores it",
            "one of PIX, PXB, PHB, SYS",
        )
    elif level is None and crosses_cards(lane) and not known.nvlink:
        needed = known.level or "SYS"
        yield _warning(
            "lane-nccl-level",
            "NCCL by itself uses P2P up to a common PCIe bridge only (PXB); between cards behind "
            "the CPU it goes through host memory",
            f"env: {{NCCL_P2P_LEVEL: {needed}}}, unless gpuguard doctor says otherwise",
        )
    if lane.requires.p2p == "required" and crosses_cards(lane) and not tells_transport(lane):
        given = ", ".join(name for name in LOG_VARIABLES if name in lane.env)
        yield _error(
            "lane-nccl-debug",
            f"env sets {given}: how NCCL connects the cards could not be seen, and the lane "
            "requires P2P",
            f"leave {given} out: gpuguard asks NCCL to write it down",
        )


def _others(lane: Lane, known: Surroundings) -> Iterator[Problem]:
    if lane.model.manifest_sha256 is None:
        yield _warning(
            "lane-model-unpinned",
            "model.manifest_sha256 is not set: a changed model would not be noticed",
            f"gpuguard lane manifest {lane.model.path}",
        )
    if not lane.gate.canary:
        yield _warning(
            "lane-no-canary",
            "gate.canary is empty: the gate shows that the lane answers, not that it is right",
            'gate: {canary: [{prompt: "The capital of France is", expect: Paris}]}',
        )
    if known.front_port == lane.port:
        yield _error(
            "lane-port-of-front",
            f"port {lane.port} is the one on which the front listens",
            "another port; 18001 is the default. Clients use the front's only",
        )
    for name in lane.fallback:
        if name == lane.name or (known.lanes is not None and name not in known.lanes):
            what = "is this lane" if name == lane.name else "does not exist"
            yield _error(
                "lane-fallback-unknown",
                f"fallback {name} {what}",
                "gpuguard lane list shows what there is",
            )
    if lane.env.get("VLLM_SKIP_P2P_CHECK", "1") not in _TRUE and lane.requires.p2p != "none":
        yield _warning(
            "lane-p2p-check",
            "VLLM_SKIP_P2P_CHECK=0: vLLM believes its cache file until that is removed",
            "leave it out: gpuguard proves P2P by itself",
        )
