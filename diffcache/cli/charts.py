"""Two small charts as inline SVG: lines over frames, and points of quality against speed."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 1080, 270, 46, 34, 12, 190


def colours(count: int) -> list[str]:
    """Distinct hues that read on light and on dark ground; the first is the strongest."""
    palette = (
        "#3b6cf6",
        "#e4572e",
        "#8a9099",
        "#14a38b",
        "#7cc6a4",
        "#b14ad0",
        "#d9a3e6",
        "#d99a1c",
    )
    return [palette[i % len(palette)] for i in range(count)]


def line_chart(series: Mapping[str, Sequence[float]], unit: str, axis: str) -> str:
    """One line for each name over 0, 1, 2, ...; values beyond 60 dB or not finite are left out.

    The rectangle of class "plot" spans the first to the last position, for scripts to find.
    """
    values = [v for line in series.values() for v in line if math.isfinite(v)]
    if not values:
        return '<p class="soft">Every frame is identical to the reference.</p>'
    low, high = _nice(min(values), max(values))
    count = max(len(line) for line in series.values())
    marks = dict(zip(series, colours(len(series)), strict=True))

    def x(i: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * i / max(1, count - 1)

    parts = [_open(), *_grid(low, high, unit)]
    parts.append(
        f'<rect class="plot" x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{HEIGHT - TOP - BOTTOM}" fill="transparent" data-count="{count}"/>'
    )
    for name, line in series.items():
        points = " ".join(
            f"{x(i):.1f},{_y(v, low, high):.1f}" for i, v in enumerate(line) if math.isfinite(v)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{marks[name]}" stroke-width="2" '
            f'stroke-linejoin="round" pointer-events="none"/>'
        )
    for i in range(0, count, max(1, count // 8)):
        parts.append(f'<text x="{x(i):.1f}" y="{HEIGHT - 14}" text-anchor="middle">{i}</text>')
    parts.append(
        f'<text x="{LEFT + (WIDTH - LEFT - RIGHT) / 2}" y="{HEIGHT - 1}" text-anchor="middle">'
        f"{escape(axis)}</text>"
    )
    parts.append(
        f'<line class="cursor" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
        'stroke="var(--soft)" stroke-dasharray="3 3" pointer-events="none"/>'
    )
    return "\n".join([*parts, *_legend(marks), "</svg>"])


def scatter(points: Mapping[str, tuple[float, float, float]], across: str, up: str) -> str:
    """Named points (x, y, lowest y); a whisker goes down from each to its lowest value."""
    finite = {n: p for n, p in points.items() if all(map(math.isfinite, p))}
    if not finite:
        return '<p class="soft">Every clip is identical to the reference.</p>'
    low, high = _nice(min(p[2] for p in finite.values()), max(p[1] for p in finite.values()))
    right = max(1.5, math.ceil(max(p[0] for p in finite.values()) * 2 + 0.2) / 2)
    left = min(1.0, math.floor(min(p[0] for p in finite.values()) * 2) / 2)
    marks = dict(zip(finite, colours(len(finite)), strict=True))

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - left) / (right - left)

    parts = [_open(), *_grid(low, high, up)]
    for half in range(int(left * 2), int(right * 2) + 1):
        parts.append(
            f'<text x="{x(half / 2):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{half / 2:g}x'
            "</text>"
        )
    parts.append(
        f'<text x="{LEFT + (WIDTH - LEFT - RIGHT) / 2}" y="{HEIGHT - 2}" text-anchor="middle">'
        f"{escape(across)}</text>"
    )
    for name, (speed, quality, lowest) in finite.items():
        at, top, bottom = x(speed), _y(quality, low, high), _y(lowest, low, high)
        label = escape(f"{name}: {speed:.2f}x, {quality:.1f} {up}, lowest {lowest:.1f}")
        parts.append(
            f'<g><title>{label}</title><line x1="{at:.1f}" x2="{at:.1f}" y1="{top:.1f}" '
            f'y2="{bottom:.1f}" stroke="{marks[name]}" stroke-width="2" opacity="0.5"/>'
            f'<circle cx="{at:.1f}" cy="{top:.1f}" r="6" fill="{marks[name]}"/></g>'
        )
    return "\n".join([*parts, *_legend(marks), "</svg>"])


def _open() -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'


def _nice(low: float, high: float) -> tuple[float, float]:
    """A range in whole fives that holds both."""
    low, high = 5 * math.floor(low / 5), 5 * math.ceil(high / 5)
    return (low, high) if high > low else (low, low + 5)


def _y(value: float, low: float, high: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)


def _grid(low: float, high: float, unit: str) -> list[str]:
    step = 5 if high - low <= 40 else 10
    lines = []
    for value in range(int(low), int(high) + 1, step):
        y = _y(value, low, high)
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="var(--line)"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value}</text>'
        )
    lines.append(f'<text x="0" y="{TOP + 4}">{escape(unit)}</text>')
    return lines


def _legend(marks: dict[str, str]) -> list[str]:
    left = WIDTH - RIGHT + 16
    return [
        f'<circle cx="{left}" cy="{TOP + 8 + 21 * i}" r="5" fill="{colour}"/>'
        f'<text class="name" x="{left + 11}" y="{TOP + 12 + 21 * i}">{escape(name)}</text>'
        for i, (name, colour) in enumerate(marks.items())
    ]
