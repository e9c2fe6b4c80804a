"""Run make as the build user, keep its log, and say in one line why it failed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from gpuguard.build import cell, history
from gpuguard.build.disk import disk_full
from gpuguard.build.log import BuildLog
from gpuguard.build.progress import Progress
from gpuguard.build.staging import Staging
from gpuguard.errors import BuildError, CommandTimeoutError
from gpuguard.host import Host

_GRACE = 5.0  # for killing what make left behind, where it has no namespace of its own
_ALMOST = 0.99  # an estimate never says "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """make, for one build.

    ``jobs`` 0: one per CPU that this process may use. ``log_name`` is the log's path inside the
    host, for messages.
    """

    host: Host
    staging: Staging
    jobs: int
    timeout_seconds: float
    log: BuildLog
    log_name: str
    progress: Progress

    def run(self, step: str, what: str, *calls: tuple[str, ...]) -> float:
        """Run make once for each call, and remember how long it took.

        Args:
            step: name for estimates: core, modules.
            what: what fails when make fails: "compiling the modules for 6.1.0-50-amd64".
            *calls: arguments of each make, such as ``("-C", folder, "modules")``.

        Returns:
            Seconds.

        Raises:
            BuildError: ``build-failed`` with the first error, or ``build-timeout``.
            StateError: ``disk-full``.
        """
        expected = history.earlier(self.host, step)
        started, done = time.monotonic(), 0
        for arguments in calls:
            self._one(what, arguments, done, expected.lines if expected else 0)
            done += self.log.lines
        seconds = time.monotonic() - started
        history.remember(self.host, step, seconds, done)
        return seconds

    def _one(self, what: str, arguments: tuple[str, ...], done: int, expected: int) -> None:
        words = ("make", f"-j{self.jobs or len(os.sched_getaffinity(0))}", *arguments)
        self.log.section(" ".join(words))

        def on_line(text: str) -> None:
            self.log.line(text)
            lines = done + self.log.lines
            fraction = min(lines / expected, _ALMOST) if expected else None
            self.progress.tick(fraction, text.strip())

        user = self.staging.user
        walled = cell.words_before(self.host, user)
        try:
            answer = self.host.run(
                *walled, *words, timeout=self.timeout_seconds, env=self._environment(), ok=None,
                user=None if walled else user, grace=None if walled else _GRACE,
                on_line=on_line, cwd=self.staging.tree,
            )  # fmt: skip
        except CommandTimeoutError as error:
            raise BuildError(
                f"{what} took longer than {self.timeout_seconds:g} s and was stopped",
                hint=f"raise build.timeout_seconds; whole log: {self.log_name}",
                code="build-timeout", detail=self.log.tail,
            ) from error  # fmt: skip
        finally:
            cell.clear(user)  # what make made is not looked at while anybody can change it
        self._judge(what, answer.exit_status)

    def _judge(self, what: str, exit_status: int) -> None:
        if self.log.disk_full or (self.log.failure and exit_status == 0):
            raise disk_full(what)
        if exit_status == 0:
            return
        why = self.log.first_error or f"make exited with {exit_status}"
        raise BuildError(
            f"{what} failed: {why}", hint=f"whole log: {self.log_name}", detail=self.log.tail
        )

    def _environment(self) -> dict[str, str]:
        # IGNORE_CC_MISMATCH: conftest.sh reads it from the environment, see build.compiler
        return {
            "LC_ALL": "C",
            "HOME": str(self.staging.tmp),
            "TMPDIR": str(self.staging.tmp),
            "IGNORE_CC_MISMATCH": "1",
        }
