"""What is written about the program agrees with the program."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer

from gpuguard import errors, state
from gpuguard.cli.app import app

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
CODES = (REPOSITORY / "docs/codes.md").read_text()
PAGES = (
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
)
MANUAL = resources.files("gpuguard").joinpath("resources/man/gpuguard.1").read_text()

#: Errors of the configuration, which ``status`` reports as findings and goes on.
CONFIG_FINDINGS = {"config-invalid", "config-untrusted", "config-unreadable"}
_CODE = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_HELP = frozenset({"-h", "--help"})  # no parameter of a verb: described once, for all
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


# --- codes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """A code in the source; ``exit_status`` None where the statement does not tell."""

    text: str
    part: str  # "core", "build", ...
    exit_status: int | None = None


@cache
def codes() -> frozenset[Code]:
    """Every code that the program can print."""
    package = REPOSITORY / "gpuguard"
    return frozenset(
        code
        for path in sorted(package.rglob("*.py"))
        for code in _codes_of(ast.parse(path.read_text()), path.relative_to(package).parts[0])
    )


def _codes_of(tree: ast.Module, part: str) -> Iterator[Code]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            values = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            if name == "_Refused":
                values.append(node.args[0])
            # decided in the core, and reported as an error: no finding
            where = "verbs" if name == "Refusal" or name.endswith("Error") else part
            for value in values:
                yield from (Code(text, where, _status(name, node)) for text in _texts(value, tree))
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code":
                    yield from (
                        Code(text, part, _status(node.name)) for text in _texts(line.value, tree)
                    )


def _texts(value: ast.expr, tree: ast.Module) -> Iterator[str]:
    """The constants that an expression can be; a name stands for what the module assigns to it."""
    match value:
        case ast.Constant(value=str(text)) if _CODE.fullmatch(text):
            yield text
        case ast.IfExp():
            yield from (*_texts(value.body, tree), *_texts(value.orelse, tree))
        case ast.BoolOp():
            yield from (text for part in value.values for text in _texts(part, tree))
        case ast.Name():
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == value.id:
                    yield from _texts(node.value, tree)


def _status(name: str, call: ast.Call | None = None) -> int | None:
    if name == "_Refused":
        return os.EX_CONFIG
    if name == "Blocker":
        given = [k.value for k in call.keywords if k.arg == "exit_status"] if call else []
        return getattr(os, given[0].attr) if given and isinstance(given[0], ast.Attribute) else 69
    if name == "Refusal" and call and any(k.arg == "exit_status" for k in call.keywords):
        return None  # by a name that the module explains
    if name == "Refusal":
        busy = any(k.arg == "is_busy" for k in call.keywords) if call else False
        return os.EX_TEMPFAIL if busy else os.EX_UNAVAILABLE
    status: int | None = getattr(getattr(errors, name, None), "exit_status", None)
    return status


def table_rows(text: str) -> Iterator[list[str]]:
    """Cells of every table row whose first cell is one code."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and _CODE.fullmatch(cells[0].strip("`")):
            yield [cells[0].strip("`"), *cells[1:]]


def finding_table() -> list[list[str]]:
    return list(table_rows(section(README, "### Finding codes")))


def section(text: str, heading: str) -> str:
    """What follows a heading, up to the next one of its level or above."""
    level = heading.split(" ", 1)[0]
    body = text.split(f"\n{heading}\n", 1)[1]
    end = re.search(rf"^#{{1,{len(level)}}} ", body, re.MULTILINE)
    return body[: end.start()] if end else body


def test_the_source_is_searched_in_earnest() -> None:
    found = {code.text for code in codes()}
    assert {"next-kernel-stock", "build-failed", "source-missing", "disk-full"} <= found


def test_every_finding_is_in_the_readme_and_no_other() -> None:
    findings = {code.text for code in codes() if code.part == "core"} | CONFIG_FINDINGS
    assert {row[0] for row in finding_table()} == findings


def test_findings_have_severity_meaning_and_remedy() -> None:
    for code, severity, meaning, remedy in finding_table():
        assert severity in ("critical", "warning", "unknown"), code
        assert meaning, code
        assert remedy, code


def test_every_error_is_documented_and_no_other() -> None:
    raised = {code.text for code in codes() if code.part != "core"}
    assert {row[0] for row in table_rows(CODES)} == raised


def test_errors_are_documented_with_their_exit_status() -> None:
    documented = {row[0]: re.findall(r"\d+", row[1]) for row in table_rows(CODES)}
    wrong = [
        f"{code.text} exits with {code.exit_status}"
        for code in codes()
        if code.part != "core" and code.exit_status is not None
        if str(code.exit_status) not in documented.get(code.text, [])
    ]
    assert wrong == []


def test_every_exit_status_is_in_readme_and_manual() -> None:
    statuses = {
        cls.exit_status
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.GpuguardError)
    }
    table = section(README, "### Exit status")
    page = MANUAL.split(".SH EXIT STATUS", 1)[1]
    for status in sorted(statuses):
        assert f"| {status} |" in table
        assert f".TP\n.B {status}\n" in page


# --- verbs and options ---------------------------------------------------------------------


@dataclass(frozen=True)
class Verb:
    """A command as ``--help`` shows it; ``name`` is empty for the program itself."""

    name: str
    options: frozenset[str]
    needs_word: bool = False


@cache
def verbs() -> dict[str, Verb]:
    """The command tree, by name: ``status``, ``config init``."""
    return {verb.name: verb for verb in _walk(typer.main.get_command(app), "")}


def _walk(command: Any, name: str) -> Iterator[Verb]:
    options = frozenset(
        option
        for parameter in command.params
        if not getattr(parameter, "hidden", False) and parameter.param_type_name == "option"
        for option in (*parameter.opts, *parameter.secondary_opts)
    )
    needs_word = any(p.param_type_name == "argument" and p.required for p in command.params)
    yield Verb(name, options, needs_word)
    for child_name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from _walk(child, f"{name} {child_name}".strip())


def manual_section(verb: Verb) -> str:
    """The part of the page about one verb, as plain text."""
    text = re.sub(r"\\f[A-Z]", "", MANUAL.replace("\\-", "-"))
    if not verb.name:
        return text.split("\n.SH OPTIONS\n")[1].split("\n.SH ")[0]
    parts = text.split("\n.SH VERBS\n")[1].split("\n.SH ")[0].split(".SS ")
    found = [part for part in parts if re.match(rf"{verb.name}(?: \[| [A-Z]|\n)", part)]
    assert len(found) == 1, f"gpuguard.1 has {len(found)} sections for {verb.name}"
    return found[0]


def leaves() -> list[str]:
    """Verbs that do something; ``config`` alone does not."""
    return [n for n in verbs() if n and not any(other.startswith(f"{n} ") for other in verbs())]


def test_the_command_tree_is_walked_in_earnest() -> None:
    assert {"", "config", "config init", "rebuild"} <= set(verbs())
    assert {"--kernel", "-k", "--dry-run"} <= verbs()["rebuild"].options


@pytest.mark.parametrize("name", ["", *leaves()], ids=lambda name: name or "gpuguard")
def test_every_verb_and_option_is_in_the_manual_and_no_other(name: str) -> None:
    verb = verbs()[name]
    tags = re.findall(r"\.TP\n(.*)\n", manual_section(verb))
    named = {option for tag in tags for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", tag)}
    assert named == verb.options | (frozenset() if name else _HELP)


@pytest.mark.parametrize("name", leaves())
def test_brackets_are_for_what_may_be_left_out(name: str) -> None:
    head = manual_section(verbs()[name]).split("\n")[0].removeprefix(name).strip()
    assert verbs()[name].needs_word == (bool(head) and not head.startswith("["))


def test_every_verb_of_the_manual_exists() -> None:
    page = MANUAL.split("\n.SH VERBS\n")[1].split("\n.SH ")[0]
    named = [line.split(" \\f")[0] for line in re.findall(r"^\.SS (.*)$", page, re.MULTILINE)]
    assert named == leaves()


# --- pages ---------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", h.replace("`", "")).strip().lower().replace(" ", "-")
        for h in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page.name}: {link}"


def commands(text: str) -> Iterator[list[str]]:
    """Words of every ``gpuguard …`` line of a code block and every inline ``gpuguard …``."""
    lines = [
        line
        for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        for line in block.split("\n")
    ]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in lines:
        match = re.match(r"\s*(?:[#$] |-> )?gpuguard ([a-z-].*)", line)
        if match and not line.lstrip().startswith("gpuguard: "):
            yield match[1].split(" #")[0].split(";")[0].split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_pages_show_exist(page: Path) -> None:
    for words in commands(page.read_text()):
        name, rest = _verb_of(words)
        assert name in verbs(), f"{page.name}: gpuguard {' '.join(words)}"
        known = verbs()[name].options
        unknown = [word for word in rest if word.startswith("-") and word not in known]
        assert unknown == [], f"{page.name}: gpuguard {' '.join(words)}"


def _verb_of(words: list[str]) -> tuple[str, Iterable[str]]:
    while words and words[0] in verbs()[""].options:
        words = words[2:] if words[0] in ("--root", "--config") else words[1:]
    if words[:1] in (["config"], ["lane"]):
        return " ".join(words[:2]), words[2:]
    return (words[0] if words and words[0] != "VERB" else ""), words[1:]


def test_the_readme_shows_commands() -> None:
    shown = {_verb_of(words)[0] for words in commands(README)}
    assert {"status", "plan", "rebuild", "backups", "rollback", "config init"} <= shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_that_pages_name_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|^\s*[$#] )make ([a-z-]+)", page.read_text(), re.MULTILINE)
    assert set(named) <= targets


def test_files_of_ours_are_in_readme_and_manual() -> None:
    release = state.depmod_file("RELEASE"), f"{state.module_tree('RELEASE')}/{state.MODULES_SUBDIR}"
    manual = MANUAL.replace("\\-", "-")
    for path in (
        state.CONFIG_FILE, state.CONFIG_DROPINS, state.BUILDS_DIR, state.FAILURES_DIR,
        state.BACKUPS_DIR, state.JOURNAL_FILE, state.LOCK_FILE, state.LOGS_DIR, state.CACHE_DIR,
        *release,
    ):  # fmt: skip
        assert path in section(README, "## Files"), path
        assert path in manual, path
