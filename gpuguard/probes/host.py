"""All probes together: a host's facts, in the order in which they depend on each other."""

from __future__ import annotations

from collections.abc import Mapping

from gpuguard.core.facts import (
    BootPin,
    DkmsEntry,
    DriverFacts,
    HeadersFacts,
    HeadersState,
    HostFacts,
    InitramfsFacts,
    InitramfsState,
    KernelFacts,
    NextKernel,
    P2pFacts,
    SecureBootFacts,
)
from gpuguard.core.packages import Package
from gpuguard.errors import GpuguardError, ProbeError, StateError
from gpuguard.host import Host
from gpuguard.host.cache import FileCache
from gpuguard.left_alone import left_alone_since
from gpuguard.probes.automation import probe_automation
from gpuguard.probes.boot_pin import probe_boot_pin
from gpuguard.probes.bootloader import probe_next_kernel
from gpuguard.probes.dkms import probe_dkms
from gpuguard.probes.dpkg import read_packages
from gpuguard.probes.driver import probe_driver
from gpuguard.probes.enforcement import probe_enforcement
from gpuguard.probes.headers import probe_headers
from gpuguard.probes.holds import probe_holds
from gpuguard.probes.initramfs import probe_initramfs
from gpuguard.probes.kernels import probe_releases, probe_running, probe_suffix
from gpuguard.probes.modprobe_options import probe_blacklisted
from gpuguard.probes.modules import iter_build_ids, probe_modules
from gpuguard.probes.p2p import probe_p2p, probe_pci_gpus
from gpuguard.probes.secureboot import probe_secure_boot
from gpuguard.records import read_failure, read_records
from gpuguard.state import module_tree


def probe_host(
    host: Host,
    cache: FileCache,
    *,
    signing_key: str | None = None,
    signing_certificate: str | None = None,
    with_p2p: bool = True,
    with_dkms: bool = False,
    strict: bool = True,
) -> HostFacts:
    """Look at everything that ``status`` and ``plan`` decide on.

    Without ``strict`` a kernel whose records cannot be read is undetermined, and the others
    are told all the same: for those who only look.

    Raises:
        StateError: our own records cannot be read; identities would be guesses.
    """
    probe = probe_kernel if strict else _probe_leniently
    releases = probe_releases(host)
    packages = _packages(host)
    installed = tuple(release for release, image in releases if image is not None)
    next_kernel = probe_next_kernel(host, installed)
    return HostFacts(
        kernels=tuple(
            probe(
                host, r, image, cache, packages, next_kernel if r == next_kernel.release else None
            )
            for r, image in releases
        ),
        running=probe_running(host),
        next=next_kernel,
        driver=_driver(host, packages),
        secure_boot=_secure_boot(host, signing_key, signing_certificate),
        p2p=probe_p2p(host) if with_p2p else P2pFacts(problem="not asked"),
        pci_gpus=probe_pci_gpus(host),
        blacklisted=_blacklisted(host),
        dkms=_dkms(host) if with_dkms else (),
        holds=probe_holds(host, packages),
        boot_pin=_boot_pin(host),
        automation=probe_automation(host),
    )


def probe_kernel(
    host: Host,
    release: str,
    image: str | None,
    cache: FileCache,
    packages: Mapping[str, Package] | None = None,
    boot: NextKernel | None = None,
) -> KernelFacts:
    """One kernel: its modules, headers, initramfs and what we built for it.

    ``boot`` is how the boot loader will start it, if it is the next one.
    """
    records = read_records(host, release)
    ours = {build_id: name for record in records for name, build_id in record.build_ids}
    problem = None
    try:
        modules = probe_modules(host, release, ours, cache)
    except GpuguardError as error:
        modules, problem = (), error.message
    headers = _headers(host, release, packages)
    command_line = boot.command_line if boot is not None else None
    return KernelFacts(
        release=release,
        image=image,
        modules=modules,
        headers=headers,
        initramfs=_initramfs(host, release, dict(iter_build_ids(modules)), cache, problem, boot),
        suffix=probe_suffix(host, release),
        records=records,
        failure=read_failure(host, release),
        left_alone=left_alone_since(host, release),
        problem=problem,
        enforced=probe_enforcement(host, release, headers.build_dir, command_line),
        command_line=command_line,
        unconfigured=_unconfigured(release, packages),
        has_own_modules=host.path(f"{module_tree(release)}/kernel").is_dir(),
    )


def _boot_pin(host: Host) -> BootPin | None:
    try:
        return probe_boot_pin(host)
    except ProbeError:
        return None  # the boot loader's own answer says what boots next


def _unconfigured(release: str, packages: Mapping[str, Package] | None) -> str | None:
    for name in (f"linux-image-{release}", f"linux-image-unsigned-{release}"):
        package = (packages or {}).get(name)
        if package is not None and not package.is_installed and not package.is_gone:
            return package.status
    return None


def _probe_leniently(
    host: Host,
    release: str,
    image: str | None,
    cache: FileCache,
    packages: Mapping[str, Package] | None,
    boot: NextKernel | None,
) -> KernelFacts:
    try:
        return probe_kernel(host, release, image, cache, packages, boot)
    except (StateError, OSError) as error:
        return KernelFacts(
            release=release,
            image=image,
            modules=(),
            headers=_headers(host, release, packages),
            initramfs=InitramfsFacts(state=InitramfsState.UNKNOWN, reason="not looked at"),
            problem=str(error),
        )


def _headers(host: Host, release: str, packages: Mapping[str, Package] | None) -> HeadersFacts:
    try:
        return probe_headers(host, release, packages)
    except (OSError, ProbeError) as error:
        return HeadersFacts(state=HeadersState.INCOMPLETE, missing=(f"readable ({error})",))


def _packages(host: Host) -> Mapping[str, Package] | None:
    try:
        return read_packages(host)
    except ProbeError:
        return None  # versions of headers packages stay unknown; the headers themselves decide


def _driver(host: Host, packages: Mapping[str, Package] | None) -> DriverFacts:
    try:
        return probe_driver(host, packages)
    except ProbeError as error:
        return DriverFacts(problem=error.message)


def _initramfs(
    host: Host,
    release: str,
    resolved: dict[str, str | None],
    cache: FileCache,
    problem: str | None,
    boot: NextKernel | None,
) -> InitramfsFacts:
    if problem is not None:
        return InitramfsFacts(state=InitramfsState.UNKNOWN, reason=problem)
    loaded = boot.initrds if boot is not None else None
    return probe_initramfs(host, release, resolved, cache, loaded=loaded)


def _blacklisted(host: Host) -> tuple[tuple[str, str], ...]:
    try:
        return probe_blacklisted(host)
    except ProbeError:
        return ()  # modprobe cannot read it either, and says so for every kernel


def _dkms(host: Host) -> tuple[DkmsEntry, ...]:
    """What dkms says of NVIDIA modules; 0.3 s and more, so only for those who show it."""
    try:
        entries = probe_dkms(host)
    except GpuguardError:
        return ()  # shown only beside the files themselves, which decide
    return tuple(entry for entry in entries if entry.module.startswith("nvidia"))


def _secure_boot(host: Host, key: str | None, certificate: str | None) -> SecureBootFacts:
    return probe_secure_boot(host, key, certificate)
