"""Tools, versions and the image are looked at before anything is stopped."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lane_outcomes import refused
from tests.lanekit import LaneHost, settle

pytestmark = pytest.mark.slow
DIGEST = "localhost/vllm@sha256:" + "ab" * 32


@pytest.fixture
def served(shared_lane_host: LaneHost) -> LaneHost:
    """Lane a serves behind the front."""
    return settle(shared_lane_host, a={})


@pytest.mark.parametrize(("backend", "tool"), [("quadlet", "podman"), ("compose", "docker")])
def test_an_image_that_is_not_here(served: LaneHost, backend: str, tool: str) -> None:
    engine = {"backend": backend, "image": DIGEST, "gpus": "none"}
    served.lane("b", engine={**engine, "venv": None})
    able(served, tool)
    assert refused(served, "b") == ["lane-engine-missing"]
    assert "is not on this machine" in served.history()[-1]["reasons"][0]
    able(served, tool, image=True)
    assert served.json("lane", "switch", "b", "-n")["refusals"] == []


@pytest.mark.parametrize(
    ("backend", "tool", "how", "why"),
    [
        ("quadlet", "podman", {"version": "4.3.1"}, "podman 4.3.1 has no quadlets"),
        ("quadlet", "podman", {"version": "unknown"}, "does not tell its version"),
        ("quadlet", "podman", {"generator": False}, "podman-system-generator"),
        ("compose", "docker", {"compose": ""}, "docker has no compose"),
        ("compose", "docker", {"compose": "v2.23.3"}, "docker compose 2.23.3 knows no files of"),
        ("compose", "docker", {"compose": "dev"}, "docker compose does not tell its version"),
        ("quadlet", "podman", {"broken": True}, "whether podman can run the image is not known"),
        ("compose", "docker", {"broken": True}, "whether docker can run the image is not known"),
    ],
)
def test_a_backend_that_cannot_run(
    served: LaneHost, backend: str, tool: str, how: dict[str, Any], why: str
) -> None:
    served.lane("b", engine={"backend": backend, "image": DIGEST, "gpus": "none", "venv": None})
    able(served, tool, image=True, **how)
    refusals = served.json("lane", "switch", "b", "-n")["refusals"]
    assert [refusal["code"] for refusal in refusals] == ["lane-engine-missing"]
    assert why in refusals[0]["message"]


def able(
    host: LaneHost,
    tool: str,
    *,
    image: bool = False,
    version: str = "4.9.3",
    generator: bool = True,
    compose: str = "2.26.1-4",
    broken: bool = False,
) -> None:
    """A container tool that answers; it runs nothing."""
    host.make_program(
        f"/opt/tools/{tool}",
        f"if sys.argv[1] == '--version': print('{tool} version {version}')\n"
        f"elif sys.argv[1] == 'compose': print('{compose}'); sys.exit({int(not compose)})\n"
        f"elif {broken}: sys.exit(125)\n"
        f"elif sys.argv[1] == 'image' and not {image}: sys.exit(1)\n"
        "elif 'inspect' in sys.argv: print('[{\"Id\": \"abc\"}]')\n",
    )
    place = "/etc/systemd/system-generators/podman-system-generator"
    if generator:
        host.make_program(place, "")
    else:
        host.path(place).unlink(missing_ok=True)
