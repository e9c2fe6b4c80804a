"""The daemon and clients that mean no good: that do not read, do not speak, guess passwords."""

from __future__ import annotations

import asyncio
import base64
import http.client
import os
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from gpuguard.daemon import connection as connections
from gpuguard.daemon import passwords as password_checks
from gpuguard.daemon import server as servers
from gpuguard.daemon.http import Request, Response
from gpuguard.daemon.passwords import Passwords, _bcrypt_is, can_check_passwords
from tests.daemon_kit import Served, cards_only, configure, serving
from tests.p2pbox import P2pBox

pytestmark = pytest.mark.slow
_TAIL = "......................IBkH8pjfkDYmjZtzsiFYGYLacsaGHyW"
_RIGHT = f"$2b$04${_TAIL}"  # of "correct horse"
_DEAR = f"$2b$14${_TAIL}"  # of nothing; a second of work
_MANY = 300
_KIB = 1024


@pytest.fixture
def box(tmp_path: Path) -> P2pBox:
    made = cards_only(tmp_path / "host", 2)
    made.configure()
    configure(made.root)
    return made


def authorization(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        yield client


def descriptors(served: Served) -> int:
    return len([*Path(f"/proc/{served.process.pid}/fd").iterdir()])


# --- that do not read ------------------------------------------------------------------------


def unread(port: int) -> socket.socket:
    """A client that asks and does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.settimeout(10)
    client.connect(("127.0.0.1", port))
    client.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    return client


def capacity() -> int:
    """What the kernel takes for somebody who does not read."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = unread(listening.getsockname()[1])
        accepted, _ = listening.accept()
        with client, accepted:
            accepted.setblocking(False)
            taken = 0
            with suppress(BlockingIOError):
                while True:
                    taken += accepted.send(b"x" * 65536)
            return taken


async def healthy(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /-/healthy HTTP/1.1\r\nConnection: close\r\n\r\n")
    try:
        return await reader.read()
    finally:
        writer.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_who_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether what is left is more than a buffer, or less, or nothing."""
    for name in ("WRITE_SECONDS", "CLOSE_SECONDS"):
        monkeypatch.setattr(connections, name, 0.2)
    sizes = [capacity() + step * 24 * _KIB for step in range(-4, 8)]

    async def play() -> None:
        left = list(sizes)
        server = servers.Server(lambda _: Response(200, b"x" * left.pop()))
        await server.start("127.0.0.1", port := free_port())
        clients = [await asyncio.to_thread(unread, port) for _ in sizes]
        async with asyncio.timeout(60):
            while left or server.connections:
                await asyncio.sleep(0.05)
        await server.stop()
        for client in clients:
            client.close()

    asyncio.run(play())


def test_who_does_not_read_takes_no_room_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "MAX_CONNECTIONS", 8)
    pages = {"/-/healthy": b"healthy\n", "/": b"x" * (capacity() + 32 * _KIB)}
    most = 0

    async def play() -> None:
        nonlocal most

        def answer(request: Request) -> Response:
            nonlocal most
            most = max(most, server.connections)
            return Response(200, pages[request.path])

        server = servers.Server(answer)
        await server.start("127.0.0.1", port := free_port())
        clients = [await asyncio.to_thread(unread, port) for _ in range(24)]
        assert (await healthy(port)).endswith(b"healthy\n")
        assert server.connections <= 8
        await server.stop()
        assert server.connections == 0
        for client in clients:
            client.close()

    asyncio.run(play())
    assert most == 8


def test_a_connection_ends_after_many_requests(
    box: P2pBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = b"GET /-/healthy HTTP/1.1\r\n\r\n"
    with serving(box.root) as served, connected(served.port) as client:
        for _ in range(servers.MAX_REQUESTS // 100 + 1):
            with suppress(ConnectionError):
                client.sendall(one * 100)
        found = b""
        with suppress(ConnectionError):
            while data := client.recv(65536):
                found += data
        assert found.count(b"healthy\n") <= servers.MAX_REQUESTS
        assert served.get("/-/healthy")[0] == 200


def test_the_end_with_connections_that_are_open_says_nothing(box: P2pBox) -> None:
    with serving(box.root) as served, ExitStack() as stack:
        for number in range(6):
            client = stack.enter_context(connected(served.port))
            client.sendall(b"GET /-/healthy HTTP/1.1\r\n" + b"\r\n" * (number % 2))
            if number % 2:
                assert client.recv(4096)
        assert served.stop() == 0
        assert [line for line in served.log() if not line.startswith("gpuguard: ")] == []


def test_no_descriptor_is_left(box: P2pBox) -> None:
    with serving(box.root) as served, ExitStack() as stack:
        served.await_told(lambda message: "READY=1" not in message)  # looked
        before = resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE)
        few = (descriptors(served) + 3, before[1])
        resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, few)
        for _ in range(10):
            stack.enter_context(connected(served.port))
        while not (said := [line for line in served.log() if "cannot be accepted" in line]):
            os.sched_yield()
        resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, before)
        assert served.get("/-/healthy")[0] == 200
        assert len(said) == 1
        assert all(line.startswith("gpuguard: ") for line in served.log())


# --- that guess passwords --------------------------------------------------------------------


def guarded(box: P2pBox, users: str) -> None:
    (box.root / "etc/gpuguard/web.yaml").write_text(f"basic_auth_users: {users}\n")
    configure(box.root, serve={"web_config_file": "/etc/gpuguard/web.yaml"})


def guess(stack: ExitStack, served: Served, number: int) -> list[http.client.HTTPConnection]:
    """Wrong passwords whose checks take a second each; nobody waits for an answer yet."""
    made = []
    for count in range(number):
        client = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        stack.callback(client.close)
        client.request("GET", "/", headers={"Authorization": authorization(f"dear:{count}")})
        made.append(client)
    return made


def test_wrong_passwords_do_not_lock_out_the_right_one(box: P2pBox) -> None:
    import signal

    guarded(box, f"{{scraper: {_RIGHT}, dear: {_DEAR}}}")
    right = {"Authorization": authorization("scraper:correct horse")}
    with serving(box.root) as served, ExitStack() as stack:
        assert served.get("/metrics", right)[0] == 200
        guesses = guess(stack, served, 40)
        assert served.get("/metrics", right)[0] == 200
        guarded(box, f"{{scraper: {_RIGHT}, dear: {_DEAR}, more: {_RIGHT}}}")
        served.process.send_signal(signal.SIGHUP)
        served.await_told(lambda message: "READY=1" in message)
        guesses += guess(stack, served, 8)
        # Known from before the reload: there is no room to check it now.
        assert served.get("/metrics", right)[0] == 200
        answer = guesses[-1].getresponse()
        assert (answer.status, answer.getheader("Connection")) == (503, "close")
        assert answer.getheader("Retry-After")
        guarded(box, f"{{scraper: {_DEAR}}}")
        served.process.send_signal(signal.SIGHUP)
        served.await_told(lambda message: "READY=1" in message)
        assert served.get("/metrics", right)[0] in (401, 503)
        guess(stack, served, 40)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(10) == 0


def test_one_client_leaves_room_for_others_and_those_who_left_take_none(box: P2pBox) -> None:
    guarded(box, f"{{scraper: {_RIGHT}, dear: {_DEAR}}}")
    with serving(box.root) as served, ExitStack() as stack:
        guesses = guess(stack, served, 20)
        other = http.client.HTTPConnection(
            "127.0.0.1", served.port, timeout=60, source_address=("127.0.0.2", 0)
        )
        stack.callback(other.close)
        other.request("GET", "/", headers={"Authorization": authorization("scraper:correct horse")})
        assert other.getresponse().status == 200
        for client in guesses:
            client.close()
        again = {"Authorization": authorization("scraper:also correct")}
        while (status := served.get("/", again)[0]) == 503:  # until it is noticed that they left
            os.sched_yield()
        assert status == 401


def test_a_no_takes_the_same_work_for_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    real, work = password_checks._crypt, []

    def crypt(password: bytes, setting: bytes) -> bytes | None:
        work.append(2 ** int(setting.split(b"$")[2]))
        return real(password, setting)

    monkeypatch.setattr(password_checks, "_crypt", crypt)
    passwords = Passwords()
    passwords.use({"cheap": _RIGHT, "middle": f"$2b$06${_TAIL}", "dear": f"$2b$08${_TAIL}"})
    for name in ("cheap", "middle", "dear", "nobody"):
        work.clear()
        checked = passwords.submit(authorization(f"{name}:wrong"), "somebody")
        assert checked is not None
        assert checked.result() is False
        assert sum(work) == 2**8, name
        assert passwords.knows(authorization(f"{name}:wrong")) is False  # remembered
    passwords.close()


def test_what_was_wrong_is_checked_again_when_the_hash_is_another() -> None:
    said = authorization("scraper:correct horse")
    passwords = Passwords()
    passwords.use({"scraper": f"$2b$04${'.' * 53}"})
    checked = passwords.submit(said, "somebody")
    assert checked is not None
    assert checked.result() is False
    passwords.use({"scraper": _RIGHT})
    assert passwords.knows(said) is None
    checked = passwords.submit(said, "somebody")
    assert checked is not None
    assert checked.result() is True
    assert passwords.knows(said) is True
    passwords.use({})
    assert passwords.knows(said) is None
    passwords.close()


def test_a_reload_can_look_while_a_password_is_checked() -> None:
    """crypt(3) of one thread spoils another's: reloads were refused, right passwords failed."""
    with ThreadPoolExecutor(2) as pool:
        checks = [pool.submit(_bcrypt_is, b"correct horse", _RIGHT) for _ in range(200)]
        assert all(can_check_passwords() for _ in range(200))
        assert all(check.result() for check in checks)
        wrong = [pool.submit(_bcrypt_is, b"wrong horse", _RIGHT) for _ in range(200)]
        assert all(can_check_passwords() for _ in range(200))
        assert not any(check.result() for check in wrong)
