"""All hosts at once: which need somebody, and for which reason."""

from __future__ import annotations

from tools.dashboards.build import Dashboard, Query, State, link_to, override
from tools.dashboards.panels import (
    BLUE,
    GREEN,
    NONE_IS_BETTER,
    NONE_IS_FINE,
    ORANGE,
    RED,
    VERDICTS,
    YELLOW,
    coloured,
    graph,
    merged,
    no_yes,
    stat,
    table,
    timeline,
    yes_no,
)

_TO_HOST = {
    "title": "This host",
    "url": "/d/gpuguard-host?var-instance=${__data.fields.Host}",
    "targetBlank": False,
}
_A_MONTH = ((None, GREEN), (14 * 86400, YELLOW), (30 * 86400, RED))

_HOSTS = stat(
    "Hosts by verdict",
    "The verdict of each host's last observation. A host whose observation is older than three "
    "intervals counts as unknown; one that answers no scrape is unreachable.",
    Query("gpuguard:hosts:count", "{{verdict}}", now=True),
    width=12,
    steps=((None, GREEN),),
    overrides=[
        override(
            state.text,
            thresholds={
                "mode": "absolute",
                "steps": [{"value": None, "color": "text"}, {"value": 1, "color": state.colour}],
            },
        )
        for state in VERDICTS
    ],
)
_PAIRS = stat(
    "P2P pairs lost",
    "Ordered pairs of cards, over all hosts, on which P2P is expected and the driver grants none.",
    Query("gpuguard:p2p_pairs_missing:sum", now=True),
    steps=NONE_IS_FINE,
)
_ALERTS = stat(
    "Alerts firing",
    "Alerts of gpuguard and of vLLM that fire now; silenced ones, too.",
    Query('count(ALERTS{alertstate="firing", component=~"gpuguard|vllm"}) or vector(0)', now=True),
    steps=NONE_IS_FINE,
)
_UNREADY = stat(
    "Next kernel not ready",
    "Hosts that would lose P2P with a reboot. Do not reboot them.",
    Query("gpuguard:hosts_next_kernel_not_ready:count", now=True),
    steps=NONE_IS_FINE,
)
_REBOOT = stat(
    "Reboot required",
    "Hosts on which another kernel, module or driver version waits for a reboot.",
    Query("gpuguard:hosts_reboot_required:count", now=True),
    steps=NONE_IS_BETTER,
)
_OLDEST_HOLD = stat(
    "Oldest hold",
    "How long ago the oldest hold of gpuguard was set: the time without a maintenance window.",
    Query("time() - min(gpuguard_hold_oldest_timestamp_seconds > 0)", now=True),
    unit="s",
    steps=((None, BLUE),),
    no_value="none",
)
_WITHHELD = stat(
    "Withheld upgrades",
    "Upgrades that holds keep back, over all hosts.",
    Query("sum by (kind) (gpuguard_withheld_upgrades)", "{{kind}}", now=True),
    steps=NONE_IS_BETTER,
    no_value="unknown",
)

_TABLE = table(
    "Hosts",
    "One line a host, the worst first. Click a host for its own dashboard.",
    Query("max by (instance, job) (instance:gpuguard_verdict:code)"),
    Query("max by (instance, job) (gpuguard_gpus)"),
    Query("min by (instance, job) (gpuguard_p2p_pairs)"),
    Query("max by (instance, job) (instance:gpuguard_p2p_pairs_missing:max)"),
    Query('min by (instance, job) (gpuguard_kernel_ready{role="next"})'),
    Query("max by (instance, job) (gpuguard_reboot_required)"),
    Query("max by (instance, job) (gpuguard_holds_drifted)"),
    Query("time() - min by (instance, job) (gpuguard_hold_oldest_timestamp_seconds > 0)"),
    Query("sum by (instance, job) (gpuguard_withheld_upgrades)"),
    Query("time() - max by (instance, job) (gpuguard_observation_timestamp_seconds)"),
    width=24,
    height=12,
    no_value="-",
    transformations=[
        *merged(
            {
                "instance": "Host",
                "Value #A": "Verdict",
                "Value #B": "Cards",
                "Value #C": "Pairs OK",
                "Value #D": "Pairs lost",
                "Value #E": "Next kernel",
                "Value #F": "Reboot",
                "Value #G": "Holds drifted",
                "Value #H": "Oldest hold",
                "Value #I": "Withheld",
                "Value #J": "Looked at",
            },
            hidden=("job",),
        ),
        {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "Verdict", "desc": True}]}},
    ],
    overrides=[
        override("Host", links=[_TO_HOST]),
        coloured("Verdict", VERDICTS),
        coloured("Next kernel", yes_no("ready", "NOT ready")),
        coloured("Reboot", no_yes("required", "no")),
        override("Oldest hold", unit="s"),
        override("Looked at", unit="s"),
        *(
            override(
                name,
                custom__cellOptions={"type": "color-text"},
                thresholds={
                    "mode": "absolute",
                    "steps": [{"value": None, "color": GREEN}, {"value": 1, "color": colour}],
                },
            )
            for name, colour in (("Pairs lost", RED), ("Holds drifted", ORANGE))
        ),
    ],
)
_VERDICTS = timeline(
    "Verdicts",
    "The verdict of each host over time.",
    Query("instance:gpuguard_verdict:code", "{{instance}}"),
    states=VERDICTS,
)
_READINESS = timeline(
    "Next kernel",
    "Whether the kernel that the boot loader will start would have P2P.",
    Query('min by (instance) (gpuguard_kernel_ready{role="next"})', "{{instance}}"),
    states=(State(1, "ready", GREEN), State(0, "NOT ready", RED)),
)
_HOLD_AGES = graph(
    "Oldest hold of each host",
    "How long each host has gone without a maintenance window.",
    Query(
        "time() - min by (instance) (gpuguard_hold_oldest_timestamp_seconds > 0)", "{{instance}}"
    ),
    unit="s",
    steps=_A_MONTH,
    minimum=0,
)
_WITHHELD_OVER_TIME = graph(
    "Withheld upgrades of each host",
    "Upgrades that holds keep back.",
    Query("sum by (instance) (gpuguard_withheld_upgrades)", "{{instance}}"),
    minimum=0,
)

FLEET = Dashboard(
    uid="gpuguard-fleet",
    title="gpuguard / Fleet",
    description="All GPU hosts: verdicts, readiness for a reboot, holds and what they cost.",
    variables=(),
    links=[link_to("gpuguard-host", "Host"), link_to("gpuguard-vllm", "vLLM lanes")],
    since="now-7d",
    rows=[
        ("Now", [_HOSTS, _PAIRS, _ALERTS, _UNREADY, _REBOOT, _OLDEST_HOLD, _WITHHELD]),
        ("Hosts", [_TABLE]),
        ("Over time", [_VERDICTS, _READINESS, _HOLD_AGES, _WITHHELD_OVER_TIME]),
    ],
)
