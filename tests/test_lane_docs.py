"""docs/lanes.md names every code and every key of a lane, and no other."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

from gpuguard.serving.lane import Engine, Expect, Gate, Lane, Model, Requires, Timeouts

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "docs/lanes.md").read_text()
_MAKERS = {"Problem", "_error", "_warning", "Refusal", "Notice"}


def spoken() -> set[str]:
    """Codes that the linter, the preflight, and the status can say."""
    found = set()
    for path in (REPOSITORY / "gpuguard/serving").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _MAKERS and node.args:
                first = node.args[0]
                code = first.value if isinstance(first, ast.Constant) else None
                if isinstance(code, str) and re.fullmatch(r"[a-z0-9-]+", code):
                    found.add(code)
    return found


def test_every_code_is_documented_and_no_other() -> None:
    codes = TEXT.split("## Codes")[1].split("## Limits")[0]
    named = set(re.findall(r"^\| `([a-z0-9-]+)` \|", codes, re.MULTILINE))
    assert named == spoken()
    assert len(named) > 30


def test_every_key_is_documented() -> None:
    table = TEXT.split("## The file")[1].split("## A switch")[0]
    sections = {"engine": Engine, "model": Model, "requires": Requires, "timeouts": Timeouts,
                "expect": Expect, "gate": Gate}  # fmt: skip
    for field in dataclasses.fields(Lane):
        if not field.init:
            continue
        if field.name not in sections:
            assert f"`{field.name}`" in table, field.name
            continue
        for inner in dataclasses.fields(sections[field.name]):
            if inner.name in ("profile", "on_fail"):  # one value each, so far
                continue
            named = (f"`{field.name}.{inner.name}`", f"`{inner.name}`")
            assert any(name in table for name in named), inner.name
