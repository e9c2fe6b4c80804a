"""What the driver grants: P2P read and write over every ordered pair of cards.

NVML in a child with a deadline; ``nvidia-smi`` where NVML does not answer. A grant is not a
proof that data arrives (CASES A); that is ``verify --deep``'s work.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import permutations

from gpuguard.core.facts import Gpu, P2pFacts, P2pPair
from gpuguard.errors import CommandError, CommandTimeoutError, ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text
from gpuguard.probes.driver import library_folders

_LOADED = "/proc/driver/nvidia/version"
_DEADLINE = 10.0
_CSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # ECMA-48; nvidia-smi underlines even into a pipe
_GPU = re.compile(r"GPU(\d+)")
_LISTED = re.compile(r"^GPU (\d+): (.*) \(UUID: (GPU-[^)]+)\)\s*$", re.MULTILINE)
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA, and 3D controllers: data-centre cards

#: (gpu, peer) -> status word, n * (n - 1) entries.
Matrix = Mapping[tuple[int, int], str]


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
    return tuple((int(i), uuid, name) for i, name, uuid in _LISTED.findall(text))


def normal_bus_id(bus_id: str) -> str:
    """A PCI address as sysfs writes it: ``0000:01:00.0`` for NVML's ``00000000:01:00.0``."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{int(domain or '0', 16):04x}:{rest}" if re.fullmatch("[0-9a-f]*", domain) else bus_id


def probe_pci_gpus(host: Host) -> tuple[str, ...]:
    """PCI addresses of every NVIDIA display device: how many cards there should be.

    Raises:
        ProbeError: sysfs is there but cannot be read.
    """
    top = "/sys/bus/pci/devices"
    return tuple(
        device
        for device in list_dir(host, top)
        if (read_text(host, f"{top}/{device}/vendor") or "").strip() == _NVIDIA
        and (read_text(host, f"{top}/{device}/class") or "").startswith(_DISPLAY_CLASSES)
    )


def probe_p2p(host: Host) -> P2pFacts:
    """Ask NVML, else nvidia-smi; ``problem`` says what is missing from the answer."""
    try:
        if read_text(host, _LOADED) is None:
            return P2pFacts(problem="no NVIDIA driver is loaded")
        facts = _ask_nvml(host)
    except CommandTimeoutError as error:
        # nvidia-smi would hang in the same place; one stuck child is enough.
        return P2pFacts(problem=error.message)
    except (CommandError, ProbeError) as error:
        facts = P2pFacts(problem=error.message)
    if facts.source is not None or not host.is_live:
        return facts
    try:
        return _ask_nvidia_smi(host)
    except (CommandError, ProbeError) as error:
        return P2pFacts(problem=f"NVML: {facts.problem}; nvidia-smi: {error.message}")


def _ask_nvml(host: Host) -> P2pFacts:
    # -P: never import from the working directory, which may be anyone's while we are root.
    env = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if not host.is_live:
        env["LD_LIBRARY_PATH"] = os.pathsep.join(_library_path(host))
    done = host.run(
        sys.executable, "-P", "-m", "gpuguard.probes.nvml_child", timeout=_DEADLINE, env=env
    )
    try:
        answer = json.loads(done.stdout)
        gpus = tuple(
            Gpu(**{**gpu, "pci_bus_id": normal_bus_id(gpu["pci_bus_id"])}) for gpu in answer["gpus"]
        )
        pairs = tuple(P2pPair(**pair) for pair in answer["pairs"])
        problem = answer["problem"]
    except (ValueError, KeyError, TypeError) as error:
        raise ProbeError(f"the NVML child answered nonsense: {error}") from error
    if not gpus:
        return P2pFacts(problem=problem or "NVML reports no cards")
    return P2pFacts(source="nvml", gpus=gpus, pairs=pairs, problem=problem)


def _library_path(host: Host) -> Iterator[str]:
    for folder in library_folders(host):
        path = host.path(folder)
        # The loader knows no root: a link out of it (/etc/alternatives) would be followed there.
        real = (path / "libnvidia-ml.so.1").resolve()
        if real.is_relative_to(host.root) and real.exists():
            yield str(path)


def _ask_nvidia_smi(host: Host) -> P2pFacts:
    listed = parse_gpu_list(_nvidia_smi(host, "-L"))
    read = parse_topo_p2p(_nvidia_smi(host, "topo", "-p2p", "r"))
    write = parse_topo_p2p(_nvidia_smi(host, "topo", "-p2p", "w"))
    bus_ids = _bus_ids(host)
    gpus = tuple(
        Gpu(index=index, uuid=uuid, pci_bus_id=bus_ids.get(uuid, ""), name=name)
        for index, uuid, name in listed
    )
    uuids = {gpu.index: gpu.uuid for gpu in gpus}
    expected = set(permutations(uuids, 2))
    if not gpus or not expected == read.keys() == write.keys():
        raise ProbeError(f"{len(gpus)} cards are listed, and the P2P matrix has {len(read)} pairs")
    pairs = tuple(
        P2pPair(src=uuids[src], dst=uuids[dst], read=status, write=write[src, dst])
        for (src, dst), status in read.items()
    )
    return P2pFacts(source="nvidia-smi", gpus=gpus, pairs=pairs)


def _nvidia_smi(host: Host, *arguments: str) -> str:
    """Standard output; its error messages go there too, so the exit status decides (CASES C45)."""
    done = host.run("nvidia-smi", *arguments, timeout=_DEADLINE, ok=None)
    if done.exit_status != 0:
        said = " ".join((done.stdout or done.stderr).split())[:300]
        raise ProbeError(f"nvidia-smi exited with {done.exit_status}: {said}")
    return done.stdout


def _bus_ids(host: Host) -> dict[str, str]:
    """UUID -> PCI address, from ``/proc/driver/nvidia/gpus/*/information``."""
    top = "/proc/driver/nvidia/gpus"
    found = {}
    for device in list_dir(host, top):
        text = read_text(host, f"{top}/{device}/information") or ""
        match = re.search(r"^GPU UUID:\s*(GPU-\S+)", text, re.MULTILINE)
        if match:
            found[match[1]] = normal_bus_id(device)
    return found


def _is_gpu(cell: str) -> bool:
    return _GPU.fullmatch(cell) is not None


def _index(name: str) -> int:
    return int(name.removeprefix("GPU"))
