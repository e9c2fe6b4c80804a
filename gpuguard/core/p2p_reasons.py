"""Why nobody could say anything about P2P: one code for each state, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable

from gpuguard.core.facts import P2pFacts

OUTSTANDING = "outstanding"
TIMEOUT = "timeout"
VERSION_MISMATCH = "version-mismatch"
NO_DRIVER = "no-driver"
NO_DEVICES = "no-devices"
CARD_UNREACHABLE = "card-unreachable"
UNREADABLE_OUTPUT = "unreadable-output"
EMPTY_OUTPUT = "empty-output"
FAILED = "failed"
LIBRARY_MISSING = "library-missing"
BINDING_MISSING = "binding-missing"
TOOL_MISSING = "tool-missing"

#: Reason -> what to do. The first ones tell more about the host, the last ones about the tools.
REMEDIES = {
    OUTSTANDING: "the driver hangs in the kernel; nothing is asked until that process is gone, "
    "which takes a reboot at worst: see dmesg for NVRM and Xid lines",
    TIMEOUT: "does nvidia-smi answer? see dmesg for NVRM and Xid lines; "
    "without persistence mode many cards take long to wake: --timeout SECONDS",
    VERSION_MISMATCH: "userland and loaded module are of different versions: reboot into a kernel "
    "that is ready (gpuguard status), and start no GPU program before",
    NO_DRIVER: "modprobe nvidia, and if that fails see dmesg; gpuguard status tells which module "
    "it would load",
    NO_DEVICES: "the driver is loaded and has no card: see dmesg for NVRM lines, and which driver "
    "holds the cards: lspci -k -d 10de:",
    CARD_UNREACHABLE: "a card does not answer: see dmesg for Xid lines; it may take a cold start",
    UNREADABLE_OUTPUT: "does nvidia-smi topo -p2p r show a square matrix?",
    EMPTY_OUTPUT: "nvidia-smi ends well and prints nothing: is it the real one? see which "
    "nvidia-smi is first in PATH",
    FAILED: "see what nvidia-smi says by itself, and dmesg for NVRM lines",
    LIBRARY_MISSING: "install the userland of the loaded driver's version (libnvidia-ml.so.1)",
    BINDING_MISSING: "install nvidia-ml-py for the Python that runs gpuguard",
    TOOL_MISSING: "install nvidia-smi of the loaded driver's version",
}


def leading(answers: Iterable[P2pFacts]) -> str:
    """The reason that tells most about the host."""
    reasons = [answer.reason or FAILED for answer in answers if answer.source is None]
    return min(reasons, key=list(REMEDIES).index, default=FAILED)
