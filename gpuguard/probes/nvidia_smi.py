"""``nvidia-smi``: the cards, and its P2P matrix, which is made for people to read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations

from gpuguard.core.expectation import normal_bus_id
from gpuguard.core.facts import Gpu, P2pFacts, P2pPair
from gpuguard.core.p2p_reasons import (
    CARD_UNREACHABLE,
    EMPTY_OUTPUT,
    FAILED,
    NO_DEVICES,
    NO_DRIVER,
    OUTSTANDING,
    TIMEOUT,
    TOOL_MISSING,
    UNREADABLE_OUTPUT,
    VERSION_MISMATCH,
)
from gpuguard.errors import CommandNotFoundError, CommandTimeoutError, ProbeError
from gpuguard.host.port import Completed, Deadline, Host
from gpuguard.host.reading import list_dir, read_text, real_path
from gpuguard.probes.driver import library_folders
from gpuguard.probes.guard import Guard, OutstandingError

_CSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # ECMA-48; nvidia-smi underlines even into a pipe
_GPU = re.compile(r"GPU(\d+)")
_LISTED = re.compile(r"^GPU (\d+): (.*) \(UUID: (GPU-[^)\s]+)\)\s*$", re.MULTILINE)
_QUERIED = re.compile(r"^(GPU-\S+), ([0-9A-Fa-f:.]+)\s*$", re.MULTILINE)
_UNREACHABLE = re.compile(
    r"^Unable to determine the device handle for gpu\s*"
    r"((?:[0-9a-f]+:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]):\s*(\S.*?)\s*$",
    re.MULTILINE | re.IGNORECASE,
)
#: nvidia-smi(1), RETURN VALUE; 18 is NVML's own number, passed on.
_BY_STATUS = {9: NO_DRIVER, 18: VERSION_MISMATCH, 127: TOOL_MISSING, 255: CARD_UNREACHABLE}
_SAID_LENGTH = 300

#: (gpu, peer) -> status word, n * (n - 1) entries.
Matrix = Mapping[tuple[int, int], str]
#: Runs nvidia-smi with these arguments; what it printed.
Say = Callable[..., str]


class _NoAnswerError(Exception):
    """It was asked and did not answer; args: reason, problem."""


def ask_nvidia_smi(host: Host, guard: Guard, timeout: float) -> P2pFacts:
    """The cards and both matrices, within ``timeout`` seconds for all calls together."""
    deadline = Deadline(timeout)
    lost: dict[str, str] = {}
    try:
        program = _program(host)
        environment = {} if host.is_live else {"LD_LIBRARY_PATH": ":".join(library_path(host))}

        def say(*arguments: str) -> str:
            done = _run(guard, (program, *arguments), deadline, environment)
            lost.update(parse_unreachable(done.stdout + done.stderr))
            return _usable(done, lost)

        return _matrix_facts(host, say, lost)
    except _NoAnswerError as error:
        reason, problem = error.args
        return P2pFacts(problem=problem, reason=reason, lost=tuple(lost.items()))


def parse_topo_p2p(text: str) -> Matrix:
    r"""Read one matrix of ``nvidia-smi topo -p2p r`` or ``w``.

    The text has no promise, so a full square is demanded: a header of GPU names, then a row
    for each of them with as many cells, ``X`` on the diagonal. Blanks, tabs, CRLF, escape
    codes, warnings before and the legend after it make no difference. Words other than the
    legend's are kept. Sample: ``" \t\x1b[4mGPU0\tGPU1\t\x1b[0m\n GPU0\tX\tOK\t\n…"`` (580).

    Raises:
        ProbeError: no matrix, or not a square one.
    """
    lines = [_CSI.sub("", line).split() for line in text.splitlines()]
    at = next((i for i, cells in enumerate(lines) if cells and all(map(_is_gpu, cells))), None)
    if at is None:
        raise ProbeError(f"no P2P matrix in: {text.strip()[:200] or '(nothing)'}")
    header = lines[at]
    rows = [cells for cells in lines[at + 1 :] if cells and _is_gpu(cells[0])]
    if [row[0] for row in rows] != header:
        raise ProbeError(f"P2P matrix of {len(header)} columns has {len(rows)} rows")
    matrix = {}
    for row_number, (name, *cells) in enumerate(rows):
        if len(cells) != len(header) or cells[row_number] != "X":
            raise ProbeError(f"P2P matrix row {name} does not fit its header: {' '.join(cells)}")
        for peer, status in zip(header, cells, strict=True):
            if peer != name:
                matrix[_index(name), _index(peer)] = status
    return matrix


def parse_gpu_list(text: str) -> tuple[tuple[int, str, str], ...]:
    """(index, UUID, name) of ``nvidia-smi -L``; indented MIG lines are no cards."""
    plain = _CSI.sub("", text).replace("\r", "")
    return tuple((int(i), uuid, name) for i, name, uuid in _LISTED.findall(plain))


def parse_unreachable(text: str) -> dict[str, str]:
    """PCI bus id -> what nvidia-smi says of a card that it cannot reach (CASES C46)."""
    return {
        normal_bus_id(bus_id): said.split(".  ")[0]
        for bus_id, said in _UNREACHABLE.findall(_CSI.sub("", text).replace("\r", ""))
    }


def library_path(host: Host) -> Iterator[str]:
    """Folders of a root's own libnvidia-ml.so.1, for programs that are started outside it."""
    for folder in library_folders(host):
        path = host.path(folder)
        # The loader knows no root: a link out of it (/etc/alternatives) would be followed there.
        real = (path / "libnvidia-ml.so.1").resolve()
        if real.is_relative_to(host.root) and real.exists():
            yield str(path)


def _program(host: Host) -> str:
    if host.is_live:
        return "nvidia-smi"
    found = real_path(host, "/usr/bin/nvidia-smi")  # the machine's own would ask the machine
    if found is None:
        raise _NoAnswerError(TOOL_MISSING, f"there is no nvidia-smi in {host.root}")
    return str(found)


def _run(
    guard: Guard, argv: tuple[str, ...], deadline: Deadline, environment: Mapping[str, str]
) -> Completed:
    try:
        return guard.run(*argv, timeout=deadline, env=environment)
    except CommandNotFoundError as error:
        raise _NoAnswerError(TOOL_MISSING, error.message) from error
    except OutstandingError as error:
        raise _NoAnswerError(OUTSTANDING, error.message) from error
    except CommandTimeoutError as error:
        raise _NoAnswerError(OUTSTANDING if error.left else TIMEOUT, error.message) from error


def _usable(done: Completed, lost: Mapping[str, str]) -> str:
    """Standard output; error messages go there too, so the exit status decides (CASES C45)."""
    said = " ".join((done.stdout + " " + done.stderr).split())[:_SAID_LENGTH]
    name = os.path.basename(done.argv[0])  # noqa: PTH119 - a word, not a path
    if "No devices were found" in said:
        raise _NoAnswerError(NO_DEVICES, f"{name} exited with {done.exit_status}: {said}")
    if done.exit_status == 0 and not said:
        raise _NoAnswerError(EMPTY_OUTPUT, f"{name} exited with 0 and printed nothing")
    if done.exit_status != 0 and not (lost and _has_content(done.stdout)):
        reason = _BY_STATUS.get(done.exit_status, CARD_UNREACHABLE if lost else FAILED)
        raise _NoAnswerError(reason, f"{name} exited with {done.exit_status}: {said}")
    return done.stdout


def _has_content(text: str) -> bool:
    """True if there is more than complaints about single cards."""
    return bool(parse_gpu_list(text)) or _GPU.search(_UNREACHABLE.sub("", text)) is not None


def _matrix_facts(host: Host, say: Say, lost: dict[str, str]) -> P2pFacts:
    try:
        listed = parse_gpu_list(say("-L"))
        read = parse_topo_p2p(say("topo", "-p2p", "r"))
        write = parse_topo_p2p(say("topo", "-p2p", "w"))
        bus_ids = _bus_ids(host, say, {uuid for _, uuid, _ in listed})
    except ProbeError as error:
        raise _NoAnswerError(UNREADABLE_OUTPUT, error.message) from error
    uuids = {index: uuid for index, uuid, _ in listed}
    if not uuids or not set(permutations(uuids, 2)) == read.keys() == write.keys():
        raise _NoAnswerError(
            CARD_UNREACHABLE if lost else UNREADABLE_OUTPUT,
            f"{len(listed)} cards are listed, and the P2P matrices have {len(read)} and "
            f"{len(write)} pairs",
        )
    return P2pFacts(
        source="nvidia-smi",
        gpus=tuple(
            Gpu(index=index, uuid=uuid, pci_bus_id=bus_ids.get(uuid, ""), name=name)
            for index, uuid, name in listed
        ),
        pairs=tuple(
            P2pPair(src=uuids[src], dst=uuids[dst], read=status, write=write[src, dst])
            for (src, dst), status in read.items()
        ),
        problem="; ".join(f"{bus_id}: {said}" for bus_id, said in lost.items()) or None,
        lost=tuple(lost.items()),
    )


def _bus_ids(host: Host, say: Say, uuids: set[str]) -> dict[str, str]:
    """UUID -> PCI address, from ``/proc/driver/nvidia/gpus/*/information``, else asked."""
    top = "/proc/driver/nvidia/gpus"
    found = {}
    for device in list_dir(host, top):
        text = read_text(host, f"{top}/{device}/information") or ""
        match = re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)", text, re.MULTILINE)
        if match:  # question marks until something has woken the card
            found[match[1]] = normal_bus_id(device)
    if uuids <= found.keys():
        return found
    try:
        said = say("--query-gpu=uuid,pci.bus_id", "--format=csv,noheader")
    except _NoAnswerError:
        return found
    return found | {uuid: normal_bus_id(bus_id) for uuid, bus_id in _QUERIED.findall(said)}


def _is_gpu(cell: str) -> bool:
    return _GPU.fullmatch(cell) is not None


def _index(name: str) -> int:
    return int(name.removeprefix("GPU"))
