"""The child's questions to NVML, over bindings that answer badly."""

from __future__ import annotations

import json
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from gpuguard.core.deep_link import ceiling
from gpuguard.deep.collect import Collector
from gpuguard.deep.look import look


class FakeError(Exception):
    """pynvml.NVMLError."""


class Nvml:
    """Cards with NVLinks; names in ``broken`` raise, names in ``missing`` do not exist."""

    NVMLError = FakeError

    def __init__(
        self, cards: int = 2, links: int = 0, *, remote: str = "peer", speed: int = 26562,
        broken: tuple[str, ...] = (), missing: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.cards, self.links, self.remote, self.speed = cards, links, remote, speed
        self.broken, self.missing = broken, missing

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            if name in object.__getattribute__(self, "missing"):
                raise AttributeError(name)
            if name in object.__getattribute__(self, "broken"):
                return self._raise
        return object.__getattribute__(self, name)

    def _raise(self, *_: object) -> None:
        raise FakeError("Not Supported")

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return self.cards

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, card: int) -> bytes:  # bytes for strings: older bindings
        return f"GPU-{card}".encode()

    def nvmlDeviceGetPciInfo(self, card: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:0{card + 1}:00.0".encode())

    def nvmlDeviceGetName(self, _card: int) -> str:
        return "RTX"

    def nvmlDeviceGetMaxPcieLinkGeneration(self, _card: int) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, _card: int) -> int:
        return 8

    def nvmlDeviceGetMemoryInfo(self, _card: int) -> SimpleNamespace:
        return SimpleNamespace(free=24 << 30)

    def nvmlDeviceGetNvLinkState(self, _card: int, link: int) -> int:
        if not self.links:
            self._raise()
        return int(link < self.links)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, _card: int, _link: int) -> int:
        return 2 if self.remote == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, card: int, _link: int) -> SimpleNamespace:
        bus_id = f"0000000{0}:0{2 - card}:00.0" if self.remote == "peer" else "FFFFFFFF:FF:FF.0"
        return SimpleNamespace(busId=bus_id)

    def nvmlDeviceGetFieldValues(self, _card: int, fields: list[Any]) -> list[SimpleNamespace]:
        assert fields[0][0] == 164
        value = SimpleNamespace(uiVal=self.speed)
        return [SimpleNamespace(nvmlReturn=0, value=value), SimpleNamespace(nvmlReturn=3)]

    def nvmlDeviceGetP2PStatus(self, _one: int, _other: int, index: int) -> int:
        assert index == 2  # a literal: the binding's own constants cannot be trusted
        return 0 if self.links else 5

    def nvmlDeviceGetComputeRunningProcesses(self, card: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=4711)] if card == 0 else []


def asked(nvml: Nvml) -> Collector:
    """What the parent knows after the look."""
    collector = Collector()

    def emit(kind: str, **values: Any) -> None:
        collector.take(json.dumps({"kind": kind, **values}))

    look(cast("ModuleType", nvml), emit)
    assert list(collector.log) == []
    return collector


def test_cards_without_nvlink() -> None:
    collector = asked(Nvml())
    one, other = collector.chosen(())
    assert (one.uuid, one.pci_bus_id, one.nvlinks) == ("GPU-0", "0000:01:00.0", ())
    assert one.memory_free_bytes == 24 << 30
    assert collector.nvlinked == {("GPU-0", "GPU-1"): False, ("GPU-1", "GPU-0"): False}
    assert collector.processes == {4711: ["GPU-0"]}
    limit = ceiling(one, other, nvlink=False)
    assert limit.link == "PCIe 4.0 x8"
    assert limit.bytes_per_second == pytest.approx(15.75e9, rel=1e-3)


@pytest.mark.parametrize("remote", ["peer", "switch"])
def test_nvlinks(remote: str) -> None:
    collector = asked(Nvml(links=4, remote=remote))
    one, other = collector.chosen(())
    limit = ceiling(one, other, nvlink=collector.nvlinked["GPU-0", "GPU-1"])
    assert limit.link == "4 NVLinks"
    assert limit.bytes_per_second == pytest.approx(4 * 26.562e9)


@pytest.mark.parametrize(
    "question",
    [
        "nvmlDeviceGetName", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo",
        "nvmlDeviceGetP2PStatus", "nvmlDeviceGetComputeRunningProcesses", "nvmlShutdown",
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["broken", "missing"])
@pytest.mark.parametrize("links", [0, 4])
def test_one_question_without_an_answer_spoils_no_other(
    question: str, how: str, links: int
) -> None:
    collector = asked(Nvml(links=links, **{how: (question,)}))  # type: ignore[arg-type]
    assert [card.uuid for card in collector.chosen(())] == ["GPU-0", "GPU-1"]
    assert collector.look_problem is None
    one, other = collector.chosen(())
    known = collector.nvlinked["GPU-0", "GPU-1"]
    if question == "nvmlDeviceGetP2PStatus":
        assert known is None
    limit = ceiling(one, other, nvlink=known).bytes_per_second
    assert limit is None or round(limit / 1e9, 2) == (106.25 if links else 15.75)


@pytest.mark.parametrize("how", ["broken", "missing"])
@pytest.mark.parametrize(
    "question", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo"]
)
def test_no_cards_is_said(question: str, how: str) -> None:
    collector = asked(Nvml(**{how: (question,)}))  # type: ignore[arg-type]
    assert collector.chosen(()) == ()
    assert collector.look_problem
