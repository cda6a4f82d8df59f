"""Small pictures for an asset's page, drawn as SVG: no plotting library is worth its weight for four charts.

Dagster shows pictures that stand in Markdown as data. In an `img` an SVG runs no script and loads nothing.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, degrees, floor, log10
from typing import NamedTuple

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 34, 46
_LEGEND = 166
_PANEL, _ARROW = 240, 26
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


class Mark(NamedTuple):
    """A point, the direction in which it moves, and an ellipse around it.

    ``towards`` is a vector of length one at most; ``ellipse`` its half axes and the angle of the first, rad.
    """

    at: tuple[float, float]
    towards: tuple[float, float] = (0.0, 0.0)
    ellipse: tuple[float, float, float] | None = None


def planes(title: str, reach: float, panels: Sequence[tuple[str, str, Mapping[str, Mark]]]) -> str:
    """An SVG of two planes with one scale on all axes, each from ``-reach`` to ``reach`` about its origin.

    Args:
        title: of the picture.
        reach: what is further away is not shown.
        panels: of each plane the labels of both axes and its marks by name.

    """
    names = list(dict.fromkeys(name for _, _, marks in panels for name in marks))
    colour = {name: _COLOURS[k % len(_COLOURS)] for k, name in enumerate(names)}
    parts = [
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT - 30, 20, title, size=14),
    ]
    scale = _PANEL / (2 * reach)
    for number, (x_label, y_label, marks) in enumerate(panels):
        left = _LEFT - 30 + number * (_PANEL + 50)
        middle = (left + _PANEL / 2, _TOP + 10 + _PANEL / 2)
        low = middle[1] + _PANEL / 2
        clip = f"panel{number}"
        parts.append(
            f'<clipPath id="{clip}"><rect x="{left}" y="{_TOP + 10}" '
            f'width="{_PANEL}" height="{_PANEL}"/></clipPath>'
        )
        for step in (-1.0, -0.5, 0.0, 0.5, 1.0):
            across, up = middle[0] + step * _PANEL / 2, middle[1] - step * _PANEL / 2
            parts += [_line(across, _TOP + 10, across, low), _line(left, up, left + _PANEL, up)]
            parts.append(_text(across, low + 16, f"{step * reach:g}", anchor="middle"))
            parts.append(_text(left - 4, up + 4, f"{step * reach:g}", anchor="end"))
        parts.append(_text(middle[0], low + 36, f"{x_label} (up: {y_label})", anchor="middle"))
        parts.append(f'<g clip-path="url(#{clip})">')
        for name, mark in marks.items():
            parts += _marked(mark, middle, scale, colour[name])
        parts.append("</g>")
    for k, name in enumerate(names):
        side = _LEFT - 30 + 2 * (_PANEL + 50) - 38
        parts.append(
            f'<rect x="{side}" y="{_TOP + 1 + 18 * k}" width="10" height="10" fill="{colour[name]}"/>'
        )
        parts.append(_text(side + 14, _TOP + 10 + 18 * k, name))
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(parts)}</svg>'


def _marked(mark: Mark, middle: tuple[float, float], scale: float, colour: str) -> list[str]:
    x, y = middle[0] + mark.at[0] * scale, middle[1] - mark.at[1] * scale
    end = (x + mark.towards[0] * _ARROW, y - mark.towards[1] * _ARROW)
    parts = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>',
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="{colour}" '
        'stroke-width="1.8"/>',
    ]
    if mark.ellipse is not None:
        first, second, angle = mark.ellipse
        parts.append(
            f'<ellipse rx="{first * scale:.1f}" ry="{second * scale:.1f}" fill="{colour}" '
            f'fill-opacity="0.08" stroke="{colour}" '
            f'transform="translate({x:.1f} {y:.1f}) rotate({-degrees(angle):.2f})"/>'
        )
    return parts


def in_markdown(svg: str, what: str) -> str:
    """Markdown with the picture in it."""
    data = b64encode(svg.encode()).decode()
    return f"![{what}](data:image/svg+xml;base64,{data})"


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {where} font-family="sans-serif" fill="#222">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e3e3e3"/>'
