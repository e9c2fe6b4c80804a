"""Who says which cards there must be: the series, and the word of ``verify``."""

from __future__ import annotations

from tests.box import Box
from tests.building import folder_for_others
from tests.daemon_kit import Series, configure, green_host, named, parse, value


def series_of(host: Box) -> Series:
    answer = host.run("metrics")
    assert answer.status == 0, answer.err
    return parse(answer.out)


def test_a_card_that_leaves_the_bus_before_anything_is_accepted() -> None:
    with folder_for_others() as folder:
        green_host(folder / "host", cards=3)
        says_who_expects(Box(folder / "host"))


def says_who_expects(host: Box) -> None:
    assert "nothing yet: a card that leaves the bus is not missed" in host.run("verify").out
    (host.root / "sys/bus/pci/devices/0000:03:00.0").unlink()
    series = series_of(host)
    assert value(series, "gpuguard_gpus") == value(series, "gpuguard_gpus_expected") == 2
    assert origin(series) == {"bus"}
    host.run("verify", "--accept")
    assert "nothing yet" not in host.run("verify").out
    assert origin(series_of(host)) == {"accepted"}
    configure(host.root, p2p={"expected_gpus": 3})
    assert origin(series_of(host)) == {"configured"}


def origin(series: Series) -> set[str]:
    found = named(series, "gpuguard_expectation_origin")
    assert len(found) == 4
    return {dict(labels)["origin"] for labels, holds in found.items() if holds == 1}
