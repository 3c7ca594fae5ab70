"""The look of a report: one style sheet in the page, for light and dark screens, wide and narrow, and paper.

Colours of lines are told apart by people who do not see all colours (after Okabe and Ito).
"""

from __future__ import annotations

LIGHT = """
  --back: #ffffff; --text: #1b1f24; --soft: #57606a; --grid: #e3e6ea; --card: #f6f8fa; --edge: #d8dee4;
  --c1: #0067a5; --c2: #d55e00; --c3: #007a5a; --c4: #a24b86; --c5: #7a6a00;
  --p0: #3b82c4; --p1: #7a5ab5; --p2: #d9480f; --p3: #2a9d8f; --p4: #8ab17d;
  --p5: #c99700; --p6: #8d6e63; --p7: #9aa4af;
"""
DARK = """
  --back: #12161b; --text: #e6e9ec; --soft: #9aa4af; --grid: #2a313a; --card: #1a2027; --edge: #333c46;
  --c1: #5cb3f0; --c2: #ff9150; --c3: #3fc79a; --c4: #e08fc6; --c5: #d8c24a;
  --p0: #5b9fdc; --p1: #a48bdc; --p2: #ff7a45; --p3: #45c4b4; --p4: #a5cf97;
  --p5: #e5b93c; --p6: #b59387; --p7: #77828e;
"""

STYLE = (
    f":root {{{LIGHT}  color-scheme: light dark; }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{{DARK}}} }}\n"
    f"@media print {{ :root {{{LIGHT}  color-scheme: light; }} }}\n"
    + """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { margin: 0 auto; padding: 28px 20px 48px; max-width: 1160px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; padding-bottom: 4px; border-bottom: 1px solid var(--edge); }
p { margin: 6px 0; max-width: 80ch; }
.soft, .note, .unit { color: var(--soft); }
.note { font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(158px, 1fr)); gap: 10px; margin: 18px 0 0; }
.tile { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 10px 12px; }
.tile b { display: block; font-size: 20px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 24px 28px; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figure.full { grid-column: 1 / -1; }
figcaption { font-weight: 600; }
figcaption .unit { font-weight: 400; }
.legend { font-size: 13px; color: var(--soft); min-height: 22px; margin-bottom: 2px; }
.key { display: inline-block; margin-right: 14px; white-space: nowrap; }
.key i { display: inline-block; width: 18px; height: 0; margin-right: 5px; vertical-align: middle;
  border-top: 3px solid var(--soft); }
.key i.dashed { border-top-style: dashed; border-top-width: 2px; }
.key i.mark { border-top: 0; border-left: 2px dotted var(--soft); height: 12px; width: 5px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg.narrow, svg.half { display: none; }
.tick { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--grid); stroke-width: 1; }
.mark { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 2 3; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.line.dashed { stroke-dasharray: 6 5; stroke-width: 1.5; }
.tip { fill: transparent !important; }
.scroll { overflow-x: auto; margin-top: 4px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 16px 5px 0; text-align: right; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
th, td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
td:last-child, th:last-child { padding-right: 0; }
.tables { display: flex; flex-wrap: wrap; gap: 14px 48px; align-items: flex-start; }
.scroll { max-width: 100%; }
ul { margin: 6px 0; padding-left: 20px; }
li { margin: 3px 0; overflow-wrap: anywhere; }
code, .said { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
@media (max-width: 900px) {
  .charts { grid-template-columns: minmax(0, 1fr); }
  svg.full { display: none; } svg.half { display: block; }
}
@media (max-width: 520px) {
  body { padding: 18px 14px 36px; }
  svg.wide, svg.half { display: none; } svg.narrow { display: block; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  th, td { padding-right: 10px; }
}
@media print {
  @page { margin: 14mm; }
  body { padding: 0; max-width: none; font-size: 11px; }
  h2 { break-after: avoid; margin-top: 20px; }
  .charts { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px 20px; }
  svg.wide, svg.half { display: block; } svg.narrow, svg.full { display: none; }
  .tile, .tables, tr { break-inside: avoid; }
  .note, .legend, .tile span, th, code, .said { font-size: 10px; }
}
"""
    + "".join(
        f".c{n} {{ stroke: var(--c{n}); }} .f{n} {{ fill: var(--c{n}); }} "
        f".key i.k{n} {{ border-color: var(--c{n}); }}\n"
        for n in range(1, 6)
    )
    + "".join(
        f"rect.p{n} {{ fill: var(--p{n}); }} "
        f".key i.p{n} {{ border: 0; width: 12px; height: 12px; border-radius: 2px; background: var(--p{n}); }}\n"
        for n in range(8)
    )
)
