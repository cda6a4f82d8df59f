"""Numbers and names in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


def agree(number: int, one: str, many: str) -> str:
    """The word that goes with a number: `one` with 1, `many` with any other."""
    return one if number == 1 else many


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: `1 run`, `1,200 runs`; `many` is for plurals that do not just add an s."""
    return f"{number:,} {agree(number, one, many or f'{one}s')}"


def named(one: str, names: Sequence[str]) -> str:
    """Names with their noun: `column a`, `columns a, b`."""
    return f"{agree(len(names), one, f'{one}s')} {', '.join(names)}"


class Reason(str):
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
