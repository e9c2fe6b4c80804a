"""GNU patch decides, on a copy; what is refused names the file and the hunk (CASES C29)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuguard.build.inputs import build_user
from gpuguard.build.patch_files import find
from gpuguard.build.patches import Applied, Outcome, apply_all
from gpuguard.build.staging import Staging, staging
from gpuguard.build.trust import trust_in
from gpuguard.errors import PatchRejectedError
from gpuguard.host import Completed, LocalHost
from tests.building import Workplace, configured

NUMBERS = "".join(f"line {number}\n" for number in range(1, 41))


class Bench:
    """An export with one file of forty lines, and patches to try on it."""

    def __init__(self, place: Workplace, here: Staging) -> None:
        self.place, self.here = place, here
        self.log: list[str] = []
        self.write("src/a.c", NUMBERS)

    def write(self, name: str, text: str) -> None:
        path = self.here.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if self.here.user is not None:
            subprocess.run(
                ["chown", "-R", f"{self.here.user.uid}:{self.here.user.gid}", self.here.tree],
                check=True,
            )

    def patch(self, name: str, old: str, new: str, *, file: str = "src/a.c") -> str:
        """A patch as ``diff -u`` makes it."""
        before, after = self.place.root / "before", self.place.root / "after"
        before.write_text(old)
        after.write_text(new)
        answer = subprocess.run(
            ["diff", "-u", f"--label=a/{file}", f"--label=b/{file}", before, after],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return self.raw(name, answer.stdout)

    def raw(self, name: str, text: str) -> str:
        (self.place.patch.parent / name).write_text(text)
        return f"/srv/patches/{name}"

    def apply(self, *paths: str, source_differs: bool | None = None) -> tuple[Applied, ...]:
        found, blockers = find(self.place.host, paths, None, trust_in(None))
        assert blockers == ()
        return apply_all(
            self.place.host, found, self.here, source_differs=source_differs, log=self.log.append
        )

    def text(self, name: str = "src/a.c") -> str:
        return (self.here.tree / name).read_text()


@pytest.fixture
def bench(workplace: Workplace) -> Iterator[Bench]:
    with staging(workplace.host, "6.1.0-50-amd64", build_user(configured())) as here:
        yield Bench(workplace, here)


def changed(number: int, text: str = "patched") -> str:
    return NUMBERS.replace(f"line {number}\n", f"{text}\n")


def rejected(bench: Bench, *paths: str, source_differs: bool | None = None) -> PatchRejectedError:
    with pytest.raises(PatchRejectedError) as caught:
        bench.apply(*paths, source_differs=source_differs)
    assert caught.value.exit_status == 65
    return caught.value


def test_applies(bench: Bench) -> None:
    (result,) = bench.apply(bench.patch("p", NUMBERS, changed(20)))
    assert result.outcome is Outcome.APPLIED
    assert bench.text() == changed(20)
    assert sorted(p.name for p in bench.here.tree.rglob("*") if p.is_file()) == ["a.c"]
    assert not (bench.here.root / "trial").exists()


def test_an_offset_is_fine_and_noted(bench: Bench) -> None:
    patch = bench.patch("p", NUMBERS, changed(20))
    bench.write("src/a.c", "more\nmore\n" + NUMBERS)
    (result,) = bench.apply(patch)
    assert result.outcome is Outcome.APPLIED
    assert result.notes == ("Hunk #1 succeeded at 19 (offset 2 lines).",)
    assert any("offset 2 lines" in line for line in bench.log)


def test_moved_context_is_rejected_with_file_and_hunk(bench: Bench) -> None:
    new = changed(5).replace("line 30\n", "patched\n")
    patch = bench.patch("p", NUMBERS, new)
    other = NUMBERS.replace("line 30\n", "upstream\n")
    bench.write("src/a.c", other)
    error = rejected(bench, patch)
    assert error.code == "patch-rejected"
    assert "src/a.c hunk #2" in error.message
    assert "FAILED" in error.detail
    assert bench.text() == other


def test_fuzz_is_refused(bench: Bench) -> None:
    patch = bench.patch("p", NUMBERS, changed(20))
    other = NUMBERS.replace("line 17\n", "upstream\n")
    bench.write("src/a.c", other)
    error = rejected(bench, patch)
    assert error.code == "patch-fuzz"
    assert "src/a.c hunk #1" in error.message
    assert bench.text() == other


def test_already_applied_is_fine_and_no_question_is_asked(bench: Bench) -> None:
    patch = bench.patch("p", NUMBERS, changed(20))
    bench.write("src/a.c", changed(20))
    (result,) = bench.apply(patch)
    assert result.outcome is Outcome.ALREADY
    assert bench.text() == changed(20)


def test_half_applied_is_rejected(bench: Bench) -> None:
    """tinygrad/open-gpu-kernel-modules#21: one file had been missed."""
    bench.write("src/b.c", NUMBERS)
    one = bench.patch("one", NUMBERS, changed(20))
    two = bench.patch("two", NUMBERS, changed(20), file="src/b.c")
    text = "".join((bench.place.root / p.lstrip("/")).read_text() for p in (one, two))
    bench.write("src/b.c", changed(20))
    error = rejected(bench, bench.raw("both", text))
    assert error.code == "patch-rejected"
    assert bench.text() == NUMBERS


def test_patches_build_on_each_other(bench: Bench) -> None:
    first = bench.patch("1", NUMBERS, changed(20, "first"))
    second = bench.patch("2", changed(20, "first"), changed(20, "second"))
    assert [r.outcome for r in bench.apply(first, second)] == [Outcome.APPLIED] * 2
    assert bench.text() == changed(20, "second")


def test_patches_in_the_wrong_order(bench: Bench) -> None:
    first = bench.patch("1", NUMBERS, changed(20, "first"))
    second = bench.patch("2", changed(20, "first"), changed(20, "second"))
    assert rejected(bench, second, first).code == "patch-rejected"


def test_one_patch_that_touches_a_file_twice(bench: Bench) -> None:
    """A series in one file, as ``git format-patch --stdout`` makes it; --dry-run rejects it."""
    one = bench.patch("1", NUMBERS, changed(20, "first"))
    two = bench.patch("2", changed(20, "first"), changed(20, "second"))
    text = "".join((bench.place.root / p.lstrip("/")).read_text() for p in (one, two))
    bench.apply(bench.raw("series", f"From 0000 Mon Sep 17\nSubject: x\n---\n{text}"))
    assert bench.text() == changed(20, "second")


def test_new_renamed_and_deleted_files(bench: Bench) -> None:
    bench.write("src/old.c", "old\n")
    bench.write("src/gone.c", "gone\n")
    bench.apply(bench.raw("git", (
        "diff --git a/src/dir/new.c b/src/dir/new.c\nnew file mode 100644\n"
        "--- /dev/null\n+++ b/src/dir/new.c\n@@ -0,0 +1 @@\n+new\n"
        "diff --git a/src/old.c b/src/renamed.c\nsimilarity index 100%\n"
        "rename from src/old.c\nrename to src/renamed.c\n"
        "diff --git a/src/gone.c b/src/gone.c\ndeleted file mode 100644\n"
        "--- a/src/gone.c\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n"
    )))  # fmt: skip
    assert bench.text("src/dir/new.c") == "new\n"
    assert bench.text("src/renamed.c") == "old\n"
    assert not (bench.here.tree / "src/gone.c").exists()


def test_a_file_that_is_not_there(bench: Bench) -> None:
    error = rejected(bench, bench.patch("p", NUMBERS, changed(20), file="src/other.c"))
    assert error.code == "patch-rejected"
    assert "not there" in error.message


def test_a_malformed_patch(bench: Bench) -> None:
    text = (bench.place.root / bench.patch("p", NUMBERS, changed(20)).lstrip("/")).read_text()
    error = rejected(bench, bench.raw("cut", text[: len(text) // 2]))
    assert error.code == "patch-rejected"
    assert bench.text() == NUMBERS


def test_a_patch_cannot_leave_the_tree(bench: Bench) -> None:
    outside = bench.place.root / "victim"
    outside.write_text(NUMBERS)
    outside.chmod(0o666)
    ups = "../" * 8
    patch = bench.patch("p", NUMBERS, changed(20), file=f"{ups}{outside}")
    assert rejected(bench, patch).code == "patch-rejected"
    assert outside.read_text() == NUMBERS


def test_patches_that_undo_each_other(bench: Bench) -> None:
    there = bench.patch("1", NUMBERS, changed(20))
    back = bench.patch("2", changed(20), NUMBERS)
    assert rejected(bench, there, back).code == "patch-changes-nothing"


def test_patches_that_undo_each_other_on_a_patched_ref(bench: Bench) -> None:
    there = bench.patch("1", NUMBERS, changed(20))
    back = bench.patch("2", changed(20), NUMBERS)
    assert len(bench.apply(there, back, source_differs=True)) == 2


def test_a_patch_that_is_in_the_stock_source(bench: Bench) -> None:
    """Merged upstream: already applied, and the tree is the stock ref's."""
    patch = bench.patch("p", NUMBERS, changed(20))
    bench.write("src/a.c", changed(20))
    assert rejected(bench, patch, source_differs=False).code == "patch-changes-nothing"


def test_a_patch_that_changes_after_it_was_looked_at(bench: Bench) -> None:
    path = bench.patch("p", NUMBERS, changed(20))
    found, _ = find(bench.place.host, [path], None, trust_in(None))
    Path(f"{bench.place.root}{path}").write_text("other")
    with pytest.raises(PatchRejectedError) as caught:
        apply_all(bench.place.host, found, bench.here, source_differs=None, log=bench.log.append)
    assert caught.value.code == "patch-changed"


def test_dos_line_ends(bench: Bench) -> None:
    text = (bench.place.root / bench.patch("p", NUMBERS, changed(20)).lstrip("/")).read_text()
    path = bench.place.patch.parent / "dos"
    path.write_bytes(text.replace("\n", "\r\n").encode())
    bench.apply("/srv/patches/dos")
    assert bench.text() == changed(20)


def test_a_folder_that_is_a_link_is_not_followed_out_of_the_tree(
    bench: Bench, tmp_path: Path
) -> None:
    """The trial copies as root; what only root may read must not get to the build user."""
    (tmp_path / "shadow").write_text("root's own\n")
    (bench.here.tree / "d").symlink_to(tmp_path)
    seen: list[Path] = []
    real = bench.place.host.run
    patch = bench.raw("p", "--- a/d/shadow\n+++ b/d/shadow\n@@ -1 +1 @@\n-root's own\n+x\n")
    found, _ = find(bench.place.host, [patch], None, trust_in(None))

    class Host(LocalHost):
        def run(self, *argv: str, **how: Any) -> Completed:
            seen.extend(bench.here.root.glob("trial/d/*"))
            return real(*argv, **how)

    with pytest.raises(PatchRejectedError):
        apply_all(
            Host(bench.place.root), found, bench.here, source_differs=None, log=bench.log.append
        )
    assert seen == []
    assert (tmp_path / "shadow").read_text() == "root's own\n"
