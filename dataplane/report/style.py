"""How the page looks, by day, by night, on paper.

Owns the colours: `c1` blue, `c2` amber, `c3` green, `c4` violet, `c5` red, `c6` teal, `c8` grey,
`c9` the line of a limit. They differ in lightness too, so that they can be told apart without hue.
"""

from __future__ import annotations

from typing import Final

_NUMBERS: Final = (1, 2, 3, 4, 5, 6, 8, 9)

_CLASSES: Final = "".join(
    f".f{n}{{fill:var(--c{n})}}.s{n}{{stroke:var(--c{n})}}.b{n}{{background:var(--c{n})}}"
    for n in _NUMBERS
)

STYLE: Final = (
    """
:root{--paper:#f5f6f8;--card:#fff;--ink:#17212b;--soft:#55606d;--edge:#dde2e8;--grid:#e9edf1;
--c1:#2b6cb8;--c2:#c9771a;--c3:#2f8a57;--c4:#7550ad;--c5:#c63b3b;--c6:#178a94;--c8:#9aa4af;
--c9:#8a2f2f}
@media (prefers-color-scheme:dark){:root{--paper:#10151b;--card:#18202a;--ink:#e8edf2;
--soft:#a3afbc;--edge:#2b3642;--grid:#26303b;--c1:#6aa9ee;--c2:#eaa44a;--c3:#5dc08a;--c4:#b295ea;
--c5:#f07f7f;--c6:#4fc3cd;--c8:#71808f;--c9:#f0a0a0}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:1440px;padding:28px 32px 40px;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Open Sans",
"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{margin:0 0 10px;font-size:30px;line-height:1.2;letter-spacing:-.01em}
h2{margin:0;font-size:18px;line-height:1.3}
h3{margin:4px 0 0;font-size:15px}
.facts{display:flex;flex-wrap:wrap;gap:4px 28px;margin:0 0 22px;font-size:14px}
.facts div{display:flex;gap:8px}
.facts dt{color:var(--soft);white-space:nowrap}
.facts dd{margin:0}
.figures{display:grid;grid-template-columns:repeat(var(--n),minmax(0,1fr));gap:12px;
margin:0 0 18px;padding:0;list-style:none}
.figures li{display:flex;flex-direction:column;padding:13px 16px;background:var(--card);
border:1px solid var(--edge);border-radius:10px}
.figures span,.figures small{color:var(--soft);font-size:13px}
.figures strong{font-size:25px;line-height:1.3;font-weight:650;font-variant-numeric:tabular-nums}
main{display:block}
main{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
main>.figures,main>.says,.wide-card{grid-column:1/-1}
main>.figures{margin:0}
.card{min-width:0;padding:18px 20px 16px;background:var(--card);border:1px solid var(--edge);
border-radius:10px}
.says{margin:2px 0 12px;color:var(--soft);font-size:14px}
.note{margin:4px 0;color:var(--soft);font-size:13px}
svg{display:block;width:100%;height:auto;overflow:hidden}
svg text{fill:var(--soft);font-size:12.5px;font-family:inherit;font-variant-numeric:tabular-nums}
svg .end{text-anchor:end}svg .mid{text-anchor:middle}
svg .part{fill:var(--ink);font-weight:600;font-size:13px}
.grid{stroke:var(--grid);stroke-width:1}
.axis{stroke:var(--c8);stroke-width:1}
.limit{stroke:var(--c9);stroke-width:1.5;stroke-dasharray:6 4}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.dashed{stroke-dasharray:5 4}
.band{opacity:.18}
g:hover>rect,rect:hover,circle:hover{opacity:.75}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;margin:0 0 6px;padding:0;list-style:none;
font-size:13px}
.legend li{display:flex;align-items:center;gap:7px}
.key{flex:none;width:12px;height:12px;border-radius:3px}
.three{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:22px}
.bars{margin:0;padding:0;list-style:none;font-size:14px}
.bars li{display:grid;grid-template-columns:minmax(0,5fr) minmax(0,4fr) 62px;gap:14px;
align-items:center;padding:6px 0;border-top:1px solid var(--grid)}
.bars li:first-child{border-top:0}
.bars b{font-weight:600}.bars small{display:block;color:var(--soft);font-size:12.5px}
.bars .bar{height:12px;border-radius:6px;background:var(--grid);overflow:hidden}
.bars .bar i{display:block;height:100%;border-radius:6px}
.bars .value{text-align:right;font-variant-numeric:tabular-nums}
footer{margin-top:20px;color:var(--soft);font-size:13px}
@media (max-width:1050px){
.figures{grid-template-columns:repeat(4,minmax(0,1fr))}body{padding:20px 18px 28px}
main{grid-template-columns:minmax(0,1fr)}
.wide text{font-size:20px}svg .part{font-size:20px}}
@media print{:root{--paper:#fff;--card:#fff;--ink:#000;--soft:#444;--edge:#ccc;--grid:#e5e5e5}
body{padding:0;font-size:12px;max-width:none}.card,.figures li{break-inside:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
    + _CLASSES
)
