"""Style sheets of pages and pictures: colours for light and dark, text sizes, and the page's columns."""

from __future__ import annotations

SERIES = 6
"""Number of colours of curves, ``--s1`` and so on."""

# Okabe and Ito's hues, which people with any colour vision can tell apart, darker on white and
# lighter on black: each has a contrast of at least 4.5 to the paper.
THEME = """
:root { color-scheme: light dark;
 --paper: #ffffff; --card: #ffffff; --ink: #20242a; --muted: #5a626d; --line: #dde1e6; --row: #f3f5f7;
 --s1: #0067a8; --s2: #b04f00; --s3: #00755a; --s4: #9a3f84; --s5: #6c6200; --s6: #5a626d;
 --alarm: #b3261e; --good: #1a7f4b; --wait: #e2e5e9; --hatch: #a3a9b2; }
@media (prefers-color-scheme: dark) { :root {
 --paper: #14171b; --card: #1b1f24; --ink: #e6e9ed; --muted: #a4acb7; --line: #333942; --row: #22272d;
 --s1: #62b6f2; --s2: #f2a255; --s3: #4ecaa0; --s4: #dc93ca; --s5: #d6c957; --s6: #a4acb7;
 --alarm: #ff8a80; --good: #6fd39b; --wait: #343a42; --hatch: #6d7681; } }
"""
PICTURE = """
.picture { font: 12px system-ui, -apple-system, Helvetica, Arial, sans-serif }
.picture text { fill: var(--ink) } .picture .muted { fill: var(--muted) }
.picture .heading { font-weight: 600; font-size: 14px } .picture .small { font-size: 11px }
.picture .paper { fill: var(--card) } .picture .lane { fill: var(--row) }
.picture .tick { stroke: var(--line); stroke-width: 1; fill: none }
.picture .axis { stroke: var(--muted); stroke-width: 1; fill: none }
.picture .curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round }
.picture .raw { fill: none; stroke-width: 1; opacity: .4 } .picture .spread { opacity: .22 }
.picture .level { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 5 3; fill: none }
.picture .lost { fill: var(--alarm); opacity: .16 } .picture .cut { stroke: var(--alarm); stroke-width: 1; stroke-dasharray: 2 2; fill: none }
.picture .block { stroke: var(--card); stroke-width: 1 }
.picture .alarm { fill: var(--alarm) }
"""
PAGE = """
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
 font: 15px/1.45 system-ui, -apple-system, Helvetica, Arial, sans-serif }
main { max-width: 1240px; margin: 0 auto; padding: 16px }
h1 { font-size: 22px; margin: 8px 0 4px; overflow-wrap: anywhere }
h2 { font-size: 17px; margin: 30px 0 10px } h3 { font-size: 15px; margin: 14px 0 6px }
p { margin: 6px 0 } .note, .muted { color: var(--muted) } .alarm { color: var(--alarm) } .good { color: var(--good) }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 8px; margin: 14px 0; padding: 0 }
.facts div { background: var(--row); border-radius: 8px; padding: 8px 10px; min-width: 0 }
.facts dt { color: var(--muted); font-size: 12.5px } .facts dd { margin: 0; font-size: 17px; font-weight: 600; overflow-wrap: anywhere }
.charts { display: grid; align-items: start; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); gap: 12px }
.charts figure, .wide { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px; margin: 0; min-width: 0 }
.picture { display: block; width: 100%; height: auto }
.wide { overflow-x: auto; margin: 10px 0 } .charts { margin: 10px 0 } .wide .picture { min-width: 700px }
article { border: 1px solid var(--line); border-left: 3px solid var(--alarm); border-radius: 6px; padding: 6px 12px; margin: 10px 0; overflow-wrap: anywhere }
article h3 { margin: 2px 0 } .pairs { display: flex; flex-wrap: wrap; gap: 2px 18px } .pairs i { color: var(--muted); font-style: normal }
.zoom > input { margin: 0 4px 0 10px } .zoom > .wide { max-height: 85vh; overflow: auto }
.zoom > .z2:checked ~ .wide .picture { width: 200% } .zoom > .z4:checked ~ .wide .picture { width: 400% }
.zoom > .z8:checked ~ .wide .picture { width: 800% }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: 4px 16px 4px 0; border-bottom: 1px solid var(--line) }
th { color: var(--muted); font-weight: 500 } td.number, th.number { text-align: right }
td { overflow-wrap: anywhere; min-width: 60px } td:first-child { overflow-wrap: normal }
@media (max-width: 600px) { table { font-size: 14px } td, th { padding-right: 10px } }
code { font: 13px ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere }
details { margin: 10px 0 } summary { cursor: pointer; color: var(--s1) }
"""
