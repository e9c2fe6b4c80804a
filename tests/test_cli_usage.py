"""Words that make no command: one line for a person, one object for a script."""

from __future__ import annotations

import pytest

from tests.box import Box


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("lane", "switch"), "Missing argument 'NAME'", "gpuguard lane switch --help"),
        (("lane", "bogus"), "No such command 'bogus'", "gpuguard lane --help"),
        (("bogus",), "No such command 'bogus'", "gpuguard --help"),
        (("status", "--bogus"), "No such option: --bogus", "gpuguard status --help"),
        (("lane", "history", "--number", "many"), "Invalid value for '--number'", "lane history"),
        (("lane", "history", "--number", "0"), "Invalid value for '--number'", "lane history"),
        (("lane",), "gpuguard lane: a verb is missing", "gpuguard lane --help"),
        ((), "missing", "gpuguard --help"),
    ],
)
def test_a_script_gets_an_object(box: Box, words: tuple[str, ...], message: str, hint: str) -> None:
    answer = box.json(*words)
    assert answer.status == 2
    assert (answer.error["code"], answer.error["exit_status"]) == ("usage", 2)
    assert message.lower() in answer.error["message"].lower()
    assert hint in answer.error["hint"]
    assert answer.err == ""


def test_a_person_gets_typers_words(box: Box) -> None:
    answer = box.run("lane", "switch")
    assert (answer.status, answer.out) == (2, "")
    assert "Missing argument 'NAME'" in answer.err


def test_what_ends_well_or_by_itself_keeps_its_status(box: Box) -> None:
    assert box.json("--version").status == 0
    assert box.json("lane", "list").document["lanes"] == []
    assert box.json("lane", "show", "none").status not in (0, 1, 2)
