"""Check a document against the JSON Schema that the package ships."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator


@cache
def validator(verb: str) -> Draft202012Validator:
    """The validator for ``gpuguard --json VERB``."""
    file = resources.files("gpuguard").joinpath(f"resources/schema/{verb}.schema.json")
    schema = json.loads(file.read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def status_problems(document: object) -> list[str]:
    """What is wrong with a status, as ``kernels[0].ready: ...``; empty: nothing."""
    return problems("status", document)


def problems(verb: str, document: object) -> list[str]:
    """What is wrong with a document of one verb."""
    errors = sorted(validator(verb).iter_errors(document), key=lambda error: error.json_path)
    return [f"{error.json_path.removeprefix('$').lstrip('.')}: {error.message}" for error in errors]


def check_status(document: Any) -> None:
    """Fail unless a document is a status as documented.

    Beyond the schema: cards and pairs agree, and a healthy matrix is complete. A schema
    cannot count.
    """
    assert status_problems(document) == []
    p2p = document["p2p"]
    cards = [gpu["uuid"] for gpu in p2p["gpus"]]
    pairs = [(pair["src"], pair["dst"]) for pair in p2p["pairs"]]
    assert len(set(cards)) == len(cards), "a card is listed twice"
    assert len(set(pairs)) == len(pairs), "a pair is listed twice"
    assert all(src != dst for src, dst in pairs), "a card is no pair with itself"
    if p2p["healthy"]:
        assert set(pairs) >= {(src, dst) for src in cards for dst in cards if src != dst}
    releases = [kernel["release"] for kernel in document["kernels"]]
    assert len(set(releases)) == len(releases), "a kernel is listed twice"
    for role in ("running", "next"):
        assert sum(role in kernel["roles"] for kernel in document["kernels"]) <= 1


def check_verify(document: Any) -> None:
    """Fail unless a document is one of ``verify`` as documented, and complete where it says so."""
    assert problems("verify", document) == []
    p2p = document["p2p"]
    cards = {gpu["uuid"] for gpu in p2p["gpus"]}
    pairs = [(pair["src"], pair["dst"]) for pair in p2p["pairs"]]
    assert len(set(pairs)) == len(pairs), "a pair is listed twice"
    assert {card for pair in pairs for card in pair} <= cards
    expected = [pair for pair in p2p["pairs"] if pair["expected"]]
    if p2p["healthy"]:
        assert len(expected) == document["expectation"]["pairs"]
        assert all(pair["read"] == pair["write"] == "OK" for pair in expected)
    assert p2p["sources"] == [s["name"] for s in document["sources"] if s["answered"]]
    assert (p2p["source"] is None) == (p2p["sources"] == [])
