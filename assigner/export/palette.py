"""Colours for any number of workers that people with any colour vision can tell apart, each with legible text on it.

The first eight are those of Okabe and Ito, Color Universal Design, 2008, black left out for grey; further ones are
the same in lighter and darker shades. A colour is never the only sign: what is coloured also says its worker.
"""

from __future__ import annotations

_BASE = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#0072B2", "#D55E00", "#BBBBBB")
_SHADES = (0.0, 0.55, -0.45)  # towards white, towards black
_DARK, _LIGHT = "#000000", "#FFFFFF"


def fill(number: int) -> str:
    """The colour of worker `number`, 0 or more, as #RRGGBB."""
    base, shade = _BASE[number % len(_BASE)], _SHADES[number // len(_BASE) % len(_SHADES)]
    end, share = (255, shade) if shade > 0 else (0, -shade)
    return "#" + "".join(f"{round(level + (end - level) * share):02X}" for level in _levels(base))


def text(colour: str) -> str:
    """Black or white, whichever contrasts more with a colour."""
    return max(_DARK, _LIGHT, key=lambda each: contrast(each, colour))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (W3C, WCAG 2.2, relative luminance)."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _levels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    linear = [
        level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4
        for level in (each / 255 for each in _levels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
