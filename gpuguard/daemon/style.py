"""The page's style sheet; nothing is loaded from anywhere."""

from __future__ import annotations

import base64
import hashlib

STYLE = """\
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1c2430;--soft:#5b6675;--line:#dfe3e8;
--ok:#1a7f4b;--ok-bg:#e3f4ea;--warning:#8a5a00;--warning-bg:#fdf1d7;--critical:#b3261e;
--critical-bg:#fbe6e4;--unknown:#5a4a9c;--unknown-bg:#ece8fa}
@media(prefers-color-scheme:dark){:root{--bg:#12161c;--card:#1b212a;--ink:#e6eaf0;--soft:#9aa6b5;
--line:#2d3643;--ok:#6fd39b;--ok-bg:#15352a;--warning:#f0c264;--warning-bg:#3a2e12;
--critical:#ff9a91;--critical-bg:#432020;--unknown:#b9aaf5;--unknown-bg:#2b2547}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1rem}
header{display:flex;flex-wrap:wrap;gap:.25rem 1rem;align-items:baseline;margin:.5rem 0 1rem}
h1{font-size:1.3rem;margin:0}h2{font-size:1rem;margin:0 0 .6rem}
.soft{color:var(--soft)}.small{font-size:.85rem}
section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:1rem;
margin:0 0 1rem}
.verdict{font-size:1.1rem;border-left:.4rem solid}
.verdict b{text-transform:uppercase;letter-spacing:.03em}
.ok{color:var(--ok);background:var(--ok-bg)}.warning{color:var(--warning);
background:var(--warning-bg)}.critical{color:var(--critical);background:var(--critical-bg)}
.unknown{color:var(--unknown);background:var(--unknown-bg)}
.tag{display:inline-block;padding:0 .5rem;border-radius:1rem;font-size:.85rem;white-space:nowrap}
.plain{border:1px solid var(--line);color:var(--soft)}
ul{list-style:none;margin:0;padding:0}li{padding:.6rem 0;border-top:1px solid var(--line)}
li:first-child{border:0;padding-top:0}
li p{margin:.2rem 0 0;overflow-wrap:anywhere}
code{font:.85rem ui-monospace,monospace;overflow-wrap:anywhere}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.35rem .6rem;border-top:1px solid var(--line);vertical-align:top}
thead th{border:0;color:var(--soft);font-weight:500;font-size:.85rem;white-space:nowrap}
tbody th{font-weight:500;white-space:nowrap}
td code{white-space:nowrap}.matrix{width:auto}
.matrix td,.matrix thead th{text-align:center;min-width:3rem}
.matrix td{border:2px solid var(--card);border-radius:.3rem;font-size:.85rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1rem;margin:0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
@media(max-width:34rem){dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.5rem}
main{padding:.6rem}section{padding:.75rem}th,td{padding:.3rem .35rem;font-size:.9rem}
.matrix td,.matrix thead th{min-width:1.9rem;padding:.3rem .1rem;font-size:.75rem}}
"""
#: Nothing but this very style sheet; no script, no picture, no frame around it.
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    f"style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'"
)
