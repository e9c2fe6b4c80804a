"""What a switch may fall back on: what was good once, or what the file says now and is in order."""

from __future__ import annotations

import json

import pytest

from tests.lanekit import LaneHost, settle
from tests.test_lane_faults import break_lane_a

pytestmark = pytest.mark.slow
_FATAL = {"STUB_FATAL": "Engine core initialization failed"}


@pytest.fixture
def fresh(lane_host: LaneHost) -> LaneHost:
    """Lane a serves behind the front."""
    return settle(lane_host, a={})


def releases(host: LaneHost) -> set[str]:
    folder = host.path("/var/lib/gpuguard/lanes/releases")
    return {file.name.removesuffix(".json") for file in folder.iterdir()}


def refuse_c(host: LaneHost) -> None:
    host.lane("c", args={"load-format": "dummy"})
    refused = host.switch("c")
    assert [refusal["code"] for refusal in refused["refusals"]] == ["lane-dummy-weights"]


def test_a_refused_lane_is_not_kept_and_nothing_falls_back_on_it(fresh: LaneHost) -> None:
    refuse_c(fresh)
    assert releases(fresh) == {fresh.lane_id("a")}
    fresh.lane("b", env=_FATAL, fallback=["c"])
    break_lane_a(fresh)
    done = fresh.switch("b")
    assert (done["status"], done["outcome"], fresh.serving()) == (71, "failed", None), done
    assert any(note.startswith("no fallback: c (") for note in done["notes"])


@pytest.mark.parametrize("how", ["refused", "failed"])
def test_the_one_that_was_good_comes_before_the_newest(fresh: LaneHost, how: str) -> None:
    fresh.lane("c")
    good = fresh.lane_id("c")
    assert fresh.switch("c")["outcome"] == "promoted"
    assert fresh.switch("a")["outcome"] == "promoted"
    if how == "refused":
        refuse_c(fresh)
    else:
        fresh.lane("c", env={"STUB_STATUS": "500"})
        assert fresh.switch("c")["outcome"] == "rolled-back"
    fresh.lane("b", env=_FATAL, fallback=["c"])
    break_lane_a(fresh)
    done = fresh.switch("b")
    assert (done["outcome"], fresh.serving(), fresh.front()) == ("fell-back", good, 200), done


def test_what_an_older_gpuguard_promoted_still_counts(fresh: LaneHost) -> None:
    fresh.lane("c")
    assert fresh.switch("c")["outcome"] == "promoted"
    good = fresh.lane_id("c")
    assert fresh.switch("a")["outcome"] == "promoted"
    record = fresh.path("/var/lib/gpuguard/lanes/promoted.json")
    order = [entry["lane_id"] for entry in json.loads(record.read_text())["promoted"]]
    assert order == [good, fresh.lane_id("a")]
    record.unlink()
    refuse_c(fresh)
    fresh.lane("b", env=_FATAL, fallback=["c"])
    break_lane_a(fresh)
    assert fresh.switch("b")["serving"] == good


def test_what_has_an_environment_in_it_is_for_root_alone(fresh: LaneHost) -> None:
    for folder in ("releases", "snapshots"):
        path = fresh.path(f"/var/lib/gpuguard/lanes/{folder}")
        assert path.stat().st_mode & 0o777 == 0o700
        assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}


def test_a_release_of_another_gpuguard_can_be_gone_back_to(fresh: LaneHost) -> None:
    """It has keys that this one does not know, and its id was made in another way."""
    fresh.lane("c")
    assert fresh.switch("c")["outcome"] == "promoted"
    folder = fresh.path("/var/lib/gpuguard/lanes")
    old, new = fresh.lane_id("a"), "a-0123456789ab"
    document = json.loads((folder / f"releases/{old}.json").read_text())
    document["lane"] |= {"colour": "red", "engine": {**document["lane"]["engine"], "wheels": 4}}
    document["files"][0]["text"] = document["files"][0]["text"].replace(old, new)
    (folder / f"releases/{new}.json").write_text(json.dumps(document))
    (folder / f"releases/{old}.json").unlink()
    for name in ("active.json", "promoted.json"):
        (folder / name).write_text((folder / name).read_text().replace(old, new))
    back = fresh.json("lane", "rollback")
    assert (back["status"], back["serving"], fresh.serving()) == (0, new, new), back
    assert fresh.front() == 200
