"""The page for a person: verdict, what to do, kernels, pair matrix, holds. No script, no links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from gpuguard import __version__
from gpuguard.core.observation import Observation
from gpuguard.daemon.style import STYLE

_REFRESH_SECONDS = 60
_SAYS = {
    "ok": "Everything is as it should be.",
    "warning": "It works; something wants attention.",
    "critical": "Something is wrong.",
    "unknown": "It could not be told.",
}
_HEADERS = {"present": "ok", "missing": "warning", "incomplete": "warning"}
_INITRAMFS = {"none": "plain", "current": "ok", "stale": "critical", "unknown": "unknown"}
_IDENTITY = {"patched": "ok", "stock": "critical", "none": "plain", "unknown": "unknown"}


def page(observation: Observation | None, verdict: str) -> bytes:
    """The whole page; before the first look it says so."""
    status = observation.status if observation is not None else {}
    more = observation.more if observation is not None else {}
    host = str(more.get("host") or "this host")
    parts = [_header(host, observation), _verdict(verdict, status, more, observation)]
    if status:
        parts += [
            _findings(status["findings"]), _p2p(status["p2p"]), _kernels(status),
            _driver(status), _holds(status["holds"]),
        ]  # fmt: skip
    if observation is not None:
        parts.append(_probes(observation))
    return _document(f"{verdict} - gpuguard on {host}", "".join(parts)).encode()


def _document(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="refresh" content="{_REFRESH_SECONDS}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{body}"
        f'<p class="soft small">gpuguard {escape(__version__)}; metrics are at /metrics</p>'
        "</main></body></html>\n"
    )


def _header(host: str, observation: Observation | None) -> str:
    seen = "not looked yet"
    if observation is not None:
        moment = datetime.fromtimestamp(observation.when, UTC)
        stamp = moment.strftime("%Y-%m-%d %H:%M:%S UTC")
        seen = f'looked at <time datetime="{moment.isoformat(timespec="seconds")}">{stamp}</time>'
    return f'<header><h1>{escape(host)}</h1><span class="soft small">{seen}</span></header>'


def _verdict(
    verdict: str, status: Mapping[str, Any], more: Mapping[str, Any], seen: Observation | None
) -> str:
    says = _SAYS[verdict] if seen is not None else "The host is being looked at."
    lines = [f"<b>{escape(verdict)}</b> {escape(says)}"]
    if status:
        reboot = status["reboot"]
        is_due = "A reboot is due" if reboot["required"] else "No reboot is due"
        safe = "it would keep P2P" if reboot["safe"] else "do NOT reboot now"
        lines.append(f"{is_due}; {safe}.")
        lines += [_text(reason) for reason in reboot["reasons"]]
    if more.get("gate"):
        lines.append(f"After the last boot: {_text(more['gate'])}")
    shown = f"<div>{lines[0]}</div>" + "".join(f'<div class="small">{x}</div>' for x in lines[1:])
    return f'<section class="verdict {escape(verdict)}">{shown}</section>'


def _findings(findings: Sequence[Mapping[str, Any]]) -> str:
    if not findings:
        return ""
    order = ("critical", "unknown", "warning")
    items = []
    for finding in sorted(findings, key=lambda f: order.index(f["severity"])):
        what = (
            f"{_tag(finding['severity'], finding['severity'])} <b>{_text(finding['subject'])}</b>"
        )
        items.append(
            f"<li>{what}<p>{_text(finding['message'])}</p>"
            f'<p class="soft">{_text(finding["remedy"])}</p>'
            f'<p class="soft small"><code>{_text(finding["code"])}</code></p></li>'
        )
    return _section("What to do", f"<ul>{''.join(items)}</ul>")


def _p2p(p2p: Mapping[str, Any]) -> str:
    gpus = p2p["gpus"]
    expected = "?" if p2p["expected_gpus"] is None else p2p["expected_gpus"]
    if not gpus:
        said = p2p["problem"] or "no card"
        return _section("P2P", f'<p class="soft">{_text(said)}; {expected} cards expected</p>')
    words = {(pair["src"], pair["dst"]): (pair["read"], pair["write"]) for pair in p2p["pairs"]}
    head = "".join(f"<th scope=col>{gpu['index']}</th>" for gpu in gpus)
    rows = []
    for gpu in gpus:
        cells = "".join(_cell(words, gpu["uuid"], other["uuid"]) for other in gpus)
        rows.append(f"<tr><th scope=row>GPU{gpu['index']}</th>{cells}</tr>")
    matrix = (
        '<div class="wide"><table class="matrix"><thead><tr><th>from, to</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    cards = [
        [f"GPU{gpu['index']}", _text(gpu["name"]), _code(gpu["pci_bus_id"]), _code(gpu["uuid"])]
        for gpu in gpus
    ]
    table = _table(("", "card", "PCI", "UUID"), cards)
    note = (
        f'<p class="soft small">{len(gpus)} of {expected} cards, as {_text(p2p["source"])} says</p>'
    )
    return _section("P2P between the cards", matrix + note + table)


def _cell(words: Mapping[tuple[str, str], tuple[str, str]], src: str, dst: str) -> str:
    if src == dst:
        return '<td class="soft">&middot;</td>'
    read, write = words.get((src, dst), ("?", "?"))
    good = read == write == "OK"
    word = read if read == write else f"{read}/{write}"
    return f'<td class="{"ok" if good else "critical"}">{_text(word)}</td>'


def _kernels(status: Mapping[str, Any]) -> str:
    rows = []
    for kernel in status["kernels"]:
        roles = " ".join(_tag(role, "plain") for role in kernel["roles"])
        ready = _tag("ready", "ok") if kernel["ready"] else _tag("not ready", "critical")
        why = "" if kernel["ready"] else f"<br><code>{_text(', '.join(kernel['obstacles']))}</code>"
        rows.append(
            [
                f"{_text(kernel['release'])} {roles}",
                ready + why,
                _modules(kernel["modules"]),
                _tag(kernel["initramfs"], _INITRAMFS.get(kernel["initramfs"], "unknown")),
                _tag(kernel["headers"], _HEADERS.get(kernel["headers"], "unknown")),
            ]
        )
    if not rows:
        return ""
    table = _table(("kernel", "boot", "modules", "initramfs", "headers"), rows)
    return _section("Kernels", table)


def _modules(modules: Iterable[Mapping[str, Any]]) -> str:
    found: dict[str, int] = {}
    for module in modules:
        found[module["identity"]] = found.get(module["identity"], 0) + 1
    shown = {**_IDENTITY, "missing": "plain"}
    return " ".join(_tag(f"{n} {name}", shown.get(name, "unknown")) for name, n in found.items())


def _driver(status: Mapping[str, Any]) -> str:
    driver = status["driver"]
    identity = driver["loaded_identity"]
    loaded = f"{_text(driver['loaded'] or 'none')} {_tag(identity, _IDENTITY[identity])}"
    rows = [
        ("loaded", loaded),
        ("userland", _text(driver["userland"] or "none")),
        ("build-id", _code(driver["loaded_build_id"] or "-")),
        ("Secure Boot", _text(status["secure_boot"]["state"])),
    ]
    return _section("Driver", _list(rows))


def _holds(holds: Mapping[str, Any]) -> str:
    if holds["problem"]:
        return _section("Holds", f'<p class="soft">{_text(holds["problem"])}</p>')
    rows = [("held", _names(holds["held"], "ok"))]
    for key, kind in (
        ("drifted", "critical"), ("missing", "critical"), ("ineffective", "warning"),
        ("foreign", "plain"), ("lifted", "warning"),
    ):  # fmt: skip
        if holds.get(key):
            rows.append((key, _names(holds[key], kind)))
    if holds.get("withheld"):
        rows.append(("upgrades that wait", " ".join(map(_withheld, holds["withheld"]))))
    return _section("Holds", _list(rows))


def _withheld(upgrade: Mapping[str, Any]) -> str:
    kind = "warning" if upgrade["security"] else "plain"
    return _tag(f"{upgrade['name']} {upgrade['installed']} → {upgrade['candidate']}", kind)


def _names(names: Sequence[str], kind: str) -> str:
    return " ".join(_tag(name, kind) for name in names) or '<span class="soft">none</span>'


def _probes(observation: Observation) -> str:
    rows = []
    for part in observation.parts:
        good = part.problem is None
        said = _tag("works", "ok") if good else f"{_tag('fails', 'critical')} {_text(part.problem)}"
        rows.append((part.probe.value, f'{said} <span class="soft">{part.seconds:.2f} s</span>'))
    return _section("Probes", _list(rows))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th scope=col>{_text(title)}</th>" for title in head)
    lines = "".join(f"<tr>{''.join(_cells(row))}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody>'
        "</table></div>"
    )


def _cells(row: Sequence[str]) -> Iterator[str]:
    yield f"<th scope=row>{row[0]}</th>"
    yield from (f"<td>{cell}</td>" for cell in row[1:])


def _list(rows: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{_text(k)}</dt><dd>{v}</dd>" for k, v in rows) + "</dl>"


def _tag(text: str, kind: str) -> str:
    return f'<span class="tag {kind}">{_text(text)}</span>'


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>"


def _text(value: object) -> str:
    return escape(str(value))
