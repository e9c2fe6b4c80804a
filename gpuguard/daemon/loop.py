"""The daemon's loop: serve, observe on an interval and on change, tell systemd, obey signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from gpuguard.core.observation import Observation
from gpuguard.daemon.events import Event, changes, verdict_of
from gpuguard.daemon.http import Request, Response
from gpuguard.daemon.looker import (
    Looker,
    OtherVersionError,
    StoppableHost,
    failed_observation,
)
from gpuguard.daemon.page import page
from gpuguard.daemon.passwords import Passwords, can_check_passwords
from gpuguard.daemon.server import Server
from gpuguard.daemon.style import POLICY
from gpuguard.daemon.tls import identity, server_context
from gpuguard.daemon.watch import Watch
from gpuguard.errors import ConfigError, GpuguardError, PreflightError
from gpuguard.exporter.exposition import (
    OPENMETRICS_TYPE,
    TEXT_TYPE,
    openmetrics_text,
    prometheus_text,
)
from gpuguard.exporter.series import Health, all_samples, note_successes
from gpuguard.host.notify import journal, notify, watchdog_seconds
from gpuguard.state import DEPMOD_DIR, LANE_STATE_DIR, RUN_DIR, STATE_DIR

_SETTLE_SECONDS = 2.0  # after the last change: a package tool changes many files
_APART_SECONDS = 5.0  # between two looks, however much changes
_STOP_SECONDS = 1.0
_EXIT_SECONDS = 1.8  # after a signal the process is gone, whatever hangs
_KINDS = 32
_TRY_AGAIN = 75  # EX_TEMPFAIL: the unit has Restart=on-failure
_OVERDUE = 3  # intervals
_OVERDUE_SECONDS = 30.0
_NEEDS_CERTIFICATE = "RequireAndVerifyClientCert"
_PAGE_HEADERS = (("Content-Security-Policy", POLICY), ("Referrer-Policy", "no-referrer"))
_WATCHED = (
    STATE_DIR, LANE_STATE_DIR, RUN_DIR, DEPMOD_DIR, "/boot", "/boot/grub", "/lib/modules",
    "/var/lib/dpkg", "/var/lib/apt/lists",
)  # fmt: skip
"""Folders in which something happens when something is installed, built, held or proven."""


class Daemon:
    """One run of ``gpuguard serve``.

    Args:
        host: what to observe.
        config_file: inside the host.
        listen: instead of what the configuration says.
    """

    def __init__(self, host: StoppableHost, config_file: str, listen: str | None = None) -> None:
        self._host = host
        self._config_file = config_file
        self._listen = listen
        self._looker = Looker(host)
        self._health = Health()
        self._server = Server(self._answer)
        self._watch = Watch()
        self._observation: Observation | None = None
        self._told: Observation | None = None
        self._pages: dict[str, Response] = {}
        self._busy_since: float | None = None
        self._is_outdated = False  # something changed during the look under way
        self._looked_at = float("-inf")
        self._wanted: asyncio.TimerHandle | None = None
        self._worker: threading.Thread | None = None
        self._passwords = Passwords()
        self._tls: Mapping[str, Any] | None = None  # what the context was made from
        self._is_reloading = self._is_reload_wanted = False
        self.exit_status = 0
        self._reported: set[tuple[str, str]] = set()
        self._configured_listen = ""

    # --- start and end -------------------------------------------------------------------

    def run(self) -> None:
        """Serve until a signal ends it.

        Raises:
            ConfigError: the configuration cannot be used.
            PreflightError: it cannot be listened where it should.
        """
        settings = self._looker.settings(self._config_file)
        self._apply(settings)
        self._configured_listen = str(settings["listen"])
        if self._listen is None:
            self._listen = self._configured_listen
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signum, self._stop.set)
        self._loop.set_exception_handler(self._unexpected)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._render()
        await self._start_server()
        self._warn_of_strangers()
        self._keep_watchdog()
        notify("READY=1", f"STATUS=listening on {self._listen}; observing for the first time")
        if self._watch.descriptor is not None:
            self._loop.add_reader(self._watch.descriptor, self._changed)
        self._cycle()
        await self._stop.wait()
        notify("STOPPING=1", "STATUS=stopping")
        last = threading.Timer(_EXIT_SECONDS, os._exit, (self.exit_status,))
        last.daemon = True
        last.start()
        self._host.stop()
        await self._server.stop()
        self._passwords.close()
        if self._worker is not None:
            deadline = self._loop.time() + _STOP_SECONDS
            while self._worker.is_alive() and self._loop.time() < deadline:
                await asyncio.sleep(0.02)
        self._watch.close()

    async def _start_server(self) -> None:
        address, _, port = str(self._listen).rpartition(":")
        try:
            await self._server.start(address.strip("[]"), int(port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise PreflightError(
                f"cannot listen on {self._listen}: {reason}",
                code="cannot-listen",
                hint="another gpuguard? another exporter? choose serve.listen, or --listen",
            ) from error

    def _warn_of_strangers(self) -> None:
        address = str(self._listen).rpartition(":")[0].strip("[]")
        is_local = address in ("localhost", "::1") or address.startswith("127.")
        needs_certificate = (self._tls or {}).get("client_auth_type") == _NEEDS_CERTIFICATE
        if not is_local and self._server.guard is None and not needs_certificate:
            without = "passwords" if self._tls is not None else "TLS and passwords"
            line = f"listening on {self._listen} for everybody, without {without}"
            self._log(Event(line, "warning", {"event": "listening-openly"}))

    # --- settings ------------------------------------------------------------------------

    def _apply(self, settings: dict[str, Any]) -> None:
        web = settings["web"] or {"tls": None, "users": {}}
        tls = identity(web["tls"])
        context = server_context(web["tls"]) if tls != self._tls and tls is not None else None
        if web["users"] and not can_check_passwords():
            raise ConfigError(
                "basic_auth_users: this system's libcrypt cannot check bcrypt hashes",
                code="web-config-invalid",
                hint="install libcrypt1 (libxcrypt)",
            )
        self._passwords.use(web["users"])
        self._server.guard = self._passwords if web["users"] else None
        self._tls = tls
        if context is not None:
            self._server.use_tls(context)
        self._looker.config = settings["config"]
        self._health.interval = float(settings["interval"])
        self._health.config_ok, self._health.config_read = True, time.time()

    def _reload(self) -> None:
        if self._is_reloading:  # one at a time, and once more for all that came meanwhile
            self._is_reload_wanted = True
            return
        self._is_reloading, self._is_reload_wanted = True, False
        notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        self._in_thread(lambda: self._looker.settings(self._config_file), self._reloaded)

    def _reloaded(self, settings: dict[str, Any] | None, error: Exception | None) -> None:
        if self._gives_way(error):
            return
        try:
            self._take_over(settings, error)
        except (GpuguardError, OSError) as refused:
            self._health.config_ok = False
            detail = getattr(refused, "detail", "").replace("\n", "; ")
            more = f": {detail}" if detail else ""
            self._log(
                Event(
                    f"configuration refused, the old one stays: {refused}{more}",
                    "error",
                    {"event": "config-refused", "code": getattr(refused, "code", "")},
                )
            )
        else:
            self._log(Event("configuration read again", "notice", {"event": "config-reloaded"}))
            self._warn_of_strangers()
        self._render()
        self._cycle(changed=True)
        self._tell_status("READY=1")
        self._is_reloading = False
        if self._is_reload_wanted:
            self._reload()

    def _take_over(self, settings: dict[str, Any] | None, error: Exception | None) -> None:
        """Use new settings; what the listening socket was made with needs a restart."""
        if settings is None:
            raise error or ConfigError("no answer")
        has_tls = bool((settings["web"] or {"tls": None})["tls"])
        for what, changed in (
            ("serve.listen", settings["listen"] != self._configured_listen),
            ("whether there is TLS", has_tls != (self._tls is not None)),
        ):
            if changed:
                raise ConfigError(
                    f"{what} is changed by a restart only",
                    code="restart-needed",
                    hint="systemctl restart gpuguard",
                )
        self._apply(settings)

    # --- observing -----------------------------------------------------------------------

    def _cycle(self, *, changed: bool = False) -> None:
        """Look now, and again after the interval.

        While a look is under way none is begun; if something has changed meanwhile, one follows it.
        """
        if self._wanted is not None:
            self._wanted.cancel()
        self._wanted = self._loop.call_later(self._health.interval, self._cycle)
        self._watch.follow(self._host.path(folder) for folder in _WATCHED)
        if self._busy_since is not None:
            self._is_outdated = self._is_outdated or changed
            self._judge_overdue()
            return
        self._is_outdated = False
        self._busy_since = self._looked_at = self._loop.time()
        self._worker = self._in_thread(self._looker.look, self._observed)

    def _in_thread(
        self, work: Callable[[], Any], then: Callable[[Any, Exception | None], None]
    ) -> threading.Thread:
        def run() -> None:
            result, failure = None, None
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - reported by whom it is handed to
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(then, result, failure)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _observed(self, found: Observation | None, error: Exception | None) -> None:
        began = self._busy_since or 0.0
        self._busy_since = None
        if self._gives_way(error):
            return
        if found is None:
            found = failed_observation(time.time(), self._loop.time() - began, repr(error))
        self._publish(found)
        if self._loop.time() - began > self._overdue:
            self._cycle()  # what it says is old
        elif self._is_outdated:
            self._look_soon()

    def _gives_way(self, error: Exception | None) -> bool:
        """End, to be started as what is installed now: this process cannot read its answers."""
        if not isinstance(error, OtherVersionError):
            return False
        self._log(Event(str(error), "notice", {"event": "other-version"}))
        self.exit_status = _TRY_AGAIN
        self._stop.set()
        return True

    @property
    def _overdue(self) -> float:
        return max(_OVERDUE * self._health.interval, _OVERDUE_SECONDS)

    def _judge_overdue(self) -> None:
        waited = self._loop.time() - (self._busy_since or 0.0)
        if waited > self._overdue:
            problem = f"a look at the host has been under way for {waited:.0f} s"
            self._publish(failed_observation(time.time(), waited, problem))

    def _publish(self, found: Observation) -> None:
        for event in changes(self._observation, found, self._told):
            self._log(event)
        self._observation = found
        if found.status:
            self._told = found
        note_successes(self._health, found)
        self._render()
        self._tell_status()

    def _changed(self) -> None:
        """Something was written: look once it is quiet."""
        if self._watch.has_news():
            self._look_soon()

    def _look_soon(self) -> None:
        settled = self._loop.time() + _SETTLE_SECONDS
        if self._wanted is not None:
            if self._wanted.when() < settled:
                return
            self._wanted.cancel()
        at = max(settled, self._looked_at + _APART_SECONDS)
        self._wanted = self._loop.call_at(at, lambda: self._cycle(changed=True))

    # --- what others see -----------------------------------------------------------------

    def _render(self) -> None:
        samples = tuple(all_samples(self._observation, self._health))
        looked = self._observation is not None
        self._pages = {
            "/metrics": Response(200, prometheus_text(samples), TEXT_TYPE),
            "openmetrics": Response(200, openmetrics_text(samples), OPENMETRICS_TYPE),
            "/-/healthy": Response(200, b"healthy\n"),
            "/-/ready": Response(200, b"ready\n") if looked else Response(503, b"not looked yet\n"),
        }
        try:  # after what alerts are made from, which must not wait for it
            shown = page(self._observation, verdict_of(self._observation))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the rest is not
            self._loop.call_exception_handler(
                {"message": "the page cannot be drawn", "exception": error}
            )
            self._pages["/"] = Response(
                500, b"The page cannot be drawn; see /metrics, and the log.\n"
            )
        else:
            self._pages["/"] = Response(200, shown, "text/html; charset=utf-8", _PAGE_HEADERS)

    def _answer(self, request: Request) -> Response:
        path = request.path
        if path == "/metrics" and "application/openmetrics-text" in request.headers.get(
            "accept", ""
        ):
            path = "openmetrics"
        elif not path.startswith("/"):
            return Response(404, b"Not Found\n")
        return self._pages.get(path) or Response(404, b"Not Found\n")

    def _log(self, event: Event) -> None:
        journal(event.message, priority=event.priority, **event.fields)

    def _tell_status(self, *more: str) -> None:
        notify(*more, f"STATUS={verdict_of(self._observation)}; listening on {self._listen}")

    def _unexpected(self, _: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Errors that nobody awaits: one line for each kind, however often they come."""
        error = context.get("exception")
        kind = (str(context["message"]), repr(error))
        if kind not in self._reported and len(self._reported) < _KINDS:
            self._reported.add(kind)
            line = f"{kind[0]}: {kind[1]}; said once"
            self._log(Event(line, "error", {"event": "daemon-error"}))

    def _keep_watchdog(self) -> None:
        """Only this loop says that it is alive: a loop that hangs is to be restarted."""
        seconds = watchdog_seconds()
        if seconds is not None:
            notify("WATCHDOG=1")
            self._loop.call_later(seconds / 3, self._keep_watchdog)
