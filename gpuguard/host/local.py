"""The machine at hand, or a directory tree; the only module that imports ``sh``."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuguard.errors import CommandError, CommandNotFoundError, CommandTimeoutError
from gpuguard.host.accounts import as_user
from gpuguard.host.files import fsync_dir, make_dirs, replace_atomically
from gpuguard.host.leash import Leash
from gpuguard.host.paths import resolve_in_root
from gpuguard.host.port import BuildUser, Completed, Deadline
from gpuguard.host.signals import HeldSignals

if TYPE_CHECKING:
    import sh

_SBIN = (
    "/usr/local/sbin",
    "/usr/sbin",
    "/sbin",
)  # depmod and dkms live there; not on a user's PATH
_GRACE_AFTER_KILL = 5.0  # a child in uninterruptible sleep is abandoned after that
_LOOK_AGAIN = 0.1
_ANY_STATUS = list(range(-64, 256))


class LocalHost:
    """See ``port.Host``; ``root`` is ``/`` or a directory that stands for it."""

    def __init__(self, root: Path | str = "/") -> None:
        self.root = Path(root).resolve()

    @property
    def is_live(self) -> bool:
        return self.root == Path("/")

    def path(self, absolute: str, *, follow: bool = True) -> Path:
        if self.is_live:
            return Path(absolute)
        return resolve_in_root(self.root, absolute, follow_last=follow)

    def inside(self, path: Path) -> str:
        return str(path) if self.is_live else "/" + str(path.relative_to(self.root))

    def has_program(self, name: str) -> bool:
        return shutil.which(name, path=_search_path()) is not None

    def run(
        self,
        *argv: str,
        timeout: float | Deadline,
        env: Mapping[str, str] = {},
        ok: Sequence[int] | None = (0,),
        cwd: Path | None = None,
        user: BuildUser | None = None,
        stdin: Path | None = None,
        stdout: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        grace: float | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Completed:
        command = (*as_user(user), *argv)
        kwargs: dict[str, Any] = {
            "_env": {"PATH": _search_path(), "LC_ALL": "C.UTF-8", "HOME": "/", **env},
            "_cwd": None if cwd is None else str(cwd),
            "_pass_fds": set(pass_fds),
        }
        deadline = timeout if isinstance(timeout, Deadline) else Deadline(timeout)
        if grace is not None:
            return _checked(self._run_leashed(command, argv, kwargs, deadline, grace, on_line), ok)
        with _opened(stdin, "rb") as source, _opened(stdout, "wb") as sink:
            kwargs["_in"] = source or b""
            if on_line is not None:
                kwargs |= _to_lines(on_line)
            elif sink is not None:
                kwargs["_out"] = sink
            with HeldSignals() as held:
                child = self._spawn(command, kwargs)
                self._wait(child, command, deadline, held)
        result = Completed(
            argv,
            int(child.exit_code),
            "" if on_line or stdout else child.stdout.decode("utf-8", "replace"),
            "" if on_line else child.stderr.decode("utf-8", "replace"),
        )
        return _checked(result, ok)

    def _run_leashed(
        self,
        command: tuple[str, ...],
        argv: tuple[str, ...],
        kwargs: dict[str, Any],
        deadline: Deadline,
        grace: float,
        on_line: Callable[[str], None] | None,
    ) -> Completed:
        with Leash() as leash, _opened(Path(os.devnull), "rb") as nothing:
            kwargs["_in"] = nothing
            if on_line is not None:
                kwargs |= _to_lines(on_line)
            else:
                kwargs |= {"_out": leash.out, "_err": leash.err}
            kwargs["_pass_fds"] |= {leash.holder}
            try:
                with HeldSignals() as held:
                    child = self._spawn(command, kwargs)
                    leash.started()
                    self._wait(child, command, deadline, held, grace / 2)
            except CommandTimeoutError as error:
                error.left = leash.pull_in(grace / 2)
                if not error.left and leash.anyone_left():
                    error.left = (child.pid,)  # another user's: we may not see what it holds
                error.abandoned = bool(error.left)
                raise
            except BaseException:  # Ctrl-C, SIGTERM
                leash.pull_in(grace / 2)
                raise
            if leash.anyone_left():
                leash.pull_in(grace)
            return Completed(argv, int(child.exit_code), leash.stdout(), leash.stderr())

    def _spawn(self, command: tuple[str, ...], kwargs: dict[str, Any]) -> sh.RunningCommand:
        import sh  # 0.16 s and 15 MB: only for those who run something

        program = shutil.which(command[0], path=_search_path())
        if program is None:
            raise CommandNotFoundError(
                f"{command[0]}: not found", hint=f"install the package that provides {command[0]}"
            )
        # Each option answers a trap of sh 2.4: a tty by default; its own _timeout costs
        # 100 ms a call and kills the direct child alone (make's cc1 lives on); an
        # exception raised in a background thread is lost.
        child: sh.RunningCommand = sh.Command(program)(
            *command[1:],
            _new_session=True,  # pgid == pid, for the killpg in _wait
            _tty_out=False,
            _bg=True,
            _bg_exc=False,
            _return_cmd=True,
            _ok_code=_ANY_STATUS,
            **kwargs,
        )
        return child

    def _wait(
        self,
        child: sh.RunningCommand,
        command: tuple[str, ...],
        deadline: Deadline,
        held: HeldSignals,
        grace: float = _GRACE_AFTER_KILL,
    ) -> None:
        # wait() in a thread: join() returns the moment it is done, and a child that
        # cannot be killed does not take us along. sh's wait(timeout=) loses output.
        waiter = threading.Thread(target=_swallow(child.wait), daemon=True)
        waiter.start()
        try:
            held.let_go()
            while waiter.is_alive() and (left := deadline.left()) > 0:
                waiter.join(min(left, _LOOK_AGAIN))  # it may have been moved nearer
        except BaseException:  # Ctrl-C, SIGTERM: leave no compiler behind
            _kill_group(child.pid)
            waiter.join(grace)
            raise
        if not waiter.is_alive():
            return
        _kill_group(child.pid)
        waiter.join(grace)
        abandoned = waiter.is_alive()
        note = ", and it cannot be killed (abandoned)" if abandoned else ""
        raise CommandTimeoutError(
            f"{shlex.join(command)}: no result within {deadline.seconds:g} s{note}",
            abandoned=abandoned,
        )

    def replace_file(self, absolute: str, source: Path | bytes, *, mode: int = 0o644) -> None:
        target = self.path(absolute, follow=False)
        make_dirs(target.parent)
        replace_atomically(target, source, mode=mode)

    def remove_file(self, absolute: str) -> None:
        target = self.path(absolute, follow=False)
        with suppress(FileNotFoundError, NotADirectoryError):
            target.unlink()
            fsync_dir(target.parent)

    def remove_empty_dir(self, absolute: str) -> None:
        target = self.path(absolute, follow=False)
        with suppress(OSError):
            target.rmdir()
            fsync_dir(target.parent)

    def make_dir(self, absolute: str, *, mode: int = 0o755) -> Path:
        target = self.path(absolute)
        make_dirs(target, mode=mode)
        return target


def _search_path() -> str:
    path = os.environ.get("PATH") or "/usr/local/bin:/usr/bin:/bin"
    have = path.split(":")
    return ":".join([*have, *(sbin for sbin in _SBIN if sbin not in have)])


class _opened:  # noqa: N801 - reads like open()
    """Open a file, or stand for "no file"."""

    def __init__(self, path: Path | None, mode: str) -> None:
        self._file = None if path is None else path.open(mode)

    def __enter__(self) -> Any:
        return self._file

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _to_lines(on_line: Callable[[str], None]) -> dict[str, Any]:
    def sink(line: str) -> None:
        on_line(line.rstrip("\n"))

    # One byte that is not UTF-8 would end sh's reading thread, and the program then waits for
    # ever for somebody to empty its pipe.
    return {"_out": sink, "_err_to_out": True, "_no_out": True, "_decode_errors": "replace"}


def _swallow(wait: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with suppress(Exception):  # the exit status is read from the child, not raised
            wait()

    return run


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _checked(result: Completed, ok: Sequence[int] | None) -> Completed:
    if ok is not None and result.exit_status not in ok:
        raise CommandError(
            f"{shlex.join(result.argv)} exited with {result.exit_status}",
            detail=_tail(result.stderr or result.stdout),
        )
    return result


def _tail(text: str, lines: int = 25) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])
