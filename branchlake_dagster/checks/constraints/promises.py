"""What a condition promises, as a value: what file metadata can be held against.

Only what is said here can be proved without reading. The Spark condition remains the meaning; a promise
is never wider than it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Sign = Literal["=", "!=", ">", ">=", "<", "<="]


@dataclass(frozen=True)
class NotNull:
    """The value is there."""


@dataclass(frozen=True)
class Compared:
    """`value sign bound`."""

    sign: Sign
    bound: Any


@dataclass(frozen=True)
class Both:
    """Two comparisons, both of which hold: a range."""

    low: Compared
    high: Compared


@dataclass(frozen=True)
class Among:
    """The value is one of these."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class NotAmong:
    """The value is none of these."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class StartsWith:
    """The text starts with this one."""

    prefix: str


@dataclass(frozen=True)
class EndsWith:
    """The text ends with this one."""

    suffix: str


@dataclass(frozen=True)
class Length:
    """The text has `low` to `high` characters; None: no limit."""

    low: int | None
    high: int | None


Promise = NotNull | Compared | Both | Among | NotAmong | StartsWith | EndsWith | Length
