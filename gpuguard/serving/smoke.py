"""The smoke gate: does the lane answer, and is it no nonsense? Minutes, not an hour.

Each part says pass, fail or inconclusive. One that fails fails the gate; inconclusive is not
good enough to be given traffic. What the words of an answer are worth is only judged by canaries of
the lane file, and by signs of broken arithmetic: one character without end, no number at all.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gpuguard.serving.engine import Answer, Engine, EngineError
from gpuguard.serving.lane import Canary, Lane

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
_OK = 200
#: Somebody else's load, or a request that does not fit: says nothing about the lane.
_NOT_APPLICABLE = frozenset({400, 404, 408, 413, 422, 429, 503})
_PROMPT = "Count from one to ten: one, two, three,"
_TOKENS = 24
_DEGENERATE = 12  # equal characters and nothing else
_SPEED_TOKENS = 64
_LONGEST_REQUEST = 120.0
_STEADY = 2  # the first token waits for the prompt; between these it is decoding


@dataclass(frozen=True, slots=True)
class Part:
    """One question and its answer."""

    name: str
    verdict: str
    detail: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GateResult:
    """All parts."""

    parts: tuple[Part, ...]

    @property
    def verdict(self) -> str:
        """Fail outranks inconclusive, which outranks pass; no part at all is inconclusive."""
        verdicts = {part.verdict for part in self.parts}
        if FAIL in verdicts:
            return FAIL
        return PASS if verdicts == {PASS} else INCONCLUSIVE

    @property
    def why(self) -> str:
        """The parts that did not pass."""
        bad = [part for part in self.parts if part.verdict != PASS]
        return "; ".join(f"{part.name}: {part.detail}" for part in bad) or "nothing was asked"

    def document(self) -> dict[str, Any]:
        """As plain values."""
        return {"verdict": self.verdict, "parts": [asdict(part) for part in self.parts]}


def run_smoke(lane: Lane, engine: Engine) -> GateResult:
    """Ask everything, as long as time is left."""
    deadline = time.monotonic() + lane.gate.seconds
    parts = []
    for name, question in _questions(lane, engine):
        left = deadline - time.monotonic()
        if left <= 0:
            parts.append(Part(name, INCONCLUSIVE, f"no time left of {lane.gate.seconds:g} s"))
            continue
        begun = time.monotonic()
        verdict, detail = question(min(left, _LONGEST_REQUEST))
        parts.append(Part(name, verdict, detail, round(time.monotonic() - begun, 2)))
    return GateResult(tuple(parts))


_Verdict = tuple[str, str]


def _questions(lane: Lane, engine: Engine) -> Iterator[tuple[str, Callable[[float], _Verdict]]]:
    yield "completion", lambda left: _completion(lane, engine, left)
    yield "logprobs", lambda left: _logprobs(lane, engine, left)
    yield "stream", lambda left: _stream(lane, engine, left)
    for number, canary in enumerate(lane.gate.canary, 1):
        yield f"canary {number}", lambda left, c=canary: _canary(lane, engine, c, left)  # type: ignore[misc]
    if lane.expect.decode_tok_s_min is not None:
        yield "speed", lambda left: _speed(lane, engine, left)


def _ask(lane: Lane, engine: Engine, left: float, **body: Any) -> Answer:
    known = {"model": lane.model.served_name, "temperature": 0, "max_tokens": _TOKENS}
    return engine.post("/v1/completions", {**known, **body}, timeout=left)


def _not_answered(answer: Answer) -> _Verdict | None:
    if answer.status == _OK:
        return None
    if answer.status == 0:
        return FAIL, f"no answer: {answer.text}"
    return _of_status(answer.status), f"HTTP {answer.status}: {answer.text[:200]}"


def _of_status(status: int) -> str:
    return INCONCLUSIVE if status in _NOT_APPLICABLE else FAIL


def _choice(answer: Answer) -> dict[str, Any]:
    document = answer.document
    choices = document.get("choices") if isinstance(document, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def _completion(lane: Lane, engine: Engine, left: float) -> _Verdict:
    answer = _ask(lane, engine, left, prompt=_PROMPT, ignore_eos=True)
    if (problem := _not_answered(answer)) is not None:
        return problem
    text = _choice(answer).get("text")
    document = answer.document
    usage = document.get("usage") if isinstance(document, dict) else None
    made = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(text, str) or not isinstance(made, int):
        return FAIL, "the answer has no text, or does not count its tokens"
    if made != _TOKENS:
        return FAIL, f"{made} tokens came, {_TOKENS} were asked for"
    if is_degenerate(text):
        return FAIL, f"one character without end ({text.strip()[:8]}…): broken arithmetic"
    return PASS, f"{made} tokens"


def is_degenerate(text: str) -> bool:
    """``!!!!!!!!!!!!``: the sign of garbage from an all-reduce (CASES C53)."""
    bare = "".join(text.split())
    # U+FFFD stands for half a character: a model of bytes may well send many
    return len(bare) >= _DEGENERATE and len(set(bare)) == 1 and bare[0] != "\ufffd"


def _logprobs(lane: Lane, engine: Engine, left: float) -> _Verdict:
    answer = _ask(lane, engine, left, prompt=_PROMPT, max_tokens=1, prompt_logprobs=1)
    if (problem := _not_answered(answer)) is not None:
        return problem
    values = list(_numbers(_choice(answer).get("prompt_logprobs")))
    if not values:
        return INCONCLUSIVE, "it gives no probabilities of the prompt"
    if not all(math.isfinite(value) for value in values):
        return FAIL, "probabilities of the prompt are no numbers"
    if len(set(values)) == 1 and len(values) > 1:
        return FAIL, "every token of the prompt is equally probable: broken arithmetic"
    return PASS, f"mean {sum(values) / len(values):.3f} over {len(values)} values"


def _numbers(entries: object) -> Iterator[float]:
    for entry in entries if isinstance(entries, list) else []:
        for token in entry.values() if isinstance(entry, dict) else []:
            value = token.get("logprob") if isinstance(token, dict) else None
            if isinstance(value, int | float):
                yield float(value)


def _stream(lane: Lane, engine: Engine, left: float) -> _Verdict:
    made = None
    try:
        for event in _events(lane, engine, left, _TOKENS):
            usage = event.get("usage")
            made = usage.get("completion_tokens") if isinstance(usage, dict) else made
    except EngineError as error:
        return _of_status(error.status), f"streaming: {error}"
    if made != _TOKENS:
        return FAIL, f"the stream counts {made} tokens, {_TOKENS} were asked for"
    return PASS, f"{made} tokens"


def _events(lane: Lane, engine: Engine, left: float, tokens: int) -> Iterator[dict[str, Any]]:
    body = {
        "model": lane.model.served_name,
        "prompt": _PROMPT,
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    return engine.stream("/v1/completions", body, timeout=left)


def _canary(lane: Lane, engine: Engine, canary: Canary, left: float) -> _Verdict:
    answer = _ask(lane, engine, left, prompt=canary.prompt, max_tokens=canary.max_tokens)
    if (problem := _not_answered(answer)) is not None:
        return problem
    text = _choice(answer).get("text")
    if not isinstance(text, str):
        return FAIL, "the answer has no text"
    if re.search(canary.expect, text) is None:
        return FAIL, f"answered {text[:60]!r}, expected /{canary.expect}/"
    return PASS, f"answered {text[:30]!r}"


def _speed(lane: Lane, engine: Engine, left: float) -> _Verdict:
    floor = lane.expect.decode_tok_s_min or 0.0
    times: list[float] = []
    made: int | None = None
    try:
        for event in _events(lane, engine, left, _SPEED_TOKENS):
            if event.get("choices"):
                times.append(time.monotonic())
            usage = event.get("usage")
            made = usage.get("completion_tokens") if isinstance(usage, dict) else made
    except EngineError as error:
        return _of_status(error.status), f"streaming: {error}"
    if len(times) <= _STEADY or times[-1] <= times[1] or not isinstance(made, int):
        return INCONCLUSIVE, f"{len(times)} pieces came: nothing to measure"
    # a piece may have several tokens: drafted ones, or what a slow reader finds waiting
    rate = made / len(times) * (len(times) - _STEADY) / (times[-1] - times[1])
    verdict = PASS if rate >= floor else FAIL
    return verdict, f"{rate:.1f} tokens a second, at least {floor:g} are expected"
