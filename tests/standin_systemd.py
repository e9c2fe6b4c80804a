"""A stand-in for systemd, for tests on machines where it is not PID 1: ``systemctl`` and
``journalctl`` for services that really run.

Reads unit files and drop-ins, keeps what it has loaded until ``daemon-reload``, runs ExecStartPre
and ExecStart with Environment and EnvironmentFile, restarts, escalates to SIGKILL, keeps logs by
invocation. One supervising process for each unit. What a unit says beyond that is ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

UNITS = Path("/etc/systemd/system")
STATE = Path("/run/standin-systemd")
LOGS = Path("/var/log/standin-systemd")
Settings = list[tuple[str, str]]


def parse(text: str) -> Settings:
    """``key=value`` of every section, lines that end in a backslash joined."""
    joined = re.sub(r"\\\n", " ", text)
    lines = [line.strip() for line in joined.split("\n")]
    return [
        (key.strip(), value.strip())
        for key, sign, value in (line.partition("=") for line in lines)
        if sign and not key.startswith(("#", ";"))
    ]


def read_unit(name: str) -> str | None:
    file = UNITS / name
    if not file.exists():
        return None
    parts = [file, *sorted((UNITS / f"{name}.d").glob("*.conf"))]
    return "\n".join(part.read_text() for part in parts)


def loaded(name: str) -> str | None:
    """What was read when the unit was first asked for, or at the last daemon-reload."""
    copy = STATE / "loaded" / name
    if not copy.exists():
        text = read_unit(name)
        if text is None:
            return None
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    return copy.read_text()


def first(settings: Settings, key: str, default: str = "") -> str:
    return next((value for known, value in reversed(settings) if known == key), default)


def state_of(name: str) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((STATE / f"{name}.json").read_text())
    except (FileNotFoundError, ValueError):
        return {"ActiveState": "inactive", "SubState": "dead", "Result": "success"}
    if state["ActiveState"] not in ("inactive", "failed") and not is_alive(state["supervisor"]):
        state |= {"ActiveState": "inactive", "SubState": "dead", "MainPID": 0}
    return state


def is_alive(pid: int) -> bool:
    try:
        return b"systemctl" in Path(f"/proc/{pid}/cmdline").read_bytes()  # a number comes again
    except OSError:
        return False


def save(name: str, **values: Any) -> None:
    STATE.mkdir(parents=True, exist_ok=True)
    new = STATE / f".{name}.{os.getpid()}"
    new.write_text(json.dumps(values))
    new.rename(STATE / f"{name}.json")


def may_start(name: str, settings: Settings) -> bool:
    """Counts a start, by whomever; false: there were too many, until reset-failed or later."""
    burst = int(first(settings, "StartLimitBurst", "5"))
    since = time.time() - float(first(settings, "StartLimitIntervalSec", "10"))
    file = STATE / f"{name}.starts"
    before = [float(line) for line in file.read_text().split()] if file.exists() else []
    recent = [at for at in before if at > since]
    if burst and len(recent) >= burst:
        return False
    file.write_text("\n".join(map(str, [*recent, time.time()])))
    return True


class Supervisor:
    """Runs one unit until it is stopped or gives up."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.stopping = threading.Event()
        self.restarts = 0
        self.invocation = ""
        self.values: dict[str, Any] = {}

    def note(self, active: str, sub: str, **more: Any) -> None:
        self.values |= {"ActiveState": active, "SubState": sub, **more}
        save(self.name, supervisor=os.getpid(), NRestarts=self.restarts,
             InvocationID=self.invocation, **self.values)  # fmt: skip

    def environment(self) -> dict[str, str]:
        found = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "INVOCATION_ID": self.invocation}
        for key, value in self.settings:
            if key == "Environment":
                found |= dict(w.replace("%%", "%").split("=", 1) for w in shlex.split(value))
            if key == "EnvironmentFile":
                text = Path(value.removeprefix("-")).read_text()
                found |= dict(parse(text))
        return found

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self.stop_wanted)
        while True:
            if not may_start(self.name, self.settings):
                failed = self.values["Result"] != "success"
                result = self.values["Result"] if failed else "start-limit-hit"
                self.note("failed", "failed", MainPID=0, Result=result)
                return
            self.invocation = uuid.uuid4().hex
            LOGS.mkdir(parents=True, exist_ok=True)
            with (LOGS / f"{self.invocation}.log").open("ab") as log:
                result, status = self.once(log)
            if self.stopping.is_set():
                self.note("inactive", "dead", MainPID=0, Result="success")
                return
            if first(self.settings, "Restart") != "always":
                failed = result != "success"
                state = ("failed", "failed") if failed else ("inactive", "dead")
                self.note(*state, MainPID=0, Result=result, ExecMainStatus=status)
                return
            self.note("activating", "auto-restart", MainPID=0, Result=result, ExecMainStatus=status)
            self.pause(float(first(self.settings, "RestartSec", "0.1")))
            if self.stopping.is_set():
                self.note("inactive", "dead", MainPID=0, Result="success")
                return
            self.restarts += 1

    def once(self, log: Any) -> tuple[str, int]:
        self.note("activating", "start-pre", MainPID=0, Result="success", ExecMainStatus=0)
        files = [value for key, value in self.settings if key == "EnvironmentFile"]
        if not all(value.startswith("-") or Path(value).exists() for value in files):
            return "resources", 0  # systemd reads them for each command, ExecStartPre included
        for key, line in self.settings:
            if key == "ExecStartPre":
                argv = command_of(line)
                env = {"PATH": os.environ["PATH"], "INVOCATION_ID": self.invocation}
                status = subprocess.call(argv, env=env, stdout=log, stderr=log)
                if status and not line.startswith("-"):
                    return "exit-code", status
        try:
            env = self.environment()
            argv = command_of(first(self.settings, "ExecStart"))
            main = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            log.write(f"{error}\n".encode())
            return "resources", 0
        self.note("active", "running", MainPID=main.pid)
        while main.poll() is None and not self.stopping.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                main.wait(0.05)
        if main.poll() is None:
            self.end(main)
        status = main.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(main.pid, signal.SIGKILL)  # what is left of its group
        if status < 0:
            return "signal", -status
        return ("exit-code" if status else "success"), status

    def end(self, main: subprocess.Popen[bytes]) -> None:
        self.note("deactivating", "stop-sigterm")
        main.terminate()
        try:
            main.wait(float(first(self.settings, "TimeoutStopSec", "90")))
        except subprocess.TimeoutExpired:
            self.note("deactivating", "stop-sigkill")
            os.killpg(main.pid, signal.SIGKILL)

    def stop_wanted(self, *_: object) -> None:
        self.stopping.set()

    def pause(self, seconds: float) -> None:
        self.stopping.wait(seconds)


def command_of(line: str) -> list[str]:
    words = shlex.split(line.lstrip("+-!@:"))
    return [word.replace("%%", "%").replace("$$", "$") for word in words]


def start(name: str, *, block: bool) -> int:
    text = loaded(name)
    if text is None:
        sys.stderr.write(f"Failed to start {name}: Unit {name} not found.\n")
        return 5
    if state_of(name)["ActiveState"] not in ("inactive", "failed"):
        return 0
    if os.fork() == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        supervisor = Supervisor(name, parse(text))
        supervisor.note("activating", "start", MainPID=0, Result="success", ExecMainStatus=0)
        os.kill(os.getppid(), signal.SIGUSR1)
        supervisor.run()
        os._exit(0)
    signal.sigwait({signal.SIGUSR1})  # it has noted that it starts
    while block and state_of(name)["ActiveState"] == "activating":
        time.sleep(0.02)
    return 0 if not block or state_of(name)["ActiveState"] == "active" else 1


def stop(name: str, *, block: bool) -> int:
    state = state_of(name)
    if state["ActiveState"] in ("inactive", "failed"):
        return 0  # by state_of: its supervisor is alive
    with contextlib.suppress(ProcessLookupError):
        os.kill(state["supervisor"], signal.SIGTERM)
    while block and state_of(name)["ActiveState"] not in ("inactive", "failed"):
        time.sleep(0.02)
    return 0


def show(name: str, wanted: list[str]) -> None:
    text = loaded(name)
    state = state_of(name)
    values = {
        "LoadState": "loaded" if text is not None else "not-found",
        "MainPID": 0,
        "NRestarts": 0,
        "InvocationID": "",
        "ExecMainStatus": 0,
        "FragmentPath": str(UNITS / name) if text is not None else "",
        "NeedDaemonReload": "yes" if text is not None and read_unit(name) != text else "no",
        **state,
    }
    for key in wanted:
        if key in values:
            print(f"{key}={values[key]}")


def answer(question: str, *names: str) -> int:
    if question == "is-system-running":
        state, fine = ("stopping" if (STATE / "shutdown").exists() else "running"), "running"
    else:
        state, fine = state_of(names[0])["ActiveState"], "active"
    print(state)
    return 0 if state == fine else 3


def systemctl(argv: list[str]) -> int:
    words = [word for word in argv if word != "--no-block"]
    block = words == argv
    match words:
        case ["show", name, "-p", wanted]:
            show(name, wanted.split(","))
        case ["start", *names]:
            return max(start(name, block=block) for name in names)
        case ["stop", *names]:
            return max(stop(name, block=block) for name in names)
        case ["kill", "-s", "KILL", name]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(state_of(name).get("MainPID", 0) or 1 << 22, signal.SIGKILL)
        case ["reset-failed", name]:
            (STATE / f"{name}.starts").unlink(missing_ok=True)
            if state_of(name)["ActiveState"] == "failed":
                (STATE / f"{name}.json").unlink()
        case ["daemon-reload"]:
            for copy in (STATE / "loaded").glob("*"):
                copy.unlink()
        case ["is-active" | "is-system-running" as question, *names]:
            return answer(question, *names)
        case _:
            sys.stderr.write(f"stand-in systemctl: {words}\n")
            return 64
    return 0


def journalctl(argv: list[str]) -> int:
    number = int(argv[argv.index("-n") + 1])
    known = "_SYSTEMD_INVOCATION_ID="
    invocation = next(word.removeprefix(known) for word in argv if word.startswith(known))
    file = LOGS / f"{invocation}.log"
    if file.exists():
        print("\n".join(file.read_text(errors="replace").splitlines()[-number:]))
    return 0


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    program = systemctl if Path(sys.argv[0]).name == "systemctl" else journalctl
    sys.exit(program(sys.argv[1:]))


if __name__ == "__main__":
    main()
