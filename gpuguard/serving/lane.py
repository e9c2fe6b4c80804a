"""A lane: one engine with one model and one set of arguments, as its file declares it. No I/O.

A lane is known by its content: ``int4-3fa91c0b7d52`` is the name and the beginning of the SHA-256
of what the file says. Comments and the order of keys do not count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter

_STRICT = ConfigDict(extra="forbid")
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
NAME_RULE = "lower-case letters, digits and dashes, at most 31, no dash first"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"[a-z0-9][a-z0-9-]*(?:\.[A-Za-z0-9_-]+)*")
_SHORT = 12
_DIGITS = 12
DEFAULT_PORT = 18001
#: What the program itself passes: an own value would go round the front, or to another model.
RESERVED_ARGS = (
    "config",  # a file of more flags, which nobody would have looked at
    "host",
    "port",
    "model",
    "served-model-name",
    "uds",
    "api-server-count",
    "headless",
)

#: The policy about P2P, and a cache of each lane's own: an own value would win over gpuguard's.
POLICY_VARIABLE = "NCCL_P2P_DISABLE"
RESERVED_ENV = (POLICY_VARIABLE, "VLLM_CACHE_ROOT")
#: Each multiplies the cards that the engine takes.
_PARALLEL = (
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "prefill-context-parallel-size",
    "data-parallel-size",
)
#: Whole numbers from 1 on; vLLM's other forms of a length ("auto", "32k") are told apart.
_COUNTS = (*_PARALLEL, "block-size", "max-num-seqs")
_LENGTH = "max-model-len"
#: vLLM's human_readable_int: 25.6k is 25,600 and 32K is 32,768, which takes no fraction.
_LENGTHS = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,6}(?=[kmg]))?)(?P<unit>[kKmMgG])")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: Specifiers, variables, quotes, and the colon that parts the sides of a container's mount: each of
#: the files that are made from a lane would read them its own way.
_NO_PATH = re.compile(r"""[\s:%$"'\\\x00-\x1f]""")

ArgValue = str | int | float | bool | list[str | int | float] | dict[str, Any]


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("must be an absolute path")
    if (wrong := _NO_PATH.search(path)) is not None:
        raise ValueError(f"must not have {wrong[0]!r} in it: unit files read it otherwise")
    return path.rstrip("/") or "/"


def _name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"must be {NAME_RULE}")
    return name


def _p2p(value: object) -> object:
    # YAML 1.1 reads an unquoted off as False.
    return "none" if value in (False, "off") else value


def _env(values: object) -> object:
    if not isinstance(values, dict):
        return values
    return {
        key: str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        for key, value in values.items()
    }


def _variables(values: dict[str, str]) -> dict[str, str]:
    for key, value in values.items():
        if not _VARIABLE.fullmatch(key):
            raise ValueError(f"{key!r} is no name of a variable")
        if "\n" in value or "\0" in value:
            raise ValueError(f"{key}: must be one line")
    return values


def _flags(args: dict[str, ArgValue]) -> dict[str, ArgValue]:
    named: dict[str, ArgValue] = {}
    for key, value in args.items():
        flag = key.replace("_", "-").removeprefix("--")
        if flag in named:
            raise ValueError(f"{flag} is given twice")
        named[flag] = value
    for key, value in named.items():
        if not _FLAG.fullmatch(key):
            raise ValueError(f"{key!r} is no flag")
        if isinstance(value, str) and ("\n" in value or "\0" in value):
            raise ValueError(f"{key}: must be one line")
    return named


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Name = Annotated[str, AfterValidator(_name)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(min_length=3)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
P2p = Literal["required", "preferred", "none"]
ProofKind = Literal["bytes", "grant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A local change of the engine: what it is, why it is there, and when it can go."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    file: Text
    sha256: Sha256
    what: Text
    why: Text
    upstream: Text  # reference of a pull request or issue, or why there is none
    drop_when: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What runs: a container image by digest, or a virtual environment.

    ``user``: account of a venv engine. ``gpus``: ``none`` for an engine on the CPU.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    backend: Literal["venv", "quadlet", "compose"]
    image: Text | None = None
    venv: AbsolutePath | None = None
    user: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]*$")] = "vllm"
    gpus: Literal["all", "none"] = "all"
    patches: tuple[Patch, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a backend without what it needs."""
        if self.backend == "venv" and (self.venv is None or self.image is not None):
            raise ValueError("backend venv needs venv, and takes no image")
        if self.backend != "venv" and (self.image is None or self.venv is not None):
            raise ValueError(f"backend {self.backend} needs image, and takes no venv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The weights, and the name under which clients ask for them."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    path: AbsolutePath
    served_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")]
    manifest_sha256: Sha256 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requires:
    """What the host must be able to do.

    ``required``: no start without a proof of this boot. ``preferred``: without one it starts with
    P2P off. ``none``: P2P is off. ``proof``: what counts as one. ``bytes``: moved over every pair
    and through an all-reduce; ``grant``: the driver's word.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    p2p: Annotated[P2p, BeforeValidator(_p2p)] = "none"
    proof: ProofKind = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds. ``first_start``: nothing is compiled yet. ``drain``: for requests under way.

    ``no_progress``: how long the engine may say nothing after it has named NCCL. ``prove``: for
    moving bytes over the cards before a start, all of it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    first_start: Seconds = 1900.0
    start: Seconds = 900.0
    stop: Seconds = 150.0
    drain: Annotated[float, Field(ge=0, le=86400)] = 300.0
    no_progress: Seconds = 180.0
    memory: Annotated[float, Field(ge=0, le=3600)] = 60.0
    prove: Seconds = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """What the engine must report once it runs; None: not looked at."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kv_tokens: Annotated[int, Field(gt=0)] | None = None
    kv_tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.02
    version: str | None = None
    decode_tok_s_min: Annotated[float, Field(gt=0)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A prompt whose answer is known; ``expect`` is a regular expression found in the answer."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    prompt: Annotated[str, Field(min_length=1)]
    expect: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(gt=0, le=4096)] = 32

    def __post_init__(self) -> None:
        """Refuse what is no regular expression."""
        try:
            re.compile(self.expect)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What must be shown before traffic comes; ``seconds`` for all of it."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    profile: Literal["smoke"] = "smoke"
    on_fail: Literal["rollback"] = "rollback"
    seconds: Seconds = 180.0
    canary: tuple[Canary, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One lane file."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Name
    engine: Engine
    model: Model
    args: Annotated[dict[str, ArgValue], AfterValidator(_flags)] = field(default_factory=dict)
    env: Annotated[dict[str, str], BeforeValidator(_env), AfterValidator(_variables)] = field(
        default_factory=dict
    )
    port: Annotated[int, Field(ge=1024, le=65535)] = DEFAULT_PORT
    requires: Requires = field(default_factory=Requires)
    timeouts: Timeouts = field(default_factory=Timeouts)
    expect: Expect = field(default_factory=Expect)
    gate: Gate = field(default_factory=Gate)
    fallback: tuple[Name, ...] = ()
    kept_id: str | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def lane_id(self) -> str:
        """The name and the beginning of the content's SHA-256; of a kept one, as it was then."""
        return self.kept_id or f"{self.name}-{self.sha256[:_SHORT]}"

    @property
    def sha256(self) -> str:
        """Of the content, whatever order and comments the file has."""
        text = json.dumps(lane_document(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def unit(self) -> str:
        """``lane-int4.service``."""
        return unit_of(self.name)

    def number(self, flag: str) -> float | None:
        """A flag's value as a number; None: not given, or no number."""
        value = self.args.get(flag)
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return None
        return number if math.isfinite(number) else None

    @property
    def tensor_parallel(self) -> int:
        """Cards that one replica is spread over."""
        return max(1, int(self.number("tensor-parallel-size") or 1))

    @property
    def cards_needed(self) -> int:
        """Cards that all of it is spread over."""
        return math.prod(max(1, int(self.number(flag) or 1)) for flag in _PARALLEL)

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest request; None: the engine decides."""
        if match := _LENGTHS.fullmatch(str(self.args.get(_LENGTH))):
            return int(float(match["number"]) * _UNITS[match["unit"]])
        value = self.number(_LENGTH)
        return None if value is None else int(value)

    @property
    def wants_p2p(self) -> bool:
        """It has cards, and data is to go directly between them."""
        return self.engine.gpus == "all" and self.requires.p2p != "none"

    def start_seconds(self, *, first: bool) -> float:
        """How long a start may take; the first one of a lane compiles."""
        return self.timeouts.first_start if first else self.timeouts.start


def wrong_numbers(lane: Lane) -> Iterator[tuple[str, str]]:
    """Flag and what is wrong with its value, for those that are counts."""
    for flag in (*_COUNTS, _LENGTH, "shutdown-timeout"):
        value = lane.args.get(flag)
        least = 0 if flag == "shutdown-timeout" else 1
        text = str(value)
        if value is None or (flag == _LENGTH and (text == "auto" or _LENGTHS.fullmatch(text))):
            continue
        if isinstance(value, bool) or not text.isdecimal() or int(text[:18]) < least:
            yield flag, f"must be a whole number from {least} on, not {text[:40]}"
        elif len(text) > _DIGITS:
            yield flag, f"is too large: {text[:40]}"


def unit_of(name: str) -> str:
    """What systemd calls a lane."""
    return f"lane-{name}.service"


def lane_document(lane: Lane) -> dict[str, Any]:
    """A lane as plain values."""
    document: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(lane)))
    del document["kept_id"]
    return document


def lane_adapter() -> TypeAdapter[Lane]:
    """Turns plain values into a lane, and tells all that is wrong with them."""
    return TypeAdapter(Lane)


def arguments(lane: Lane) -> tuple[str, ...]:
    """The flags as words: ``true`` is the flag alone, ``false`` its ``--no-`` form."""
    words: list[str] = []
    for flag, value in lane.args.items():
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            words += [f"--{flag}", json.dumps(value, separators=(",", ":"), sort_keys=True)]
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return tuple(words)
