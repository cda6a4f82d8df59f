"""Small pictures for an asset's page, drawn as SVG: no plotting library is worth its weight for three charts.

Dagster shows pictures that stand in Markdown as data. In an `img` an SVG runs no script and loads nothing.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 34, 46
_LEGEND = 166
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#555")


class _Axis:
    """From values to places along one side of the picture."""

    def __init__(self, values: Sequence[float], begin: float, end: float, *, log: bool) -> None:
        self._log, self._begin, self._end = log, begin, end
        places = [self._value(one) for one in values] or [0.0, 1.0]
        self.low, self.high = min(places), max(places)
        if log:
            self.low, self.high = floor(self.low), ceil(self.high)
        if self.high <= self.low:
            self.high = self.low + 1.0

    def _value(self, one: float) -> float:
        return log10(one) if self._log else one

    def place(self, one: float) -> float:
        share = (self._value(one) - self.low) / (self.high - self.low)
        return self._begin + share * (self._end - self._begin)

    def ticks(self) -> list[float]:
        if self._log:
            every = max(1, round((self.high - self.low) / 8))
            return [10.0**power for power in range(int(self.low), int(self.high) + 1, every)]
        span = self.high - self.low
        step = 10 ** floor(log10(span / 4))
        step *= next((k for k in (1, 2, 5) if span / (step * k) <= 8), 10)
        return [k * step for k in range(ceil(self.low / step), floor(self.high / step) + 1)]


def chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Points],
    *,
    dots: Mapping[str, Points] | None = None,
    log: tuple[bool, bool] = (False, False),
) -> str:
    """An SVG of lines by name, with dots of the same colours where they have the same name.

    Points whose logarithm is asked for must be positive.
    """
    dots = dots or {}
    every = [point for group in (*lines.values(), *dots.values()) for point in group]
    names = list(dict.fromkeys([*lines, *dots]))
    right = _WIDTH - _RIGHT - (_LEGEND if len(names) > 1 else 0)
    x = _Axis([one for one, _ in every], _LEFT, right, log=log[0])
    y = _Axis([one for _, one in every], _HEIGHT - _BOTTOM, _TOP, log=log[1])
    colour = {name: _COLOURS[k % len(_COLOURS)] for k, name in enumerate(names)}
    parts = [
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 20, title, size=14),
        _text((_LEFT + right) / 2, _HEIGHT - 8, x_label, anchor="middle"),
        f'<g transform="translate(16 {_HEIGHT / 2:g}) rotate(-90)">',
        _text(0, 0, y_label, anchor="middle"),
        "</g>",
    ]
    for tick in x.ticks():
        at = x.place(tick)
        parts.append(_line(at, _TOP, at, _HEIGHT - _BOTTOM))
        parts.append(_text(at, _HEIGHT - _BOTTOM + 16, f"{tick:g}", anchor="middle"))
    for tick in y.ticks():
        at = y.place(tick)
        parts.append(_line(_LEFT, at, right, at))
        parts.append(_text(_LEFT - 6, at + 4, f"{tick:g}", anchor="end"))
    for name, points in lines.items():
        path = " ".join(f"{x.place(a):.1f},{y.place(b):.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour[name]}" stroke-width="1.8"/>')
    for name, points in dots.items():
        parts += [
            f'<circle cx="{x.place(a):.1f}" cy="{y.place(b):.1f}" r="3" fill="{colour[name]}"/>'
            for a, b in points
        ]
    for k, name in enumerate(names if len(names) > 1 else []):
        at = _TOP + 10 + 18 * k
        side = right + 12
        parts.append(f'<rect x="{side}" y="{at - 9}" width="10" height="10" fill="{colour[name]}"/>')
        parts.append(_text(side + 16, at, name))
    body = "".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">{body}</svg>'


def in_markdown(svg: str, what: str) -> str:
    """Markdown with the picture in it."""
    data = b64encode(svg.encode()).decode()
    return f"![{what}](data:image/svg+xml;base64,{data})"


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {where} font-family="sans-serif" fill="#222">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e3e3e3"/>'
