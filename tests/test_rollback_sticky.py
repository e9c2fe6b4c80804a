"""What an operator rolled back stays so until he asks for a rebuild."""

from __future__ import annotations

from tests.box import K2, Box

MARK = f"/var/lib/gpuguard/left-alone/{K2}.json"


def test_an_automatic_run_leaves_it_alone_and_a_rebuild_patches_it(box: Box) -> None:
    box.rebuilt()
    assert box.run("rollback", "--kernel", K2).status == 0
    status = box.run("rebuild", "--automatic")
    assert "rolled back on" in status.out
    assert box.kernel(K2)["ready"] is False
    found = box.findings(K2)["next-kernel-stock"]
    assert "automatic runs leave it alone" in found["remedy"]

    box.rebuilt()

    assert box.kernel(K2)["ready"] is True
    assert not box.path(MARK).exists()
    assert "nothing to do" in box.run("plan").out


def test_a_mark_that_cannot_be_read_stops_instead_of_guessing(box: Box) -> None:
    box.rebuilt()
    assert box.run("rollback", "--kernel", K2).status == 0
    box.path(MARK).write_text("{")
    answer = box.run("rebuild", "--automatic")
    assert answer.status != 0
    assert "left-alone" in answer.err
    assert box.kernel(K2)["ready"] is False
