"""The maintenance window end to end, with real apt and dpkg on a root of the test's own."""

from __future__ import annotations

from tests.box import K1, K2
from tests.windowbox import WindowBox


def test_a_new_kernel_comes_in_a_window_and_is_ready_when_dpkg_is_done(
    window_box: WindowBox,
) -> None:
    box = window_box
    before = box.held()
    answer = box.json("upgrade")
    assert answer.status == 0, answer.out + answer.err
    document = answer.document
    assert {(p["name"], p["old"], p["new"]) for p in document["packages"]} >= {
        ("linux-image-generic", "1", "2"),
        (f"linux-image-{K2}", None, "2"),
    }
    assert document["reboot"]["safe"] is True
    assert document["reboot"]["next"] == K2
    assert document["window"]["phase"] == "waiting-for-boot"
    assert box.kernel(K2)["ready"]
    assert box.held() >= before | {f"linux-image-{K2}", f"linux-headers-{K2}"}
    assert K1 in [kernel["release"] for kernel in box.status()["kernels"]]
