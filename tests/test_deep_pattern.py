"""Every word tells where it belongs; ceilings are physics."""

from __future__ import annotations

import struct
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from gpuguard.core.deep_facts import NvLink
from gpuguard.core.deep_link import ceiling, pcie_bytes_per_second
from gpuguard.core.deep_pattern import Tag, describe, mix, origin, runs, unmix
from tests.deep_kit import card

WORDS = st.integers(0, (1 << 64) - 1)
TAGS = st.builds(
    Tag, st.integers(0, 63), st.integers(0, 63), st.integers(0, 255), st.integers(0, 15)
)


@given(WORDS)
def test_mixing_can_be_undone(word: int) -> None:
    assert unmix(mix(word)) == word
    assert mix(unmix(word)) == word


@given(TAGS, st.integers(0, (1 << 32) - 2))
def test_a_word_names_its_transfer_and_place(tag: Tag, index: int) -> None:
    assert origin(tag.word(index)) == (tag, index)
    assert tag.word(index) not in (0, tag.poison)


@given(TAGS, TAGS, st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_no_two_places_hold_the_same_word(one: Tag, other: Tag, i: int, k: int) -> None:
    assert (one.word(i) == other.word(k)) == ((one, i) == (other, k))


def test_every_ordered_pair_has_a_pattern_of_its_own() -> None:
    firsts = {Tag(a, b, 0, 0).word(0) for a, b in permutations(range(16), 2)}
    assert len(firsts) == 16 * 15


def test_what_is_found_is_named() -> None:
    tag = Tag(0, 1, 2, 3)
    assert describe(0, tag, 5) == "zeros"
    assert describe(tag.poison, tag, 5) == "nothing arrived"
    assert describe(tag.word(5 + 512), tag, 5) == "the right data 4096 bytes off"
    assert describe(Tag(1, 0, 2, 3).word(5), tag, 5) == "data of the transfer from card 1 to card 0"
    assert describe(Tag(0, 1, 1, 0).word(0), tag, 5).startswith("data of an earlier transfer")
    assert describe(Tag(0, 1, 1, 0).poison, tag, 5) == "what an earlier check left there"
    assert "read from nowhere" in describe((1 << 64) - 1, tag, 5)
    two_nans = struct.unpack("<Q", struct.pack("<ff", float("nan"), float("nan")))[0]
    assert describe(two_nans, tag, 5) == "NaN"
    assert describe(tag.word(5) ^ 1 << 40, tag, 5) in ("foreign bytes",)


@given(st.integers(1, 1 << 20).map(lambda n: 8 * n))
def test_samples_lie_within_and_cover_both_ends(length: int) -> None:
    taken = list(runs(length, 4096))
    assert taken[0][0] == 0
    assert sum(taken[-1]) == length // 8
    assert all(first >= 0 and first + count <= length // 8 for first, count in taken)


def test_the_ceiling_of_the_case() -> None:
    """C01: Gen5 x16, "about 63 GB/s one way"."""
    rate = ceiling(card(0), card(1), nvlink=False).bytes_per_second
    assert rate is not None
    assert round(rate / 1e9, 1) == 63.0


@given(st.integers(1, 7), st.sampled_from([1, 2, 4, 8, 16]))
def test_more_lanes_and_newer_generations_carry_more(generation: int, width: int) -> None:
    rate = pcie_bytes_per_second(generation, width)
    assert rate is not None
    wider = pcie_bytes_per_second(generation, 2 * width)
    assert wider == 2 * rate
    newer = pcie_bytes_per_second(generation + 1, width)
    assert newer is None or newer > 1.8 * rate
    assert rate < {1: 2.5, 2: 5, 3: 8, 4: 16, 5: 32, 6: 64, 7: 128}[generation] * 1e9 * width / 8


@given(
    st.integers(1, 7), st.sampled_from([1, 4, 8, 16]), st.integers(1, 7),
    st.sampled_from([1, 4, 8, 16]),
)  # fmt: skip
def test_the_narrower_end_decides(g0: int, w0: int, g1: int, w1: int) -> None:
    one = card(0, pcie_generation=g0, pcie_width=w0)
    other = card(1, pcie_generation=g1, pcie_width=w1)
    ends = [pcie_bytes_per_second(g0, w0), pcie_bytes_per_second(g1, w1)]
    there, back = ceiling(one, other, nvlink=False), ceiling(other, one, nvlink=False)
    assert there.bytes_per_second == back.bytes_per_second == min(e for e in ends if e is not None)


def test_what_is_not_known_is_not_claimed() -> None:
    assert ceiling(card(0), card(1), nvlink=None).bytes_per_second is None
    for unknown in ({"pcie_generation": None}, {"pcie_width": None}, {"pcie_generation": 9}):
        assert ceiling(card(0, **unknown), card(1), nvlink=False).bytes_per_second is None
        assert ceiling(card(0), card(1, **unknown), nvlink=False).bytes_per_second is None
    assert ceiling(card(0), card(0), nvlink=None).link == "one card"


def test_nvlink_through_a_switch_and_direct() -> None:
    switched = tuple(
        NvLink(remote_bus_id=None, to_switch=True, bytes_per_second=26.562e9) for _ in range(18)
    )
    found = ceiling(card(0, nvlinks=switched), card(1, nvlinks=switched), nvlink=True)
    assert found.link == "18 NVLinks"
    assert found.bytes_per_second is not None
    assert round(found.bytes_per_second / 1e9) == 478
    to_peer = NvLink(remote_bus_id="0000:02:00.0", to_switch=False, bytes_per_second=14e9)
    to_other = NvLink(remote_bus_id="0000:03:00.0", to_switch=False, bytes_per_second=14e9)
    back = NvLink(remote_bus_id="0000:01:00.0", to_switch=False, bytes_per_second=14e9)
    direct = ceiling(
        card(0, nvlinks=(to_peer, to_peer, to_other)), card(1, nvlinks=(back, back)), nvlink=True
    )
    assert (direct.bytes_per_second, direct.link) == (28e9, "2 NVLinks")
    mute = NvLink(remote_bus_id="0000:02:00.0", to_switch=False)
    assert ceiling(card(0, nvlinks=(mute,)), card(1), nvlink=True).bytes_per_second is None
    assert ceiling(card(0), card(1), nvlink=True).bytes_per_second is None
