"""What is expected, how two answers become one, and what is thought of it: no I/O."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from gpuguard.core.expectation import Expectation, Origin, is_card, normal_bus_id, normal_card
from gpuguard.core.facts import BuildRecord, DriverFacts, Gpu, P2pFacts, P2pPair
from gpuguard.core.findings import Finding, Verdict
from gpuguard.core.loaded import loaded_identity
from gpuguard.core.p2p import Grant, p2p_findings, p2p_healthy
from gpuguard.core.p2p_merge import disagreements, merged
from gpuguard.core.p2p_reasons import REMEDIES, leading
from gpuguard.core.verify import VerifyFacts, acceptable_pairs, refusal, verify
from tests.p2pbox import bus_id, uuid


def gpus(*numbers: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(index=index, uuid=uuid(number), pci_bus_id=bus_id(number), name="RTX 5090")
        for index, number in enumerate(numbers)
    )


def answer(*numbers: int, source: str = "nvml", **tokens: str) -> P2pFacts:
    """Cards that all reach each other, but for ``tokens``: ``t1_2="CNS"``."""
    pairs = []
    for src, dst in permutations(numbers, 2):
        token = tokens.get(f"t{src}_{dst}", "OK")
        pairs.append(P2pPair(src=uuid(src), dst=uuid(dst), read=token, write=token))
    return P2pFacts(source=source, gpus=gpus(*numbers), pairs=tuple(pairs))


def on_bus(count: int) -> dict[str, str | None]:
    return {bus_id(number): "nvidia" for number in range(1, count + 1)}


def grant(p2p: P2pFacts, expected: Expectation | None = None, **more: Any) -> Grant:
    bus = more.pop("on_bus", on_bus(4))
    held_against = (expected or Expectation()).on_bus(tuple(bus))
    return Grant(p2p=p2p, expected=held_against, on_bus=bus, **more)


def found(given: Grant) -> dict[str, Finding]:
    return {finding.code: finding for finding in p2p_findings(given)}


# --- names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "normal"),
    [
        ("00000000:A1:00.0", "0000:a1:00.0"), ("a1:00.0", "0000:a1:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"), ("0000:06:00", "0000:06:00"),
        (uuid(1).upper(), uuid(1)), ("gpu-" + uuid(1)[4:], uuid(1)), ("MIG-x", "MIG-x"),
    ],
)  # fmt: skip
def test_names_of_cards(card: str, normal: str) -> None:
    assert normal_card(card) == normal
    assert normal_bus_id(normal) == normal


@pytest.mark.parametrize("card", ["", "0", "GPU0", "GPU-1", "01:00", "0000:01:00.8", "card 1"])
def test_what_names_no_card(card: str) -> None:
    assert not is_card(card)


# --- expectations ---------------------------------------------------------------------------


def test_the_bus_is_what_is_expected_if_nobody_says_anything() -> None:
    expected = Expectation(exclude=(bus_id(4),)).on_bus(tuple(on_bus(4)))
    assert (expected.origin, expected.number, expected.cards) == (
        Origin.PCI_BUS, 3, tuple(map(bus_id, (1, 2, 3))),
    )  # fmt: skip
    assert Expectation().on_bus(()).origin is Origin.NONE
    assert Expectation(exclude=(bus_id(1),)).on_bus((bus_id(1),)).number is None


def test_a_word_of_the_operator_outranks_the_bus() -> None:
    expected = Expectation(origin=Origin.CONFIGURATION, count=2)
    assert expected.on_bus(tuple(on_bus(4))) == expected
    assert expected.expected_pairs(gpus(1, 2, 3)) == set(
        permutations([uuid(1), uuid(2), uuid(3)], 2)
    )


def test_an_excluded_card_that_the_driver_sees_does_not_count() -> None:
    expected = Expectation(origin=Origin.CONFIGURATION, count=3, exclude=(bus_id(4),))
    given = grant(answer(1, 2, 3, 4, t1_4="CNS", t4_1="CNS"), expected)
    assert p2p_healthy(given) is True
    assert found(given) == {}


def test_pairs_between_groups_are_not_expected() -> None:
    expected = Expectation(
        origin=Origin.CONFIGURATION, groups=((bus_id(1), uuid(2)), (bus_id(3), bus_id(4)))
    )
    assert len(expected.expected_pairs(gpus(1, 2, 3, 4))) == 4
    assert expected.expected_pairs(gpus(1, 3)) == frozenset()


def test_accepted_pairs_are_exactly_those() -> None:
    expected = Expectation(origin=Origin.ACCEPTED, pairs=((uuid(1), uuid(2)), (uuid(1), uuid(9))))
    assert expected.expected_pairs(gpus(1, 2)) == {(uuid(1), uuid(2))}


# --- two answers ----------------------------------------------------------------------------


def test_two_answers_that_agree() -> None:
    both = {"nvml": answer(1, 2), "nvidia-smi": answer(1, 2, source="nvidia-smi")}
    assert disagreements(both) == {}
    assert merged(both) == answer(1, 2)


def test_indexes_do_not_matter() -> None:
    other = answer(2, 1, source="nvidia-smi", t1_2="CNS")
    both = {"nvml": answer(1, 2, t1_2="CNS"), "nvidia-smi": other}
    assert disagreements(both) == {}


def test_the_worse_word_counts() -> None:
    for nvml, smi in (
        (answer(1, 2), answer(1, 2, t1_2="XYZ")),
        (answer(1, 2, t1_2="XYZ"), answer(1, 2)),
    ):
        both = {"nvml": nvml, "nvidia-smi": smi}
        assert [pair.read for pair in merged(both).pairs] == ["XYZ", "OK"]
        assert list(disagreements(both)) == [f"{uuid(1)} -> {uuid(2)}"]


def test_that_there_is_no_card_is_an_answer() -> None:
    none = P2pFacts(reason="no-devices")
    assert set(disagreements({"nvml": none, "nvidia-smi": answer(1, 2)})) >= {uuid(1), uuid(2)}
    assert disagreements({"nvml": none, "nvidia-smi": none}) == {}
    assert disagreements({"nvml": NOBODY, "nvidia-smi": answer(1, 2)}) == {}


def test_a_bus_id_that_only_the_second_knows() -> None:
    nvml = answer(1, 2)
    without = replace(nvml, gpus=tuple(replace(gpu, pci_bus_id="") for gpu in nvml.gpus))
    assert merged({"nvidia-smi": without, "nvml": nvml}).gpus == nvml.gpus


def test_every_reason_has_a_remedy_of_its_own() -> None:
    assert len(set(REMEDIES.values())) == len(REMEDIES)


def test_the_reason_that_tells_most_leads() -> None:
    missing, mismatch = P2pFacts(reason="tool-missing"), P2pFacts(reason="version-mismatch")
    assert leading([missing, mismatch]) == leading([mismatch, missing]) == "version-mismatch"
    assert leading([P2pFacts()]) == leading([]) == "failed"


# --- causes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "cause", "words"),
    [
        ({"loaded": "patched"}, "platform", "so a rebuild changes nothing"),
        ({"loaded": "stock"}, "module", "gpuguard status"),
        ({"loaded": "unknown"}, "unknown", "first see whether the loaded module is patched"),
        ({"loaded": "stock", "flavour": "proprietary"}, "module", "cannot be patched"),
    ],
)
def test_what_a_rebuild_cannot_change_it_is_not_told_to(
    more: dict[str, Any], cause: str, words: str
) -> None:  # CASES C07
    finding = found(grant(answer(1, 2, 3, 4, t1_2="CNS"), **more))["p2p-lost"]
    assert finding.evidence["cause"] == cause
    assert words in finding.remedy


def test_a_driver_option_is_looked_for_first() -> None:
    finding = found(grant(answer(1, 2, 3, 4, t1_2="DR"), loaded="patched"))["p2p-lost"]
    assert "/proc/driver/nvidia/params" in finding.remedy


@pytest.mark.parametrize(
    ("build_id", "records", "identity"),
    [
        ("aa", (BuildRecord(release="r", driver_version="1", build_ids=(("nvidia", "aa"),)),),
         "patched"),
        ("aa", (), "stock"), ("aa", None, "unknown"), (None, (), "unknown"),
    ],
)  # fmt: skip
def test_whose_module_is_loaded(
    build_id: str | None, records: tuple[BuildRecord, ...] | None, identity: str
) -> None:
    driver = DriverFacts(loaded="580.159.04", loaded_build_id=build_id)
    assert loaded_identity(driver, records) == identity
    assert loaded_identity(DriverFacts(), records) == "none"


# --- verdicts -------------------------------------------------------------------------------


def facts(*answers: P2pFacts, **more: Any) -> VerifyFacts:
    return VerifyFacts(
        answers=dict(zip(("nvml", "nvidia-smi"), answers, strict=False)),
        **{"on_bus": on_bus(4), "driver": DriverFacts(), "loaded": "stock", "guest": None,
           "expected": Expectation(), **more},
    )  # fmt: skip


ALL = answer(1, 2, 3, 4)
NOBODY = P2pFacts(problem="no answer", reason="no-driver")


@pytest.mark.parametrize(
    ("answers", "more", "verdict", "status"),
    [
        ((ALL, ALL), {}, Verdict.OK, 0),
        ((ALL, NOBODY), {}, Verdict.OK, 0),
        ((NOBODY, NOBODY), {}, Verdict.UNKNOWN, 3),
        ((ALL, answer(1, 2, 3, 4, t1_2="NS")), {}, Verdict.CRITICAL, 1),
        ((answer(1, 2, 3), NOBODY), {}, Verdict.CRITICAL, 1),
        ((ALL, NOBODY), {"guest": "QEMU"}, Verdict.WARNING, 0),
        ((replace(ALL, pairs=ALL.pairs[1:]), NOBODY), {}, Verdict.UNKNOWN, 3),
        ((ALL, P2pFacts(reason="outstanding", problem="since")), {}, Verdict.CRITICAL, 1),
        ((P2pFacts(), P2pFacts()), {}, Verdict.UNKNOWN, 3),
        ((answer(1), NOBODY), {"on_bus": on_bus(1)}, Verdict.OK, 0),
        ((P2pFacts(source="nvml"), NOBODY), {"on_bus": {}}, Verdict.UNKNOWN, 3),
    ],
)  # fmt: skip
def test_verdicts(
    answers: tuple[P2pFacts, ...], more: dict[str, Any], verdict: Verdict, status: int
) -> None:
    verification = verify(facts(*answers, **more))
    assert (verification.verdict, verification.exit_status) == (verdict, status)
    assert (verification.healthy is True) == (status == 0) or verdict is Verdict.CRITICAL


def test_nothing_is_healthy_that_could_not_be_looked_at() -> None:
    answers: tuple[dict[str, P2pFacts], ...] = (
        {}, {"nvml": NOBODY}, {"nvml": P2pFacts(source="nvml")},
    )  # fmt: skip
    for nobody in answers:
        verification = verify(replace(facts(on_bus={}), answers=nobody))
        assert verification.healthy is not True
        assert verification.exit_status == 3


def test_a_card_on_the_bus_that_nobody_expects() -> None:
    expected = Expectation(origin=Origin.CONFIGURATION, count=3)
    verification = verify(facts(answer(1, 2, 3), NOBODY, expected=expected))
    (finding,) = verification.findings
    assert (finding.code, finding.subject) == ("card-not-driven", bus_id(4))
    assert verification.exit_status == 0


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((NOBODY, NOBODY), "nothing could be looked at"),
        ((ALL, answer(1, 2, 3)), "different things"),
        ((replace(ALL, pairs=ALL.pairs[1:]), NOBODY), "11 of 12"),
        ((P2pFacts(source="nvml"), NOBODY), "no card"),
        ((replace(ALL, pairs=tuple(replace(p, read="CNS") for p in ALL.pairs)), NOBODY), "no pair"),
    ],
)
def test_what_is_not_accepted(answers: tuple[P2pFacts, ...], words: str) -> None:
    assert words in (refusal(verify(facts(*answers))) or "")


def test_what_is_accepted() -> None:
    verification = verify(facts(answer(1, 2, 3, t1_2="CNS"), NOBODY))
    assert refusal(verification) is None
    assert len(acceptable_pairs(verification)) == 5
