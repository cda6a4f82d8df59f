"""Numbers and names in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


def pluralize(number: int, singular: str, plural: str) -> str:
    """The word that goes with a number: `singular` with 1, `plural` with any other."""
    return singular if number == 1 else plural


def format_count(number: int, singular: str, plural: str = "") -> str:
    """A number with its noun: `1 run`, `1,200 runs`; `plural` is for plurals that do not just add an s."""
    return f"{number:,} {pluralize(number, singular, plural or f'{singular}s')}"


def format_names(singular: str, names: Sequence[str]) -> str:
    """Names with their noun: `column a`, `columns a, b`."""
    return f"{pluralize(len(names), singular, f'{singular}s')} {', '.join(names)}"


class CodedReason(str):
    """Why something was decided: a sentence for people, and `code` for programs and tests.

    Args:
        sentence (str): The text, which may be rewritten at any time.
        code (str): The cause in snake case, such as `same_files`.

    """

    __slots__ = ("code",)
    code: str

    def __new__(cls, sentence: str, code: str) -> Self:  # noqa: D102 - see the class
        reason = super().__new__(cls, sentence)
        reason.code = code
        return reason

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        # The default would call the class with the text alone.
        return type(self), (str(self), self.code)
