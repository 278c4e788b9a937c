"""HTML frame and style sheet of the report: it loads nothing and runs no code."""

from string import Template

STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --ink: #1b1f24; --soft: #5d6672; --line: #e1e5ea;
  --good: #11783c; --good-bg: #dcf5e4; --bad: #b3261e; --bad-bg: #fbe4e2; --code: #f3f5f7;
  --c0: #2f6fde; --c1: #e0762f; --c2: #1f9d6b; --c3: #a24bd1; --c4: #c9304f; --c5: #7a8594; }
@media (prefers-color-scheme: dark) { :root { --bg: #101418; --card: #191f26; --ink: #e7ebf0; --soft: #98a3b0;
  --line: #2b333d; --good: #6fdc97; --good-bg: #12351f; --bad: #ff938a; --bad-bg: #43191a; --code: #12171c;
  --c0: #6ba2ff; --c1: #ff9e5e; --c2: #4fd39c; --c3: #cb8bf0; --c4: #ff7a92; --c5: #9aa6b5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 4px; }
h3 { font-size: 14px; margin: 0; }
p { margin: 0; } .soft { color: var(--soft); }
.grid { display: grid; gap: 16px; margin-top: 16px; }
.tiles { display: flex; flex-wrap: wrap; }
.tiles .tile { flex: 1 1 150px; min-width: min-content; } .tile.wide { flex-basis: 260px; }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(360px, 100%), 1fr)); }
.cards { grid-template-columns: repeat(auto-fill, minmax(min(380px, 100%), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px; min-width: 0; }
.tile .value { font-size: 26px; font-weight: 650; letter-spacing: -.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile .value small { font-size: 15px; font-weight: 500; color: var(--soft); letter-spacing: 0; }
.tile .value .up { color: var(--good); } .tile .value .down { color: var(--bad); }
svg { display: block; width: 100%; height: auto; margin-top: 8px; overflow: visible; }
svg text { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); stroke-width: 1; }
polyline { fill: none; stroke: var(--c); stroke-linejoin: round; stroke-linecap: round; }
.line { stroke-width: 2; } .raw { stroke-width: 1; opacity: .3; }
circle { fill: transparent; } circle.mark { fill: var(--c); } circle:hover { fill: var(--c); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); }
.c3 { --c: var(--c3); } .c4 { --c: var(--c4); } .c5 { --c: var(--c5); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; color: var(--soft); padding: 0; margin: 4px 0 0;
  list-style: none; }
.legend li::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  background: var(--c); margin-right: 6px; }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.rollout { display: flex; flex-direction: column; gap: 12px; }
.top { display: flex; gap: 14px; min-width: 0; }
.strip { display: flex; gap: 6px; flex-wrap: wrap; }
.strip figure { margin: 0; text-align: center; }
.strip figcaption { font-size: 12px; white-space: pre-wrap; max-width: 24ch; overflow-wrap: anywhere; }
.strip img { width: 72px; height: auto; background: #fff; display: block; margin: 0 auto; border: 1px solid #8884; }
.pictures { display: flex; gap: 8px; flex-wrap: wrap; flex: 0 0 auto; max-width: 45%; align-content: flex-start; }
.pictures img { width: 148px; max-width: 100%; height: auto; align-self: flex-start; background: #fff;
  border: 1px solid var(--line); border-radius: 8px; }
img.tiny { image-rendering: pixelated; }
.question { min-width: 0; flex: 1; }
.prompt { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 9em; overflow: auto; }
.truth { margin-top: 8px; overflow-wrap: anywhere; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.answer { min-width: 0; }
.answer header { display: flex; flex-wrap: wrap; gap: 4px 5px; align-items: center; font-size: 13px; }
.answer .when { flex-basis: 100%; }
.badge { border-radius: 99px; padding: 1px 8px; font-size: 11.5px; font-weight: 600; background: var(--code); }
.badge.good { color: var(--good); background: var(--good-bg); } .badge.bad { color: var(--bad); background: var(--bad-bg); }
pre { margin: 6px 0 0; padding: 10px; background: var(--code); border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 15em; overflow: auto; unicode-bidi: isolate;
  font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
details { margin-top: 16px; } summary { cursor: pointer; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-top: 10px; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; } .numbers td:not(:first-child), .numbers th:not(:first-child) {
  text-align: right; white-space: nowrap; }
@media print { body { background: #fff; } .card { break-inside: avoid; } pre, .prompt { max-height: none; } }
"""

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>$style</style>
</head>
<body><main>
<h1>$title</h1>
<p class="soft">$subtitle</p>
$body
</main></body>
</html>
""")
