"""The schema of ``status --json`` accepts what is documented and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.schema import check_status, status_problems

GPUS = [
    {"index": n, "uuid": f"GPU-{n}", "pci_bus_id": f"00000000:0{n}:00.0", "name": "RTX 4090"}
    for n in range(2)
]
GOOD: dict[str, Any] = {
    "schema": 1,
    "verdict": "critical",
    "findings": [
        {
            "code": "next-kernel-stock",
            "severity": "critical",
            "subject": "6.1.0-50-amd64",
            "message": "the next boot loses P2P",
            "remedy": "gpuguard rebuild --next",
            "evidence": {"build_id": "ab" * 20},
        }
    ],
    "kernels": [
        {
            "release": "6.1.0-50-amd64",
            "roles": ["next", "installed"],
            "ready": False,
            "modules": [
                {
                    "name": "nvidia",
                    "path": "/lib/modules/6.1.0-50-amd64/updates/dkms/nvidia-current-open.ko",
                    "identity": "stock",
                    "build_id": "ab" * 20,
                    "vermagic": "6.1.0-50-amd64 SMP preempt mod_unload modversions ",
                    "version": "535.261.03",
                    "others": [],
                }
            ],
            "initramfs": "none",
            "headers": "present",
        }
    ],
    "driver": {
        "userland": "535.261.03",
        "loaded": None,
        "loaded_identity": "none",
        "flavour": None,
        "source": None,
    },
    "p2p": {
        "source": "nvml",
        "healthy": True,
        "expected_gpus": 2,
        "gpus": GPUS,
        "pairs": [
            {"src": "GPU-0", "dst": "GPU-1", "read": "OK", "write": "OK"},
            {"src": "GPU-1", "dst": "GPU-0", "read": "OK", "write": "OK"},
        ],
    },
    "holds": {"held": [], "missing": [], "ineffective": [], "foreign": []},
    "reboot": {"required": False, "safe": False, "reasons": ["the next kernel is not ready"]},
}


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """The good status with one value replaced."""
    document = copy.deepcopy(GOOD)
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return document


def test_the_documented_status_is_accepted() -> None:
    check_status(GOOD)


def test_more_keys_are_welcome_everywhere() -> None:
    document = changed("kernels", 0, "modules", 0, "signed", to=True)
    document["more"] = {"of": "it"}
    check_status(document)


@pytest.mark.parametrize("key", sorted(GOOD))
def test_no_documented_key_may_be_left_out(key: str) -> None:
    document = {name: value for name, value in GOOD.items() if name != key}
    assert f": {key!r} is a required property" in status_problems(document)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("schema",), 2, "schema: 1 was expected"),
        (("verdict",), "fine", "verdict: 'fine' is not one of"),
        (("verdict",), "ok", "findings: "),
        (("findings",), [], "findings: [] should be non-empty"),
        (("findings", 0, "code"), "Next Kernel", "findings[0].code: 'Next Kernel' does not match"),
        (("findings", 0, "severity"), "ok", "findings[0].severity: 'ok' is not one of"),
        (("kernels", 0, "roles"), ["default"], "kernels[0].roles[0]: 'default' is not one of"),
        (("kernels", 0, "ready"), None, "kernels[0].ready: None is not of type 'boolean'"),
        (("kernels", 0, "initramfs"), "old", "kernels[0].initramfs: 'old' is not one of"),
        (("kernels", 0, "modules", 0, "identity"), "own", "kernels[0].modules[0].identity: 'own'"),
        (("kernels", 0, "modules", 0, "path"), None, "kernels[0].modules[0].path: None is not"),
        (("kernels", 0, "modules", 0, "build_id"), "XY", "kernels[0].modules[0].build_id: 'XY'"),
        (("driver", "flavour"), "nouveau", "driver.flavour: 'nouveau' is not one of"),
        (("p2p", "source"), None, "p2p.healthy: True should not be valid"),
        (("p2p", "gpus", 0, "pci_bus_id"), "1", "p2p.gpus[0].pci_bus_id: '1' does not match"),
        (("reboot", "required"), "no", "reboot.required: 'no' is not of type 'boolean'"),
    ],
)
def test_what_is_not_documented_is_refused(
    path: tuple[str | int, ...], value: object, problem: str
) -> None:
    assert any(found.startswith(problem) for found in status_problems(changed(*path, to=value)))


def test_a_healthy_matrix_is_complete() -> None:
    with pytest.raises(AssertionError):
        check_status(changed("p2p", "pairs", to=GOOD["p2p"]["pairs"][:1]))
