"""NVML's answer and nvidia-smi's, laid side by side, pair by pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpuguard.core.facts import Gpu, P2pFacts, P2pPair
from gpuguard.core.p2p_reasons import NO_DEVICES, leading

_Pairs = Mapping[tuple[str, str], P2pPair]


def merged(answers: Mapping[str, P2pFacts]) -> P2pFacts:
    """One answer of all; where they differ, the one that is not OK.

    Args:
        answers: by the name of who was asked, in order of preference.
    """
    lost = tuple(entry for answer in answers.values() for entry in answer.lost)
    answered = [answer for answer in answers.values() if answer.source is not None]
    problems = [f"{name}: {answer.problem}" for name, answer in answers.items() if answer.problem]
    problem = "; ".join(problems) or None
    if not answered:
        return P2pFacts(problem=problem, reason=leading(answers.values()), lost=lost)
    pairs = [_pairs(answer) for answer in answered]
    return P2pFacts(
        source=answered[0].source,
        gpus=_all_gpus(answered),
        pairs=tuple(_worse(key, pairs) for key in dict.fromkeys(k for one in pairs for k in one)),
        problem=problem,
        lost=lost,
    )


def disagreements(answers: Mapping[str, P2pFacts]) -> dict[str, str]:
    """What the sources say differently: pair or card -> who says what; empty: they agree.

    That there is no card is an answer, too.
    """
    answered = {
        name: answer
        for name, answer in answers.items()
        if answer.source is not None or answer.reason == NO_DEVICES
    }
    seen = {name: {gpu.uuid: gpu for gpu in answer.gpus} for name, answer in answered.items()}
    found = {}
    for uuid in dict.fromkeys(uuid for gpus in seen.values() for uuid in gpus):
        if any(uuid not in gpus for gpus in seen.values()):
            found[uuid] = ", ".join(
                f"{name} {'sees it' if uuid in gpus else 'does not'}" for name, gpus in seen.items()
            )
    pairs = {name: _pairs(answer) for name, answer in answered.items()}
    for key in dict.fromkeys(key for one in pairs.values() for key in one):
        said = {name: one[key] for name, one in pairs.items() if key in one}
        if len({(pair.read, pair.write) for pair in said.values()}) > 1:
            found[" -> ".join(key)] = ", ".join(
                f"{name} read {pair.read} write {pair.write}" for name, pair in said.items()
            )
    return found


def _pairs(answer: P2pFacts) -> dict[tuple[str, str], P2pPair]:
    return {(pair.src, pair.dst): pair for pair in answer.pairs}


def _all_gpus(answered: Sequence[P2pFacts]) -> tuple[Gpu, ...]:
    found: dict[str, Gpu] = {}
    for answer in answered:
        for gpu in answer.gpus:
            known = found.get(gpu.uuid)
            if known is None:
                found[gpu.uuid] = gpu
            elif not known.pci_bus_id:
                found[gpu.uuid] = replace(known, pci_bus_id=gpu.pci_bus_id)
    return tuple(found.values())


def _worse(key: tuple[str, str], sources: Sequence[_Pairs]) -> P2pPair:
    said = [source[key] for source in sources if key in source]
    src, dst = key
    return P2pPair(
        src=src,
        dst=dst,
        read=next(_not_ok(pair.read for pair in said), "OK"),
        write=next(_not_ok(pair.write for pair in said), "OK"),
    )


def _not_ok(tokens: Iterator[str]) -> Iterator[str]:
    return (token for token in tokens if token != "OK")  # noqa: S105 - no secret
