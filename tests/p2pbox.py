"""Small host trees with cards, and a driver that says what a test wants it to say.

Either the demo's simulated libnvidia-ml with real clients, or, for what that cannot say, a
fake ``pynvml`` for the NVML child and a fake ``nvidia-smi`` in the tree.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpuguard.cli.verify  # noqa: F401 - so that a child need not import it
from gpuguard.demo.driver import install_driver
from gpuguard.demo.source import VERSION
from gpuguard.demo.tree import add_cards
from tests.box import Answer, Box
from tests.schema import check_verify
from tests.trees import make_tree

REPOSITORY = Path(__file__).parents[1]
RELEASE = "6.8.0-90-generic"
_POLICY = {True: "standin-p2p-policy=ok", False: "standin-p2p-policy=chipset-not-supported"}
LEGEND = (
    "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"
    "  GNS  = GPU not supported\n  TNS  = Topology not supported\n  NS   = Not supported\n"
    "  U    = Unknown\n"
)
UUID = "GPU-00000000-0000-4000-8000-0000000000{:02x}"

#: A binding that answers from state.json beside it; the traps are those of real bindings.
PYNVML = """
import json, os, time
_S = json.load(open(os.path.join(os.path.dirname(__file__), "state.json")))
class NVMLError(Exception): pass
def _error(name): return type("NVMLError_" + name, (NVMLError,), {})(name)
NVML_P2P_CAPS_INDEX_READ = (0,)
def _text(t): return t.encode() if _S.get("bytes") else t
def nvmlInit():
    if _S.get("init"): raise _error(_S["init"])
def nvmlShutdown():
    open(_S["log"], "a").write("shutdown\\n")
def nvmlDeviceGetCount():
    if _S.get("count_error"): raise _error(_S["count_error"])
    return len(_S["cards"])
def nvmlDeviceGetHandleByIndex(i):
    if _S["cards"][i].get("lost"): raise _error(_S["cards"][i]["lost"])
    return i
def nvmlDeviceGetUUID(h): return _text(_S["cards"][h]["uuid"])
def nvmlDeviceGetName(h): return _text("NVIDIA GeForce RTX 5090")
class _Pci: pass
def nvmlDeviceGetPciInfo(h):
    p = _Pci(); p.busId = _text("0000" + _S["cards"][h]["bus"].upper()); return p
def nvmlDeviceGetP2PStatus(a, b, cap):
    if not isinstance(cap, int): raise TypeError("Don't know how to convert parameter 3")
    said = _S["status"].get("%d %d %d" % (a, b, cap), _S.get("all", 0))
    if isinstance(said, str): raise _error(said)
    return said
"""


@dataclass
class P2pBox:
    """A tree with ``cards`` cards at 0000:01:00.0, 0000:02:00.0, …, all bound to nvidia."""

    root: Path
    cards: int = 4
    seen: list[int] = field(default_factory=list)  # numbers from 1 of those the driver sees

    def __post_init__(self) -> None:
        self.seen = self.seen or list(range(1, self.cards + 1))
        make_tree(
            self.root,
            {
                "proc/sys/kernel/osrelease": f"{RELEASE}\n",
                "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for "
                f"x86_64  {VERSION}  Release Build  (builder@host)\n",
                "binding": None,
                "sys/bus/pci/devices": None,
            },
        )
        add_cards(self.root, self.cards)
        for number in range(1, self.cards + 1):
            self.bind(number, "nvidia")
        for number in self.seen:
            information = f"Model: \t RTX 5090\nGPU UUID:  \t {uuid(number)}\n"
            make_tree(
                self.root, {f"proc/driver/nvidia/gpus/{bus_id(number)}/information": information}
            )

    def bind(self, number: int, driver: str | None) -> None:
        """Which kernel driver holds a card."""
        link = (self.root / f"sys/bus/pci/devices/{bus_id(number)}").resolve() / "driver"
        link.unlink(missing_ok=True)
        if driver is not None:
            (self.root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            link.symlink_to(f"../../../../bus/pci/drivers/{driver}")

    def nvml(self, status: Mapping[str, Any] | None = None, **state: Any) -> P2pBox:
        """NVML's answer; ``status`` maps "src dst capability" (numbers from 0) to it."""
        cards = [{"uuid": uuid(n), "bus": bus_id(n)} for n in self.seen]
        for index, error in state.pop("lost", {}).items():
            cards[index]["lost"] = error
        log = str(self.root / "nvml.log")
        document = {"cards": cards, "status": status or {}, "log": log, **state}
        (self.root / "binding/pynvml.py").write_text(PYNVML)
        (self.root / "binding/state.json").write_text(json.dumps(document))
        return self

    def without_nvml(self, code: str = "raise ImportError('no pynvml')") -> P2pBox:
        (self.root / "binding/pynvml.py").write_text(code)
        return self

    def smi(
        self, read: str | None = None, write: str | None = None, listed: str | None = None
    ) -> P2pBox:
        """What the tree's nvidia-smi prints; by default that all is well."""
        read = matrix(len(self.seen)) if read is None else read
        texts = {
            "list": gpu_list(self.seen) if listed is None else listed,
            "r": read,
            "w": read if write is None else write,
        }
        for name, text in texts.items():
            (self.root / f"smi-{name}.txt").write_bytes(text.encode())
        return self.smi_script(
            f'case "$*" in -L) cat {self.root}/smi-list.txt;; "topo -p2p r") cat '
            f'{self.root}/smi-r.txt;; "topo -p2p w") cat {self.root}/smi-w.txt;; *) exit 2;; esac'
        )

    def smi_script(self, script: str) -> P2pBox:
        program = self.root / "usr/bin/nvidia-smi"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return self

    def configure(self, **p2p: Any) -> None:
        document = {"source": {"path": "/srv/nvidia"}, "p2p": p2p}
        make_tree(self.root, {"etc/gpuguard/gpuguard.yaml": json.dumps(document)})

    def run(self, *words: str, **environment: str) -> Answer:
        """``gpuguard verify``; its NVML child takes its modules from where this process does."""
        binding = str(self.root / "binding")
        sys.path.insert(0, binding)
        try:
            return Box(self.root).run(*words, **environment)
        finally:
            sys.path.remove(binding)

    def verify(self, *words: str, **environment: str) -> tuple[int, dict[str, Any]]:
        """Exit status and document; the document is one as documented."""
        answer = self.run("--json", "verify", *words, **environment)
        document = answer.document
        check_verify(document)
        wanted = {"ok": 0, "warning": 0, "critical": 1, "unknown": 3}[document["verdict"]]
        assert answer.status == wanted
        return answer.status, document

    def findings(self, *words: str) -> dict[str, dict[str, Any]]:
        return {finding["code"]: finding for finding in self.verify(*words)[1]["findings"]}


def simulated_host(root: Path, cards: int, *, patched: bool = True) -> P2pBox:
    """Cards whose driver is the demo's library, which says OK, or CNS."""
    box = P2pBox(root, cards)
    module = f"vermagic={RELEASE} SMP\0{_POLICY[patched]}\0"
    make_tree(
        root,
        {
            f"lib/modules/{RELEASE}/modules.dep": "updates/nvidia.ko:\n",
            f"lib/modules/{RELEASE}/updates/nvidia.ko": module,
        },
    )
    install_driver(root)
    return box


def program_environment(binding: Path | None = None) -> dict[str, str]:
    """For gpuguard run from the repository, with a binding of the test's before the real one."""
    path = [str(binding)] if binding is not None and any(binding.glob("*.py")) else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(REPOSITORY)])}


def bus_id(number: int) -> str:
    return f"0000:{number:02x}:00.0"


def uuid(number: int) -> str:
    return UUID.format(number)


def gpu_list(numbers: Sequence[int]) -> str:
    return "".join(
        f"GPU {index}: NVIDIA GeForce RTX 5090 (UUID: {uuid(number)})\n"
        for index, number in enumerate(numbers)
    )


def matrix(size: int, status: str = "OK", **cells: str) -> str:
    """As nvidia-smi prints it; ``cells`` has single ones: ``c0_1="CNS"``."""
    names = [f"GPU{i}" for i in range(size)]
    lines = [" \t\x1b[4m" + "\t".join(names) + "\t\x1b[0m\n"]
    for row, name in enumerate(names):
        row_cells = ["X" if row == i else cells.get(f"c{row}_{i}", status) for i in range(size)]
        lines.append(" " + "\t".join([name, *row_cells]) + "\t\n")
    return "".join(lines) + LEGEND


def gone(pids: Sequence[int], within: float = 2.0) -> bool:
    """True once none of these processes runs any more; zombies wait for PID 1, not for us."""
    deadline = time.monotonic() + within
    while any(map(_runs, pids)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
