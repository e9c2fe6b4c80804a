"""Alert rules, recording rules and Alertmanager's example, by promtool and amtool."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuguard.core.metrics import Probe
from gpuguard.core.p2p_reasons import REMEDIES
from tests.monitoring import (
    ALERT_RULES,
    CASES,
    PROMETHEUS,
    RECORDING_RULES,
    REPOSITORY,
    alerts,
    problems_of,
    rules,
    run,
    selectors,
    title,
)

RUNBOOK = REPOSITORY / "docs/alerts.md"
CASE_FILES = sorted(CASES.glob("*.test.yml"))
ALERTMANAGER = PROMETHEUS / "alertmanager.yml.example"
EXAMPLE = PROMETHEUS / "prometheus.yml.example"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(duration: str) -> int:
    return sum(int(n) * _SECONDS[unit] for n, unit in re.findall(r"(\d+)([smhd])", duration))


def cases() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every check of an alert, with the file it is in."""
    for file in CASE_FILES:
        for case in yaml.safe_load(file.read_text())["tests"]:
            yield from ((file, check) for check in case.get("alert_rule_test", ()))


# --- the rules -----------------------------------------------------------------------------


@pytest.mark.parametrize("file", [ALERT_RULES, RECORDING_RULES], ids=lambda file: file.name)
def test_rules_are_rules(file: Path) -> None:
    done = run("promtool", "check", "rules", "--lint=all", "--lint-fatal", file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", CASE_FILES, ids=lambda file: file.name)
def test_cases(file: Path) -> None:
    done = run("promtool", "test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", alerts(), ids=title)
def test_every_alert_fires_once_and_stays_quiet_once(rule: dict[str, Any]) -> None:
    own = [check for _, check in cases() if check["alertname"] == rule["alert"]]
    severity = rule["labels"]["severity"]
    assert any(
        alert["exp_labels"]["severity"] == severity
        for check in own
        for alert in check["exp_alerts"]
    )
    assert any(not check["exp_alerts"] for check in own)


def test_every_recording_rule_has_a_case() -> None:
    text = (CASES / "recording.test.yml").read_text()
    asked = set(re.findall(r"expr: .*?([a-z]+:gpuguard?[\w:]*|gpuguard:[\w:]+)", text))
    recorded = {rule["record"] for rule in rules(RECORDING_RULES)}
    helpers = {"instance:gpuguard_fresh:bool", "instance:gpuguard_interval:seconds"}
    assert recorded - helpers == asked


@pytest.mark.parametrize("rule", alerts(), ids=title)
def test_every_alert_says_what_where_and_what_to_do(rule: dict[str, Any]) -> None:
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["labels"]["component"] in {"gpuguard", "vllm"}
    assert notes["runbook_url"].endswith(f"#{rule['alert'].lower()}")
    if not rule["expr"].startswith("absent("):
        assert "{{ $labels.instance }}" in notes["summary"]
        assert re.search(r"\{\{ \$(value|labels)", notes["description"])


def test_the_runbook_has_a_section_per_alert_and_no_other() -> None:
    sections = re.findall(r"^### (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sections == list(dict.fromkeys(rule["alert"] for rule in alerts()))
    for part in re.split(r"^### ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        assert "**At night:**" in body, name


def test_the_runbooks_place_can_be_changed(tmp_path: Path) -> None:
    """By Prometheus' external label, which the example sets and takes off again."""
    case: dict[str, Any] = {
        "rule_files": [str(ALERT_RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "external_labels": {"gpuguard_runbooks": "https://wiki.example.org/alerts.md"},
                "input_series": [
                    {"series": 'gpuguard_config_last_reload_successful{instance="a"}',
                     "values": "0x9"}
                ],
                "alert_rule_test": [
                    {"eval_time": "6m", "alertname": "GpuguardConfigRefused",
                     "exp_alerts": [{"exp_labels": {"never": "never"}}]}
                ],
            }
        ],
    }  # fmt: skip
    (tmp_path / "case.yml").write_text(yaml.safe_dump(case))
    said = run("promtool", "test", "rules", tmp_path / "case.yml")
    assert 'runbook_url="https://wiki.example.org/alerts.md#gpuguardconfigrefused"' in (
        said.stdout + said.stderr
    )
    example = yaml.safe_load(EXAMPLE.read_text())
    assert list(example["global"]["external_labels"]) == ["gpuguard_runbooks"]
    (relabel,) = example["alerting"]["alert_relabel_configs"]
    assert relabel == {"action": "labeldrop", "regex": "gpuguard_runbooks"}


# --- metrics that rules name ---------------------------------------------------------------


def expressions() -> Iterator[str]:
    for file in (ALERT_RULES, RECORDING_RULES):
        for rule in rules(file):
            yield rule["expr"]
            yield from re.findall(r'printf\s+"([^"]+)"', str(rule.get("annotations", "")))


def test_metrics_and_labels_exist() -> None:
    asked = [selector for expr in expressions() for selector in selectors(expr)]
    assert {"gpuguard_p2p_pairs", "vllm:num_requests_waiting"} <= {s.name for s in asked}
    assert [problem for selector in asked for problem in problems_of(selector)] == []


def test_job_names_are_those_of_the_example() -> None:
    asked = {value for expr in expressions() for value in re.findall(r'up\{job="(\w+)"\}', expr)}
    example = yaml.safe_load(EXAMPLE.read_text())
    assert asked == {job["job_name"] for job in example["scrape_configs"]}


# --- do the cases notice a changed rule ----------------------------------------------------


#: Changes that change nothing.
EQUIVALENT: set[tuple[str, str]] = set()


def mutants(rule: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rule with one thing changed, which at least one case must notice."""
    duration = rule.get("for", "0m")
    changed = ["0s", f"{seconds(duration) * 3}s"] if seconds(duration) else ["10m"]
    for other in changed:
        yield f"for {other}", {**rule, "for": other}
    for what, expr in _other_expressions(rule["expr"]):
        yield what, {**rule, "expr": expr}


def _other_expressions(expr: str) -> Iterator[tuple[str, str]]:
    swaps = {" > ": " >= ", " < ": " <= ", " == 0": " >= 0", " == 1": " >= 0"}
    for old, new in swaps.items():
        for match in re.finditer(re.escape(old), expr):
            yield f"{old}->{new}", expr[: match.start()] + new + expr[match.end() :]
    for match in re.finditer(r"0\.\d|\b14\b|\b3 \*", expr):
        for factor in (0.9, 1.1):
            number = float(match[0].rstrip(" *")) * factor
            new = f"{number:g}{' *' if match[0].endswith('*') else ''}"
            yield f"{match[0]}->{new}", expr[: match.start()] + new + expr[match.end() :]
    for match in re.finditer(r"\{[^}]*\}", expr):
        yield f"without {match[0]}", expr[: match.start()] + expr[match.end() :]
    branches = re.split(r" or (?:on \(instance, job\) )?", expr)
    if len(branches) > 1:
        for branch in branches:
            yield f"only {branch}", branch
    for match in re.finditer(r" (?:and|unless) on [^|]*?(?= or |$)", expr):
        yield f"without{match[0]}", expr[: match.start()] + expr[match.end() :]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(alerts())), ids=lambda i: title(alerts()[i]))
def test_cases_notice_a_changed_rule(index: int, tmp_path: Path) -> None:
    """A near miss is one only if it would fire with a slightly different rule."""
    rule = alerts()[index]
    own = {file for file, check in cases() if check["alertname"] == rule["alert"]}
    survivors = []
    for what, mutant in mutants(rule):
        document = yaml.safe_load(ALERT_RULES.read_text())
        place = [(g, r) for g in document["groups"] for r in g["rules"]][index]
        place[1].clear()
        place[1].update(mutant)
        (tmp_path / "mutant.yml").write_text(yaml.safe_dump(document))
        if not any(_fails(file, tmp_path, rule["alert"]) for file in own):
            survivors.append(what)
    assert [s for s in survivors if (rule["alert"], s) not in EQUIVALENT] == []


def _fails(file: Path, folder: Path, alert: str) -> bool:
    """Whether the cases of an alert fail with the mutant in place of the rules."""
    document = yaml.safe_load(file.read_text())
    document["rule_files"] = [str(folder / "mutant.yml"), str(RECORDING_RULES)]
    for case in document["tests"]:
        case["alert_rule_test"] = [c for c in case["alert_rule_test"] if c["alertname"] == alert]
    document["tests"] = [case for case in document["tests"] if case["alert_rule_test"]]
    (folder / file.name).write_text(yaml.safe_dump(document))
    return run("promtool", "test", "rules", folder / file.name).returncode != 0


# --- Alertmanager and Prometheus -----------------------------------------------------------


def test_alertmanagers_example_is_valid() -> None:
    done = run("amtool", "check-config", ALERTMANAGER)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("severity", "receiver"), [("critical", "pager"), ("warning", "chat")])
def test_who_is_told(severity: str, receiver: str) -> None:
    done = run(
        "amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}",
        f"--verify.receivers={receiver}", f"severity={severity}", "instance=a",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def inhibitions() -> Iterator[tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]]:
    """Every inhibition, with the alerts that its two sides match."""
    for rule in yaml.safe_load(ALERTMANAGER.read_text())["inhibit_rules"]:
        yield rule, _matched(rule["source_matchers"]), _matched(rule["target_matchers"])


def _matched(matchers: list[str]) -> list[dict[str, Any]]:
    found = list(alerts())
    for matcher in matchers:
        parts = re.fullmatch(r'(\w+)=~?"([^"]+)"', matcher)
        assert parts, matcher
        wanted = set(parts[2].split("|"))
        if parts[1] == "probe":
            assert wanted <= {*Probe}
            continue  # which probe it is shows when it fires
        values = [{"alertname": r["alert"], **r["labels"]}[parts[1]] for r in found]
        assert wanted <= set(values), f"{matcher}: no such alert"
        found = [r for r, value in zip(found, values, strict=True) if value in wanted]
    return found


def test_a_cause_is_there_before_its_consequences() -> None:
    """Else the consequence would be sent first, and the cause as a second message."""
    group_of = {
        title(rule): group["name"]
        for group in yaml.safe_load(ALERT_RULES.read_text())["groups"]
        for rule in group["rules"]
    }
    order = [title(rule) for rule in alerts()]
    for _, causes, consequences in inhibitions():
        for cause, consequence in product(causes, consequences):
            if cause["labels"]["severity"] != consequence["labels"]["severity"]:
                continue  # they go to different receivers
            first, second = title(cause), title(consequence)
            wait = seconds(cause.get("for", "0m")) - seconds(consequence.get("for", "0m"))
            assert wait <= 0, f"{first} comes after {second}"
            if wait == 0:
                assert group_of[first] == group_of[second]
                assert order.index(first) < order.index(second)


def test_no_two_alerts_silence_each_other() -> None:
    silences = {
        (title(cause), title(consequence))
        for _, causes, consequences in inhibitions()
        for cause in causes
        for consequence in consequences
    }
    assert silences
    assert [pair for pair in silences if pair[::-1] in silences] == []


def test_nothing_silences_wrong_data() -> None:
    silenced = {r["alert"] for _, _, consequences in inhibitions() for r in consequences}
    assert not silenced & {"GpuguardWrongData", "GpuguardTransferFailed", "GpuguardAbsent",
                           "GpuguardCardMissing", "GpuguardModuleNotPatched",
                           "GpuguardP2PUnavailable"}  # fmt: skip
    titles = {title(r) for _, _, consequences in inhibitions() for r in consequences}
    assert "GpuguardNextKernelNotReady-critical" not in titles
    assert all(
        rule.get("equal") or causes[0]["alert"] == "GpuguardAbsent"
        for rule, causes, _ in inhibitions()
    )


#: Alerts about one kernel.
OF_A_KERNEL = {
    "GpuguardModuleNotPatched", "GpuguardModuleShadowed", "GpuguardNextKernelNotReady",
    "GpuguardRebuildFailed",
}  # fmt: skip


def test_what_is_about_one_kernel_silences_nothing_about_another() -> None:
    found = []
    for rule, causes, consequences in inhibitions():
        for cause, consequence in product(causes, consequences):
            if {cause["alert"], consequence["alert"]} <= OF_A_KERNEL:
                found.append((cause["alert"], consequence["alert"]))
                assert "kernel" in rule["equal"], found[-1]
            else:
                assert "kernel" not in rule.get("equal", ()), (cause["alert"], consequence["alert"])
    assert found


def test_reasons_that_keep_cuda_from_running_are_reasons() -> None:
    (expr,) = (r["expr"] for r in alerts() if r["alert"] == "GpuguardP2PUnavailable")
    (said,) = re.findall(r'reason=~"([^"]+)"', expr)
    assert set(said.split("|")) <= set(REMEDIES)


def test_prometheus_example_is_valid(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    installed = "/usr/local/share/gpuguard/prometheus"
    assert installed in text
    (tmp_path / "prometheus.yml").write_text(text.replace(installed, str(PROMETHEUS)))
    done = run("promtool", "check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(alerts())} rules found" in done.stdout
