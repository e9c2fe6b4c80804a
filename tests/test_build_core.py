"""Core objects: compiled once for many kernels, by content; damaged ones are never linked in."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpuguard.build import core_cache
from gpuguard.build.core_objects import CoreInputs, provide
from gpuguard.build.inputs import build_user
from gpuguard.build.log import BuildLog, new_log
from gpuguard.build.make import Make
from gpuguard.build.records import Compiler
from gpuguard.build.source import export, probe
from gpuguard.build.staging import staging
from gpuguard.demo.source import VERSION
from gpuguard.errors import BuildError
from tests.building import Listener, Workplace, configured

INPUTS = CoreInputs(source="sha256:s", patches="none", driver_version=VERSION)
GCC = Compiler(cc="gcc", version="gcc (Test 12.2.0) 12.2.0", major=12, cxx="g++")
NAMES = ("nv-kernel.o", "nv-modeset-kernel.o")


@contextmanager
def prepared(place: Workplace, edit: Callable[[Path], object] = lambda _: None) -> Iterator[Make]:
    """An export of the tree's source, ready for its core objects."""
    config, place.listener = configured(), Listener()
    with staging(place.host, "6.1.0-50-amd64", build_user(config)) as here:
        found = probe(place.host, config.source, None)
        export(place.host, found.state, here)
        edit(here.tree)
        name, path = new_log(place.host, "6.1.0-50-amd64")
        with BuildLog(path, here.tree) as log:
            yield Make(
                host=place.host, staging=here, jobs=2, timeout_seconds=60, log=log,
                log_name=name, progress=place.listener,
            )  # fmt: skip


def run(
    place: Workplace,
    compiler: Compiler = GCC,
    inputs: CoreInputs = INPUTS,
    edit: Callable[[Path], object] = lambda _: None,
) -> bool:
    with prepared(place, edit) as make:
        cached = provide(make, compiler, inputs)
        for module, name in zip(("nvidia", "nvidia-modeset"), NAMES, strict=True):
            link = make.staging.tree / "kernel-open" / module / f"{name}_binary"
            assert link.is_symlink()
            assert link.resolve().is_relative_to(place.root / "var/cache/gpuguard/core")
            assert link.read_bytes()[:4] == b"\x7fELF"
    return cached


def entries(place: Workplace) -> list[Path]:
    folder = place.root / "var/cache/gpuguard/core"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def append(name: str) -> Callable[[Path], object]:
    def edit(tree: Path) -> None:
        file = tree / name
        file.chmod(0o666)
        file.write_text(file.read_text() + "\n/* changed */\n")

    return edit


def test_first_build_then_cache(workplace: Workplace) -> None:
    assert run(workplace) is False
    step, detail, estimate = workplace.listener.steps[0]
    assert (step, estimate) == ("core", None)
    assert detail == "core objects: to be built because first build of this version"
    assert run(workplace) is True
    assert workplace.listener.steps[0][1] == "core objects: cached"
    assert len(entries(workplace)) == 1


def test_an_entry_is_roots_own_and_describes_itself(workplace: Workplace) -> None:
    run(workplace)
    (entry,) = entries(workplace)
    assert {p.name for p in entry.iterdir()} == {*NAMES, "meta.json"}
    for path in entry.iterdir():
        assert path.stat().st_uid == os.geteuid()
        assert path.stat().st_mode & 0o777 == 0o644
    meta = json.loads((entry / "meta.json").read_text())
    assert meta["key"]["architecture"] == platform.machine()
    assert set(meta["objects"]) == set(NAMES)
    assert meta["objects"]["nv-kernel.o"]["size"] == (entry / "nv-kernel.o").stat().st_size
    assert meta["build_seconds"] > 0


@pytest.mark.parametrize("name", ["src/nvidia/src/rm_core.c", "version.mk", "utils.mk"])
def test_what_the_core_is_made_from_decides(workplace: Workplace, name: str) -> None:
    run(workplace)

    def edit(tree: Path) -> None:
        file = tree / name
        file.chmod(0o666)
        file.write_text(file.read_text() + "\n")

    assert run(workplace, edit=edit) is False
    assert "because the source or a patch changed" in workplace.listener.steps[0][1]
    assert workplace.listener.steps[0][2] is not None  # an estimate from the run before


def test_what_only_the_kernel_part_is_made_from_does_not(workplace: Workplace) -> None:
    run(workplace)
    assert run(workplace, edit=append("kernel-open/nvidia/nv.c")) is True


def test_another_compiler(workplace: Workplace) -> None:
    run(workplace)
    assert run(workplace, replace(GCC, version="gcc (Test 12.3.0) 12.3.0")) is False
    assert "because the compiler changed" in workplace.listener.steps[0][1]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_object_is_built_again_and_that_is_said(
    workplace: Workplace, damage: str
) -> None:
    run(workplace)
    file = entries(workplace)[0] / "nv-kernel.o"
    good = file.read_bytes()
    if damage == "flip":
        file.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    elif damage == "truncate":
        file.write_bytes(good[:-1])
    else:
        file.unlink()
    assert run(workplace) is False
    assert "cannot be used: nv-kernel.o is damaged" in workplace.listener.steps[0][1]
    assert run(workplace) is True


@pytest.mark.parametrize("text", ["", "{}", '{"key": 1}', "[]", "null", "\0\xff"])
def test_a_damaged_description(workplace: Workplace, text: str) -> None:
    run(workplace)
    (entries(workplace)[0] / "meta.json").write_text(text)
    assert run(workplace) is False
    assert run(workplace) is True


def test_an_entry_under_a_false_name_is_not_used(workplace: Workplace) -> None:
    run(workplace)
    run(workplace, edit=append("src/nvidia/src/rm_core.c"))
    first, second = entries(workplace)
    meta = (first / "meta.json").read_text()
    (second / "meta.json").write_text(meta)
    assert {path for path, _ in core_cache.entries(workplace.host)} == {first}


def test_three_entries_are_kept_and_the_one_in_use_is_among_them(workplace: Workplace) -> None:
    run(workplace)
    (first,) = entries(workplace)
    (first.parent / ".new-left-by-kill").mkdir()
    for number in range(3):
        for entry in entries(workplace):  # all else is older than what is used now
            os.utime(entry, (number, number))
        assert run(workplace) is True
        run(workplace, replace(GCC, version=f"gcc (Test 12.{number}.9) 12.{number}.9"))
    assert len(entries(workplace)) == 3
    assert first in entries(workplace)


def test_expected_answers_without_looking_at_the_source(workplace: Workplace) -> None:
    run(workplace)
    host = workplace.host
    assert core_cache.expected(host, ("sha256:s", "none"), GCC.version)
    assert not core_cache.expected(host, ("sha256:s", "other"), GCC.version)
    assert not core_cache.expected(host, ("sha256:s", "none"), "gcc (Test 13.1.0) 13.1.0")


def test_a_core_that_does_not_compile(workplace: Workplace) -> None:
    def edit(tree: Path) -> None:
        file = tree / "src/nvidia/src/rm_core.c"
        file.chmod(0o666)
        file.write_text("int broken(void) { return nothing; }\n")

    with pytest.raises(BuildError) as caught:
        run(workplace, edit=edit)
    assert caught.value.code == "build-failed"
    assert "compiling the core objects failed: src/rm_core.c:1: error:" in caught.value.message
    assert entries(workplace) == []
    assert workplace.staging == []


def replaced_makefile(recipe: str) -> Callable[[Path], object]:
    def edit(tree: Path) -> None:
        file = tree / "src/nvidia/Makefile"
        file.chmod(0o666)
        file.write_text(f"all:\n\t@mkdir -p _out/Linux_$$(uname -m)\n\t@{recipe}\n")

    return edit


@pytest.mark.parametrize(
    "recipe",
    [
        "true",
        "ln -s /etc/shadow _out/Linux_$$(uname -m)/nv-kernel.o",
        "mkfifo _out/Linux_$$(uname -m)/nv-kernel.o",
        "mkdir _out/Linux_$$(uname -m)/nv-kernel.o",
    ],
)
def test_only_a_regular_file_is_taken_over(workplace: Workplace, recipe: str) -> None:
    """The build user must not get root to copy what it points to, or to wait on a pipe."""
    with pytest.raises(BuildError) as caught:
        run(workplace, edit=replaced_makefile(recipe))
    assert caught.value.code == "core-incomplete"
    assert "nv-kernel.o" in caught.value.message
    assert entries(workplace) == []


def test_the_compiler_is_named_to_make(workplace: Workplace) -> None:
    recipe = "echo CC=$(CC) CXX=$(CXX) TMPDIR=$$TMPDIR HOME=$$HOME LC_ALL=$$LC_ALL"
    with pytest.raises(BuildError):
        run(workplace, Compiler(cc="gcc", version="v", major=12), edit=replaced_makefile(recipe))
    said = next(line for line in workplace.log.splitlines() if line.startswith("CC=gcc"))
    assert "CXX=false" in said
    assert "/staging/" in said.split("TMPDIR=")[1]
    assert said.endswith("LC_ALL=C")
