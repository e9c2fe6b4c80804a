"""Sign modules with the machine's own key, as DKMS would; its tools and places differ.

Debian: ``sign-file`` of linux-kbuild; Ubuntu: ``kmodsign`` of sbsigntool, or sign-file in the
headers. DKMS lets a failed signature pass with a warning; here it is an error, because under
Secure Boot the machine then comes up without its driver.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from gpuguard.build.records import Blocker
from gpuguard.build.trust import trust_in
from gpuguard.config import SigningConfig
from gpuguard.core.facts import KernelFacts, SecureBootFacts, SecureBootState
from gpuguard.errors import BuildError, CommandError
from gpuguard.host import Host
from gpuguard.host.elf import read_module

_TIMEOUT = 60.0
_ENROL = (
    "DKMS makes one at its first build (Debian: /var/lib/dkms/mok.key, Ubuntu: "
    "/var/lib/shim-signed/mok/MOK.priv); or set signing.key and signing.certificate"
)


@dataclass(frozen=True, slots=True)
class Signer:
    """A tool and what to call it with; paths are this process's."""

    tool: str
    algorithm: str
    key: str
    certificate: str

    def sign(self, host: Host, file: Path) -> None:
        """Append a signature and make sure that it is there.

        Raises:
            BuildError: ``signing-failed``.
        """
        try:
            host.run(self.tool, self.algorithm, self.key, self.certificate, str(file),
                     timeout=_TIMEOUT)  # fmt: skip
        except CommandError as error:
            raise BuildError(
                f"signing {file.name} failed: {error.message}",
                hint="check that the key and the certificate belong together (signing.key, "
                "signing.certificate)",
                code="signing-failed",
                detail=error.detail,
            ) from error
        with file.open("rb") as signed:
            if not read_module(signed).signed:
                raise BuildError(
                    f"{self.tool} left {file.name} without a signature", code="signing-failed"
                )


@dataclass(frozen=True, slots=True)
class SigningPlan:
    """How modules of one kernel will be signed; ``signer`` None: not, and ``reason`` why."""

    signer: Signer | None = None
    reason: str = ""
    blocker: Blocker | None = None


def plan(
    host: Host, config: SigningConfig, kernel: KernelFacts, secure_boot: SecureBootFacts
) -> SigningPlan:
    """Decide whether and how to sign; reads only."""
    required = config.mode == "always" or secure_boot.state is SecureBootState.ON
    if config.mode == "never":
        return _unsigned("signing.mode is never", secure_boot.state is SecureBootState.ON)
    if not required and not kernel.headers.module_signing:
        return SigningPlan(reason="the kernel has no module signatures")
    key, certificate = config.key or secure_boot.key, config.certificate or secure_boot.certificate
    if key is None or certificate is None:
        return _unsigned("there is no key and certificate", required)
    for path in (key, certificate):
        if problem := _file_problem(host, path, required):
            return problem
    tool = _tool(host, kernel)
    if tool is None:
        return _without_tool(kernel, required)
    pair = _of_this_process(host, key), _of_this_process(host, certificate)
    return SigningPlan(Signer(tool, kernel.headers.signature_hash, *pair))


def wish(config: SigningConfig) -> str:
    """What the configuration asks for, in one line."""
    return " ".join((config.mode, config.key or "-", config.certificate or "-"))


def key_identity(host: Host, config: SigningConfig, secure_boot: SecureBootFacts) -> str:
    """One line that is another when the key or certificate is; without reading either."""
    found = []
    for path in (config.key or secure_boot.key, config.certificate or secure_boot.certificate):
        if config.mode == "never" or path is None or _is_token(path):
            found.append(path or "-")
            continue
        try:
            status = host.path(path).stat()
            found.append(f"{path}:{status.st_size}:{status.st_mtime_ns}")
        except OSError as error:
            found.append(f"{path}:{error.strerror}")
    return " ".join(found)


def _unsigned(reason: str, required: bool) -> SigningPlan:  # noqa: FBT001 - one word, few callers
    if not required:
        return SigningPlan(reason=reason)
    return SigningPlan(
        blocker=Blocker(
            code="signing-key-missing",
            message=f"modules must be signed here, and {reason}",
            hint=_ENROL,
        )
    )


def _untrusted(path: str, why: str, required: bool) -> SigningPlan:  # noqa: FBT001 - as above
    reason = f"others than root can change {path}: {why}"
    if not required:
        return SigningPlan(reason=reason)
    return SigningPlan(
        blocker=Blocker(
            code="signing-key-untrusted",
            message=f"modules must be signed here, and {reason}",
            hint=f"chown root:root {path} && chmod go-w {path}, in a folder of root's; if others "
            "could write it, make and enrol a new one",
        )
    )


def _file_problem(host: Host, path: str, required: bool) -> SigningPlan | None:  # noqa: FBT001
    """Why a key or certificate cannot be used; None if it can."""
    if _is_token(path):
        return None
    if not host.path(path).is_file():
        return _unsigned(f"{path} is not there", required)
    why = _distrust(host, path)
    return None if why is None else _untrusted(path, why, required)


def _is_token(path: str) -> bool:
    return path.startswith("pkcs11:")  # a token's URI; sign-file(1) takes it as it is


def _of_this_process(host: Host, path: str) -> str:
    return path if _is_token(path) else str(host.path(path))


def _without_tool(kernel: KernelFacts, required: bool) -> SigningPlan:  # noqa: FBT001 - as above
    reason = f"no tool that root may trust to sign modules of {kernel.release}"
    if not required:
        return SigningPlan(reason=reason)
    return SigningPlan(
        blocker=Blocker(
            code="signing-tool-missing",
            message=f"modules must be signed here, and there is {reason}",
            hint="Debian: install linux-kbuild of this kernel; Ubuntu: install sbsigntool",
        )
    )


def _tool(host: Host, kernel: KernelFacts) -> str | None:
    version = re.match(r"\d+\.\d+", kernel.release)
    places = [f"/usr/lib/linux-kbuild-{version[0]}/scripts/sign-file"] if version else []
    if kernel.headers.build_dir is not None:
        places.append(f"{kernel.headers.build_dir}/scripts/sign-file")
    for place in places:
        path = host.path(place)
        if os.access(path, os.X_OK) and path.is_file() and _distrust(host, place) is None:
            return str(path)
    return "kmodsign" if host.has_program("kmodsign") else None


def _distrust(host: Host, absolute: str) -> str | None:
    return trust_in(None).problem(host, absolute)
