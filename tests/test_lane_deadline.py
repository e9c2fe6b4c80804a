"""An engine that never comes to an end holds nobody up: every question has one deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from gpuguard.serving.engine import Engine, EngineError
from tests.lane_outcomes import rolled_back
from tests.lanekit import LaneHost, settle

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"
_ENOUGH = 20.0  # a hang would be for ever


@contextmanager
def server(head: bytes, piece: bytes, pause: float) -> Iterator[Engine]:
    """Sends the head, then one piece after the other as long as somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                link, _ = listener.accept()
                with link:
                    link.recv(1 << 16)
                    link.sendall(head)
                    while not over.wait(pause):
                        link.sendall(piece)

        over = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        yield Engine(listener.getsockname()[1])
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def ended(action: threading.Thread) -> bool:
    action.daemon = True
    action.start()
    action.join(_ENOUGH)
    return not action.is_alive()


@pytest.mark.parametrize(
    ("head", "piece"),
    [(_HEAD, b"x"), (b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"), (b"", b"H"),
     (b"", b"HTTP/1.1 100 Continue\r\n\r\n")],
    ids=["body", "headers", "status", "continue"],
)  # fmt: skip
def test_an_answer_that_drips(head: bytes, piece: bytes) -> None:
    answers = []
    with server(head, piece, 0.05) as engine:
        ask = threading.Thread(target=lambda: answers.append(engine.get("/health", timeout=1)))
        assert ended(ask), "it waits for ever"
    assert answers[0].status == 0
    assert answers[0].text


@pytest.mark.parametrize(
    ("piece", "pause", "why"),
    [
        (b'data: {"a": 1}\n\n', 0.05, "timed out"),
        (b'data: {"a": 1}\n\n' * 4096, 0.0, "more than"),
        (b": still here" * 4096 + b"\n", 0.0, "too long"),
        (b"x" * 65536, 0.0, "line without end"),
    ],
    ids=["slow", "many events", "long comments", "one line"],
)
def test_a_stream_without_end(piece: bytes, pause: float, why: str) -> None:
    said: list[str] = []

    def listen() -> None:
        try:
            for _ in engine.stream("/v1/completions", {}, timeout=2 if pause else 60):
                pass
        except EngineError as error:
            said.append(str(error))

    with server(_HEAD, piece, pause) as engine:
        assert ended(threading.Thread(target=listen)), "it listens for ever"
    assert why in said[0]


def test_a_body_without_end() -> None:
    answers = []
    with server(_HEAD, b"x" * 65536, 0.0) as engine:
        ask = threading.Thread(target=lambda: answers.append(engine.get("/metrics", timeout=60)))
        assert ended(ask), "it reads for ever"
    assert (answers[0].status, "longer than" in answers[0].text) == (0, True)


def test_what_takes_long_and_ends_in_time_is_an_answer() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    with server(head, b"x", 0.05) as engine:
        begun = time.monotonic()
        assert engine.get("/health", timeout=_ENOUGH).text == "xxxxx"
        assert time.monotonic() > begun


@pytest.mark.slow
def test_a_switch_to_an_engine_without_end_leads_back(lane_host: LaneHost) -> None:
    host = settle(lane_host, a={})
    host.lane("b", env={"STUB_ENDLESS": "1"}, gate={"seconds": 3})
    assert "gate fail: stream: " in rolled_back(host, "b")
    host.lane("b", env={"STUB_DRIP": "/health", "VLLM_ENGINE_READY_TIMEOUT_S": "2"},
              timeouts={"first_start": 3})  # fmt: skip
    assert "/health does not answer yet" in rolled_back(host, "b")


@pytest.mark.slow
def test_resume_says_that_the_front_does_not_obey(lane_host: LaneHost) -> None:
    host = settle(lane_host, a={})
    host.stop_front()
    said = host.run("lane", "resume")
    assert (said.status, "[front-down]" in said.err) == (69, True), said
    assert "gets no traffic" in said.err
    host.start_front()
    assert host.run("lane", "resume").status == 0
