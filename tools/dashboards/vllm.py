"""The vLLM lanes: who waits, how full the KV cache is, how long answers take, which lane it is."""

from __future__ import annotations

from collections.abc import Iterator

from gpuguard.core.samples_lanes import STEPS
from tools.dashboards.build import Dashboard, Panel, Query, State, label_variable, link_to, override
from tools.dashboards.panels import (
    BLUE,
    GREEN,
    NONE_IS_BETTER,
    ORANGE,
    RED,
    YELLOW,
    columns,
    graph,
    stat,
    table,
    timeline,
    yes_no,
)

_I = 'instance=~"$instance"'
_M = f'{_I}, model_name=~"$model_name"'
_HOST = '"host", "$1", "instance", "(.*?)(:[0-9]+)?"'
#: gpuguard and vLLM are two targets of one host: what they share is the name before the port.
_CHOSEN = (
    f'on (host) group_left () group by (host) (label_replace(up{{job="vllm", {_I}}}, {_HOST}))'
)


def _of_hosts(metric: str, labels: str = "") -> str:
    """Series of gpuguard on the hosts of the chosen engines; ``labels`` besides the host's."""
    by = f"host, {labels}" if labels else "host"
    return f"max by ({by}) (label_replace({metric}, {_HOST})) * {_CHOSEN}"


_FULLNESS = ((None, GREEN), (0.7, YELLOW), (0.9, RED))

_NOW = [
    stat(
        "Engine",
        "Whether vLLM answers Prometheus.",
        Query(f'up{{job="vllm", {_I}}}', "{{instance}}", now=True),
        states=(State(1, "up", GREEN), State(0, "DEAD", RED)),
        width=4,
        no_value="not scraped",
    ),
    stat(
        "Running",
        "Requests that are computed now; --max-num-seqs is the most there can be.",
        Query(f"sum(vllm:num_requests_running{{{_M}}})", now=True),
        steps=((None, BLUE),),
        width=4,
    ),
    stat(
        "Waiting",
        "Requests in the queue. With less than 70 % of the KV cache in use a queue wants more "
        "slots; with more than 90 % it is memory.",
        Query(f"sum(vllm:num_requests_waiting{{{_M}}})", now=True),
        steps=NONE_IS_BETTER,
        width=4,
    ),
    stat(
        "KV cache in use",
        "The fullest KV cache of the chosen engines.",
        Query(f"max(vllm:kv_cache_usage_perc{{{_M}}})", now=True),
        unit="percentunit",
        steps=_FULLNESS,
        width=4,
    ),
    stat(
        "Preemptions in the last hour",
        "Requests that were thrown out of the KV cache and computed again.",
        Query(f"sum(increase(vllm:num_preemptions_total{{{_M}}}[1h]))", now=True),
        steps=NONE_IS_BETTER,
        width=4,
    ),
    stat(
        "First token, p99",
        "99 % of the requests of the last 5 minutes had their first token within this.",
        Query(
            "histogram_quantile(0.99, sum by (le) "
            f"(rate(vllm:time_to_first_token_seconds_bucket{{{_M}}}[5m])))",
            now=True,
        ),
        unit="s",
        steps=((None, BLUE),),
        width=4,
        no_value="no requests",
    ),
]

_STEPS = (
    State(0, "no switch", GREEN),
    *(State(number, step, YELLOW) for number, step in enumerate(STEPS, 1)),
)
_LANE = [
    stat(
        "Lane",
        "The lane that is meant to serve, as gpuguard has recorded it.",
        Query(_of_hosts("gpuguard_lane_info", "lane"), "{{lane}}", now=True),
        show="name",
        steps=((None, BLUE),),
        width=4,
        no_value="none",
    ),
    stat(
        "Ready",
        "Whether the engine that the front leads to answers /health.",
        Query(_of_hosts("gpuguard_lane_ready"), "{{host}}", now=True),
        states=yes_no("ready", "NOT ready"),
        width=4,
        no_value="no front",
    ),
    stat(
        "Switch",
        "The step of the switch that is under way. Meanwhile VllmEngineDead is quiet.",
        Query(_of_hosts("gpuguard_lane_switch_step"), "{{host}}", now=True),
        states=_STEPS,
        width=4,
    ),
    stat(
        "Last switch",
        "How it ended: promoted, refused (nothing was stopped), rolled-back, fell-back, failed.",
        Query(
            _of_hosts("gpuguard_lane_last_switch_outcome == 1", "outcome"), "{{outcome}}", now=True
        ),
        show="name",
        steps=((None, BLUE),),
        width=4,
        no_value="none",
    ),
    stat(
        "Since the last switch",
        "Since it ended, well or not.",
        Query(
            f"time() - ({_of_hosts('gpuguard_lane_last_switch_timestamp_seconds')} > 0)",
            "{{host}}",
            now=True,
        ),
        unit="s",
        steps=((None, BLUE),),
        width=4,
        no_value="never",
    ),
    stat(
        "P2P of the lane",
        "Whether the active lane was started with P2P; a lane that wants none is started without.",
        Query(_of_hosts("gpuguard_lane_p2p_on"), "{{host}}", now=True),
        states=(State(1, "on", GREEN), State(0, "off", YELLOW)),
        width=4,
        no_value="unknown",
    ),
    timeline(
        "Switches",
        "Steps of switches over time: how long clients waited, and in which step.",
        Query(_of_hosts("gpuguard_lane_switch_step"), "{{host}}"),
        states=_STEPS,
        height=6,
    ),
    graph(
        "Switches by outcome",
        "Those that ended within the last day.",
        Query(
            "sum by (outcome) (label_replace("
            f"increase(gpuguard_lane_switches_total[1d]), {_HOST}) * {_CHOSEN})",
            "{{outcome}}",
        ),
        minimum=0,
        height=6,
    ),
    table(
        "Active lane",
        "What gpuguard has recorded, and what the engine says of itself: data type and size of "
        "its KV cache.",
        Query(
            "max by (host, engine, cache_dtype, block_size, num_gpu_blocks, kv_cache_size_tokens, "
            f"kv_cache_max_concurrency) (label_replace(vllm:cache_config_info{{{_I}}}, {_HOST}))"
        ),
        Query(
            "max by (host, engine, model_name) "
            f"(label_replace(vllm:num_requests_running{{{_M}}}, {_HOST}))"
        ),
        Query(_of_hosts("gpuguard_lane_info", "lane, lane_id")),
        width=24,
        height=5,
        transformations=[
            {"id": "merge", "options": {}},
            *columns(
                {
                    "host": "Host",
                    "lane": "Lane",
                    "lane_id": "Lane id",
                    "engine": "Engine",
                    "model_name": "Model",
                    "cache_dtype": "KV data type",
                    "kv_cache_size_tokens": "KV tokens",
                    "kv_cache_max_concurrency": "Full sessions",
                    "block_size": "Block",
                    "num_gpu_blocks": "Blocks",
                    "Value #B": "Running",
                },
                hidden=("Value #A", "Value #C"),
            ),
        ],
        overrides=[override("Running", custom__align="right")],
    ),
]
_QUEUE = [
    graph(
        "Requests",
        "Running and waiting, by model.",
        Query(f"sum by (model_name) (vllm:num_requests_running{{{_M}}})", "{{model_name}} running"),
        Query(f"sum by (model_name) (vllm:num_requests_waiting{{{_M}}})", "{{model_name}} waiting"),
        minimum=0,
    ),
    graph(
        "KV cache in use",
        "A queue below the first line wants more slots (--max-num-seqs), above the second one it "
        "wants memory.",
        Query(f"max by (model_name, engine) (vllm:kv_cache_usage_perc{{{_M}}})", "{{model_name}}"),
        unit="percentunit",
        minimum=0,
        steps=_FULLNESS,
        custom={"thresholdsStyle": {"mode": "line"}},
    ),
    graph(
        "Preemptions",
        "Requests a second that were thrown out of the KV cache and computed again.",
        Query(
            f"sum by (model_name) (rate(vllm:num_preemptions_total{{{_M}}}[$__rate_interval]))",
            "{{model_name}}",
        ),
        unit="reqps",
        minimum=0,
    ),
    timeline(
        "Why requests wait",
        "Where the rules VllmQueueNeedsSlots and VllmQueueNeedsMemory would fire.",
        Query(
            f"clamp_max(sum by (instance) (vllm:num_requests_waiting{{{_M}}}), 1) * on (instance) "
            f"(1 + (max by (instance) (vllm:kv_cache_usage_perc{{{_M}}}) >= bool 0.7) "
            f"+ (max by (instance) (vllm:kv_cache_usage_perc{{{_M}}}) > bool 0.9))",
            "{{instance}}",
        ),
        states=(
            State(0, "no queue", GREEN),
            State(1, "slots", YELLOW),
            State(2, "between", ORANGE),
            State(3, "memory", RED),
        ),
    ),
]


def _quantiles(series: str) -> Iterator[Query]:
    for quantile, name in ((0.5, "p50"), (0.99, "p99")):
        yield Query(
            f"histogram_quantile({quantile}, sum by (le, model_name) "
            f"(rate(vllm:{series}_bucket{{{_M}}}[$__rate_interval])))",
            f"{{{{model_name}}}} {name}",
        )


def _latency(title: str, description: str, series: str) -> Panel:
    return graph(title, description, *_quantiles(series), unit="s", minimum=0)


_LATENCY = [
    _latency(
        "Time to first token", "Waiting and reading the prompt.", "time_to_first_token_seconds"
    ),
    _latency(
        "Time between tokens",
        "How fast an answer is written; lost P2P shows here.",
        "inter_token_latency_seconds",
    ),
    _latency("Whole requests", "From arrival to the last token.", "e2e_request_latency_seconds"),
    _latency("Time in the queue", "Before a request gets a slot.", "request_queue_time_seconds"),
]
_WORK = [
    graph(
        "Tokens",
        "Tokens read and written a second.",
        Query(
            f"sum by (model_name) (rate(vllm:prompt_tokens_total{{{_M}}}[$__rate_interval]))",
            "{{model_name}} read",
        ),
        Query(
            f"sum by (model_name) (rate(vllm:generation_tokens_total{{{_M}}}[$__rate_interval]))",
            "{{model_name}} written",
        ),
        unit="cps",
        minimum=0,
    ),
    graph(
        "Requests that ended",
        "By reason.",
        Query(
            "sum by (finished_reason) "
            f"(rate(vllm:request_success_total{{{_M}}}[$__rate_interval]))",
            "{{finished_reason}}",
        ),
        unit="reqps",
        minimum=0,
    ),
]

VLLM = Dashboard(
    uid="gpuguard-vllm",
    title="gpuguard / vLLM lanes",
    description="The engines: queue, KV cache, latency, preemptions, and which lane is active.",
    variables=[
        label_variable(
            "instance", "Engine", "vllm:num_requests_running", "vLLM as Prometheus scrapes it.",
            several=True,
        ),
        label_variable(
            "model_name", "Model", "vllm:num_requests_running", "The served model name.",
            several=True,
        ),
    ],
    links=[link_to("gpuguard-fleet", "Fleet"), link_to("gpuguard-host", "Host")],
    since="now-6h",
    rows=[
        ("Now", _NOW),
        ("Lane", _LANE),
        ("Slots or memory", _QUEUE),
        ("Latency", _LATENCY),
        ("Work", _WORK),
    ],
)  # fmt: skip
