"""Draw pictures for an asset's page with Matplotlib, without a display.

Dagster shows a picture whose data are part of a Markdown text. Matplotlib takes a second to import, so it is
imported when the first picture is drawn.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

_SIZE_INCHES, _DOTS_PER_INCH = (7.5, 4.2), 96
_MAX_LABEL = 40


def new_figure(title: str) -> Figure:
    """Return an empty figure, 720 by 403 pixels.

    Figures share no state, so threads can draw at the same time.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    figure.suptitle(title, parse_math=False)
    return figure


def draw_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Points],
    *,
    dots: Mapping[str, Points] | None = None,
    log: tuple[bool, bool] = (False, False),
) -> Figure:
    """Draw lines by name, and dots in the colors of the lines with the same names.

    Args:
        title: The title of the figure.
        x_label: The quantity and unit of the horizontal axis.
        y_label: The quantity and unit of the vertical axis.
        lines: The points of each line, by name.
        dots: Points that are not joined, by name.
        log: Whether the axes are logarithmic. A logarithmic axis does not show points that are not positive.
    """
    figure = new_figure(title)
    axes = figure.add_subplot()
    axes.set(
        xlabel=x_label,
        ylabel=y_label,
        xscale="log" if log[0] else "linear",
        yscale="log" if log[1] else "linear",
    )
    axes.grid(visible=True, alpha=0.3)
    names = list(dict.fromkeys([*lines, *(dots or {})]))
    for number, name in enumerate(names):
        color = f"C{number % 10}"
        line, points = lines.get(name, ()), (dots or {}).get(name, ())
        axes.plot(*_coordinates(line), color=color, label=escape_label(name))
        axes.plot(*_coordinates(points), "o", markersize=4, color=color)
    if len(names) > 1:
        figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _coordinates(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def escape_label(text: str) -> str:
    """Return a label that Matplotlib shows unchanged.

    Otherwise Matplotlib hides `_a`, and reads `$a$` as a formula. A long text is shortened to 40 characters,
    so that it leaves room for the picture.
    """
    if len(text) > _MAX_LABEL:
        text = f"{text[: _MAX_LABEL - 1]}…"
    text = text.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


def to_png(figure: Figure) -> bytes:
    """Render a figure as PNG, some 20 to 100 kB."""
    stream = BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def to_markdown(figure: Figure, text: str) -> str:
    """Return Markdown that contains the figure. `text` is the alternative text."""
    return picture_markdown(to_png(figure), text)


def picture_markdown(png: bytes, text: str) -> str:
    """Return Markdown that contains a PNG picture. `text` is the alternative text."""
    return f"![{text}](data:image/png;base64,{b64encode(png).decode()})"
