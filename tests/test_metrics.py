"""``gpuguard metrics``: the table, the textfile, the reference, and each probe's own failure."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuguard.core.metrics import METRICS, REGULAR_PROBES
from gpuguard.core.observation import decode
from gpuguard.exporter.reference import reference
from tests.box import K1, K2, Answer, Box
from tests.building import folder_for_others
from tests.daemon_kit import Series, configure, green_host, named, parse, value

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with folder_for_others() as folder:
        green_host(folder / "host", cards=3)
        yield folder / "host"


@pytest.fixture
def host(base: Path) -> Iterator[Box]:
    """A green host of the test's own, with three cards; the build user may enter it."""
    with folder_for_others() as folder:
        shutil.copytree(base, folder / "host", symlinks=True)
        yield Box(folder / "host")


def series_of(host: Box) -> Series:
    answer = host.run("metrics")
    assert answer.status == 0, answer.err
    return parse(answer.out)


# --- the table -----------------------------------------------------------------------------


def test_the_reference_is_as_the_table_is() -> None:
    assert (REPOSITORY / "docs/metrics.md").read_text() == reference(), "run: make docs"


def test_names_and_labels_keep_to_the_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"gpuguard_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not {"host", "instance", "job", "le", "quantile"} & set(metric.labels), metric.name
        for milli in ("_ms", "_milliseconds", "_mb", "_kib", "_percent"):
            assert not metric.name.endswith(milli), metric.name
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


# --- what it prints ------------------------------------------------------------------------


def test_a_green_host(host: Box) -> None:
    series = series_of(host)
    known = {metric.name for metric in METRICS}
    assert {name for name, _ in series} <= known
    assert value(series, "gpuguard_verdict", verdict="ok") == 1
    assert value(series, "gpuguard_gpus") == value(series, "gpuguard_gpus_expected") == 3
    assert len(named(series, "gpuguard_p2p_pair_ok")) == 12
    assert set(named(series, "gpuguard_p2p_pair_status").values()) == {0}
    assert value(series, "gpuguard_observation_interval_seconds") == 0
    successes = {dict(labels)["probe"] for labels in named(series, "gpuguard_probe_success")}
    assert successes == {probe.value for probe in REGULAR_PROBES}
    assert value(series, "gpuguard_textfile_last_run_timestamp_seconds") is None


def test_the_observation_as_json(host: Box) -> None:
    document = host.json("metrics").document
    observation = decode(document)
    assert {part.probe for part in observation.parts} == set(REGULAR_PROBES)
    assert observation.status["verdict"] == "ok"
    assert observation.more["host"] == "rig-07"


def test_stock_kernel_next(host: Box) -> None:
    shutil.rmtree(host.root / f"var/lib/gpuguard/builds/{K2}")  # nobody's build any more
    series = series_of(host)
    assert value(series, "gpuguard_kernel_ready", kernel=K2, role="next") == 0
    assert value(series, "gpuguard_kernel_ready", kernel=K1, role="running") == 1
    disk = {"module": "nvidia", "kernel": K2, "where": "disk"}
    assert value(series, "gpuguard_module_patched", **disk) == 0
    assert value(series, "gpuguard_reboot_safe") == 0
    assert value(series, "gpuguard_kernels", ready="true") == 1
    assert value(series, "gpuguard_kernels", ready="false") == 1


def let_the_other_copy_win(host: Box) -> None:
    (host.root / f"etc/depmod.d/zz-gpuguard-{K2}.conf").unlink()
    depmod = ["/usr/sbin/depmod", "-b", str(host.root), "-C", f"{host.root}/etc/depmod.d", K2]
    (host.root / "etc/depmod.d/stock.conf").write_text(f"override nvidia {K2} updates/dkms\n")
    subprocess.run(depmod, check=True, capture_output=True)


def test_shadowed(host: Box) -> None:
    let_the_other_copy_win(host)
    series = series_of(host)
    assert value(series, "gpuguard_module_shadowed", module="nvidia", kernel=K2) == 1
    assert value(series, "gpuguard_module_shadowed", module="nvidia", kernel=K1) == 0


def test_a_lost_card_keeps_its_accepted_pairs(host: Box) -> None:
    assert host.run("verify", "--accept").status == 0
    device = host.root / "sys/bus/pci/devices/0000:03:00.0"
    device.unlink()
    series = series_of(host)
    assert value(series, "gpuguard_gpus") == 2
    assert value(series, "gpuguard_gpus_expected") == 3
    pairs = named(series, "gpuguard_p2p_pair_ok")
    assert sorted(pairs.values()) == [0] * 8 + [1] * 4
    assert value(series, "gpuguard_p2p_pairs", capability="read") == 2
    assert value(series, "gpuguard_p2p_pairs_expected", capability="read") == 6


def test_a_number_of_cards_is_expected(host: Box) -> None:
    configure(host.root, p2p={"expected_gpus": 4})
    series = series_of(host)
    assert value(series, "gpuguard_gpus_expected") == 4
    assert value(series, "gpuguard_p2p_pairs", capability="write") == 6
    assert value(series, "gpuguard_p2p_pairs_expected", capability="write") == 12


def test_p2p_within_groups_only(host: Box) -> None:
    groups = [["0000:01:00.0", "0000:02:00.0"]]
    configure(host.root, p2p={"groups": groups, "expected_gpus": 3})
    series = series_of(host)
    assert len(named(series, "gpuguard_p2p_pair_ok")) == 4
    assert value(series, "gpuguard_p2p_pairs_expected", capability="read") == 2


def test_failed_builds_are_counted(host: Box) -> None:
    (host.root / "srv/nvidia/source/kernel-open/Makefile").write_text("modules:\n\tfalse\n")
    answers = [host.rebuild("--kernel", K2, "--force") for _ in range(2)]
    assert [answer.status for answer in answers] == [70, 70]
    series = series_of(host)
    assert value(series, "gpuguard_rebuilds_total", result="failed") == 2
    assert value(series, "gpuguard_rebuilds_total", result="done") == 2
    failed = value(series, "gpuguard_rebuild_last_timestamp_seconds", result="failed")
    done = value(series, "gpuguard_rebuild_last_timestamp_seconds", result="done")
    assert failed is not None
    assert done is not None
    assert failed > done > 0
    assert value(series, "gpuguard_kernel_build_failed", kernel=K2) == 0  # the old build is ready
    let_the_other_copy_win(host)
    series = series_of(host)
    assert value(series, "gpuguard_kernel_build_failed", kernel=K2) == 1
    assert value(series, "gpuguard_kernel_build_failed", kernel=K1) == 0


def test_what_keeps_a_build_from_beginning_is_no_build(host: Box) -> None:
    shutil.rmtree(host.root / "srv/nvidia/source")
    assert host.rebuild("--kernel", K2, "--force").status == 78
    assert value(series_of(host), "gpuguard_rebuilds_total", result="failed") == 0


def test_a_queued_run(host: Box) -> None:
    (host.root / "var/lib/gpuguard/rebuild-wanted").touch()
    series = series_of(host)
    assert value(series, "gpuguard_rebuild_queued") == 1
    assert value(series, "gpuguard_automatic_run_last_timestamp_seconds") == 0
    assert value(series, "gpuguard_automatic_run_last_exit_status") is None


def test_the_gate(host: Box) -> None:
    assert named(series_of(host), "gpuguard_gate_verdict") == {}
    assert host.run("verify", "--gate").status == 0
    series = series_of(host)
    assert value(series, "gpuguard_gate_verdict", verdict="ok") == 1
    assert sum(named(series, "gpuguard_gate_verdict").values()) == 1
    (host.root / "proc/sys/kernel/random/boot_id").write_text("boot-2\n")
    assert named(series_of(host), "gpuguard_gate_verdict") == {}  # that was another boot


# --- what cannot be looked at --------------------------------------------------------------


def _no_next_kernel(root: Path) -> None:
    (root / "vmlinuz").unlink()


def _no_build_id(root: Path) -> None:
    (root / "sys/module/nvidia/notes/.note.gnu.build-id").unlink()


def _no_library(root: Path) -> None:
    for library in (root / "usr/lib/x86_64-linux-gnu").glob("libnvidia-ml.so*"):
        library.unlink()


def _garbage(file: str) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("{")

    return write


@pytest.mark.parametrize(
    ("probe", "spoil", "gone"),
    [
        ("kernel", _no_next_kernel, "gpuguard_kernel_ready"),
        ("driver", _no_build_id, "gpuguard_module_info"),
        ("topo", _no_library, "gpuguard_p2p_pairs"),
        ("holds", _garbage("var/lib/gpuguard/holds.json"), "gpuguard_holds_drifted"),
        ("rebuild", _garbage("var/lib/gpuguard/rebuilds.json"), "gpuguard_rebuilds_total"),
        ("gate", _garbage("run/gpuguard/gate.json"), "gpuguard_gate_verdict"),
    ],
)
def test_each_probe_fails_alone(
    host: Box, probe: str, spoil: Callable[[Path], None], gone: str
) -> None:
    before = series_of(host)
    spoil(host.root)
    after = series_of(host)
    failed = {
        dict(labels)["probe"]
        for labels, good in named(after, "gpuguard_probe_success").items()
        if not good
    }
    assert failed == {probe}
    assert named(after, gone) == {}
    assert value(after, "gpuguard_probe_last_success_timestamp_seconds", probe=probe) == 0
    others = {m.name for m in METRICS if m.probe not in (None, probe)} - {
        "gpuguard_p2p_unavailable",
        "gpuguard_module_patched",
        "gpuguard_driver_info",
    }
    assert {n for n, _ in before if n in others} == {n for n, _ in after if n in others}


def test_boot_that_cannot_be_read(host: Box) -> None:
    (host.root / "boot").rename(host.root / "boot.away")
    (host.root / "boot").symlink_to("boot")  # a loop: nobody can look
    series = series_of(host)
    assert value(series, "gpuguard_verdict", verdict="unknown") == 1
    assert value(series, "gpuguard_probe_success", probe="kernel") == 0
    assert value(series, "gpuguard_probe_success", probe="topo") == 1
    assert value(series, "gpuguard_p2p_pairs", capability="read") == 6


def test_a_broken_configuration_is_a_finding_and_a_metric(host: Box) -> None:
    configure(host.root, p2p={"expected": 4})
    series = series_of(host)
    assert value(series, "gpuguard_config_last_reload_successful") == 0
    assert value(series, "gpuguard_findings", severity="warning") == 1


# --- the last deep check -------------------------------------------------------------------


def _deep(host: Box, **engines: str) -> None:
    uuids = [gpu["uuid"] for gpu in host.status()["p2p"]["gpus"]]
    rates = {"copy-push": 50e9, "copy-pull": 40e9, "kernel-store": 45e9, "kernel-load": 30e9}
    pairs = [
        {
            "src": src,
            "dst": dst,
            "ceiling_bytes_per_second": 63e9,
            "load_latency_seconds": 1.5e-6,
            "engines": [
                {"engine": name, "verdict": engines.get(name, "ok"), "bytes_per_second": rate}
                for name, rate in rates.items()
            ],
        }
        for src in uuids
        for dst in uuids
        if src != dst
    ]
    collective = {"verdict": "wrong-data"}
    deep = {"pairs": pairs, "collective": collective}
    document = {"schema": 1, "when": 1700000000.5, "deep": deep}
    (host.root / "var/lib/gpuguard/p2p-deep.json").write_text(json.dumps(document))
    accepted = [{"src": uuids[0], "dst": uuids[1], "bytes_per_second": {"copy-push": 60e9}}]
    baseline = {"schema": 1, "accepted": "2026-01-01T00:00:00Z", "length": 1, "pairs": accepted}
    (host.root / "var/lib/gpuguard/p2p-baseline.json").write_text(json.dumps(baseline))


def test_the_last_deep_check(host: Box) -> None:
    _deep(host, **{"kernel-load": "wrong-data", "copy-pull": "hang"})
    series = series_of(host)
    found = named(series, "gpuguard_p2p_transfer_ok")
    by_engine = {
        (dict(labels)["operation"], dict(labels)["engine"]): good for labels, good in found.items()
    }
    # what hangs has compared nothing: no wrong data, and counted apart
    assert by_engine == {("write", "ce"): 1, ("write", "sm"): 1, ("read", "sm"): 0}
    pairs = len(named(series, "gpuguard_p2p_bandwidth_bytes_per_second"))
    for verdict, engines in (("ok", 2), ("hang", 1), ("wrong_data", 1), ("implausible", 0)):
        assert value(series, "gpuguard_p2p_transfers", verdict=verdict) == engines * pairs
    assert set(named(series, "gpuguard_p2p_bandwidth_bytes_per_second").values()) == {50e9}
    assert set(named(series, "gpuguard_p2p_bandwidth_limit_bytes_per_second").values()) == {63e9}
    accepted = named(series, "gpuguard_p2p_bandwidth_accepted_bytes_per_second")
    assert list(accepted.values()) == [60e9]
    assert value(series, "gpuguard_p2p_collective_verdict", verdict="wrong_data") == 1
    assert sum(named(series, "gpuguard_p2p_collective_verdict").values()) == 1
    when = value(series, "gpuguard_probe_last_success_timestamp_seconds", probe="transfer")
    assert when == 1700000000.5


def test_a_deep_record_that_cannot_be_used(host: Box) -> None:
    _garbage("var/lib/gpuguard/p2p-deep.json")(host.root)
    series = series_of(host)
    assert value(series, "gpuguard_probe_success", probe="transfer") == 0
    assert named(series, "gpuguard_p2p_transfer_ok") == {}


# --- textfile ------------------------------------------------------------------------------


def textfile(host: Box, file: Path) -> Answer:
    return host.run("metrics", "--textfile", str(file))


def test_textfile(host: Box, tmp_path: Path) -> None:
    file = tmp_path / "gpuguard.prom"
    answer = textfile(host, file)
    assert (answer.status, answer.out) == (0, "")
    assert file.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["gpuguard.prom"]
    series = parse(file.read_text())
    ran = value(series, "gpuguard_textfile_last_run_timestamp_seconds")
    assert ran is not None
    assert ran >= (value(series, "gpuguard_observation_timestamp_seconds") or 0) > 0


def test_textfile_passes_promtool(host: Box, tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing; apt-get install prometheus")
    _deep(host)
    file = tmp_path / "gpuguard.prom"
    textfile(host, file)
    with file.open() as text:
        command = ["promtool", "check", "metrics"]
        done = subprocess.run(command, stdin=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_textfile_that_cannot_be_written_leaves_the_old_one(host: Box, tmp_path: Path) -> None:
    answer = textfile(host, tmp_path / "nowhere" / "gpuguard.prom")
    assert answer.status == 74
    assert "[textfile-unwritable]" in answer.err


def test_textfile_needs_the_name_that_is_read(host: Box, tmp_path: Path) -> None:
    answer = textfile(host, tmp_path / "gpuguard.txt")
    assert answer.status == 2
    assert ".prom" in answer.err


# --- between the cards ---------------------------------------------------------------------


def _bridge(host: Box, card: int, control: int) -> None:
    """The port above a card gets an extended configuration space with ACS."""
    device = (host.root / f"sys/bus/pci/devices/0000:0{card}:00.0").resolve().parent
    space = bytearray(4096)
    space[0:4] = (0x10DE1234).to_bytes(4, "little")
    space[0x100:0x104] = (0x0001000D).to_bytes(4, "little")
    space[0x106:0x108] = control.to_bytes(2, "little")
    (device / "config").write_bytes(space)


def test_what_is_between_the_cards(host: Box) -> None:
    for card, control in ((1, 0x1D), (2, 0x00), (3, 0x1D)):
        _bridge(host, card, control)
    group = host.root / "sys/kernel/iommu_groups/7"
    (group / "devices").mkdir(parents=True)
    (group / "devices/0000:01:00.0").touch()
    (group / "type").write_text("DMA-FQ\n")
    series = series_of(host)
    assert value(series, "gpuguard_pci_acs_redirecting_bridges") == 2
    assert value(series, "gpuguard_iommu_translating") == 1
    (group / "type").write_text("identity\n")
    assert value(series_of(host), "gpuguard_iommu_translating") == 0


def test_what_cannot_be_read_is_not_there(host: Box) -> None:
    series = series_of(host)  # no port has a configuration space that can be read
    assert named(series, "gpuguard_pci_acs_redirecting_bridges") == {}
    assert value(series, "gpuguard_probe_success", probe="pci") == 1
