"""``status`` with a configuration that cannot be followed: it says so, and looks all the same."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.box import K1, K2, Box
from tests.schema import check_status
from tests.test_docs import CONFIG_FINDINGS

FILE = "/etc/gpuguard/gpuguard.yaml"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="checked for root alone; run as root")


def trouble(box: Box) -> dict[str, Any]:
    """The finding about the configuration; there is one."""
    found = box.findings("configuration")
    assert len(found) == 1
    assert set(found) <= CONFIG_FINDINGS
    check_status(box.status())
    return next(iter(found.values()))


def test_a_typo_does_not_hide_an_unsafe_reboot(box: Box) -> None:
    box.configure(kernels={"ignor": [K2]}, backups={"keep": 0})
    assert trouble(box) == {
        "code": "config-invalid",
        "severity": "warning",
        "subject": "configuration",
        "message": f"{FILE}: 2 problems in the configuration; the host is judged by the defaults",
        "remedy": "correct the file, then run: gpuguard config validate",
        "evidence": {
            "gpuguard.yaml: kernels.ignor": "unknown key; did you mean kernels.ignore?",
            "gpuguard.yaml: backups.keep": "must be greater than or equal to 1 (got 0)",
        },
    }
    answer = box.run("status")
    assert answer.status == 1
    assert "[next-kernel-stock]" in answer.out
    assert f"WARNING configuration: {FILE}: 2 problems" in answer.out
    for verb in ("plan", "rebuild"):  # no guessing where something is to be done
        assert box.run(verb).status == 78


def test_of_a_good_host_it_is_the_verdict(box: Box) -> None:
    box.rebuilt()
    assert box.status()["verdict"] == "ok"
    box.path(FILE).write_text("source: [\n")
    assert trouble(box)["code"] == "config-invalid"
    assert box.status()["verdict"] == "warning"
    assert box.kernel(K1)["ready"] is True


@needs_root
def test_a_configuration_that_others_can_write_is_not_followed(box: Box) -> None:
    box.path(FILE).chmod(0o666)
    found = trouble(box)
    assert (found["code"], found["severity"]) == ("config-untrusted", "warning")
    assert found["remedy"] == f"chmod go-w {box.path(FILE)}"


@needs_root
def test_a_configuration_that_cannot_be_read_is_unknown(box: Box) -> None:
    box.rebuilt()
    box.path(FILE).chmod(0o600)
    box.path("var/lib/gpuguard").chmod(0o755)
    answer = box.run("--json", "status", user="nobody")
    found = [f for f in answer.document["findings"] if f["subject"] == "configuration"]
    assert [(f["code"], f["severity"]) for f in found] == [("config-unreadable", "unknown")]
    assert answer.status == 3
