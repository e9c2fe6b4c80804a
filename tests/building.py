"""What the tests of ``gpuguard.build`` share: a host tree to build in, sources, a listener.

As root everything compiles as ``nobody``, who must be able to reach the tree: it lies in a
folder of its own below ``/tmp``, because pytest's ``tmp_path`` is closed to others.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpuguard.build.inputs import InputsProbe
from gpuguard.build.pipeline import BuildResult, build_modules
from gpuguard.build.records import BuildInputs
from gpuguard.config import BuildConfig, Config, SigningConfig, SourceConfig
from gpuguard.core.facts import (
    MODULE_NAMES,
    HeadersFacts,
    HeadersState,
    InitramfsFacts,
    InitramfsState,
    KernelFacts,
    SecureBootFacts,
    SecureBootState,
)
from gpuguard.demo.headers import HeadersCache
from gpuguard.demo.kernels import install_headers
from gpuguard.demo.source import P2P_PATCH, VERSION, copy_standin
from gpuguard.errors import GpuguardError
from gpuguard.host import LocalHost
from gpuguard.probes.headers import probe_headers

USER = "nobody"
OWNER = "daemon"  # somebody else, who owns a clone; an account of every Debian
IS_ROOT = os.geteuid() == 0
SOURCE = "/srv/source"
PATCH = "/srv/patches/p2p.patch"
NO_SECURE_BOOT = SecureBootFacts(state=SecureBootState.OFF)
needs_root = pytest.mark.skipif(not IS_ROOT, reason="needs root: several accounts, or mount")

#: Takes the place of NVIDIA's kernel-open/Makefile: "compiles" by copying finished modules.
COPYING_MAKEFILE = """\
modules:
\t@echo "  LD [M]  copying from $(MODULES)"
\t@cp $(MODULES)/*.ko .
"""


@dataclass
class Listener:
    """Keeps what a build told; ``at`` runs something when a step begins."""

    at: dict[str, Callable[[], object]] = field(default_factory=dict)
    steps: list[tuple[str, str, float | None]] = field(default_factory=list)
    ticks: list[tuple[float | None, str]] = field(default_factory=list)

    def step(self, name: str, detail: str, estimate_seconds: float | None) -> None:
        self.steps.append((name, detail, estimate_seconds))
        self.at.get(name, lambda: None)()

    def tick(self, fraction: float | None, text: str) -> None:
        self.ticks.append((fraction, text))

    def detail(self, step: str) -> str:
        return next(detail for name, detail, _ in self.steps if name == step)


@dataclass
class Workplace:
    """A host tree with a source and a patch, and one way to build in it."""

    root: Path
    listener: Listener = field(default_factory=Listener)

    @property
    def host(self) -> LocalHost:
        return LocalHost(self.root)

    @property
    def source(self) -> Path:
        return self.root / SOURCE.lstrip("/")

    @property
    def patch(self) -> Path:
        return self.root / PATCH.lstrip("/")

    @property
    def staging(self) -> list[Path]:
        """Staging folders that are there now."""
        folder = self.root / "var/cache/gpuguard/staging"
        return sorted(folder.iterdir()) if folder.is_dir() else []

    @property
    def log(self) -> str:
        """The newest build log."""
        logs = (self.root / "var/log/gpuguard").glob("build-*.log")
        return max(logs, key=lambda path: path.stat().st_mtime_ns).read_text()

    def inputs(self, config: Config, kernel: KernelFacts, version: str | None) -> BuildInputs:
        return InputsProbe(self.host, config, version).for_kernel(kernel)

    def build(
        self,
        kernel: KernelFacts,
        config: Config | None = None,
        *,
        version: str = VERSION,
        secure_boot: SecureBootFacts = NO_SECURE_BOOT,
        base_names: dict[str, str] | None = None,
        use: Callable[[BuildResult], object] = lambda _: None,
    ) -> BuildResult:
        """Build, hand the result to ``use`` while its files are there, and leave."""
        config = config or configured()
        inputs = self.inputs(config, kernel, version)
        with build_modules(
            self.host, config, kernel, inputs, secure_boot, base_names or {}, self.listener
        ) as result:
            use(result)
        return result


def configured(
    *,
    patches: tuple[str, ...] = (PATCH,),
    ref: str | None = None,
    stock_ref: str | None = None,
    trusted_owner: str | None = None,
    signing: SigningConfig | None = None,
    timeout_seconds: float = 300.0,
    modules: tuple[str, ...] = MODULE_NAMES,
    user: str = USER,
) -> Config:
    return Config(
        source=SourceConfig(
            path=SOURCE,
            ref=ref,
            stock_ref=stock_ref,
            patches=patches,
            trusted_owner=trusted_owner,
        ),
        build=BuildConfig(user=user, timeout_seconds=timeout_seconds, modules=modules),
        signing=signing or SigningConfig(),
    )


def a_kernel(
    release: str = "6.1.0-50-amd64",
    *,
    suffix: str = "",
    headers: Mapping[str, Any] | None = None,
) -> KernelFacts:
    """A kernel whose headers are said to be there; for what only reads."""
    given = dict(headers or {})
    if "compiler" not in given:
        given["compiler"] = gcc_text()
    folder = f"/usr/src/linux-headers-{release}"
    facts = HeadersFacts(
        state=HeadersState.PRESENT,
        build_dir=folder,
        source_dir=folder,
        fingerprint="f" * 64,
        package=f"linux-headers-{release}",
        architecture="x86_64",
        release=release,
    )
    return KernelFacts(
        release=release,
        image=f"/boot/vmlinuz-{release}",
        modules=(),
        headers=replace(facts, **given),
        initramfs=InitramfsFacts(state=InitramfsState.NONE),
        suffix=suffix,
    )


def real_kernel(host: LocalHost, release: str, *, suffix: str = "") -> KernelFacts:
    """A kernel whose headers really are in the tree."""
    return KernelFacts(
        release=release,
        image=f"/boot/vmlinuz-{release}",
        modules=(),
        headers=probe_headers(host, release),
        initramfs=InitramfsFacts(state=InitramfsState.NONE),
        suffix=suffix,
    )


def gcc_text() -> str:
    """What the kernel's configuration would say if this machine's gcc had compiled it."""
    line = subprocess.run(["gcc", "--version"], capture_output=True, text=True, check=True).stdout
    return line.split("\n", 1)[0]


@pytest.fixture
def workplace() -> Iterator[Workplace]:
    """A tree of the test's own with the stand-in's source and its patch; no kernels."""
    with folder_for_others() as folder:
        yield furnish(folder)


@pytest.fixture(scope="session")
def real_tree(kernel_headers: HeadersCache) -> Iterator[Workplace]:
    """One tree with the real headers of two kernels; tests that compile share it."""
    with folder_for_others() as folder:
        place = furnish(folder)
        for release in kernel_headers.releases:
            install_headers(place.root, release, kernel_headers.root)
        yield place


@dataclass
class RealBuild:
    """One real build, and copies of what it made."""

    kernel: KernelFacts
    result: BuildResult
    listener: Listener
    modules: Path  # <name>.ko
    log: str


@pytest.fixture(scope="session")
def real_build(real_tree: Workplace, kernel_headers: HeadersCache) -> RealBuild:
    """The stand-in, patched, built by real kbuild for the older of two real kernels."""
    kernel = real_kernel(real_tree.host, kernel_headers.releases[0])
    kept = real_tree.root / "kept"
    kept.mkdir()

    def keep(result: BuildResult) -> None:
        for module in result.modules:
            shutil.copyfile(module.file, kept / f"{module.name}.ko")

    real_tree.listener = Listener()
    result = real_tree.build(kernel, use=keep)
    return RealBuild(kernel, result, real_tree.listener, kept, real_tree.log)


class folder_for_others:  # noqa: N801 - reads like TemporaryDirectory()
    """A temporary folder that every account may enter."""

    def __enter__(self) -> Path:
        self._folder = Path(tempfile.mkdtemp(prefix="gpuguard-test-"))
        self._folder.chmod(0o755)
        return self._folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def furnish(root: Path) -> Workplace:
    place = Workplace(root)
    place.source.parent.mkdir(parents=True)
    copy_standin(place.source)
    place.patch.parent.mkdir(parents=True)
    shutil.copyfile(P2P_PATCH, place.patch)
    for folder in ("var/cache", "var/log", "lib/modules"):
        (root / folder).mkdir(parents=True)
    return place


def copy_modules_instead(place: Workplace, modules: Path) -> None:
    """Make the tree's source "compile" within milliseconds, by copying finished modules."""
    makefile = place.source / "kernel-open" / "Makefile"
    makefile.write_text(COPYING_MAKEFILE.replace("$(MODULES)", str(modules)))


def git(folder: Path, *arguments: str, user: str | None = None) -> str:
    """git for setting up a clone, as another account if named."""
    identity = {"NAME": "t", "EMAIL": "t@example.invalid"}
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        **{f"GIT_{who}_{k}": v for who in ("AUTHOR", "COMMITTER") for k, v in identity.items()},
    }
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, user=user, group=user,
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def make_clone(place: Workplace) -> None:
    """Turn the source into a clone: tag VERSION is stock, VERSION-p2p is patched."""
    git(place.source, "init", "--quiet")
    git(place.source, "add", "--all")
    git(place.source, "commit", "--quiet", "--message=stock")
    git(place.source, "tag", VERSION)
    git(place.source, "apply", str(place.patch))
    git(place.source, "commit", "--quiet", "--all", "--message=p2p")
    git(place.source, "tag", f"{VERSION}-p2p")


def as_account(name: str, function: Callable[[], str]) -> str:
    """What a function answers in a child process that has become another account."""
    LocalHost().run("true", timeout=10)  # imports now what that account may not be able to read
    account = pwd.getpwnam(name)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            answer = function()
        except BaseException as error:  # noqa: BLE001 - a child must not go on as the test run
            answer = repr(error)
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def look(
    place: Workplace,
    config: Config | None = None,
    kernel: KernelFacts | None = None,
    version: str | None = VERSION,
) -> BuildInputs:
    return place.inputs(config or configured(), kernel or a_kernel(), version)


def codes(inputs: BuildInputs) -> list[str]:
    assert all(blocker.hint and blocker.message for blocker in inputs.blockers)
    return [blocker.code for blocker in inputs.blockers]


class small_disk:  # noqa: N801 - reads like open()
    """A file system of a given size in place of a folder."""

    def __init__(self, folder: Path, size: str) -> None:
        self.folder, self.size = folder, size

    def __enter__(self) -> None:
        options = f"size={self.size},mode=755"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.folder],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", self.folder], check=True)


def chown_tree(folder: Path) -> None:
    subprocess.run(["chown", "-R", f"{OWNER}:{OWNER}", folder], check=True)


def refused(place: Workplace, kernel: KernelFacts, **how: object) -> GpuguardError:
    """The error that a build ends with; nothing else is left of it."""
    with pytest.raises(GpuguardError) as caught:
        place.build(kernel, **how)  # type: ignore[arg-type]
    assert place.staging == []
    return caught.value
