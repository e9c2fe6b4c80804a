"""Ask the driver, hold it against what is expected, keep what is right: behind ``verify``."""

from __future__ import annotations

from dataclasses import dataclass

from gpuguard.accepted import write_accepted
from gpuguard.core.expectation import Expectation
from gpuguard.core.loaded import loaded_identity
from gpuguard.core.verify import Verification, VerifyFacts, acceptable_pairs, refusal
from gpuguard.core.virtual import guest_of
from gpuguard.errors import VerifyError
from gpuguard.host import Host
from gpuguard.probes.driver import probe_driver
from gpuguard.probes.kernels import probe_running
from gpuguard.probes.p2p import probe_answers, probe_bound_drivers
from gpuguard.probes.virt import probe_virt
from gpuguard.records import read_records
from gpuguard.verbs.clock import now

DEFAULT_TIMEOUT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What is expected from now on."""

    expectation: Expectation
    pairs: int  # of how many ordered pairs

    @property
    def line(self) -> str:
        """One sentence."""
        good = len(self.expectation.pairs or ())
        return f"accepted: {self.expectation.count} cards, {good} of {self.pairs} ordered pairs OK"


def look_at_p2p(
    host: Host, expected: Expectation, *, timeout: float = DEFAULT_TIMEOUT
) -> VerifyFacts:
    """Ask NVML and nvidia-smi, and look at what explains their answers.

    Raises:
        ProbeError: the PCI bus cannot be read.
        StateError: our own records cannot be read.
    """
    running = probe_running(host)
    driver = probe_driver(host)
    records = read_records(host, running) if running is not None else None
    return VerifyFacts(
        answers=probe_answers(host, timeout),
        on_bus=probe_bound_drivers(host),
        driver=driver,
        loaded=loaded_identity(driver, records),
        guest=guest_of(probe_virt(host)),
        expected=expected,
    )


def accept(host: Host, verification: Verification) -> Accepted:
    """Keep the state as it is now as what is right.

    Raises:
        VerifyError: it cannot be what anybody wants, or nobody could look.
        PrivilegeError, StateError: it cannot be written.
    """
    if (reason := refusal(verification)) is not None:
        raise VerifyError(
            f"not accepted: {reason}",
            code="accept-refused",
            hint="see what gpuguard verify says, and accept when it is as it should be",
        )
    seen = verification.grant.seen
    expectation = write_accepted(host, seen, acceptable_pairs(verification), now=now())
    return Accepted(expectation=expectation, pairs=len(seen) * (len(seen) - 1))
