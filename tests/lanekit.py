"""A host for lanes: the real program as root of a machine of its own, stub engines, real proxy.

Mount namespace and chroot: ``/etc``, ``/var``, ``/run``, ``/opt`` and ``/srv`` are the test's, the
rest is this machine's. Ports are on loopback and free ones. systemd is the stand-in of
``standin_systemd``.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import gpuguard.__main__ as program
import gpuguard.cli.app
import gpuguard.cli.lane  # noqa: F401 - verbs are imported when asked for: here, once for all
from gpuguard.host import LocalHost
from gpuguard.serving.lane import Lane
from gpuguard.serving.lane_file import read_lane
from tests.lanerun import (
    PATIENCE,
    Fakes,
    Hook,
    Running,
    Said,
    cmdline,
    free_port,
    killer,
    refuser,
    wait_for,
)

__all__ = ["PATIENCE", "LaneHost", "Running", "Said", "free_port", "settle", "wait_for"]

REPOSITORY = Path(__file__).parents[1]
PROGRAM = "/opt/gpuguard/bin/gpuguard"
VENV = "/opt/vllm"
MODEL = "/srv/model"
STANDINS = ("/opt/pynvml", "/opt/cuda")  # where bindings of NVML and CUDA are pretended
_OWN = ("etc", "var", "run", "opt", "srv")
_CLONE_NEWNS = 0x00020000
_LIBC = ctypes.CDLL(None, use_errno=True)


class LaneHost(Fakes):
    """The machine; made by the fixture ``lane_host``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self.front_port = free_port()
        self._holder: subprocess.Popen[str] | None = None
        self._proxy: subprocess.Popen[bytes] | None = None

    # --- the machine

    def set_up(self) -> None:
        for name in _OWN:
            (self.root / name).mkdir(parents=True)
        for entry in (
            "passwd",
            "group",
            "hosts",
            "hostname",
            "nsswitch.conf",
            "ld.so.cache",
            "ld.so.conf",
            "ssl",
        ):
            source = Path("/etc") / entry
            if source.is_dir():
                shutil.copytree(source, self.root / "etc" / entry, symlinks=True)
            elif source.exists():
                shutil.copy(source, self.root / "etc" / entry)
        found = f"sys.path[:0] = [place for place in {STANDINS} if os.path.isdir(place)]"
        main = "from gpuguard.__main__ import main\nmain()\n"
        self.make_program(PROGRAM, f"import os\n{found}\n{main}")
        stub = f"import runpy\nrunpy.run_path({str(REPOSITORY / 'tests/stub_vllm.py')!r}, run_name='__main__')\n"  # noqa: E501
        self.make_program(f"{VENV}/bin/vllm", stub)
        systemd = "from tests.standin_systemd import main\nmain()\n"
        for tool in ("systemctl", "journalctl"):
            self.make_program(f"/opt/tools/{tool}", systemd)
        (self.path(MODEL)).mkdir(parents=True)
        self.path(f"{MODEL}/weights.safetensors").write_bytes(b"weights")
        self.path(f"{MODEL}/config.json").write_text("{}")
        self._hold_namespace()

    def make_program(self, path: str, body: str) -> None:
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        paths = [str(REPOSITORY), *filter(None, sys.path)]
        # -S: looking through site-packages takes longer than all the rest
        file.write_text(f"#!{sys.executable} -S\nimport sys\nsys.path[:0] = {paths!r}\n{body}")
        file.chmod(0o755)

    def _hold_namespace(self) -> None:
        names = [entry.name for entry in Path("/").iterdir() if entry.name not in _OWN]
        lines = []
        for name in names:
            source, target = Path("/") / name, self.root / name
            if source.is_symlink():
                target.symlink_to(source.readlink())
            elif source.is_dir() and name != "lost+found":
                target.mkdir()
                lines.append(f"mount --rbind /{name} {target}")
        # the program beside the interpreter comes first: this machine's has no stand-ins
        beside = Path(sys.executable).parent / "gpuguard"
        if beside.exists():
            lines.append(f"mount --bind {self.path(PROGRAM)} {self.path(str(beside))}")
        script = " && ".join([*lines, "echo ready", "read end"])
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != "ready":
            _, error = self._holder.communicate()
            pytest.skip(f"no mount namespace can be made here: {error.strip()}")

    def tear_down(self) -> None:
        for name in self.units():
            self.systemctl("stop", name)
        self.stop_front()
        if self._holder is not None:
            self._holder.communicate("end\n")

    def enter(self) -> None:
        """For a child of this process: become one of that machine."""
        assert self._holder is not None
        namespace = os.open(f"/proc/{self._holder.pid}/ns/mnt", os.O_RDONLY)
        if _LIBC.setns(namespace, _CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
        os.chroot(self.root)
        os.chdir("/")
        os.environ["PATH"] = f"/opt/tools:{os.environ['PATH']}"

    def command(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a program there."""
        env = {**os.environ, "PATH": f"/opt/tools:{os.environ['PATH']}"}
        return subprocess.run(
            argv, preexec_fn=self.enter, env=env, capture_output=True, text=True, check=False
        )

    def boot(self) -> None:
        """As after a power loss: nothing runs, /run is empty, and the boot has another id."""
        for state in map(self.unit, self.units()):
            if state["ActiveState"] in ("inactive", "failed"):
                continue  # its numbers may be somebody else's by now
            if b"/opt/tools/systemctl" in cmdline(state["supervisor"]):
                os.kill(state["supervisor"], signal.SIGKILL)
            if state["MainPID"] and f"{VENV}/bin/vllm".encode() in cmdline(state["MainPID"]):
                os.killpg(state["MainPID"], signal.SIGKILL)
        self.stop_front()
        shutil.rmtree(self.path("/run"))
        self.path("/run").mkdir()
        self.pretend("/proc/sys/kernel/random/boot_id", f"{uuid.uuid4()}\n")

    # --- the program

    def start(self, *words: str, die_at: int | None = None, full: range | None = None) -> Running:
        """``gpuguard WORDS`` in a child, not waited for.

        Args:
            *words: its arguments.
            die_at: kill -9 it before it renames a file for the so many-th time.
            full: the renames, counted from 1, for which the disk has no room.
        """
        folder = Path(tempfile.mkdtemp(dir=self.root.parent))
        child = os.fork()
        if child == 0:
            hook = None if die_at is None else killer(die_at)
            self._become_program(words, folder, hook if full is None else refuser(full))
        return Running(child, folder)

    def _become_program(self, words: tuple[str, ...], folder: Path, hook: Hook | None) -> None:
        status = 1
        try:
            for number, name in ((1, "out"), (2, "err")):
                file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(file, number)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            self.enter()
            sys.argv = [PROGRAM, *words]
            # children that ask NVML or CUDA get this path
            sys.path[:0] = [place for place in STANDINS if Path(place).is_dir()]
            if hook is not None:
                sys.addaudithook(hook)
            program.main()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001 - a child must not go on as the test run
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def run(self, *words: str, die_at: int | None = None, full: range | None = None) -> Said:
        said = self.start(*words, die_at=die_at, full=full).wait()
        assert "Traceback" not in said.err, said.err
        return said

    def json(self, *words: str) -> Any:
        said = self.run("--json", *words)
        assert said.out, said.err
        return {"status": said.status, **said.document}

    def switch(self, name: str) -> dict[str, Any]:
        return dict(self.json("lane", "switch", name))

    # --- lanes

    def lane(self, name: str, **changes: Any) -> None:
        """Write a lane file; ``args``, ``env`` and so on are merged, None takes a key away."""
        base: dict[str, Any] = {
            "name": name,
            "engine": {"backend": "venv", "venv": VENV, "user": "root", "gpus": "none"},
            "model": {"path": MODEL, "served_name": "tiny"},
            "args": {"max-model-len": 2048, "max-num-seqs": 4, "shutdown-timeout": 5},
            "env": {"VLLM_ENGINE_READY_TIMEOUT_S": 20},
            "port": self.port,
            "timeouts": {"first_start": 20, "start": 20, "stop": 10, "drain": 5, "memory": 0},
        }
        for key, value in changes.items():
            if isinstance(value, dict) and isinstance(base.get(key), dict):
                merged = {**base[key], **value}
                base[key] = {k: v for k, v in merged.items() if v is not None}
            else:
                base[key] = value
        file = self.path(f"/etc/gpuguard/lanes/{name}.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(base))
        drop_in = self.path(f"/etc/systemd/system/lane-{name}.service.d/fast.conf")
        drop_in.parent.mkdir(parents=True, exist_ok=True)
        drop_in.write_text("[Service]\nRestartSec=0.1\n")

    def lane_id(self, name: str) -> str:
        return self.read(name).lane_id

    def read(self, name: str) -> Lane:
        return read_lane(LocalHost(self.root), name)

    def serving(self) -> str | None:
        """The lane that answers, by the environment of its process."""
        pids = [state["MainPID"] for state in map(self.unit, self.units())]
        running = [pid for pid in pids if pid and Path(f"/proc/{pid}").exists()]
        assert len(running) <= 1, "two lanes at once"
        if not running:
            return None
        return Path(f"/proc/{running[0]}/environ").read_bytes().split(b"VLLM_CACHE_ROOT=")[1].split(
            b"\0")[0].decode().rpartition("/")[2]  # fmt: skip

    def units(self) -> list[str]:
        folder = self.path("/run/standin-systemd")
        return sorted(file.name.removesuffix(".json") for file in folder.glob("*.json"))

    def unit(self, name: str) -> dict[str, Any]:
        file = self.path(f"/run/standin-systemd/{name}.json")
        return dict(json.loads(file.read_text())) if file.exists() else {"MainPID": 0}

    def systemctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.command("systemctl", *words)

    def history(self) -> list[dict[str, Any]]:
        return list(self.json("lane", "history")["switches"])

    def state(self, name: str) -> dict[str, Any] | None:
        file = self.path(f"/var/lib/gpuguard/lanes/{name}.json")
        return dict(json.loads(file.read_text())) if file.exists() else None

    # --- the front

    def start_front(self) -> None:
        """``lane setup``, and the real proxy."""
        if shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip("haproxy is not installed: apt-get install haproxy")
        if not self.path("/etc/gpuguard/front.cfg").exists():
            config = self.path("/etc/gpuguard/gpuguard.yaml")
            config.parent.mkdir(parents=True, exist_ok=True)
            listen = f"127.0.0.1:{self.front_port}"
            values = {"source": {"path": "/opt/none"}, "lanes": {"listen": listen}}
            config.write_text(yaml.safe_dump(values))
            said = self.run("lane", "setup")
            assert said.status == 0, said.err
        self.path("/run/gpuguard-front").mkdir(exist_ok=True)
        self._proxy = subprocess.Popen(
            ["haproxy", "-f", "/etc/gpuguard/front.cfg"],
            preexec_fn=self.enter,  # noqa: PLW1509 - to become one of that machine
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"},
        )  # fmt: skip
        wait_for(lambda: self.ask(self.front_port, "/health")[0] != 0, "the front")

    @property
    def has_front(self) -> bool:
        return self._proxy is not None and self._proxy.poll() is None

    def stop_front(self) -> None:
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait()
            self._proxy = None

    def ask(self, port: int, path: str = "/v1/models") -> tuple[int, dict[str, str], str]:
        """Status (0: nobody), headers in lower case, body."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            headers = {key.lower(): value for key, value in answer.getheaders()}
            return answer.status, headers, answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return 0, {}, str(error)
        finally:
            connection.close()

    def front(self) -> int:
        """Status of the front."""
        return self.ask(self.front_port)[0]


def settle(host: LaneHost, **lanes: dict[str, Any]) -> LaneHost:
    """A host that tests share, as new: these lanes alone, the first one serves behind the front."""
    for folder, pattern in (("etc/gpuguard/lanes", "*"), ("run/gpuguard", "proof.json"),
                            ("etc/systemd/system", "lane-*.d/broken.conf")):  # fmt: skip
        for file in (host.root / folder).glob(pattern):
            file.unlink()
    host.systemctl("daemon-reload")
    for name, changes in lanes.items():
        host.lane(name, **changes)
    if not host.has_front:
        host.start_front()
    first = next(iter(lanes))
    host.run("lane", "resume")
    if (host.state("active") or {}).get("lane_id") != host.lane_id(first) or not host.serving():
        assert host.switch(first)["outcome"] == "promoted"
    wait_for(lambda: host.front() == 200, "the first lane")
    return host


@contextlib.contextmanager
def made(root: Path) -> Iterator[LaneHost]:
    host = LaneHost(root)
    host.set_up()
    try:
        yield host
    finally:
        host.tear_down()


@pytest.fixture(scope="module")
def shared_lane_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaneHost]:
    """A machine for all tests of a module, to be settled before each."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a mount namespace: run as root")
    with made(tmp_path_factory.mktemp("lanes") / "host") as host:
        yield host


@pytest.fixture
def lane_host(tmp_path: Path) -> Iterator[LaneHost]:
    """A machine without lanes."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a mount namespace: run as root")
    pwd.getpwnam("root")
    with made(tmp_path / "host") as host:
        yield host
