"""Plots as SVG, without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = (
    *("#1b6ca8", "#c8553d", "#3a7d44", "#7b4ea3"),
    *("#8a6d1d", "#333333", "#d48ab0", "#2aa198"),
)
WIDTH, HEIGHT, MARGIN = 560, 360, 60


@dataclass(frozen=True)
class Line:
    """One line of a plot, with its name."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def log_plot(lines: Sequence[Line], x_title: str, y_title: str) -> str:
    """Lines over logarithmic axes with a mark at every power of ten."""
    x_range = _decades([value for line in lines for value in line.x])
    y_range = _decades([value for line in lines for value in line.y])

    def across(value: float) -> float:
        return MARGIN + _part(value, x_range) * (WIDTH - 2 * MARGIN)

    def down(value: float) -> float:
        return HEIGHT - MARGIN - _part(value, y_range) * (HEIGHT - 2 * MARGIN)

    parts = _frame(x_title, y_title)
    for power in range(x_range[0], x_range[1] + 1):
        x = across(10.0**power)
        parts.append(_rule(x, MARGIN, x, HEIGHT - MARGIN))
        parts.append(_mark(x, HEIGHT - MARGIN + 18, "middle", power))
    for power in range(y_range[0], y_range[1] + 1):
        y = down(10.0**power)
        parts.append(_rule(MARGIN, y, WIDTH - MARGIN, y))
        parts.append(_mark(MARGIN - 6, y + 4, "end", power))
    for k, line in enumerate(lines):
        colour = COLOURS[k % len(COLOURS)]
        points = [(across(x), down(y)) for x, y in zip(line.x, line.y, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y = MARGIN + 16 * (k + 1)
        parts.append(f'<text x="{MARGIN + 8}" y="{y}" fill="{colour}">{line.name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low = math.floor(math.log10(min(values)))
    return low, max(low + 1, math.ceil(math.log10(max(values))))


def _part(value: float, decades: tuple[int, int]) -> float:
    return (math.log10(value) - decades[0]) / (decades[1] - decades[0])


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _frame(x_title: str, y_title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{x_title}</text>',
        f'<text x="14" y="24">{y_title}</text>',
    ]


def _text(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def _mark(x: float, y: float, anchor: str, power: int) -> str:
    return _text(x, y, anchor, f"{10.0**power:g}")


@dataclass(frozen=True)
class Band:
    """A line with the range around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def band_plot(bands: Sequence[Band], x_title: str, y_title: str) -> str:
    """Bands over a linear x axis and a logarithmic y axis, names at the right."""
    right = max(band.x[-1] for band in bands)
    bottom, top = min(min(b.low) for b in bands), max(max(b.y) for b in bands)
    bottom, top = bottom / 1.05, top * 1.05

    def across(value: float) -> float:
        return MARGIN + value / right * (WIDTH - 2 * MARGIN)

    def down(value: float) -> float:
        part = math.log(min(value, top) / bottom) / math.log(top / bottom)
        return HEIGHT - MARGIN - part * (HEIGHT - 2 * MARGIN)

    parts = _frame(x_title, y_title)
    for k in range(5):
        x, y = right * k / 4, bottom * (top / bottom) ** (k / 4)
        parts.append(_rule(across(x), MARGIN, across(x), HEIGHT - MARGIN))
        parts.append(_rule(MARGIN, down(y), WIDTH - MARGIN, down(y)))
        parts.append(_text(across(x), HEIGHT - MARGIN + 18, "middle", f"{x:.0f}"))
        parts.append(_text(MARGIN - 6, down(y) + 4, "end", f"{y:.3g}"))
    for k, band in enumerate(bands):
        colour = COLOURS[k % len(COLOURS)]
        around = [
            *zip(band.x, band.high, strict=True),
            *reversed(list(zip(band.x, band.low, strict=True))),
        ]
        area = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in around)
        line = zip(band.x, band.y, strict=True)
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line)
        parts.append(f'<polygon points="{area}" fill="{colour}" opacity="0.15"/>')
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = MARGIN + 16 * (k + 1)
        parts.append(
            f'<text x="{WIDTH - MARGIN - 8}" y="{y}" text-anchor="end" fill="{colour}">'
            f"{band.name}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])
