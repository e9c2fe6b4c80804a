"""The P2P matrix as people know it from ``nvidia-smi topo -p2p``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import typer

from gpuguard.cli.render import table
from gpuguard.core.facts import P2pFacts
from gpuguard.core.p2p import Grant

_Cells = Mapping[tuple[str, str], str]


def matrices_text(answers: Mapping[str, P2pFacts], grant: Grant) -> str:
    """A matrix for each thing that is said; what is the same is shown once."""
    shown: dict[tuple[tuple[tuple[str, str], str], ...], list[str]] = {}
    cells_of: dict[tuple[tuple[tuple[str, str], str], ...], _Cells] = {}
    for label, cells in _all(answers):
        key = tuple(sorted(cells.items()))
        shown.setdefault(key, []).append(label)
        cells_of[key] = cells
    return "\n\n".join(
        f"{_heading(labels, answers)}\n{_matrix(cells_of[key], grant)}"
        for key, labels in shown.items()
    )


def _all(answers: Mapping[str, P2pFacts]) -> Iterator[tuple[str, _Cells]]:
    for name, answer in answers.items():
        if answer.source is not None:
            yield f"{name} read", {(p.src, p.dst): p.read for p in answer.pairs}
            yield f"{name} write", {(p.src, p.dst): p.write for p in answer.pairs}


def _heading(labels: list[str], answers: Mapping[str, P2pFacts]) -> str:
    """``read and write (nvml and nvidia-smi agree)``."""
    names = list(dict.fromkeys(label.rpartition(" ")[0] for label in labels))
    kinds = list(dict.fromkeys(label.rpartition(" ")[2] for label in labels))
    if len(labels) != len(names) * len(kinds):
        return "P2P " + ", ".join(labels)
    answered = sum(answer.source is not None for answer in answers.values())
    agree = " agree" if len(names) > 1 else "" if answered == 1 else " alone"
    return f"P2P {' and '.join(kinds)} ({' and '.join(names)}{agree})"


def _matrix(cells: _Cells, grant: Grant) -> str:
    gpus = grant.p2p.gpus
    expected = grant.expected.expected_pairs(grant.seen)
    rows = [["", *(f"GPU{gpu.index}" for gpu in gpus)]]
    for gpu in gpus:
        row = [f"GPU{gpu.index}"]
        for peer in gpus:
            if peer is gpu:
                row.append("X")
            else:
                pair = (gpu.uuid, peer.uuid)
                row.append(_cell(cells.get(pair, "-"), is_expected=pair in expected))
        rows.append(row)
    return table(rows)


def _cell(token: str, *, is_expected: bool) -> str:
    if not is_expected:
        return typer.style(token, dim=True)
    if token == "OK":  # noqa: S105 - no secret
        return typer.style(token, fg=typer.colors.GREEN)
    return typer.style(token, fg=typer.colors.RED, bold=True)
