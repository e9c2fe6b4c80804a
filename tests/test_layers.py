"""Dependencies point one way, only a few modules may do special things, and code stays small."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
MAX_FUNCTION_LINES = 60
MAX_MODULE_LINES = 400

_BASE = frozenset({"errors", "core", "state"})
_CONFIG = frozenset({"config", "config_yaml", "config_check", "config_file"})
_RECORDS = frozenset(
    {"records", "accepted", "proof", "left_alone", "last_run", "window", "ledger", "setup_record"}
    | {"tally", "deep_record"}
)
_TREE = _BASE | _CONFIG | _RECORDS | {"host"}
_ACT = frozenset({"probes", "build", "apply"})
_PROGRAM = frozenset({"cli", "demo", "daemon", "exporter"})

#: What each part may import, besides itself and other people's packages. A part that is not
#: listed is a use case: it may import all but the program around it.
ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "core": frozenset({"errors"}),
    "state": frozenset({"core"}),
    "host": _BASE,
    "config": _BASE,
    "config_yaml": _BASE,
    "config_check": _BASE | _CONFIG,
    "config_file": _BASE | _CONFIG | {"host"},
    "records": _BASE | {"host", "left_alone"},
    "accepted": _BASE | {"host"},
    "proof": _BASE | {"host"},
    "tally": _BASE | {"host"},
    "deep_record": _BASE | {"host"},
    "left_alone": _BASE | {"host"},
    "last_run": _BASE | {"host"},
    "window": _BASE | {"host"},
    "ledger": _BASE | {"host"},
    "probes": _TREE,
    "build": _TREE | {"probes"},
    "apply": _TREE | {"probes"},  # it looks at what it has done: who would modprobe load now
    "deep": _TREE | {"probes"},
    "serving": _TREE | {"probes"},
}


@dataclass(frozen=True)
class Import:
    """One imported module and the place of the statement."""

    path: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(REPOSITORY)}:{self.line} imports {self.module}"

    @property
    def importer(self) -> str:
        return part_of(self.path)


def part_of(path: Path) -> str:
    """``host`` for gpuguard/host/local.py, ``config`` for gpuguard/config.py."""
    first = path.relative_to(REPOSITORY / "gpuguard").parts[0]
    return first.removesuffix(".py")


def modules(*folders: str) -> list[Path]:
    """The Python files below some folders of the repository."""
    return sorted(path for folder in folders for path in (REPOSITORY / folder).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text(), str(path))


@cache
def imports() -> tuple[Import, ...]:
    """Every import in the package, also those within functions."""
    return tuple(found for path in modules("gpuguard") for found in _imports_of(path))


def _imports_of(path: Path) -> Iterator[Import]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            # With the name, which may be a module: from gpuguard import state.
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (Import(path, node.lineno, name) for name in names)


def report(offenders: Iterator[Import]) -> None:
    """Fail with one line for each offender."""
    assert "\n".join(map(str, offenders)) == ""


def own(found: Import) -> str | None:
    """The part of this package that is imported; None for anything else."""
    name, _, rest = found.module.partition(".")
    return rest.split(".")[0] if name == "gpuguard" else None


def may_import(importer: str, part: str) -> bool:
    """Whether dependencies between two parts point the right way."""
    if importer == part or importer in _PROGRAM | {"__main__"} or part == "__version__":
        return True
    return part in ALLOWED.get(importer, _TREE | _ACT | {"deep", "serving", "verbs", importer})


def test_dependencies_point_one_way() -> None:
    report(
        found
        for found in imports()
        if (part := own(found)) is not None and not may_import(found.importer, part)
    )


def test_the_demo_is_imported_by_nothing_but_the_command_line() -> None:
    allowed = {"demo", "cli", "__main__"}
    report(f for f in imports() if own(f) == "demo" and f.importer not in allowed)


def test_the_core_and_the_errors_need_the_standard_library_alone() -> None:
    report(
        found
        for found in imports()
        if found.importer in ("core", "errors")
        and own(found) is None
        and found.module.split(".")[0] not in sys.stdlib_module_names
    )


def test_the_core_does_no_input_or_output() -> None:
    doors = {"os", "shutil", "subprocess", "tempfile", "socket", "io"}
    report(
        found
        for found in imports()
        if found.importer == "core"
        and (found.module.split(".")[0] in doors or found.module in ("pathlib", "pathlib.Path"))
    )


def test_programs_are_run_in_one_place() -> None:
    runners = {"sh", "subprocess"}
    local = REPOSITORY / "gpuguard/host/local.py"
    report(f for f in imports() if f.module.split(".")[0] in runners and f.path != local)


def test_only_the_command_line_talks_to_people() -> None:
    talkers = {"typer", "rich", "click"}
    report(
        found
        for found in imports()
        if found.module.split(".")[0] in talkers and found.importer not in ("cli", "__main__")
    )


def test_only_the_command_line_prints_and_exits() -> None:
    offenders = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}: {ast.unparse(node.func)}()"
        for path in modules("gpuguard")
        if part_of(path) not in ("cli", "__main__")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("print", "sys.exit", "exit", "sys.stdout.write")
    ]
    assert "\n".join(offenders) == ""


@pytest.mark.parametrize("folder", ["gpuguard", "tests", "benchmarks"])
def test_functions_and_modules_stay_small(folder: str) -> None:
    offenders = [problem for path in modules(folder) for problem in _too_long(path)]
    assert "\n".join(offenders) == ""


def _too_long(path: Path) -> Iterator[str]:
    name = path.relative_to(REPOSITORY)
    lines = len(path.read_text().splitlines())
    if lines > MAX_MODULE_LINES:
        yield f"{name}: {lines} > {MAX_MODULE_LINES} lines"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} > {MAX_FUNCTION_LINES} lines"


def test_the_check_sees_a_wrong_import() -> None:
    path = REPOSITORY / "gpuguard/core/facts.py"
    assert not may_import(part_of(path), "host")
    assert not may_import("probes", "build")
    assert not may_import("serving", "apply")
    assert not may_import("verbs", "cli")
    assert may_import("cli", "probes")
