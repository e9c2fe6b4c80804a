"""Ansible's connection to a container that booted.py has started: nsenter, no ssh, no network.

``ansible_booted_pid_file`` names a file with the pid of the container's init. It is read again
for each command, because a reboot changes it; a pid that is gone means: not reachable now.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
name: booted
short_description: run commands in a container of systemd-nspawn
description: The commands run in all namespaces of the container.
author: gpuguard maintainers
extends_documentation_fragment: [connection_pipelining]
options:
  pid_file:
    description: A file with the pid of the container's init.
    type: path
    required: true
    vars: [{name: ansible_booted_pid_file}]
  umask:
    description: That of the account that logs in.
    type: str
    default: "0022"
    vars: [{name: ansible_booted_umask}]
"""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Connection(ConnectionBase):  # type: ignore[misc]
    transport = "booted"
    has_pipelining = True

    def _connect(self) -> Connection:
        super()._connect()
        self._connected = True
        return self

    def exec_command(
        self, cmd: str, in_data: bytes | None = None, sudoable: bool = True
    ) -> tuple[int, bytes, bytes]:
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        done = subprocess.run(
            [*self._entered(), "/bin/sh", "-c", f"umask {self.get_option('umask')}; {cmd}"],
            input=in_data or b"", capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode != 0 and done.stderr.startswith(b"nsenter: "):
            raise AnsibleConnectionFailure(done.stderr.decode(errors="replace"))
        return done.returncode, done.stdout, done.stderr

    def put_file(self, in_path: str, out_path: str) -> None:
        super().put_file(in_path, out_path)
        self._copy(Path(in_path).read_bytes(), "cat >" + self._shell.quote(out_path))

    def fetch_file(self, in_path: str, out_path: str) -> None:
        super().fetch_file(in_path, out_path)
        Path(out_path).write_bytes(self._copy(b"", "cat " + self._shell.quote(in_path)))

    def close(self) -> None:
        self._connected = False

    def reset(self) -> None:
        self.close()

    def _entered(self) -> list[str]:
        pid = Path(self.get_option("pid_file")).read_text().strip()
        if not pid or not Path("/proc", pid).is_dir():
            raise AnsibleConnectionFailure("the container is not running")
        nsenter = shutil.which("nsenter")
        assert nsenter is not None
        return [nsenter, "-t", pid, "-a", "env", "-i", f"PATH={_PATH}", "LC_ALL=C.UTF-8",
                "HOME=/root"]  # fmt: skip

    def _copy(self, content: bytes, command: str) -> bytes:
        status, out, errors = self.exec_command(command, content)
        if status != 0:
            raise AnsibleConnectionFailure(errors.decode(errors="replace"))
        return out
