"""Lanes of a real vLLM on the CPU, and the stub held against it. Opt-in: ``make test-vllm``.

About ten minutes on two cores, once ``tools/make-vllm.sh`` has made the environment (3.5 GB).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuguard.serving.engine import Answer, Engine, EngineError
from gpuguard.serving.reading import parse_load, pool_tokens
from tests.kit import cache_folder
from tests.lanekit import LaneHost, made, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
FOLDER = cache_folder() / "vllm"
GOLDEN = Path(__file__).parent / "golden/vllm-0.32.0-metrics.txt"
#: What the log of a start must have, in this order, of the real one and of the stub.
LOG = (
    r"\(APIServer pid=\d+\) INFO .*version 0\.32\.0",
    r"\(APIServer pid=\d+\) INFO .*Using max model len 2048",
    r"\(EngineCore pid=\d+\) INFO .*Initializing a V1 LLM engine \(v0\.32\.0\)",
    r"\(\w+ pid=\d+\) INFO .*Loading weights took [\d.]+ seconds",
    r"\(EngineCore pid=\d+\) INFO .*CPU KV cache size: [\d,]+ tokens, Maximum concurrency for",
    r"2,048 tokens per request: [\d.]+x",
    r"init engine \(profile, create kv cache, warmup model\) took [\d.]+ s",
    r"Starting vLLM server on http://127\.0\.0\.1:\d+",
    r"INFO:     Started server process \[\d+\]",
    r"INFO:     Waiting for application startup\.",
    r"INFO:     Application startup complete\.",
)
_START = 400


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaneHost]:
    if os.environ.get("GPUGUARD_REAL_VLLM") != "1":
        pytest.skip("opt-in, ten minutes and 3.5 GB: make test-vllm")
    if not (FOLDER / "tiny/config.json").exists():
        pytest.skip("the CPU build of vLLM is not there: tools/make-vllm.sh")
    if os.geteuid() != 0:
        pytest.skip("needs root for a mount namespace: run as root")
    with made(tmp_path_factory.mktemp("vllm") / "host") as machine:
        real_lane(machine, "a")
        real_lane(machine, "b", args={"max-num-seqs": 8}, expect={"kv_tokens": 8388608},
                  env={"VLLM_CPU_KVCACHE_SPACE": "2"})  # fmt: skip
        machine.lane("stub", env={"STUB_KV_TOKENS": "4194304"})
        machine.start_front()
        yield machine


def real_lane(host: LaneHost, name: str, **changes: Any) -> None:
    known: dict[str, Any] = {
        "engine": {"venv": str(FOLDER / "venv")},
        "model": {"path": str(FOLDER / "tiny")},
        "args": {"dtype": "bfloat16", "enforce-eager": True, "shutdown-timeout": 20},
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENGINE_READY_TIMEOUT_S": _START - 20},
        "timeouts": {"first_start": _START, "start": _START, "stop": 40, "drain": 60},
    }
    for key, value in changes.items():
        known[key] = {**known[key], **value} if key in known else value
    host.lane(name, **known)


def log_of(host: LaneHost, name: str) -> str:
    invocation = host.unit(f"lane-{name}.service")["InvocationID"]
    return host.path(f"/var/log/standin-systemd/{invocation}.log").read_text(errors="replace")


def families(metrics: str) -> set[str]:
    """``name type labels``, as the golden file has them."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", metrics, re.MULTILINE):
        labels = set()
        pattern = rf"^{re.escape(name)}(?:_bucket|_count|_sum)?(?:\{{([^\n]*)\}})? "
        for match in re.finditer(pattern, metrics, re.MULTILINE):
            labels |= set(re.findall(r'(\w+)="', match[1] or ""))
        found.add(f"{name} {kind} {','.join(sorted(labels - {'le'})) or '-'}")
    return found


def shape(value: Any) -> Any:
    """Keys and kinds of a document."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def conversation(host: LaneHost) -> dict[str, Any]:
    """What both must answer alike: status, and the part of the answer that gpuguard reads."""
    engine = Engine(host.port)

    def ask(**body: Any) -> Answer:
        known = {"model": "tiny", "prompt": "Count", "max_tokens": 4, "temperature": 0}
        return engine.post("/v1/completions", {**known, "ignore_eos": True, **body}, timeout=60)

    plain = ask()
    probabilities = ask(max_tokens=1, prompt_logprobs=1).document["choices"][0]["prompt_logprobs"]
    body = {"model": "tiny", "prompt": "x", "max_tokens": 5, "ignore_eos": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    events = list(engine.stream("/v1/completions", body, timeout=60))
    (entry,) = engine.get("/v1/models").document["data"]
    tokens = engine.post("/tokenize", {"model": "tiny", "prompt": "abc"}).document
    with pytest.raises(EngineError) as refused:
        list(engine.stream("/v1/completions", {**body, "model": "nope"}, timeout=60))
    return {
        "health": engine.get("/health").status,
        "ping": engine.get("/ping").status,
        "version": engine.get("/version").document,
        "model": {key: entry[key] for key in ("id", "object", "owned_by", "max_model_len")},
        "usage": {key: plain.document["usage"][key] for key in ("completion_tokens",)},
        "choice": shape({k: plain.document["choices"][0][k] for k in ("index", "text")}),
        "finish": plain.document["choices"][0]["finish_reason"],
        "first probability": probabilities[0],
        "probabilities": {
            type(t["logprob"]).__name__ for p in probabilities[1:] for t in p.values()
        },
        "stream usage": events[-1]["usage"]["completion_tokens"],
        "unknown model": (ask(model="nope").status, refused.value.status),
        "too long": ask(prompt="x" * 5000).status,
        "too long, where": ask(prompt="x" * 5000).document["error"]["param"],
        "tokenize": {key: tokens[key] for key in ("count", "max_model_len")},
        "no such page": engine.get("/server_info").status,
    }


@pytest.fixture(scope="module")
def real(host: LaneHost) -> dict[str, Any]:
    """Lane a, started for the first time, and all that the contract is about."""
    done = host.switch("a")
    assert (done["status"], done["outcome"]) == (0, "promoted"), done
    said = conversation(host)  # first: metrics of requests are there once there were some
    metrics = Engine(host.port).get("/metrics").text
    return {"done": done, "metrics": metrics, "log": log_of(host, "a"), "said": said}


def test_stub_and_real_server_are_alike(host: LaneHost, real: dict[str, Any]) -> None:
    golden = set(GOLDEN.read_text().splitlines())
    if os.environ.get("GPUGUARD_WRITE_GOLDEN"):
        GOLDEN.write_text("\n".join(sorted(families(real["metrics"]))) + "\n")
        golden = families(real["metrics"])
    assert sorted(families(real["metrics"])) == sorted(golden)
    assert host.switch("stub")["outcome"] == "promoted"
    assert conversation(host) == real["said"]
    metrics, log = Engine(host.port).get("/metrics").text, log_of(host, "stub")
    assert sorted(families(metrics)) == sorted(golden)
    for text in (real["log"], log):
        assert re.search(".*".join(LOG), text, re.DOTALL), text
    sizes = {pool_tokens(m, t.splitlines()) for m, t in ((real["metrics"], real["log"]),
                                                        (metrics, log))}  # fmt: skip
    assert sizes == {4194304}
    assert pool_tokens("", real["log"].splitlines()) == 4194304  # the log says the same
    assert parse_load(real["metrics"]).is_idle
    assert parse_load(metrics).is_idle


def test_forward_and_back(host: LaneHost, real: dict[str, Any]) -> None:
    forward = host.switch("b")
    assert (forward["outcome"], forward["kv_tokens"]) == ("promoted", 8388608), forward
    back = host.json("lane", "switch", "a")
    assert (back["outcome"], host.front(), host.serving()) == ("promoted", 200, host.lane_id("a"))
    assert back["starts"][0]["first"] is False
    again = host.json("lane", "rollback")
    assert (again["outcome"], host.serving()) == ("promoted", host.lane_id("b")), again


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"args": {"dtype": "nonsense"}}, "argument --dtype: invalid choice"),
        ({"gate": {"canary": [{"prompt": "The capital of France is", "expect": "Paris"}]}},
         "gate fail: canary 1: answered"),
        ({"expect": {"kv_tokens": 1000000}}, "1000000 are expected"),
    ],
    ids=["cannot-start", "wrong-answers", "kv-pool"],
)  # fmt: skip
def test_a_lane_that_is_not_good(
    host: LaneHost, real: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    before = host.serving()
    real_lane(host, "c", **changes)
    done = host.switch("c")
    assert (done["outcome"], host.serving(), host.front()) == ("rolled-back", before, 200), done
    assert why in done["reasons"][0]


def test_an_engine_killed_leaves_with_status_0_and_comes_back(
    host: LaneHost, real: dict[str, Any]
) -> None:
    name = f"lane-{(host.serving() or '').rpartition('-')[0]}.service"
    before = host.unit(name)
    found = host.command("pgrep", "-P", str(before["MainPID"]), "-f", "EngineCore|multiprocessing")
    names = host.command("ps", "-o", "pid=,comm=", "--ppid", str(before["MainPID"])).stdout
    engine = next((line.split()[0] for line in names.splitlines() if "EngineCor" in line),
                  found.stdout.split()[0])  # fmt: skip
    host.command("kill", "-9", engine)
    wait_for(lambda: host.unit(name).get("NRestarts", 0) == 1, "systemd starts it again", 120)
    wait_for(lambda: host.front() == 200, "it is back", _START)
    assert host.unit(name)["MainPID"] != before["MainPID"]


def test_a_request_in_flight_is_finished_before_the_switch(
    host: LaneHost, real: dict[str, Any]
) -> None:
    answers: list[Answer] = []
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1500, "ignore_eos": True}
    client = threading.Thread(
        target=lambda: answers.append(
            Engine(host.front_port).post("/v1/completions", body, timeout=120)
        )
    )
    client.start()
    engine = Engine(host.port)
    wait_for(lambda: parse_load(engine.get("/metrics").text).running == 1, "the request", 60)
    assert host.switch("stub")["outcome"] == "promoted"
    client.join()
    assert [(a.status, a.document["usage"]["completion_tokens"]) for a in answers] == [(200, 1500)]


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ("looking at what", {"stub"}),
        ("keeping the state", {"stub"}),
        ("no new requests", {"stub", "a"}),  # seconds at most: it may be one step further by then
        ("stopping what runs", {"stub", "a"}),
        ("starting a-", {"a"}),
        ("waiting for a-", {"a"}),
        ("is it what its file says", {"a"}),
        ("gate", {"a"}),
        ("traffic goes to a-", {"a"}),
    ],
)
def test_kill_9_in_each_step_of_a_switch_to_a_real_engine(
    host: LaneHost, real: dict[str, Any], said: str, ends: set[str]
) -> None:
    if host.serving() != host.lane_id("stub"):
        assert host.switch("stub")["outcome"] == "promoted"
    run = host.start("lane", "switch", "a")
    run.says(said, _START)
    run.kill()
    assert run.wait().status == -9
    assert host.run("lane", "resume").status in (0, 69)  # 69: refused, the old one goes on
    wait_for(lambda: host.front() == 200, "a lane", _START)
    serving = host.serving() or ""
    assert serving.rpartition("-")[0] in ends
    assert host.state("switch") is None
    assert host.history()[-1]["serving"] == serving
