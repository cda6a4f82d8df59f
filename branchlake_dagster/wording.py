"""Format numbers, names and reasons for messages that people read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Self


def pluralize(number: int, singular: str, plural: str) -> str:
    """Return `singular` if `number` is 1, and `plural` otherwise."""
    return singular if number == 1 else plural


def format_count(number: int, singular: str, plural: str = "") -> str:
    """Format a number with its noun: `1 run`, `1,200 runs`.

    `plural` is needed only if the plural does not just add an s.
    """
    return f"{number:,} {pluralize(number, singular, plural or f'{singular}s')}"


def format_names(singular: str, names: Sequence[str]) -> str:
    """Format names with their noun, `singular` or its plural in s: `column a`, `columns a, b`."""
    return f"{pluralize(len(names), singular, f'{singular}s')} {', '.join(names)}"


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def format_printable(text: str) -> str:
    r"""Return a text on one line, with an escape such as `\x1b` for each control character.

    Text from records may contain sequences that clear a terminal or change what it shows.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class CodedReason(str):
    """The reason for a decision: a sentence for people, with a `code` for programs and tests.

    Args:
        sentence (str): The reason in words, which may be rewritten at any time.
        code (str): The cause in snake case, such as `same_files`.

    """

    __slots__ = ("code",)
    code: str

    def __new__(cls, sentence: str, code: str) -> Self:  # noqa: D102 - see the class
        reason = super().__new__(cls, sentence)
        reason.code = code
        return reason

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        # The default would call the class with the sentence alone.
        return type(self), (str(self), self.code)
