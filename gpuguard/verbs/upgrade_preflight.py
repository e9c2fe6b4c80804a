"""Look before a maintenance window opens: what would apt do, and would the result have P2P."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuguard.build.inputs import InputsProbe
from gpuguard.build.prebuilt import build_ahead, keep_only
from gpuguard.build.progress import Progress
from gpuguard.build.scratch_headers import Scratch, scratch_folder, scratch_headers
from gpuguard.config import Config
from gpuguard.core.assess import assess
from gpuguard.core.facts import (
    HeadersFacts,
    HostFacts,
    InitramfsFacts,
    InitramfsState,
    KernelFacts,
)
from gpuguard.core.packages import Package, key_of, name_matcher
from gpuguard.core.upgrade import (
    MENDING,
    Change,
    Refusal,
    Trial,
    Upgrade,
    choose,
    driver_refusals,
    headers_refusals,
    is_specification,
    kernels_to_try,
    reduce,
    removal_refusals,
    without_holds,
)
from gpuguard.errors import (
    CommandError,
    CommandNotFoundError,
    GpuguardError,
    ProbeError,
    StateError,
    UsageError,
)
from gpuguard.host import Host
from gpuguard.host.reading import read_text
from gpuguard.ledger import read_ledger
from gpuguard.probes import apt
from gpuguard.probes.dpkg import read_packages
from gpuguard.probes.withheld import has_lists, lists_updated
from gpuguard.state import CACHE_DIR
from gpuguard.verbs.holds import hold_policy
from gpuguard.verbs.inspect import look, policy_of
from gpuguard.verbs.upgrade_room import room_refusals

_DPKG_STATUS = "/var/lib/dpkg/status"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the operator asked for; no ``packages``: those that the policy and we hold.

    ``fetch``: also download everything; a dry run does without.
    """

    packages: tuple[str, ...] = ()
    allow_removals: bool = False
    build: bool = True
    fetch: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What was found out; nothing but gpuguard's own cache has changed.

    ``foreign``: packages that are left as they are, because somebody else holds them.
    ``safe_now``: whether a reboot would be safe without the upgrade. ``lists_updated``: when apt's
    lists were fetched last.
    """

    wish: Wish
    facts: HostFacts
    upgrade: Upgrade
    refusals: tuple[Refusal, ...] = ()
    trials: tuple[Trial, ...] = ()
    foreign: tuple[str, ...] = ()
    automatic: tuple[str, ...] = ()
    safe_now: bool = False
    lists_updated: str | None = None

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to upgrade."""
        return not self.upgrade.changes and not self.refusals


def prepare(host: Host, config: Config, wish: Wish, progress: Progress) -> Preflight:
    """Plan the upgrade and try its builds; the caller holds the lock.

    Raises:
        UsageError: a package is named that cannot be asked for.
        ProbeError, StateError, CommandError: something could not be looked at.
    """
    progress.step("plan", "what apt would do", None)
    facts = look(host, config, with_p2p=False)
    try:
        with scratch_folder(host) as scratch:
            looking = _Looking(host, config, wish, facts, scratch, progress)
            return looking.preflight()
    except OSError as error:
        raise StateError(
            f"{error.filename or CACHE_DIR}: {error.strerror}",
            code="state-unwritable",
            hint="see that the disk is writable and not full (df -h); nothing was changed",
        ) from error


def apt_words(wish: Wish, requested: Sequence[str]) -> tuple[str, ...]:
    """Options and packages for apt-get, the same for the plan and for the deed."""
    return (
        # What the policy means is upgraded where it is installed; who names a package wants it.
        *(() if wish.packages else ("--only-upgrade",)),
        *requested,
    )


class _Looking:
    """One preflight: each step's answer is the next one's question."""

    def __init__(
        self,
        host: Host,
        config: Config,
        wish: Wish,
        facts: HostFacts,
        scratch: Scratch,
        progress: Progress,
    ) -> None:
        self._host, self._config, self._wish = host, config, wish
        self._facts, self._scratch, self._progress = facts, scratch, progress
        self._policy = hold_policy(config)
        self._status = f"{scratch.inside}/status"
        ledger = read_ledger(host)
        self._ours = frozenset(ledger.packages if ledger is not None else ())
        self._foreign: tuple[str, ...] = ()

    def preflight(self) -> Preflight:
        """Everything, until the first step that makes the next one pointless."""
        packages = read_packages(self._host)
        if refusals := tuple(self._health()):
            return self._answer(Upgrade(), refusals)
        self._write_status()
        try:
            upgrade = self._plan(packages)
        except CommandNotFoundError:
            raise
        except CommandError as error:
            return self._answer(Upgrade(), (self._impossible(error),))
        refusals = (
            *(() if self._wish.allow_removals else removal_refusals(upgrade, self._is_meant)),
            *headers_refusals(upgrade, named=bool(self._wish.packages)),
            *driver_refusals(upgrade, self._config.driver_version),
            *room_refusals(self._host, upgrade),
        )
        if refusals or not upgrade.changes:
            return self._answer(upgrade, refusals)
        if self._wish.fetch:
            words = apt_words(self._wish, upgrade.requested)
            self._progress.step("download", f"{len(upgrade.versions)} packages", None)
            apt.download_all(self._host, words, self._status)
        trials = self._trials(upgrade)
        failed = tuple(t.refusal for t in trials if t.refusal is not None and t.is_required)
        return self._answer(upgrade, _distinct(failed), trials)

    def _answer(
        self, upgrade: Upgrade, refusals: tuple[Refusal, ...], trials: tuple[Trial, ...] = ()
    ) -> Preflight:
        marked = apt.automatic(self._host) if upgrade.changes else frozenset()
        asked = [word.partition("=")[0] for word in upgrade.requested]
        return Preflight(
            wish=self._wish,
            facts=self._facts,
            upgrade=upgrade,
            refusals=refusals,
            trials=trials,
            foreign=self._foreign,
            automatic=tuple(name for name in asked if name in marked),
            lists_updated=lists_updated(self._host),
            safe_now=assess(self._facts, policy_of(self._config)).reboot.safe,
        )

    def _is_meant(self, name: str) -> bool:
        in_policy = name_matcher(self._policy.packages)(name)
        return (in_policy and not name_matcher(self._policy.exclude)(name)) or name_matcher(
            self._config.upgrade.packages
        )(name)

    def _health(self) -> Iterator[Refusal]:
        report = apt.unfinished(self._host)
        if report:
            yield Refusal(
                code="dpkg-unhealthy",
                message="packages are half installed, half configured, or lack what they need",
                hint=f"mend that first:\n{MENDING}",
                detail=report,
            )
        if not has_lists(self._host):
            yield Refusal(
                code="apt-lists-missing",
                message="apt has no lists of packages, so nobody can say what there is to upgrade",
                hint=apt.UPDATE_HINT,
            )

    def _write_status(self) -> None:
        """The status file as it will be with our holds lifted; those of others stay."""
        text = read_text(self._host, _DPKG_STATUS)
        if text is None:
            raise ProbeError(
                f"{_DPKG_STATUS} is not there",
                hint="gpuguard upgrade works on hosts with dpkg and apt",
            )
        (self._scratch.path / "status").write_text(without_holds(text, self._ours))

    def _plan(self, packages: Mapping[str, Package]) -> Upgrade:
        requested = self._requested(packages)
        if not requested:
            return Upgrade()
        first = self._simulate(requested)
        self._refuse_unknown(requested, first)
        exact = reduce(requested, first)
        # Once more with what changes alone, and its versions: that is what apt will be asked.
        return Upgrade(requested=exact, changes=self._simulate(exact) if exact else ())

    def _simulate(self, requested: Sequence[str]) -> tuple[Change, ...]:
        return apt.simulate(self._host, apt_words(self._wish, requested), self._status)

    def _requested(self, packages: Mapping[str, Package]) -> tuple[str, ...]:
        if not self._wish.packages:
            also = name_matcher(self._config.upgrade.packages)
            wanted = {*self._policy.wanted(packages), *self._ours}
            choice = choose(
                packages,
                is_meant=lambda key: key in wanted or also(key.partition(":")[0]),
                ours=self._ours,
            )
            self._foreign = choice.foreign
            return choice.names
        return tuple(self._named(word, packages) for word in self._wish.packages)

    def _named(self, word: str, packages: Mapping[str, Package]) -> str:
        """A word of the operator's as apt prints the package in its plan."""
        if not is_specification(word):
            raise UsageError(
                f"{word}: not a package, as NAME or NAME=VERSION",
                code="usage",
                hint="names as dpkg -l prints them, no patterns, no + or - at the end",
            )
        name, equals, version = word.partition("=")
        key = key_of(name, packages)
        plain, colon, architecture = key.partition(":")
        if colon and key not in packages:  # not installed yet
            key = plain if architecture == apt.native_architecture(self._host) else key
        package = packages.get(key)
        if package is not None and package.is_held and key not in self._ours:
            raise UsageError(
                f"{key} is on hold, and the hold is not gpuguard's",
                code="hold-foreign",
                hint=f"who set it may lift it: apt-mark unhold {key}",
            )
        return f"{key}{equals}{version}"

    def _refuse_unknown(self, requested: Sequence[str], changes: Sequence[Change]) -> None:
        """A virtual name: apt takes another package for it, and the plan knows no such name."""
        if not self._wish.packages:
            return
        planned = {change.name for change in changes}
        asked = {name for word in requested if (name := word.partition("=")[0]) not in planned}
        known = apt.show(self._host, sorted(asked))
        if unknown := sorted(n for n in asked if n.partition(":")[0] not in known):
            raise UsageError(
                f"{', '.join(unknown)}: apt has no such package",
                code="package-unknown",
                hint="names as apt-cache policy knows them; a virtual package: name a real one",
            )

    def _impossible(self, error: CommandError) -> Refusal:
        held = f"; held by others: {', '.join(self._foreign)}" if self._foreign else ""
        return Refusal(
            code="apt-plan-failed",
            message=f"apt cannot do this upgrade{held}",
            hint="see what it says, mend that, and try again; nothing was changed",
            detail=error.detail,
        )

    def _trials(self, upgrade: Upgrade) -> tuple[Trial, ...]:
        policy = policy_of(self._config)
        installed = [
            kernel.release
            for kernel in self._facts.kernels
            if kernel.image is not None
            and kernel.left_alone is None
            and policy.looks_after(kernel.release)
        ]
        wanted = kernels_to_try(upgrade, installed, self._facts.next.release)
        if not self._wish.build:
            return wanted
        keep_only(self._host, [trial.release for trial in wanted])
        version = (
            upgrade.driver_version or self._config.driver_version or self._facts.driver.userland
        )
        probe = InputsProbe(self._host, self._config, version, self._facts.secure_boot)
        return tuple(self._try(trial, upgrade, probe) for trial in wanted)

    def _try(self, trial: Trial, upgrade: Upgrade, probe: InputsProbe) -> Trial:
        try:
            kernel = self._kernel(trial.release, upgrade)
            inputs = probe.for_kernel(kernel)
            for blocker in inputs.blockers:
                raise blocker.error()
            self._progress.step("try", f"the patched modules for {trial.release}", None)
            seconds = build_ahead(
                self._host, self._config, kernel, inputs, self._facts.secure_boot, self._progress
            )
            return replace(trial, was_built=True, seconds=seconds)
        except GpuguardError as error:
            return replace(trial, refusal=refusal_of(error, trial.release))

    def _kernel(self, release: str, upgrade: Upgrade) -> KernelFacts:
        """The kernel as it will be: with the headers that will be installed."""
        known = next((k for k in self._facts.kernels if k.release == release), None)
        if known is not None and not upgrade.has_headers(release):
            return replace(known, suffix="")
        self._progress.step("headers", f"of {release}", None)
        headers = scratch_headers(
            self._host, self._scratch, release, upgrade.versions, _ticker(self._progress)
        )
        return replace(known, headers=headers, suffix="") if known else _future(release, headers)


def refusal_of(error: GpuguardError, release: str) -> Refusal:
    """Why the patched modules for a kernel cannot be built, told before it is installed."""
    return Refusal(
        code=error.code,
        message=f"no patched modules for {release}: {error.message}",
        hint=error.hint or "nothing was changed",
        exit_status=error.exit_status,
        detail=error.detail,
    )


def error_of(preflight: Preflight) -> GpuguardError:
    """The first refusal as an error, the others in its detail."""
    first, *others = preflight.refusals
    lines = [first.detail, *(f"also: {other.message} [{other.code}]" for other in others)]
    error = GpuguardError(
        f"{first.message}; nothing was changed",
        code=first.code,
        hint=first.hint,
        detail="\n".join(filter(None, lines)),
    )
    error.exit_status = first.exit_status
    return error


def _future(release: str, headers: HeadersFacts) -> KernelFacts:
    return KernelFacts(
        release=release,
        image=f"/boot/vmlinuz-{release}",
        modules=(),
        headers=headers,
        initramfs=InitramfsFacts(state=InitramfsState.NONE),
    )


def _distinct(refusals: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """One of each: a source that is not there is not there for every kernel."""
    seen: dict[tuple[str, str], Refusal] = {}
    for refusal in refusals:
        seen.setdefault((refusal.code, refusal.message.partition(": ")[2]), refusal)
    return tuple(seen.values())


def _ticker(progress: Progress) -> Callable[[str], None]:
    return lambda text: progress.tick(None, text)
