"""The compiler for one kernel: gcc of the major that compiled the kernel itself.

NVIDIA's conftest.sh wants the same minor too and bails out otherwise; a distribution's point
update of gcc then stops every rebuild. Same major is what kernel ABI asks for, so that check is
switched off by its documented ``IGNORE_CC_MISMATCH=1`` and the difference is logged. Plugins
and options come with a major: another one is refused.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator

from gpuguard.build.records import Blocker, Compiler
from gpuguard.host import Host

_TIMEOUT = 20.0
#: "gcc-12 (Debian 12.2.0-14+deb12u1) 12.2.0", "gcc (GCC) 13.2.1 20240101",
#: "aarch64-linux-gcc.br_real (Buildroot 2020.08) 9.3.0": the version follows the last bracket.
_VERSION = re.compile(r"^(?P<program>\S+) .*\)\s+(?P<full>(?P<major>\d+)\.\d+(?:\.\d+)?)")


def parse_version(text: str) -> tuple[str, int, str] | None:
    """(program, major, full version) from CONFIG_CC_VERSION_TEXT or ``gcc --version``.

    None for anything but gcc (clang's line has no bracket before its version).
    """
    match = _VERSION.match(text.strip())
    if match is None or "clang" in text or not re.search(r"gcc|\bcc\b", match["program"]):
        return None
    return match["program"], int(match["major"]), match["full"]


def choose(host: Host, kernel_text: str | None) -> Compiler | Blocker:
    """The installed gcc for a kernel's CONFIG_CC_VERSION_TEXT, or why there is none."""
    wanted = parse_version(kernel_text or "")
    if wanted is None:
        said = f"says {kernel_text!r}" if kernel_text else "does not say"
        return Blocker(
            code="compiler-mismatch",
            message=f"the kernel's configuration {said}: the gcc that compiled it cannot be told",
            hint="only kernels compiled by gcc are supported",
        )
    program, major, full = wanted
    others = []
    for candidate in _candidates(program, major):
        version = _version_line(host, candidate)
        parsed = parse_version(version or "")
        if version is None or parsed is None:
            continue
        if parsed[1] != major:
            others.append(f"{candidate} is {parsed[2]}")
            continue
        return Compiler(
            cc=candidate,
            version=_identity(version),
            major=major,
            cxx=_cxx(host, major),
            remark="" if parsed[2] == full else f"kernel compiled by {full}, this is {parsed[2]}",
        )
    package = f"install the package gcc-{major} (apt-get install gcc-{major})"
    if others:
        return Blocker(
            code="compiler-mismatch",
            message=f"the kernel was compiled by gcc {full}, but {', '.join(others)}",
            hint=package,
        )
    return Blocker(
        code="compiler-missing",
        message=f"no gcc {major} is installed, and the kernel was compiled by gcc {full}",
        hint=package,
    )


def cxx_blocker(compiler: Compiler) -> Blocker:
    """The blocker for a core that has C++ and no C++ compiler of this major."""
    return Blocker(
        code="compiler-missing",
        message=f"the core objects have C++ sources and no g++ {compiler.major} is installed",
        hint=f"install the package g++-{compiler.major} (apt-get install g++-{compiler.major})",
    )


def _candidates(program: str, major: int, driver: str = "gcc") -> Iterator[str]:
    triplet = f"{platform.machine()}-linux-gnu-{driver}"
    names = (program, f"{driver}-{major}", f"{triplet}-{major}", driver, triplet)
    yield from dict.fromkeys(names)


def _cxx(host: Host, major: int) -> str | None:
    for candidate in _candidates(f"g++-{major}", major, "g++"):
        version = _version_line(host, candidate)
        match = _VERSION.match(version or "")
        if match is not None and int(match["major"]) == major:
            return candidate
    return None


def _version_line(host: Host, program: str) -> str | None:
    if "/" in program or not host.has_program(program):
        return None
    answer = host.run(program, "--version", timeout=_TIMEOUT, ok=None, env={"LC_ALL": "C"})
    return answer.stdout.split("\n", 1)[0].strip() if answer.exit_status == 0 else None


def _identity(version: str) -> str:
    # "gcc-12 (Debian …) 12.2.0" and "gcc (Debian …) 12.2.0" are one compiler
    return f"gcc {version.split(' ', 1)[1]}"
