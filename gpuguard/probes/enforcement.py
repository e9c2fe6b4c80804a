"""What makes a kernel reject unsigned modules even without Secure Boot.

Sources: kernel/module/signing.c (``sig_enforce``), security/lockdown/lockdown.c.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import read_bytes

_OPTIONS = (
    "CONFIG_MODULE_SIG_FORCE",
    "CONFIG_LOCK_DOWN_KERNEL_FORCE_INTEGRITY",
    "CONFIG_LOCK_DOWN_KERNEL_FORCE_CONFIDENTIALITY",
)
_LOCKDOWN = ("lockdown=integrity", "lockdown=confidentiality")
_YES = ("", "=1", "=y", "=Y", "=on")  # kstrtobool; nothing: as a switch


def probe_enforcement(
    host: Host, release: str, build_dir: str | None, command_line: str | None
) -> str | None:
    """What enforces signatures in a kernel, in words; None: nothing that files tell.

    Args:
        host: where to look.
        release: kernel release.
        build_dir: its headers, whose configuration stands in for that in ``/boot``.
        command_line: what it is started with, if that is known.
    """
    return next(_by_command_line(command_line or ""), None) or next(
        (
            f"{option} is set in {path}"
            for path, text in _configurations(host, release, build_dir)
            for option in _OPTIONS
            if f"\n{option}=y\n".encode() in text
        ),
        None,
    )


def _by_command_line(command_line: str) -> Iterator[str]:
    for word in command_line.split():
        name, equals, value = word.replace("-", "_").partition("=")
        if (name == "module.sig_enforce" and equals + value in _YES) or word in _LOCKDOWN:
            yield f"its command line has {word}"


def _configurations(host: Host, release: str, build_dir: str | None) -> Iterator[tuple[str, bytes]]:
    """The kernel's own configuration, else that of its headers."""
    places = (f"/boot/config-{release}", f"{build_dir}/.config" if build_dir else "")
    for path in filter(None, places):
        try:
            text = read_bytes(host, path)
        except ProbeError:  # closed to us; the headers have the same
            continue
        if text is not None:
            yield path, b"\n" + text + b"\n"
            return
