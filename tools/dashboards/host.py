"""One host: pairs, kernels, modules, rebuilds, holds, and whether gpuguard itself is well."""

from __future__ import annotations

from tools.dashboards.build import Dashboard, Panel, Query, label_variable, link_to, override
from tools.dashboards.panels import (
    BLUE,
    GREEN,
    NONE_IS_BETTER,
    NONE_IS_FINE,
    ORANGE,
    P2P_STATUS,
    RED,
    VERDICTS,
    YELLOW,
    coloured,
    columns,
    graph,
    matrix,
    no_yes,
    stat,
    table,
    timeline,
    yes_no,
)

_I = 'instance="$instance"'


_NOW = [
    stat(
        "Verdict",
        "The verdict of the last observation; unknown if that is older than three intervals.",
        Query(f"instance:gpuguard_verdict:code{{{_I}}}", now=True),
        states=VERDICTS,
        width=4,
    ),
    stat(
        "P2P pairs",
        "Ordered pairs of cards on which the driver grants P2P, by capability.",
        Query(f"gpuguard_p2p_pairs{{{_I}}}", "{{capability}}", now=True),
        steps=((None, BLUE),),
        width=4,
    ),
    stat(
        "Pairs lost",
        "Ordered pairs on which P2P is expected and not granted.",
        Query(f"instance:gpuguard_p2p_pairs_missing:max{{{_I}}}", now=True),
        steps=NONE_IS_FINE,
        width=4,
    ),
    stat(
        "Cards missing",
        "Cards that are expected and that the driver does not show.",
        Query(f"gpuguard_gpus_expected{{{_I}}} - gpuguard_gpus{{{_I}}}", now=True),
        steps=NONE_IS_FINE,
        width=4,
    ),
    stat(
        "Loaded modules",
        "Whether every NVIDIA module in memory is one that gpuguard built.",
        Query(f'min(gpuguard_module_patched{{{_I}, where="loaded"}})', now=True),
        states=yes_no("patched", "stock"),
        width=4,
    ),
    stat(
        "Next kernel",
        "Whether the kernel that the boot loader will start would have P2P.",
        Query(f'gpuguard_kernel_ready{{{_I}, role="next"}}', "{{kernel}}", now=True),
        states=yes_no("ready", "NOT ready"),
        width=4,
        no_value="unknown",
    ),
    stat(
        "Reboot",
        "Whether another kernel, module or driver version waits for a reboot.",
        Query(f"max(gpuguard_reboot_required{{{_I}}})", now=True),
        states=no_yes("required", "not required"),
        width=4,
    ),
    stat(
        "Gate after boot",
        "What the gate proved after the last boot; serving units start only after it.",
        Query(f"gpuguard_gate_verdict{{{_I}}} == 1", "{{verdict}}", now=True),
        show="name",
        width=4,
        steps=((None, BLUE),),
        no_value="has not run",
    ),
    stat(
        "Holds drifted",
        "Packages that policy holds and that are not held.",
        Query(f"gpuguard_holds_drifted{{{_I}}}", now=True),
        steps=NONE_IS_BETTER,
        width=4,
    ),
    stat(
        "Oldest hold",
        "How long ago the oldest hold of gpuguard was set.",
        Query(f"time() - (gpuguard_hold_oldest_timestamp_seconds{{{_I}}} > 0)", now=True),
        unit="s",
        steps=((None, BLUE),),
        width=4,
        no_value="none",
    ),
    stat(
        "Withheld upgrades",
        "Upgrades that holds keep back.",
        Query(f"gpuguard_withheld_upgrades{{{_I}}}", "{{kind}}", now=True),
        steps=NONE_IS_BETTER,
        width=4,
        no_value="unknown",
    ),
    stat(
        "Looked at",
        "How long ago the last observation ended.",
        Query(f"time() - gpuguard_observation_timestamp_seconds{{{_I}}}", now=True),
        unit="s",
        steps=((None, GREEN), (180, YELLOW), (900, RED)),
        width=4,
    ),
]
_PAIRS = [
    *(
        matrix(
            f"P2P {capability}",
            f"What the driver says of {capability} from a card (line) to a card (column), as in "
            f"nvidia-smi topo -p2p {capability[0]}. Empty: the probe failed, and nothing is known.",
            f'gpuguard_p2p_pair_status{{{_I}, capability="{capability}"}}',
            states=P2P_STATUS,
        )
        for capability in ("read", "write")
    ),
    matrix(
        "Bandwidth",
        "What the last deep probe measured from a card (line) to a card (column). Empty: there "
        "was none.",
        f"gpuguard_p2p_bandwidth_bytes_per_second{{{_I}}}",
        unit="Bps",
        steps=((None, BLUE),),
        no_value="not measured",
    ),
    stat(
        "Last deep check",
        "Engines of ordered pairs by what gpuguard verify --deep has shown, and its all-reduce. "
        "Empty: there was none.",
        Query(f"gpuguard_p2p_transfers{{{_I}}} > 0", "{{verdict}}", now=True),
        Query(f"gpuguard_p2p_collective_verdict{{{_I}}} == 1", "all-reduce: {{verdict}}", now=True),
        show="value_and_name",
        steps=((None, BLUE),),
        width=12,
        height=8,
        no_value="there was none",
    ),
    timeline(
        "Pairs over time",
        "Each ordered pair on which P2P is expected, by capability.",
        Query(f"gpuguard_p2p_pair_ok{{{_I}}}", "{{capability}} {{src_uuid}} → {{dst_uuid}}"),
        states=yes_no("OK", "lost"),
        width=24,
    ),
]
_KERNELS = [
    table(
        "Kernels",
        "Kernels with their role, and whether a boot into them would have P2P.",
        Query(f"gpuguard_kernel_ready{{{_I}}}"),
        transformations=columns(
            {"kernel": "Kernel", "role": "Role", "Value": "Ready"},
            hidden=("__name__", "instance", "job"),
        ),
        overrides=[coloured("Ready", yes_no("ready", "NOT ready"))],
    ),
    table(
        "Modules",
        "Whether the module in memory, the one that modprobe would load and the one in the "
        "initramfs are of gpuguard's making.",
        Query(f"gpuguard_module_patched{{{_I}}}"),
        transformations=columns(
            {"kernel": "Kernel", "module": "Module", "where": "Where", "Value": "Identity"},
            hidden=("__name__", "instance", "job"),
        ),
        overrides=[coloured("Identity", yes_no("patched", "stock"))],
    ),
    timeline(
        "Readiness over time",
        "A kernel that arrives is red until its modules are rebuilt.",
        Query(f"gpuguard_kernel_ready{{{_I}}}", "{{role}} {{kernel}}"),
        states=yes_no("ready", "NOT ready"),
    ),
    table(
        "Shadowed modules",
        "Modules of gpuguard beside which another copy wins.",
        Query(f"gpuguard_module_shadowed{{{_I}}} == 1"),
        transformations=columns(
            {"kernel": "Kernel", "module": "Module", "Value": "Shadowed"},
            hidden=("__name__", "instance", "job"),
        ),
        no_value="none",
        overrides=[coloured("Shadowed", no_yes("shadowed", "no"))],
    ),
]
_REBUILDS = [
    graph(
        "Rebuilds",
        "Rebuilds that ended, by result.",
        Query(f"increase(gpuguard_rebuilds_total{{{_I}}}[$__rate_interval])", "{{result}}"),
        width=8,
        minimum=0,
    ),
    stat(
        "Last rebuilds",
        "How long ago a rebuild last ended, by result.",
        Query(
            f"time() - (gpuguard_rebuild_last_timestamp_seconds{{{_I}}} > 0)",
            "{{result}}",
            now=True,
        ),
        unit="s",
        width=8,
        height=8,
        steps=((None, BLUE),),
        no_value="never",
    ),
    stat(
        "Duration of the last rebuild",
        "How long the last rebuild took, by result.",
        Query(f"gpuguard_rebuild_duration_seconds{{{_I}}}", "{{result}}", now=True),
        unit="s",
        width=8,
        height=8,
        steps=((None, BLUE),),
        no_value="never",
    ),
]
_AUTOMATIC = [
    stat(
        "Automatic run",
        "Whether one is wanted and has not begun.",
        Query(f"gpuguard_rebuild_queued{{{_I}}}", now=True),
        states=no_yes("wanted", "none wanted"),
        width=8,
    ),
    stat(
        "Last automatic run",
        "How long ago the last automatic run ended.",
        Query(f"time() - (gpuguard_automatic_run_last_timestamp_seconds{{{_I}}} > 0)", now=True),
        unit="s",
        steps=((None, BLUE),),
        width=8,
        no_value="never",
    ),
    stat(
        "Its exit status",
        "0: fine, 1: something is not healthy, 75: another program was at work.",
        Query(f"gpuguard_automatic_run_last_exit_status{{{_I}}}", now=True),
        steps=((None, GREEN), (1, YELLOW), (65, RED)),
        width=8,
        no_value="there was none",
    ),
]
_HOLDS = [
    table(
        "Packages that policy holds",
        "Each package in the policy, and whether it is held.",
        Query(f"gpuguard_package_held{{{_I}}}"),
        transformations=columns(
            {"package": "Package", "Value": "Held"}, hidden=("__name__", "instance", "job")
        ),
        overrides=[coloured("Held", yes_no("held", "NOT held"))],
    ),
    graph(
        "Withheld upgrades",
        "Upgrades that holds keep back, by kind.",
        Query(f"gpuguard_withheld_upgrades{{{_I}}}", "{{kind}}"),
        minimum=0,
    ),
]
_PROBES = [
    timeline(
        "Probes",
        "Whether gpuguard could look. Where a probe fails, its series vanish.",
        Query(f"gpuguard_probe_success{{{_I}}}", "{{probe}}"),
        states=yes_no("looked", "could not look"),
    ),
    graph(
        "Duration of the probes",
        "How long each probe took.",
        Query(f"gpuguard_probe_duration_seconds{{{_I}}}", "{{probe}}"),
        unit="s",
        minimum=0,
    ),
    table(
        "Causes",
        "What takes P2P away or slows it down: 0 is good. gpuguard doctor says more. Bridges are "
        "counted only where root looks (textfile).",
        Query(
            f"label_replace(gpuguard_iommu_translating{{{_I}}},"
            ' "cause", "IOMMU translates", "", "")'
            f" or label_replace(gpuguard_pci_acs_redirecting_bridges{{{_I}}},"
            ' "cause", "bridges that redirect (ACS)", "", "")'
            f" or label_replace(gpuguard_p2p_unavailable{{{_I}}},"
            ' "cause", "driver cannot be asked: $1", "reason", "(.*)")'
        ),
        transformations=columns(
            {"cause": "Cause", "Value": "State"}, hidden=("__name__", "instance", "job", "reason")
        ),
        overrides=[
            override(
                "State",
                custom__cellOptions={"type": "color-background", "mode": "basic"},
                thresholds={
                    "mode": "absolute",
                    "steps": [{"value": None, "color": GREEN}, {"value": 1, "color": ORANGE}],
                },
            )
        ],
    ),
    table(
        "Cards",
        "The cards that the driver shows, with the size of BAR1: P2P needs it to be as large as "
        "the memory.",
        Query(
            "gpuguard_gpu_bar1_bytes * on (instance, uuid) group_left (index, name, pci_bus_id) "
            f"gpuguard_gpu_info{{{_I}}}"
        ),
        transformations=columns(
            {
                "index": "Index",
                "name": "Name",
                "pci_bus_id": "PCI bus id",
                "uuid": "UUID",
                "Value": "BAR1",
            },
            hidden=("instance", "job"),
        ),
        overrides=[override("BAR1", unit="bytes")],
        height=8,
    ),
]


def _card_graph(title: str, series: str, unit: str) -> Panel:
    return graph(
        title,
        "From dcgm-exporter or nvidia_gpu_exporter, joined by the card's UUID. Empty where "
        "neither is scraped.",
        Query(f"{series}{{{_I}}}", "GPU{{index}} {{pci_bus_id}}"),
        unit=unit,
        minimum=0,
        width=6,
        no_value="no exporter",
    )


HOST = Dashboard(
    uid="gpuguard-host",
    title="gpuguard / Host",
    description="One GPU host: pairs, kernels, modules, rebuilds, holds, probes.",
    variables=[
        label_variable(
            "instance", "Host", "gpuguard_build_info", "A host as Prometheus scrapes it."
        )
    ],
    links=[link_to("gpuguard-fleet", "Fleet"), link_to("gpuguard-vllm", "vLLM lanes")],
    rows=[
        ("Now", _NOW),
        ("Pairs of cards", _PAIRS),
        ("Kernels and modules", _KERNELS),
        ("Rebuilds", [*_REBUILDS, *_AUTOMATIC]),
        ("Holds", _HOLDS),
        ("Looking", _PROBES),
        (
            "Cards, by other exporters",
            [
                _card_graph("Temperature", "gpuguard:gpu_temperature:celsius", "celsius"),
                _card_graph("Utilisation", "gpuguard:gpu_utilization:ratio", "percentunit"),
                _card_graph("Power", "gpuguard:gpu_power:watts", "watt"),
                _card_graph("Memory", "gpuguard:gpu_memory_used:bytes", "bytes"),
            ],
        ),
    ],
)
