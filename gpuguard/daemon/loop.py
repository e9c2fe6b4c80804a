"""The daemon's loop: serve, observe on an interval and on change, tell systemd, obey signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from gpuguard.core.observation import Observation
from gpuguard.daemon.events import Event, changes, verdict_of
from gpuguard.daemon.http import Request, Response, Server
from gpuguard.daemon.looker import Looker, StoppableHost, failed_observation
from gpuguard.daemon.page import page
from gpuguard.daemon.style import POLICY
from gpuguard.daemon.tls import Passwords, can_check_passwords, server_context
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
from gpuguard.state import DEPMOD_DIR, RUN_DIR, STATE_DIR

_SETTLE_SECONDS = 2.0  # after the last change: a package tool changes many files
_APART_SECONDS = 5.0  # between two looks, however much changes
_STOP_SECONDS = 1.0
_OVERDUE = 3  # intervals
_OVERDUE_SECONDS = 30.0
_PAGE_HEADERS = (("Content-Security-Policy", POLICY), ("Referrer-Policy", "no-referrer"))
_WATCHED = (
    STATE_DIR, RUN_DIR, DEPMOD_DIR, "/boot", "/boot/grub", "/lib/modules", "/var/lib/dpkg",
    "/var/lib/apt/lists",
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
        self._tls: ssl.SSLContext | None = None
        self._tls_files: dict[str, Any] | None = None
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
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._render()
        listening = await self._start_server()
        self._warn_of_strangers()
        self._keep_watchdog()
        notify("READY=1", f"STATUS=listening on {self._listen}; observing for the first time")
        if self._watch.descriptor is not None:
            self._loop.add_reader(self._watch.descriptor, self._changed)
        self._cycle()
        await self._stop.wait()
        notify("STOPPING=1", "STATUS=stopping")
        listening.close()
        self._host.stop()
        if self._worker is not None:
            deadline = self._loop.time() + _STOP_SECONDS
            while self._worker.is_alive() and self._loop.time() < deadline:
                await asyncio.sleep(0.02)
        self._watch.close()

    @property
    def is_stuck(self) -> bool:
        """A look that cannot be ended is still under way."""
        return self._worker is not None and self._worker.is_alive()

    async def _start_server(self) -> asyncio.Server:
        address, _, port = str(self._listen).rpartition(":")
        try:
            return await self._server.start(address.strip("[]"), int(port), self._tls)
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
        if not is_local and self._server.check is None:
            without = "passwords" if self._tls is not None else "TLS and passwords"
            line = f"listening on {self._listen} for everybody, without {without}"
            self._log(Event(line, "warning", {"event": "listening-openly"}))

    # --- settings ------------------------------------------------------------------------

    def _apply(self, settings: dict[str, Any]) -> None:
        web = settings["web"] or {"tls": None, "users": {}}
        context = server_context(web["tls"]) if web["tls"] else None
        if web["users"] and not can_check_passwords():
            raise ConfigError(
                "basic_auth_users: this system's libcrypt cannot check bcrypt hashes",
                code="web-config-invalid",
                hint="install libcrypt1 (libxcrypt)",
            )
        passwords = Passwords(web["users"]) if web["users"] else None
        self._server.knows = passwords.knows if passwords else None
        self._server.check = passwords.check if passwords else None
        self._tls, self._tls_files = context, web["tls"]
        self._looker.config = settings["config"]
        self._health.interval = float(settings["interval"])
        self._health.config_ok, self._health.config_read = True, time.time()

    def _reload(self) -> None:
        notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        self._in_thread(lambda: self._looker.settings(self._config_file), self._reloaded)

    def _reloaded(self, settings: dict[str, Any] | None, error: Exception | None) -> None:
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
        self._render()
        self._cycle(changed=True)
        self._tell_status("READY=1")

    def _take_over(self, settings: dict[str, Any] | None, error: Exception | None) -> None:
        """Use new settings; what the listening socket was made with needs a restart."""
        if settings is None:
            raise error or ConfigError("no answer")
        web = settings["web"] or {"tls": None}
        for what, changed in (
            ("serve.listen", settings["listen"] != self._configured_listen),
            ("TLS", _without_files(web["tls"]) != _without_files(self._tls_files)),
        ):
            if changed:
                raise ConfigError(
                    f"{what} is changed by a restart only",
                    code="restart-needed",
                    hint="systemctl restart gpuguard",
                )
        running = self._tls
        self._apply(settings)
        if running is not None and self._tls_files is not None:
            # connections that come from now on get the new certificate
            running.load_cert_chain(self._tls_files["cert_file"], self._tls_files["key_file"])
            self._tls = running

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
        if found is None:
            found = failed_observation(time.time(), self._loop.time() - began, repr(error))
        self._publish(found)
        if self._loop.time() - began > self._overdue:
            self._cycle()  # what it says is old
        elif self._is_outdated:
            self._look_soon()

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
        shown = page(self._observation, verdict_of(self._observation))
        self._pages = {
            "/": Response(200, shown, "text/html; charset=utf-8", _PAGE_HEADERS),
            "/metrics": Response(200, prometheus_text(samples), TEXT_TYPE),
            "openmetrics": Response(200, openmetrics_text(samples), OPENMETRICS_TYPE),
            "/-/healthy": Response(200, b"healthy\n"),
            "/-/ready": Response(200, b"ready\n") if looked else Response(503, b"not looked yet\n"),
        }

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

    def _keep_watchdog(self) -> None:
        """Only this loop says that it is alive: a loop that hangs is to be restarted."""
        seconds = watchdog_seconds()
        if seconds is not None:
            notify("WATCHDOG=1")
            self._loop.call_later(seconds / 3, self._keep_watchdog)


def _without_files(tls: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a new certificate does not change."""
    if tls is None:
        return None
    return {key: tls[key] for key in tls if key not in ("cert_file", "key_file")}
