"""Numbers and names in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def agree(number: int, one: str, many: str) -> str:
    """The word that goes with a number: `one` with 1, `many` with any other."""
    return one if number == 1 else many


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: `1 run`, `1,200 runs`; `many` is for plurals that do not just add an s."""
    return f"{number:,} {agree(number, one, many or f'{one}s')}"


def named(one: str, names: Sequence[str]) -> str:
    """Names with their noun: `column a`, `columns a, b`."""
    return f"{agree(len(names), one, f'{one}s')} {', '.join(names)}"
