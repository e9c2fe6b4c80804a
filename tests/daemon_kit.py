"""The real daemon on a tree, waited for by what it tells its service manager."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gpuguard.demo.driver import install_driver
from gpuguard.demo.tree import add_cards
from tests.box import K1, K2, Box, furnish, load
from tests.p2pbox import P2pBox, bus_id, program_environment
from tests.trees import make_tree

WAIT = 90.0
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def green_host(root: Path, cards: int = 2) -> Box:
    """Two kernels with patched modules, the older one loaded, cards with P2P between all."""
    box = furnish(root, K1, K2)
    for release in (K1, K2):
        box.compile_to(release, seed="ok")
    box.rebuilt()
    add_cards(root, cards)
    for number in range(1, cards + 1):
        bind_card(root, number)
    install_driver(root)
    load(root, root / f"lib/modules/{K1}/updates/gpuguard/nvidia.ko")
    make_tree(root, {"etc/hostname": "rig-07\n", "proc/sys/kernel/random/boot_id": "boot-1\n"})
    for node in ("nvidiactl", *(f"nvidia{number}" for number in range(cards))):
        make_tree(root, {f"dev/{node}": ""})
    return box


def bind_card(root: Path, number: int) -> None:
    link = (root / f"sys/bus/pci/devices/{bus_id(number)}").resolve() / "driver"
    link.symlink_to("../../../../bus/pci/drivers/nvidia")


def lose_patch(root: Path, release: str = K1) -> None:
    """Somebody puts the stock modules back for a kernel; those of the running one are loaded."""
    (root / f"etc/depmod.d/zz-gpuguard-{release}.conf").unlink()
    shutil.rmtree(root / f"lib/modules/{release}/updates/gpuguard")
    subprocess.run(
        ["/usr/sbin/depmod", "-b", root, "-C", root / "etc/depmod.d", release],
        check=True, capture_output=True,
    )  # fmt: skip
    if release == K1:
        load(root, root / f"lib/modules/{K1}/updates/dkms/nvidia.ko")


def parse(text: str) -> Series:
    """Name and labels -> value, by the client library's own parser."""
    return {
        (entry.name, frozenset(entry.labels.items())): entry.value
        for family in text_string_to_metric_families(text)
        for entry in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float | None:
    """Of one series; None: it is not there."""
    return series.get((name, frozenset(labels.items())))


def named(series: Series, name: str) -> dict[frozenset[tuple[str, str]], float]:
    """All series of a metric."""
    return {labels: number for (found, labels), number in series.items() if found == name}


@dataclass
class Served:
    """A running daemon."""

    process: subprocess.Popen[str]
    port: int
    manager: socket.socket
    errors: Path
    told: list[str] = field(default_factory=list)

    def get(
        self, path: str, headers: Mapping[str, str] = {}, method: str = "GET"
    ) -> tuple[int, bytes, Mapping[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}
        finally:
            connection.close()

    def series(self) -> Series:
        status, body, _ = self.get("/metrics")
        assert status == 200
        return parse(body.decode())

    def await_told(self, wanted: Callable[[str], bool]) -> str:
        """The next message to the service manager that is wanted."""
        while True:
            message = self.manager.recv(65536).decode()
            self.told.append(message)
            if wanted(message):
                return message

    def await_status(self, word: str) -> None:
        """Until an observation says this verdict."""
        self.await_told(lambda message: f"STATUS={word};" in message)

    def await_series(self, wanted: Callable[[Series], bool]) -> Series:
        """Until, after some observation, the series are as wanted."""
        while not wanted(found := self.series()):
            self.await_told(lambda message: "STATUS=" in message)
        return found

    def log(self) -> list[str]:
        return self.errors.read_text().splitlines()

    def stop(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        return self.process.wait(WAIT)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def configure(root: Path, *, interval: float = 3600, **more: Any) -> None:
    """The tree's configuration with keys of the daemon; ``more``: further keys, top-level."""
    file = root / "etc/gpuguard/gpuguard.d/90-test.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    serve = {"interval_seconds": interval, **more.pop("serve", {})}
    file.write_text(json.dumps({"serve": serve, **more}))


@contextmanager
def serving(
    root: Path,
    *words: str,
    binding: Path | None = None,
    program: Path | None = None,
    **environment: str,
) -> Iterator[Served]:
    """Run ``gpuguard serve`` until the end of the block; it has told that it is ready.

    ``program``: the folder of another gpuguard than the repository's.
    """
    if program is not None:
        environment["PYTHONPATH"] = str(program)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        manager.bind(f"{folder}/notify")
        manager.settimeout(WAIT)
        errors = Path(folder) / "stderr"
        with errors.open("w") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpuguard", "--root", str(root), "serve",
                 "--listen", f"127.0.0.1:{port}", *words],
                env={**program_environment(binding), "NOTIFY_SOCKET": f"{folder}/notify",
                     **environment},
                stdout=subprocess.DEVNULL, stderr=sink, text=True, cwd=program,
            )  # fmt: skip
        served = Served(process, port, manager, errors)
        try:
            served.await_told(lambda message: "READY=1" in message)
            yield served
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            manager.close()


def run_serve(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A daemon that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "gpuguard", "--root", str(root), "serve", *words],
        env=program_environment(), capture_output=True, text=True, timeout=WAIT, check=False,
    )  # fmt: skip


def cards_only(root: Path, cards: int) -> P2pBox:
    """A tree with cards and a fake binding, without kernels."""
    return P2pBox(root, cards).nvml()


def environment_without(name: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != name}
