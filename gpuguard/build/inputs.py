"""What a build for a kernel would be made from, and what stands in its way; reads only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gpuguard.build import blockers, core_cache, disk, patch_files, sign
from gpuguard.build import compiler as compilers
from gpuguard.build import source as sources
from gpuguard.build.blockers import build_user
from gpuguard.build.records import Blocker, BuildInputs, Compiler, PatchFile
from gpuguard.build.source import SourceProbe
from gpuguard.build.trust import Trust, trust_in
from gpuguard.config import Config
from gpuguard.core.facts import HeadersState, KernelFacts, SecureBootFacts, SecureBootState
from gpuguard.errors import ProbeError
from gpuguard.host import Host
from gpuguard.probes.headers import headers_fingerprint

__all__ = ["Blocker", "BuildInputs", "InputsProbe", "build_user"]

_NO_SECURE_BOOT = SecureBootFacts(state=SecureBootState.UNKNOWN)


@dataclass(slots=True)
class InputsProbe:
    """Looks at source and patches once, and at each compiler once, for any number of kernels."""

    host: Host
    config: Config
    driver_version: str | None
    secure_boot: SecureBootFacts = _NO_SECURE_BOOT
    _source: SourceProbe | None = None
    _patches: tuple[tuple[PatchFile, ...], tuple[Blocker, ...]] | None = None
    _compilers: dict[str | None, Compiler | Blocker] = field(default_factory=dict)
    _trees: dict[Path, str | None] = field(default_factory=dict)

    def for_kernel(self, kernel: KernelFacts) -> BuildInputs:
        """Inputs and blockers for one kernel."""
        source, patches = self._look_at_source(), self._look_at_patches()
        chosen = self._compiler(kernel)
        compiler = chosen if isinstance(chosen, Compiler) else None
        fingerprint, unreadable = self._headers(kernel)
        cached = compiler is not None and core_cache.expected(
            self.host, (source.state.identity, patch_files.fingerprint(patches[0])),
            compiler.version,
        )  # fmt: skip
        found = (
            *blockers.version(self.driver_version),
            *blockers.headers(kernel),
            *unreadable,
            *blockers.untrusted_headers(self.host, kernel, self._trust(), self._trees),
            *([chosen] if isinstance(chosen, Blocker) else []),
            *blockers.cxx(compiler, source.state, cached=cached),
            *source.blockers,
            *patches[1],
            *blockers.unpatched(source.state, patches[0], self.config),
            *blockers.program(self.host, kernel),
            *blockers.user(self.host, self.config),
            *disk.blockers(self.host, kernel.release, source.state.size_bytes, core_cached=cached),
            *self._signing_blockers(kernel),
        )
        values = {
            "compiler": compiler.version if compiler else "",
            "driver_version": self.driver_version or "",
            "headers": fingerprint,
            "modules": ",".join(sorted(self.config.build.modules)),
            "patches": patch_files.fingerprint(patches[0]),
            "signing": sign.wish(self.config.signing),
            "signing_key": sign.key_identity(self.host, self.config.signing, self.secure_boot),
            "source": source.state.identity,
            "timeout_seconds": f"{self.config.build.timeout_seconds:g}",
        }
        return BuildInputs(
            inputs=tuple(sorted(values.items())),
            compiler=compiler,
            source=source.state,
            patches=patches[0],
            driver_version=self.driver_version,
            blockers=found,
        )

    def _look_at_source(self) -> SourceProbe:
        if self._source is None:
            self._source = sources.probe(self.host, self.config.source, self.driver_version)
        return self._source

    def _look_at_patches(self) -> tuple[tuple[PatchFile, ...], tuple[Blocker, ...]]:
        if self._patches is None:
            self._patches = patch_files.find(
                self.host, self.config.source.patches, self.driver_version, self._trust()
            )
        return self._patches

    def _trust(self) -> Trust:
        try:
            return trust_in(self.config.source.trusted_owner)
        except KeyError:  # source.probe says so
            return trust_in(None)

    def _compiler(self, kernel: KernelFacts) -> Compiler | Blocker | None:
        if kernel.headers.state is not HeadersState.PRESENT:
            return None  # the headers would say which; they are the thing to get first
        text = kernel.headers.compiler
        if text not in self._compilers:
            self._compilers[text] = compilers.choose(self.host, text)
        return self._compilers[text]

    def _headers(self, kernel: KernelFacts) -> tuple[str, list[Blocker]]:
        if kernel.headers.state is not HeadersState.PRESENT:
            return "", []
        if kernel.headers.fingerprint is not None:
            return kernel.headers.fingerprint, []
        try:
            return headers_fingerprint(self.host, kernel.headers), []
        except ProbeError as error:
            blocker = Blocker(code="headers-incomplete", message=error.message, hint=error.hint)
            return "", [blocker]

    def _signing_blockers(self, kernel: KernelFacts) -> list[Blocker]:
        plan = sign.plan(self.host, self.config.signing, kernel, self.secure_boot)
        return [plan.blocker] if plan.blocker else []
