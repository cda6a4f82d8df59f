"""The console to which commands print tables."""

from __future__ import annotations

import sys

from rich.console import Console


def open_console(width: int) -> Console:
    """Return a console for standard output. If the output is not a terminal, it has `width` characters.

    Brackets are printed as they are. rich would take them for markup: it would leave out `[table raw.orders]`
    of a reason, and fail at `[/]`.
    """
    return Console(markup=False) if sys.stdout.isatty() else Console(width=width, markup=False)
