"""Pieces of a self-contained HTML page: its frame, the timeline and the table of decisions.

Everything is inline; the page's own content policy forbids any request. Rows are those of
`Report.rows`; only attributes are read, so this module imports nothing of the package.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

CELL, GAP, LANE, LABEL = 13, 2, 24, 150  # pixels of the timeline

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; media-src data: blob:"
)

STYLE = """
:root { --ink: #17202c; --soft: #5d6b7c; --line: #dfe5ec; --ground: #f5f7fa; --card: #ffffff;
  --compute: #3457d5; --reuse: #c5d3f3; --accent: #3457d5; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8edf4; --soft: #9aa8ba; --line: #2b3545;
  --ground: #10151d; --card: #18202b; --compute: #7c9bff; --reuse: #2c3c63; --accent: #9db4ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 20px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.02em; margin: 0 0 6px; }
h2 { font-size: 18px; letter-spacing: -0.01em; margin: 0 0 4px; }
p { margin: 0 0 14px; } .soft { color: var(--soft); } small { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 20px 22px; margin: 18px 0; overflow-x: auto; }
section.plain { background: none; border: 0; padding: 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { font-weight: 600; color: var(--soft); font-size: 13px; text-align: right;
  white-space: nowrap; }
td { text-align: right; } th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr:last-child td { border-bottom: 0; } tr.best td { font-weight: 650; }
.scroll { max-height: 420px; overflow: auto; } .scroll th { position: sticky; top: 0;
  background: var(--card); } td.words, th.words { text-align: left; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin: 0 6px 0 0; }
.key + .key, .keys span + span { margin-left: 14px; }
svg { display: block; max-width: 100%; min-width: 640px; height: auto; }
svg text { fill: var(--soft);
  font: 12px system-ui, sans-serif; } svg .name { fill: var(--ink); }
dl { columns: 3 260px; column-gap: 32px; margin: 8px 0 0; }
dl div { break-inside: avoid; padding: 2px 0; } dt { color: var(--soft); font-size: 13px; }
dd { margin: 0 0 4px; }
"""


def page(title: str, sections: Sequence[str], script: str = "", style: str = "") -> str:
    """A whole HTML document of `sections` (HTML); `script` and `style` are added inline."""
    blocks = "\n".join(s if s.lstrip().startswith("<section") else section(s) for s in sections)
    code = f"<script>\n{script}\n</script>\n" if script else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}{style}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{blocks}\n</main>\n{code}</body>\n</html>\n"
    )


def section(content: str, heading: str = "", note: str = "") -> str:
    """One card of the page; `content` is HTML, the heading and the note are text."""
    head = f"<h2>{escape(heading)}</h2>\n" if heading else ""
    head += f'<p class="soft">{escape(note)}</p>\n' if note else ""
    return f"<section>\n{head}{content}\n</section>"


def table(header: Sequence[str], body: Iterable[Sequence[Any]], words: Sequence[int] = ()) -> str:
    """An HTML table of text cells; columns in `words` are set flush left."""

    def line(cells: Sequence[Any], tag: str) -> str:
        marks = (' class="words"' if i in words else "" for i in range(len(cells)))
        inner = (f"<{tag}{m}>{escape(str(c))}</{tag}>" for c, m in zip(cells, marks, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    lines = "\n".join(line(cells, "td") for cells in body)
    return f"<table>\n<thead>{line(header, 'th')}</thead>\n<tbody>\n{lines}\n</tbody>\n</table>"


def timeline_svg(rows: Iterable[Any]) -> str:
    """Computed and reused calls over the steps, a lane for each (module, branch).

    A cell is one step (of one chunk); where several sites decide within it, the filled height is
    the share that was computed. Its tooltip tells reason, metric and error.
    """
    lanes: dict[tuple[str, str], dict[tuple[int, int], list[Any]]] = {}
    for row in rows:
        place = (-1 if row.chunk is None else row.chunk, row.step)
        lanes.setdefault((row.module, row.branch), {}).setdefault(place, []).append(row)
    if not lanes:
        return '<p class="soft">No calls were recorded.</p>'
    places = sorted({place for lane in lanes.values() for place in lane})
    cell = max(4, min(CELL, 960 // len(places) - GAP))
    width, height = LABEL + len(places) * (cell + GAP) + 8, len(lanes) * LANE + 22
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        'aria-label="Computed and reused calls over the steps">'
    ]
    for number, ((module, branch), calls) in enumerate(lanes.items()):
        top = number * LANE + 2
        label = " ".join(word for word in (module, branch) if word)
        parts.append(f'<text class="name" x="0" y="{top + 14}">{escape(label)}</text>')
        for place, calls_here in calls.items():
            left = LABEL + places.index(place) * (cell + GAP)
            parts.append(_timeline_cell(calls_here, left, top, cell))
    bottom = len(lanes) * LANE + 15
    for position in range(0, len(places), 10 if len(places) > 12 else 1):
        left = LABEL + position * (cell + GAP)
        parts.append(f'<text x="{left}" y="{bottom}">{places[position][1]}</text>')
    return "\n".join([*parts, "</svg>", _timeline_keys()])


def decision_table(rows: Iterable[Any]) -> str:
    """Every recorded call with what was decided and why, in a box that scrolls."""
    header = (
        "step",
        "module",
        "site",
        "branch",
        "timestep",
        "decision",
        "reason",
        "metric",
        "error",
    )
    body = (
        (
            row.step if row.chunk is None else f"{row.chunk}/{row.step}",
            *(row.module, row.site, row.branch, f"{row.timestep:g}", row.decision, row.reason),
            *("" if value is None else f"{value:.3g}" for value in (row.metric, row.error)),
        )
        for row in rows
    )
    return f'<div class="scroll">{table(header, body, words=(1, 2, 3, 5, 6))}</div>'


def _timeline_cell(calls: Sequence[Any], left: float, top: float, width: float) -> str:
    computed = sum(row.decision == "compute" for row in calls) / len(calls)
    height = LANE - 6
    filled = height * computed
    lower = (
        f'<rect x="{left}" y="{top + height - filled:g}" width="{width}" height="{filled:g}" '
        'rx="2" fill="var(--compute)"/>'
        if computed
        else ""
    )
    return (
        f"<g><title>{escape(_tooltip(calls, computed))}</title>"
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="2" fill="var(--reuse)"/>'
        f"{lower}</g>"
    )


def _tooltip(calls: Sequence[Any], computed: float) -> str:
    row = calls[0]
    words = [f"step {row.step}" if row.chunk is None else f"chunk {row.chunk}, step {row.step}"]
    if len(calls) > 1:
        return f"{words[0]}: {computed:.0%} of {len(calls)} decisions compute"
    words.append(f"{row.decision}: {row.reason}" if row.reason else row.decision)
    words += [
        f"{name} {value:.3g}"
        for name, value in (("metric", row.metric), ("error", row.error))
        if value is not None
    ]
    return ", ".join(words)


def _timeline_keys() -> str:
    return (
        '<p class="keys soft"><span><i class="key" style="background:var(--compute)"></i>computed'
        '</span><span><i class="key" style="background:var(--reuse)"></i>reused</span></p>'
    )
