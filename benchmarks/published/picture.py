"""Predicted against measured steps as an SVG: how far the one is from the other, by what was measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 300, 64, 34, 16, 52
BAND, STEP = 0.15, 0.05
COLOURS = ("#1f6feb", "#d1571b")  # told apart by the colour-blind, and by their shapes


def scatter(points: Sequence[tuple[str, str, float, float]]) -> str:
    """The picture: one mark for each run, the name under the pointer, a band of 15 % either way.

    Args:
        points: (set, name, measured, predicted), of at most two sets; seconds above 0.
    """
    measured = [seconds for _, _, seconds, _ in points]
    low, high = math.floor(math.log10(min(measured))), math.floor(math.log10(max(measured))) + 1
    most = STEP * math.ceil(max(BAND, *(abs(after / before - 1) for _, _, before, after in points)) / STEP + 0.5)

    def x(seconds: float) -> float:
        return LEFT + WIDTH * (math.log10(seconds) - low) / (high - low)

    def y(error: float) -> float:
        return TOP + HEIGHT * (1 - error / most) / 2

    size, end, foot = f"{LEFT + WIDTH + RIGHT} {TOP + HEIGHT + BOTTOM}", LEFT + WIDTH, TOP + HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}">',
        '<g font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<rect x="{LEFT}" y="{y(BAND):.1f}" width="{WIDTH}" height="{y(-BAND) - y(BAND):.1f}" fill="#e8ecf1"/>',
        f'<line x1="{LEFT}" y1="{y(0):.1f}" x2="{end}" y2="{y(0):.1f}" stroke="#8b949e"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#57606a"/>',
    ]
    lines += [
        f'<text x="{x(10.0**decade):.1f}" y="{foot + 18}" text-anchor="middle">{10.0**decade:g}</text>'
        for decade in range(low, high + 1)
    ]
    ticks = round(most / STEP)
    for tick, error in ((tick, tick * STEP) for tick in range(-ticks, ticks + 1)):
        text = f"{error:+.0%}" if tick else "0%"
        lines.append(f'<text x="{LEFT - 8}" y="{y(error) + 4:.1f}" text-anchor="end">{text}</text>')
    lines += [
        f'<text x="{LEFT + WIDTH / 2}" y="{foot + 40}" text-anchor="middle">measured step, s</text>',
        f'<text x="{LEFT}" y="18">predicted, against measured</text>',
    ]
    sets = list(dict.fromkeys(of for of, *_ in points))
    for of, name, before, after in points:
        said = f"{of} {name}: {before:g} s measured, {after:.3g} s predicted"
        lines.append(f"<g><title>{said}</title>{_mark(sets.index(of), x(before), y(after / before - 1))}</g>")
    for n, of in enumerate(sets):
        lines.append(f'{_mark(n, end - 150 + 80 * n, 14)}<text x="{end - 140 + 80 * n}" y="18">{of}</text>')
    return "\n".join([*lines, "</g>", "</svg>", ""])


def _mark(of: int, x: float, y: float) -> str:
    style = f'fill="none" stroke="{COLOURS[of]}" stroke-width="1.8"'
    if of == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {style}/>'
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {style}/>'
