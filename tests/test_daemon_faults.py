"""The daemon among hostile clients, hung drivers, full disks, and with TLS and passwords."""

from __future__ import annotations

import base64
import http.client
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.daemon_kit import (
    Served,
    cards_only,
    configure,
    free_port,
    named,
    run_serve,
    serving,
    value,
)
from tests.p2pbox import P2pBox, gone
from tests.trees import make_tree

pytestmark = pytest.mark.slow
_CONNECTIONS = 1000
#: openssl passwd and htpasswd make the like; of "correct horse"
_HASH = "$2b$04$......................IBkH8pjfkDYmjZtzsiFYGYLacsaGHyW"


@pytest.fixture
def box(tmp_path: Path) -> P2pBox:
    made = cards_only(tmp_path / "host", 2)
    made.configure()
    configure(made.root)
    return made


@contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as client:
        yield client


def answer_to(served: Served, data: bytes) -> bytes:
    """All that comes back until the server closes."""
    with connected(served) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        return _rest(client)


def _rest(client: socket.socket) -> bytes:
    found = b""
    try:
        while data := client.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3000 + b"\r\n", b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nTwo : blanks\r\n\r\n", b"400"),
        (b"GET http://127.0.0.1/metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"GET  / HTTP/1.1\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\n", b"505"),
        (b"BREW / HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /../../../etc/shadow HTTP/1.1\r\nConnection: close\r\n\r\n", b"404"),
    ],
    ids=["long target", "many fields", "tls", "no field", "odd field", "proxy", "blanks", "http2",
         "method", "traversal"],
)  # fmt: skip
def test_what_is_no_request(box: P2pBox, request_bytes: bytes, status: bytes) -> None:
    with serving(box.root) as served:
        assert answer_to(served, request_bytes).startswith(b"HTTP/1.1 " + status)
        assert served.get("/-/healthy")[0] == 200
        assert served.stop() == 0
        assert all(line.startswith("gpuguard: ") for line in served.log())  # no backtrace


def test_a_body_is_not_taken_for_the_next_request(box: P2pBox) -> None:
    smuggled = b"GET /-/ready HTTP/1.1\r\n\r\n"
    head = f"POST / HTTP/1.1\r\nContent-Length: {len(smuggled)}\r\n\r\n".encode()
    with serving(box.root) as served:
        found = answer_to(served, head + smuggled)
        assert found.count(b"HTTP/1.1 ") == 1
        assert found.startswith(b"HTTP/1.1 405")


def test_two_requests_at_once_on_one_connection(box: P2pBox) -> None:
    one = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving(box.root) as served:
        assert answer_to(served, one * 2).count(b"healthy\n") == 2


def test_slow_loris_is_shown_the_door(box: P2pBox) -> None:
    with serving(box.root) as served, connected(served) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        assert _rest(client).startswith(b"HTTP/1.1 408")


def test_a_thousand_connections_do_not_keep_a_scrape_away(box: P2pBox) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _CONNECTIONS + 100:
        pytest.skip(f"no more than {most} files may be open here; ulimit -Hn {_CONNECTIONS + 100}")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], _CONNECTIONS + 100), most))
    try:
        with serving(box.root) as served, ExitStack() as stack:
            for number in range(_CONNECTIONS):
                client = stack.enter_context(connected(served))
                if number % 2:
                    client.sendall(b"GET / HT")
            assert served.get("/metrics")[0] == 200
            descriptors = [*Path(f"/proc/{served.process.pid}/fd").iterdir()]
            assert len(descriptors) < 200
            assert all(line.startswith("gpuguard: ") for line in served.log())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_reader_that_does_not_read(box: P2pBox) -> None:
    with serving(box.root) as served, connected(served) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
        assert served.get("/metrics")[0] == 200


# --- probes --------------------------------------------------------------------------------


def hang_nvml(box: P2pBox) -> Path:
    """NVML never answers; the file gets the pid of each that waits for it."""
    pids = box.root / "pids"
    box.without_nvml(
        f"import os, time\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\ntime.sleep(3600)"
    )
    return pids


def test_end_while_a_look_hangs(box: P2pBox) -> None:
    pids = hang_nvml(box)
    os.mkfifo(pids)
    with serving(box.root, binding=box.root / "binding") as served, pids.open() as file:
        hung = int(file.readline())  # it hangs from now on
        assert served.stop() == 0
        assert gone([hung])


def test_nvml_hangs(box: P2pBox) -> None:
    hang_nvml(box)
    with serving(box.root, binding=box.root / "binding") as served:
        served.await_status("unknown")
        series = served.series()
        assert value(series, "gpuguard_probe_success", probe="topo") == 0
        assert value(series, "gpuguard_p2p_unavailable", reason="timeout") == 1
        assert value(series, "gpuguard_probe_last_success_timestamp_seconds", probe="topo") == 0
        assert named(series, "gpuguard_p2p_pair_ok") == {}
        assert value(series, "gpuguard_probe_success", probe="rebuild") == 1


def test_a_look_that_never_comes_back(box: P2pBox) -> None:
    configure(box.root, interval=1)
    version = box.root / "proc/driver/nvidia/version"
    text = version.read_text()
    with serving(box.root, binding=box.root / "binding") as served:
        served.await_series(lambda s: value(s, "gpuguard_p2p_pairs", capability="read") == 2)
        version.unlink()
        os.mkfifo(version)  # whoever opens it waits, and no signal of ours reaches that thread
        series = served.await_series(
            lambda s: value(s, "gpuguard_probe_success", probe="topo") == 0
        )
        assert named(series, "gpuguard_p2p_pair_ok") == {}
        assert set(named(series, "gpuguard_probe_success").values()) == {0}
        assert served.get("/-/healthy")[0] == 200
        with version.open("w") as file:
            version.unlink()
            version.write_text(text)
            file.write(text)
        served.await_series(lambda s: value(s, "gpuguard_p2p_pairs", capability="read") == 2)
        version.unlink()
        os.mkfifo(version)
        assert served.stop() == 0


def test_no_card_and_none_expected(tmp_path: Path) -> None:
    make_tree(tmp_path, {"proc/sys/kernel/osrelease": "6.8.0-90-generic\n"})
    with serving(tmp_path) as served:
        served.await_status("unknown")  # there is no kernel, either
        series = served.series()
        assert value(series, "gpuguard_probe_success", probe="topo") == 1
        assert value(series, "gpuguard_gpus") == 0
        assert value(series, "gpuguard_p2p_pairs_expected", capability="read") == 0


def test_full_disk_for_the_state(box: P2pBox) -> None:
    cache = box.root / "var/cache/gpuguard"
    cache.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(cache)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        (cache / "filler").write_bytes(b"x" * 4096)
        with serving(box.root, binding=box.root / "binding") as served:
            served.await_told(lambda message: "STATUS=unknown;" in message)
            series = served.series()
            assert value(series, "gpuguard_p2p_pairs", capability="read") == 2
    finally:
        subprocess.run(["umount", str(cache)], check=True)


# --- TLS and passwords ---------------------------------------------------------------------


def certificate(folder: Path, name: str = "web") -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing; apt-get install openssl")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", f"{name}.key", "-out", f"{name}.crt"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip


def web_config(box: P2pBox, text: str) -> Path:
    folder = box.root / "etc/gpuguard"
    (folder / "web.yaml").write_text(text)
    configure(box.root, serve={"web_config_file": "/etc/gpuguard/web.yaml"})
    return folder


def test_tls(box: P2pBox) -> None:
    folder = web_config(box, "tls_server_config: {cert_file: web.crt, key_file: web.key}\n")
    certificate(folder)
    with serving(box.root) as served:
        assert _get_tls(served, folder / "web.crt") == 200
        assert not answer_to(served, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP")
        certificate(folder)  # a new one
        served.process.send_signal(signal.SIGHUP)
        served.await_told(lambda message: "READY=1" in message)
        assert _get_tls(served, folder / "web.crt") == 200


def _get_tls(served: Served, trusted: Path, chain: tuple[Path, Path] | None = None) -> int:
    context = ssl.create_default_context(cafile=str(trusted))
    if chain is not None:
        context.load_cert_chain(*chain)
    connection = http.client.HTTPSConnection("127.0.0.1", served.port, timeout=30, context=context)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().status
    finally:
        connection.close()


def test_client_certificates(box: P2pBox) -> None:
    folder = web_config(
        box,
        "tls_server_config:\n  cert_file: web.crt\n  key_file: web.key\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: client.crt\n",
    )
    certificate(folder)
    certificate(folder, "client")
    with serving(box.root) as served:
        pair = (folder / "client.crt", folder / "client.key")
        assert _get_tls(served, folder / "web.crt", pair) == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            _get_tls(served, folder / "web.crt")


def test_passwords(box: P2pBox) -> None:
    web_config(box, f"basic_auth_users:\n  scraper: {_HASH}\n")
    with serving(box.root) as served:
        for path in ("/metrics", "/", "/-/healthy", "/nothing"):
            status, body, headers = served.get(path)
            assert (status, body) == (401, b"Unauthorized\n")
            assert headers["www-authenticate"].startswith("Basic ")
        for wrong in ("scraper:wrong", "nobody:correct horse", "scraper", ":", "scraper:\0"):
            assert served.get("/metrics", _basic(wrong))[0] == 401, wrong
        for _ in range(2):
            assert served.get("/metrics", _basic("scraper:correct horse"))[0] == 200
        assert served.get("/metrics", {"Authorization": "Basic %%%"})[0] == 401
        assert served.get("/metrics", {"Authorization": "Bearer x"})[0] == 401


def _basic(text: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(text.encode()).decode()}"}


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("tls_server_config: {cert_file: no.crt, key_file: no.key}", "web-config-invalid",
         "there is no file no.crt"),
        ("tls_server_config: {key_file: x}", "web-config-invalid", "there is no file x"),
        ("tls_server_config: {}", "web-config-invalid", "cert_file is missing"),
        ("basic_auth_users: {me: secret}", "web-config-invalid", "must be a bcrypt hash"),
        ("tls_config: {}", "web-config-invalid", "tls_config is not known here"),
        ("rate_limit: {}", "web-config-invalid", "rate_limit is not known here"),
        ("[1, 2]", "web-config-invalid", "must be a mapping"),
        ("a: [", "web-config-invalid", "expected"),
        (None, "web-config-unreadable", "No such file"),
    ],
)  # fmt: skip
def test_a_wrong_web_configuration(box: P2pBox, text: str | None, code: str, says: str) -> None:
    folder = web_config(box, text or "")
    if text is None:
        (folder / "web.yaml").unlink()
    done = run_serve(box.root, "--listen", f"127.0.0.1:{free_port()}")
    assert done.returncode == 78
    assert f"[{code}]" in done.stderr
    assert says in done.stderr
    assert "secret" not in done.stderr


def test_a_web_configuration_that_others_can_write(box: P2pBox) -> None:
    folder = web_config(box, "")
    (folder / "web.yaml").chmod(0o666)
    done = run_serve(box.root, "--listen", f"127.0.0.1:{free_port()}")
    assert done.returncode == 78
    assert "[web-config-untrusted]" in done.stderr


def test_key_and_certificate_that_do_not_belong_together(box: P2pBox) -> None:
    folder = web_config(box, "tls_server_config: {cert_file: web.crt, key_file: other.key}\n")
    certificate(folder)
    certificate(folder, "other")
    done = run_serve(box.root, "--listen", f"127.0.0.1:{free_port()}")
    assert done.returncode == 78
    assert "[tls-unusable]" in done.stderr


def test_handshakes_that_never_begin_take_no_room(box: P2pBox) -> None:
    folder = web_config(box, "tls_server_config: {cert_file: web.crt, key_file: web.key}\n")
    certificate(folder)
    with serving(box.root) as served, ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connected(served))
        assert _get_tls(served, folder / "web.crt") == 200
        assert len([*Path(f"/proc/{served.process.pid}/fd").iterdir()]) < 200
        assert served.stop() == 0
        assert all(line.startswith("gpuguard: ") for line in served.log())
