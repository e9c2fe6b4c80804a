"""What verbs of ``gpuguard lane`` need before they act: a live system, the lock, a listener."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import typer

from gpuguard.accepted import read_accepted
from gpuguard.cli.context import Context
from gpuguard.cli.render import shown
from gpuguard.config import Config, LanesConfig
from gpuguard.config_file import read_config
from gpuguard.errors import ConfigError, ProbeError, StateError, UsageError
from gpuguard.host import Host
from gpuguard.serving import store
from gpuguard.serving.history import duration_text
from gpuguard.serving.lanes import Intent, Lanes, Listener
from gpuguard.serving.machine import Role, Step, Switch
from gpuguard.serving.proving import Prover
from gpuguard.serving.steps import Settings
from gpuguard.serving.store import exclusive
from gpuguard.verbs.expected import expectation_of
from gpuguard.verbs.setup import find_program

_SAY_AGAIN_SECONDS = 30.0  # without a terminal: a log must not have a line for every look
_WORDS = {
    Step.PREFLIGHT: "looking at what {target} needs",
    Step.SNAPSHOT: "keeping the state as it is now",
    Step.DRAIN: "{old} gets no new requests",
    Step.STOP: "stopping what runs",
    Step.START: "starting {target}",
    Step.READY: "waiting for {target}",
    Step.IDENTITY: "is it what its file says",
    Step.GATE: "asking {target} what is known",
    Step.PROMOTE: "traffic goes to {target}",
    Step.UNDRAIN: "traffic goes back to {old}",
    Step.HALT: "stopping everything",
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A lane by name; None: the one before."""

    name: str | None

    def intend(self, lanes: Lanes) -> Intent:
        """What that means."""
        if self.name is None:
            return lanes.intend_rollback()
        return lanes.intend_switch(self.name)


def require_live(context: Context) -> None:
    """Refuse a tree: systemd runs on the machine at hand.

    Raises:
        UsageError: ``--root`` was given.
    """
    if not context.host.is_live:
        raise UsageError(
            f"lanes of {context.host.root} cannot be started from here: no systemd runs there",
            hint="leave --root out; lane list, show, validate and history work with it",
        )


def lanes_config(context: Context) -> LanesConfig:
    """The section of the configuration; its defaults where there is none."""
    config = read_config(context.host, context.config_file)
    return LanesConfig() if config is None else config.lanes


def _lanes_config_or_default(context: Context) -> LanesConfig:
    """A broken configuration must not keep anybody from going back to a lane that works."""
    try:
        return lanes_config(context)
    except ConfigError as error:
        typer.echo(f"gpuguard: {error.message}; lanes go on with defaults", err=True)
        return LanesConfig()


def lanes_of(context: Context) -> Lanes:
    """The use cases, with somebody who tells a person."""
    config = _lanes_config_or_default(context)
    talker = _Talker(context.host, is_quiet=context.json)
    listener = Listener(talker.step, talker.progress)
    settings = Settings(retry_after=config.retry_after_seconds, prover=prover_of(context))
    return Lanes(context.host, lambda: (find_program(context.host),), settings, listener)


def prover_of(context: Context) -> Prover:
    """Who moves bytes between the cards, where a lane wants that and nobody has."""

    def missing() -> str | None:
        from gpuguard.deep.tools import missing_tools

        return missing_tools(context.host)

    def prove(seconds: float, progress: Callable[[str], None]) -> str | None:
        from gpuguard.verbs.prove import prove_bytes

        try:
            expected = expectation_of(_config_or_none(context), read_accepted(context.host))
        except (ProbeError, StateError) as error:
            return error.message
        return prove_bytes(context.host, expected, seconds, progress)

    return Prover(missing, prove)


def _config_or_none(context: Context) -> Config | None:
    with suppress(ConfigError):  # then every pair of cards has to be right
        return read_config(context.host, context.config_file)
    return None


def intended(context: Context, chosen: Chosen) -> Intent:
    """What a switch would do, and all that is in its way."""
    lanes = lanes_of(context)
    return lanes.look(chosen.intend(lanes))


@contextmanager
def changing_lanes(context: Context, *, wait: bool = False) -> Iterator[Lanes]:
    """Hold the lock of the lanes; ``wait`` for the end of a switch that is under way.

    Raises:
        LockHeldError: another switch is under way, and it was not to be waited for.
    """
    lanes = lanes_of(context)
    with exclusive(context.host, wait=wait):
        context.output.has_acted = True
        yield lanes


class _Talker:
    """One line for each step, on stderr; progress within a step on a terminal, else seldom."""

    def __init__(self, host: Host, *, is_quiet: bool) -> None:
        self._host = host
        self._is_quiet = is_quiet
        self._is_terminal = sys.stderr.isatty()
        self._last = ""
        self._said = time.monotonic()

    def step(self, switch: Switch, expected: float | None) -> None:
        if self._is_quiet:
            return
        text = _WORDS.get(switch.step, switch.step.value)
        if switch.step is Step.DRAIN and switch.old is None:
            text = "the front takes no new requests; no lane is active"
        text = text.format(target=switch.target, old=switch.old or "nobody")
        if switch.step is Step.READY:
            text = f"{text} ({self._guess(switch, expected)})"
        if switch.step is Step.STOP and switch.role is not Role.NEW:
            text = f"{switch.reasons[-1] if switch.reasons else 'failed'}; next: {switch.target}"
        typer.echo(f"{switch.step.value:<9} {shown(text)}", err=True)
        self._said = time.monotonic()

    def _guess(self, switch: Switch, expected: float | None) -> str:
        guess = f"about {duration_text(expected)}" if expected else "no earlier start is known"
        with suppress(StateError, ProbeError):  # the switch itself says what cannot be read
            lane = store.read_release(self._host, switch.target).lane
            limit = lane.start_seconds(first=not store.is_warm(self._host, switch.target))
            return f"{guess}, at most {limit:g} s"
        return guess

    def progress(self, text: str) -> None:
        if self._is_quiet or text == self._last:
            return
        is_due = time.monotonic() - self._said >= _SAY_AGAIN_SECONDS
        if self._is_terminal or is_due:
            self._last, self._said = text, time.monotonic()
            typer.echo(f"{'':<9} {shown(text)}", err=True)
