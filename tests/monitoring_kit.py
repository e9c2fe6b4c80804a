"""Real Prometheus, Alertmanager and node_exporter on loopback, and what they scrape and tell."""

from __future__ import annotations

import http.server
import json
import queue
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.daemon_kit import free_port
from tests.monitoring import ALERT_RULES, PROMETHEUS, RECORDING_RULES, tool

WAIT = 60.0
Vector = list[dict[str, Any]]


@contextmanager
def program(ready: str, *argv: str | Path) -> Iterator[None]:
    """A server, from the line of its log that says it is ready to the end of the block."""
    process = subprocess.Popen(
        [tool(str(argv[0])), *map(str, argv[1:])], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    log: list[str] = []
    try:
        while True:
            line = lines.get(timeout=WAIT)
            assert line is not None, "".join(log)
            log.append(line)
            if ready in line:
                break
        yield
    finally:
        process.terminate()
        process.wait(WAIT)
        reader.join(WAIT)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        lines.put(line)
    lines.put(None)


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an API call."""
        text = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{text}", timeout=WAIT) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        return document["data"]

    def query(self, expr: str) -> Vector:
        """One result per series: its labels as ``metric``, its number as ``value``."""
        found = self.ask("query", query=expr)["result"]
        return [{"metric": f["metric"], "value": float(f["value"][1])} for f in found]

    def value(self, expr: str) -> float | None:
        """Of a query with one result; None: it has none."""
        found = self.query(expr)
        assert len(found) <= 1, found
        return found[0]["value"] if found else None

    def by(self, label: str, expr: str) -> dict[str, float]:
        """Value by label."""
        return {f["metric"][label]: f["value"] for f in self.query(expr)}

    def await_query(self, expr: str, wanted: Callable[[Vector], bool] = bool) -> Vector:
        """Ask until the answer is as wanted; Prometheus tells nobody by itself."""
        deadline = time.monotonic() + WAIT
        while not wanted(found := self.query(expr)):
            assert time.monotonic() < deadline, f"{expr}: {found}"
            time.sleep(0.2)
        return found

    def alerts(self, state: str) -> set[tuple[str, str]]:
        """(name, instance) of the alerts in a state."""
        found = self.query(f'ALERTS{{alertstate="{state}"}}')
        return {(f["metric"]["alertname"], f["metric"].get("instance", "")) for f in found}


def quick_rules(folder: Path) -> list[str]:
    """The shipped rules, with seconds for minutes in ``for`` and one-second groups."""
    written = []
    for file in (ALERT_RULES, RECORDING_RULES):
        document = yaml.safe_load(file.read_text())
        for group in document["groups"]:
            group["interval"] = "1s"
            for rule in group["rules"]:
                if "for" in rule:
                    rule["for"] = rule["for"].replace("m", "s").replace("h", "m")
        (folder / file.name).write_text(yaml.safe_dump(document, sort_keys=False))
        written.append(str(folder / file.name))
    return written


@contextmanager
def prometheus(
    folder: Path, jobs: Mapping[str, Sequence[str]], alertmanager: str | None = None
) -> Iterator[Prometheus]:
    """Scrape every second what the shipped example scrapes, under the names it has there."""
    port = free_port()
    targets = [{"job_name": job, "static_configs": [{"targets": [*t]}]} for job, t in jobs.items()]
    example = yaml.safe_load((PROMETHEUS / "prometheus.yml.example").read_text())
    document = {
        "global": {**example["global"], "scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": quick_rules(folder),
        "scrape_configs": targets,
    }
    if alertmanager is not None:
        document["alerting"] = {
            **example["alerting"],
            "alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}],
        }
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(document))
    with program(
        "Server is ready to receive web requests", "prometheus", f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
    ):  # fmt: skip
        yield Prometheus(f"http://127.0.0.1:{port}")


@contextmanager
def alertmanager(folder: Path, webhook: str) -> Iterator[str]:
    """The shipped example, with short waits, telling a receiver of the test's."""
    text = (PROMETHEUS / "alertmanager.yml.example").read_text()
    for old, new in (
        ("http://127.0.0.1:9094", webhook),
        ("group_wait: 30s", "group_wait: 2s"),
        ("group_interval: 5m", "group_interval: 2s"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "alertmanager.yml").write_text(text)
    address = f"127.0.0.1:{free_port()}"
    with program(
        "Listening on", "prometheus-alertmanager", "--cluster.listen-address=",
        f"--config.file={folder / 'alertmanager.yml'}", f"--storage.path={folder / 'am'}",
        f"--web.listen-address={address}",
    ):  # fmt: skip
        yield address


@contextmanager
def node_exporter(textfiles: Path) -> Iterator[str]:
    """With nothing but its textfile collector."""
    address = f"127.0.0.1:{free_port()}"
    with program(
        "Listening on", "prometheus-node-exporter", "--collector.disable-defaults",
        "--collector.textfile", f"--collector.textfile.directory={textfiles}",
        f"--web.listen-address={address}",
    ):  # fmt: skip
        yield address


@dataclass(frozen=True)
class Message:
    """What Alertmanager sent to a receiver."""

    receiver: str
    status: str  # firing, resolved
    alerts: tuple[dict[str, Any], ...]

    @property
    def names(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.alerts}

    @property
    def firing(self) -> set[str]:
        return {a["labels"]["alertname"] for a in self.alerts if a["status"] == "firing"}


@dataclass
class Webhook:
    """A receiver; ``messages`` are all that came, in order."""

    url: str
    arrived: queue.Queue[Message]
    messages: list[Message] = field(default_factory=list)

    def wait(self, wanted: Callable[[Message], bool]) -> Message:
        """The next message that is wanted."""
        while True:
            message = self.arrived.get(timeout=WAIT)
            self.messages.append(message)
            if wanted(message):
                return message


@contextmanager
def webhook() -> Iterator[Webhook]:
    """On loopback; /pager and /chat are the receivers of the shipped example."""
    arrived: queue.Queue[Message] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = self.path.strip("/")
            arrived.put(Message(name, document["status"], tuple(document["alerts"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http_server(Handler) as address:
        yield Webhook(f"http://{address}", arrived)


@contextmanager
def http_server(handler: type[http.server.BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """Its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(WAIT)


@contextmanager
def exposition(text: Callable[[], str]) -> Iterator[str]:
    """A target; ``text`` is asked at each scrape."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http_server(Handler) as address:
        yield address
