"""From source and patches to checked, signed, compressed modules for one kernel, in staging.

Changes nothing on the host but its own cache, staging and log folders. What compiles and
patches runs as the build user; what is then checked, signed and handed on is root's own copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpuguard.build import core_objects, history, kbuild, links, patches, sign, source
from gpuguard.build.check import all_there, check_module
from gpuguard.build.compress import compress
from gpuguard.build.core_objects import CoreInputs
from gpuguard.build.disk import clear_errors
from gpuguard.build.handover import take_over
from gpuguard.build.inputs import build_user
from gpuguard.build.log import BuildLog, new_log
from gpuguard.build.make import Make
from gpuguard.build.patches import Applied
from gpuguard.build.progress import Progress
from gpuguard.build.records import BuildInputs, BuildResult, BuiltModule, Compiler
from gpuguard.build.sign import SigningPlan
from gpuguard.build.staging import Staging, staging
from gpuguard.config import Config
from gpuguard.core.facts import KernelFacts, SecureBootFacts
from gpuguard.errors import BuildError, PreflightError
from gpuguard.host import Host
from gpuguard.host.files import sha256_file

__all__ = ["BuildResult", "BuiltModule", "build_modules", "finish_module"]

_STRIP_TIMEOUT = 300.0


@contextmanager
def build_modules(
    host: Host,
    config: Config,
    kernel: KernelFacts,
    inputs: BuildInputs,
    secure_boot: SecureBootFacts,
    base_names: Mapping[str, str],
    progress: Progress,
    *,
    is_finished: bool = True,
) -> Iterator[BuildResult]:
    """Build the modules of one kernel; they lie in a staging folder until the context ends.

    Args:
        host: the machine or tree to build for.
        config: what to build and how.
        kernel: the target; never the running one by default.
        inputs: of ``InputsProbe``, without blockers.
        secure_boot: decides whether a missing signature is an error.
        base_names: canonical module name -> base name of the file that modprobe resolves
            (``nvidia-drm`` -> ``nvidia-current-open-drm`` on Debian); default: the same.
        progress: told about every step.
        is_finished: False leaves them unsigned and uncompressed; see ``finish_module``.

    Raises:
        PreflightError: a blocker.
        PatchRejectedError: a patch does not apply as it stands.
        BuildError: the compiler, or a check of its result, said no.
        StateError: the disk is full, or staging cannot be written.
        CommandError: a program is missing or failed.
    """
    compiler, version, signing = _preflight(host, config, kernel, inputs, secure_boot)
    if not is_finished:
        signing = SigningPlan(reason="that is for later")
        kernel = replace(kernel, suffix="")
    with ExitStack() as stack:
        with clear_errors():  # around the build alone: what the caller raises is the caller's
            place = stack.enter_context(staging(host, kernel.release, build_user(config)))
            name, path = new_log(host, kernel.release)
            log = stack.enter_context(BuildLog(path, place.tree))
            make = Make(
                host=host, staging=place, jobs=config.build.jobs, log=log, log_name=name,
                timeout_seconds=config.build.timeout_seconds, progress=progress,
            )  # fmt: skip
            run = _Run(
                make=make, kernel=kernel, inputs=inputs, compiler=compiler, version=version,
                signing=signing, base_names=base_names,
            )  # fmt: skip
            result = run.result(config)
        yield result


def _preflight(
    host: Host,
    config: Config,
    kernel: KernelFacts,
    inputs: BuildInputs,
    secure_boot: SecureBootFacts,
) -> tuple[Compiler, str, SigningPlan]:
    """What a build cannot do without.

    Raises:
        PreflightError: a blocker, the first one; ConfigError if it is the configuration's.
    """
    signing = sign.plan(host, config.signing, kernel, secure_boot)
    for blocker in (*inputs.blockers, *([signing.blocker] if signing.blocker else [])):
        raise blocker.error()
    if inputs.compiler is None or inputs.driver_version is None:
        raise PreflightError("compiler or driver version is not known")
    return inputs.compiler, inputs.driver_version, signing


def finish_module(
    host: Host,
    file: Path,
    name: str,
    kernel: KernelFacts,
    version: str,
    signing: SigningPlan,
    build_id: str,
) -> tuple[Path, str]:
    """Sign a stripped module and compress it as that kernel needs; the file, and its SHA-256.

    Raises:
        BuildError: it cannot be signed, or is not what it was.
    """
    if signing.signer is not None:
        signing.signer.sign(host, file)
    if check_module(file, name, kernel.release, version).build_id != build_id:
        raise BuildError(f"{name} lost its build-id on the way", code="no-build-id")
    result = compress(host, file, kernel.suffix)
    return result, sha256_file(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One build under way."""

    make: Make
    kernel: KernelFacts
    inputs: BuildInputs
    compiler: Compiler
    version: str
    signing: SigningPlan
    base_names: Mapping[str, str]

    def result(self, config: Config) -> BuildResult:
        """All steps, one after the other."""
        started = time.monotonic()
        self.prepare()
        cached = self.compile(config)
        return BuildResult(
            release=self.kernel.release,
            driver_version=self.version,
            modules=self.finish(config),
            inputs=self.inputs.lasting,
            core_cached=cached,
            signed=self.signing.signer is not None,
            duration_seconds=time.monotonic() - started,
            log=self.make.log_name,
            staging=self._staging.root,
        )

    @property
    def _staging(self) -> Staging:
        return self.make.staging

    def prepare(self) -> None:
        """Export the source and patch it."""
        self._step("source", _describe_source(self.inputs))
        source.export(self.make.host, self.inputs.source, self._staging)
        if self.compiler.remark:
            self.make.log.section(f"compiler: {self.compiler.version}; {self.compiler.remark}")
        self._step("patches", f"{len(self.inputs.patches)} to apply")
        self.make.log.section("patches")
        applied = patches.apply_all(
            self.make.host,
            self.inputs.patches,
            self._staging,
            source_differs=self.inputs.source.differs_from_stock,
            log=self.make.log.line,
        )
        links.must_stay_inside(self._staging.tree)  # a patch can make one, too
        for item in applied:
            self._tell(item)

    def compile(self, config: Config) -> bool:
        """Core objects, then the kernel's modules; True if the core came from the cache."""
        wanted = kbuild.wanted_modules(self._staging.tree, config.build.modules)
        origin = CoreInputs(
            source=self.inputs.source.identity,
            patches=dict(self.inputs.inputs)["patches"],
            driver_version=self.version,
        )
        cached = core_objects.provide(self.make, self.compiler, origin)
        self._step("modules", f"{', '.join(wanted)} for {self.kernel.release}")
        kbuild.build(self.make, self.kernel, self.compiler, wanted)
        return cached

    def finish(self, config: Config) -> tuple[BuiltModule, ...]:
        """Take the modules over, check, strip, sign and compress them."""
        wanted = kbuild.wanted_modules(self._staging.tree, config.build.modules)
        signed = "signed" if self.signing.signer else f"not signed: {self.signing.reason}"
        self._step("check", f"{len(wanted)} modules, {signed}")
        made = all_there(self._staging.tree, wanted)
        return tuple(self._finish_one(name, path) for name, path in made.items())

    def _finish_one(self, name: str, made: Path) -> BuiltModule:
        host, base = self.make.host, self.base_names.get(name, name)
        file = self._staging.out / f"{base}.ko"
        take_over(made, file)
        before = check_module(file, name, self.kernel.release, self.version)
        # As dkms does. Debug information is ten times the module; the build-id survives.
        host.run("strip", "--strip-debug", str(file), timeout=_STRIP_TIMEOUT)
        build_id = before.build_id or ""
        result, digest = finish_module(
            host, file, name, self.kernel, self.version, self.signing, build_id
        )
        return BuiltModule(name=name, base_name=base, file=result, build_id=build_id, sha256=digest)

    def _step(self, name: str, detail: str) -> None:
        earlier = history.earlier(self.make.host, name)
        self.make.progress.step(name, detail, earlier.seconds if earlier else None)

    def _tell(self, item: Applied) -> None:
        notes = f" ({'; '.join(item.notes)})" if item.notes else ""
        text = f"{Path(item.patch.path).name}: {item.outcome}{notes}"
        self.make.log.line(text)
        self.make.progress.tick(None, text)


def _describe_source(inputs: BuildInputs) -> str:
    found = inputs.source
    at = f" at {found.ref} ({found.commit[:12]})" if found.ref and found.commit else ""
    return f"{found.path}{at}, version {found.version}"
