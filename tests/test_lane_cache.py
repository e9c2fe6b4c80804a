"""Caches of compiled kernels: with them a start is a warm one, and they go with their release."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from gpuguard.host import LocalHost
from gpuguard.serving import store
from gpuguard.serving.caches import make_cache
from gpuguard.serving.prepare import prepare
from tests.lanekit import LaneHost, settle
from tests.test_lane_lint import IMAGE, make_lane
from tests.trees import make_tree

OLD = [f"old-{number:012x}" for number in range(30)]


@pytest.fixture
def served(shared_lane_host: LaneHost) -> LaneHost:
    """Lane a serves behind the front."""
    return settle(shared_lane_host, a={})


def cache(host: LaneHost, lane_id: str) -> Path:
    return host.path(f"/var/cache/gpuguard/lanes/{lane_id}")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_without_its_cache_a_lane_starts_as_for_the_first_time(served: LaneHost, how: str) -> None:
    # the engine needs longer than timeouts.start as soon as it has to compile
    served.lane("b", env={"STUB_START_SECONDS": "4", "OF": how}, timeouts={"start": 1})
    lane_id = served.lane_id("b")
    assert served.switch("b")["starts"][0]["first"] is True
    assert served.switch("a")["outcome"] == "promoted"
    assert served.json("lane", "switch", "b", "-n")["first_start"] is False
    for file in cache(served, lane_id).iterdir():
        file.unlink()
    if how == "removed":
        cache(served, lane_id).rmdir()
    assert served.json("lane", "switch", "b", "-n")["first_start"] is True
    done = served.switch("b")
    assert (done["outcome"], done["starts"][0]["first"]) == ("promoted", True), done["reasons"]
    assert served.switch("a")["outcome"] == "promoted"
    assert served.json("lane", "switch", "b", "-n")["first_start"] is False


@pytest.mark.slow
def test_caches_go_with_their_releases(lane_host: LaneHost) -> None:
    host = lane_host
    settle(host, a={"fallback": ["c"]}, b={}, c={})
    for name in ("c", "b", "a"):
        assert host.switch(name)["outcome"] == "promoted"
    before = [host.lane_id(name) for name in ("a", "b", "c")]
    host.lane("b", args={"max-num-seqs": 3})
    releases = host.path("/var/lib/gpuguard/lanes/releases")
    for age, lane_id in enumerate(OLD):
        (releases / f"{lane_id}.json").write_text("{}")
        os.utime(releases / f"{lane_id}.json", (1e9 - age, 1e9 - age))
    for lane_id in before:
        os.utime(releases / f"{lane_id}.json", (1, 1))  # older than all of them
    gone = "gone-" + "0" * 12
    for name in (*OLD, gone, "somebody-elses"):
        make_tree(cache(host, name), {"kernels/k": "x"})
    stuck = cache(host, OLD[-1])
    (stuck / "kernels/k").unlink()
    (stuck / "kernels").rmdir()
    stuck.rmdir()
    stuck.symlink_to("/srv")
    for place in ("warm/{}", "fingerprints/{}.json"):
        make_tree(host.path("/var/lib/gpuguard/lanes"), {place.format(OLD[-2]): ""})

    done = host.switch("b")
    assert (done["status"], done["outcome"]) == (0, "promoted"), done["reasons"]
    (note,) = done["notes"]
    assert f"{OLD[-1]} is not needed any more, and stays: " in note
    left = {file.name for file in cache(host, "").iterdir()}
    kept = {file.name.removesuffix(".json") for file in releases.iterdir()}
    assert left == {*kept, "somebody-elses", OLD[-1]}
    assert {gone, OLD[-2], before[1]} & left == set()
    # what serves, where a rollback goes, that one's fallback, and the newest of the others
    assert {host.lane_id("b"), before[0], before[2], OLD[0]} <= left
    assert host.path(f"/var/lib/gpuguard/lanes/warm/{OLD[-2]}").exists() is False
    assert host.path(f"/var/lib/gpuguard/lanes/fingerprints/{OLD[-2]}.json").exists() is False
    assert host.path("/srv/model").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders away: run as root")
@pytest.mark.parametrize("tool", ["podman", "docker"])
@pytest.mark.parametrize(
    ("user", "owner", "said"),
    [
        ("2000", 2000, ""),
        ("2000:0", 2000, ""),
        ("2000:users", 2000, ""),
        ("", 0, ""),
        ("root", 0, ""),
        (None, 0, ""),
        ("vllm", 0, "the image runs as vllm, whose number only the image knows"),
        ("99999999999999999999", 0, "cannot be given to 99999999999999999999"),
        ("broken", 0, "as whom the image runs is not known"),
    ],
)
def test_the_account_of_an_image_can_write_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, user: str | None, owner: int,
    said: str,
) -> None:  # fmt: skip
    config = {} if user is None else {"User": user}
    answer = "" if user == "broken" else json.dumps([{"Id": "x", "Config": config}])
    program = tmp_path / "bin" / tool
    make_tree(
        tmp_path, {f"bin/{tool}": f"#!/bin/sh\necho \"$*\" >{tmp_path}/asked\necho '{answer}'\n"}
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    lane = make_lane(engine={"backend": {"podman": "quadlet", "docker": "compose"}[tool]})
    folder, notes = make_cache(LocalHost(tmp_path / "root"), lane)
    assert (tmp_path / "asked").read_text() == f"image inspect {IMAGE}\n"
    assert (folder.stat().st_uid, bool(notes)) == (owner, bool(said))
    assert said in " ".join(notes)
    os.chown(folder, 4711, -1)  # by hand
    if user == "vllm":
        assert make_cache(LocalHost(tmp_path / "root"), lane) == (folder, ())


def note_of(build_id: bytes) -> bytes:
    """As the kernel shows it below /sys/module."""
    return struct.pack("<III", 4, len(build_id), 3) + b"GNU\0" + build_id


NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (x)\n"
DRIVEN: dict[str, str | bytes] = {
    "proc/sys/kernel/osrelease": "6.1.0-30-amd64\n",
    "proc/driver/nvidia/version": NVRM.format("580.95.05"),
    "sys/module/nvidia/notes/.note.gnu.build-id": note_of(b"a" * 20),
    **{f"sys/bus/pci/devices/0000:0{n}:00.0/vendor": "0x10de\n" for n in (1, 2)},
    **{f"sys/bus/pci/devices/0000:0{n}:00.0/class": "0x030000\n" for n in (1, 2)},
}


@pytest.mark.parametrize(
    "other",
    [
        {"proc/sys/kernel/osrelease": "6.1.0-31-amd64\n"},
        {
            "proc/driver/nvidia/version": str(DRIVEN["proc/driver/nvidia/version"]).replace(
                "95", "96"
            )
        },
        {"sys/module/nvidia/notes/.note.gnu.build-id": note_of(b"b" * 20)},
        {"sys/bus/pci/devices/0000:02:00.0/vendor": "0x8086\n"},
    ],
    ids=["kernel", "driver", "module", "cards"],
)
def test_the_engines_word_on_p2p_holds_for_one_state_alone(
    tmp_path: Path, other: dict[str, str | bytes]
) -> None:
    host = LocalHost(make_tree(tmp_path, DRIVEN))
    engine = {"backend": "venv", "venv": "/opt/vllm", "image": None, "user": "root"}
    lane = make_lane(engine=engine, requires={"p2p": "preferred"})
    store.write_release(host, store.Release(lane, ()), anew=True)
    store.write_active(host, store.Active(lane_id=lane.lane_id))
    prepare(host, lane.name)
    word = host.path(f"/var/cache/gpuguard/lanes/{lane.lane_id}/gpu_p2p_access_cache_for_0,1.json")
    word.write_text('{"0->1": true}')
    prepare(host, lane.name)
    assert word.exists()  # nothing has changed
    make_tree(tmp_path, other)
    done = prepare(host, lane.name)
    (aside,) = word.parent.glob("gpu_p2p_access_cache_for_*")
    assert aside.name.startswith(f"{word.name}.outdated-")
    assert any("moved aside" in note for note in done.notes)
