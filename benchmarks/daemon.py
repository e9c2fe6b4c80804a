"""`gpuguard serve` on 8 simulated cards and 5 kernels: memory, CPU time, scrapes, series."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figures import Figures
from gpuguard.demo.driver import install_driver
from tests import toys
from tests.box import load
from tests.p2pbox import P2pBox, program_environment

_CARDS = 8
_KERNELS = tuple(f"6.8.0-{abi}-generic" for abi in range(90, 95))
_SCRAPE_SECONDS = 15.0
_INTERVAL_SECONDS = 60
_SECONDS = float(os.environ.get("GPUGUARD_BENCH_SECONDS", "600"))
_RATE, _BURST_SECONDS, _CLIENTS = 50, 20.0, 5
_TICKS = os.sysconf("SC_CLK_TCK")
_PERCENTILE = 0.99


def measure(figures: Figures) -> None:
    """Ten quiet minutes with a scrape every 15 s, then 50 scrapes a second."""
    with tempfile.TemporaryDirectory(prefix="gpuguard-bench-") as folder:
        root = Path(folder) / "host"
        _make_tree(root)
        with _daemon(root) as (pid, port):
            before = _cpu_seconds(pid)
            began = time.monotonic()
            while (left := began + _SECONDS - time.monotonic()) > 0:
                _scrape(port)
                time.sleep(min(_SCRAPE_SECONDS, left))
            seconds = time.monotonic() - began
            spent = [now - then for now, then in zip(_cpu_seconds(pid), before, strict=True)]
            resident = _resident_mib(pid)
            series = _series(port)
            answer = _raw_answer(port)
            waits = sorted(_burst(port))
            peak = _resident_mib(pid, "VmHWM:")
    method = (
        f"{_CARDS} simulated cards, {len(_KERNELS)} kernels of 5 modules, nothing changes; "
        f"{seconds:.0f} s from the first observation on, a scrape every {_SCRAPE_SECONDS:g} s, an "
        f"observation every {_INTERVAL_SECONDS} s; own time {spent[0]:.2f} s, ended children "
        f"(NVML by the real binding) {spent[1]:.2f} s"
    )
    share = sum(spent) / seconds * 100
    figures.add("daemon: CPU, children included", [share], "%", bound=0.2, method=method)
    _ending(figures)
    figures.add(
        "daemon: resident memory", [resident], "MiB", bound=45, method="VmRSS after that time"
    )
    figures.add("daemon: peak memory", [peak], "MiB", method="VmHWM after everything, one process")
    figures.add("daemon: series", [float(series)], "series", bound=399, method="lines of /metrics")
    figures.add(
        "daemon: /metrics p99", [_share(waits, _PERCENTILE)], "ms", bound=10,
        method=f"{len(waits)} scrapes at {_RATE} a second by {_CLIENTS} clients on connections "
        f"that they keep; median {_share(waits, 0.5):.2f} ms, worst {waits[-1] * 1000:.1f} ms",
    )  # fmt: skip
    with _bare(answer) as port:
        bare = sorted(_burst(port))
    figures.add(
        "the same bytes from a bare socket: p99", [_share(bare, _PERCENTILE)], "ms",
        method=f"what the machine makes of it just then: threads that only receive and send; "
        f"median {_share(bare, 0.5):.2f} ms, worst {bare[-1] * 1000:.1f} ms",
    )  # fmt: skip


def _ending(figures: Figures) -> None:
    """SIGTERM while NVML hangs in the middle of a look."""
    seconds = []
    for _ in range(3):
        with tempfile.TemporaryDirectory(prefix="gpuguard-bench-") as folder:
            box = P2pBox(Path(folder) / "host", 2)
            hung = box.root / "hung"
            os.mkfifo(hung)
            box.without_nvml(f"import time; open({str(hung)!r}, 'w').close(); time.sleep(3600)")
            with _daemon(box.root, box.root / "binding") as (pid, _):
                hung.open().close()
                began = time.monotonic()
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)
                seconds.append(time.monotonic() - began)
    figures.add(
        "daemon: SIGTERM during a look that hangs", seconds, "s", bound=2, worst=True,
        method="until the process is gone; NVML sleeps",
    )  # fmt: skip


def _make_tree(root: Path) -> None:
    for release in _KERNELS:
        toys.toy_kernel(root, release)
        toys.stock_modules(root, release, seed="ok")  # the simulated driver grants P2P by that
    P2pBox(root, _CARDS).configure()
    install_driver(root)
    load(root, root / f"lib/modules/{_KERNELS[0]}/updates/dkms/nvidia.ko")
    toys.set_next(root, _KERNELS[-1])
    toys.set_running(root, _KERNELS[0])
    (root / "etc/gpuguard/gpuguard.d").mkdir()
    interval = f"serve:\n  interval_seconds: {_INTERVAL_SECONDS}\n"
    (root / "etc/gpuguard/gpuguard.d/serve.yaml").write_text(interval)


@contextmanager
def _daemon(root: Path, binding: Path | None = None) -> Iterator[tuple[int, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "gpuguard", "--root", str(root), "serve"]
    process = subprocess.Popen(
        [*command, "--listen", f"127.0.0.1:{port}"],
        env=program_environment(binding), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _await(port, "/-/healthy" if binding else "/-/ready")
        yield process.pid, port
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(10)


def _await(port: int, path: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if _get(port, path)[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError("the daemon is not ready within 60 s")


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _scrape(port: int) -> bytes:
    status, body = _get(port, "/metrics")
    assert status == 200
    return body


def _series(port: int) -> int:
    return sum(not line.startswith(b"#") for line in _scrape(port).splitlines())


def _burst(port: int) -> list[float]:
    waits: list[float] = []
    clients = [threading.Thread(target=_client, args=(port, waits)) for _ in range(_CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return waits


def _client(port: int, waits: list[float]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    pause = _CLIENTS / _RATE
    began = time.monotonic()
    for number in range(int(_BURST_SECONDS / pause)):
        time.sleep(max(0.0, began + number * pause - time.monotonic()))
        asked = time.monotonic()
        connection.request("GET", "/metrics")
        assert connection.getresponse().read()
        waits.append(time.monotonic() - asked)
    connection.close()


def _share(waits: list[float], share: float) -> float:
    return waits[int(len(waits) * share)] * 1000


def _raw_answer(port: int) -> bytes:
    """Head and body as they come over the wire."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        found = b""
        while b"\r\n\r\n" not in found:
            found += client.recv(65536)
        head, _, body = found.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        while len(body) < length:
            body += client.recv(65536)
        return head + b"\r\n\r\n" + body


@contextmanager
def _bare(answer: bytes) -> Iterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    child = os.fork()
    if child == 0:
        while True:
            client, _ = listening.accept()
            threading.Thread(target=_send_for_each, args=(client, answer), daemon=True).start()
    listening.close()
    try:
        yield port
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _send_for_each(client: socket.socket, answer: bytes) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while client.recv(65536):
        client.sendall(answer)


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """Own time, and that of children that have ended and were waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, children = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
    return own / _TICKS, children / _TICKS


def _resident_mib(pid: int, field: str = "VmRSS:") -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(field)
