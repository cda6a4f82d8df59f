"""Write a tree of items in the two notations of navigation messages: KVN (keyword = value) and XML.

Only this module checks the values: they are single lines of printable ASCII, so that a name cannot add a
line, a tag or a unit (CCSDS 508.0-B-1, 6.2.2; 502.0-B-3, 7.2 to 7.4).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from html import escape
from math import isfinite

from branchlake_dagster.sda.messages.errors import NotAMessage

LONGEST_LINE = 254
_PRINTABLE = re.compile(r"[ -~]*")
_IDENTIFIER = re.compile(r"[A-Z0-9_-]+")
_HEAD = '<?xml version="1.0" encoding="UTF-8"?>'
_SCHEMA = "https://sanaregistry.org/r/ndmxml_unqualified/ndmxml-3.0.0-master-3.0.xsd"


class Notation(StrEnum):
    """The notation of a message. Its value is part of file names."""

    KVN = "kvn"
    XML = "xml"


@dataclass(frozen=True)
class Item:
    """A keyword with its value, and the value's unit if it has one."""

    keyword: str
    value: str
    unit: str | None = None

    def __post_init__(self) -> None:
        """Raise NotAMessage for a value that cannot be a line of a message.

        These are empty values, values that are not one line of printable ASCII, and values with which keyword
        and unit make a line of more than 254 characters.
        """
        if not self.value.strip() or not _PRINTABLE.fullmatch(self.value):
            raise NotAMessage(
                f"{self.keyword} cannot be {self.value!r}: a value is one line of ASCII.",
                reason="value",
                subject=self.keyword,
            )
        if len(self.keyword) + len(self.value) + len(self.unit or "") + 6 > LONGEST_LINE:
            raise NotAMessage(f"{self.keyword} is too long for a line of {LONGEST_LINE} characters.")


@dataclass(frozen=True)
class Block:
    """Items and blocks under an XML tag. KVN writes only the items."""

    tag: str
    parts: tuple[Item | Block, ...]


def format_text(value: str | None, default: str = "UNKNOWN") -> str:
    """Convert free text to a value: capital letters in one line, without brackets and equals signs.

    Other characters become ``?``. An empty text gives the default.
    """
    plain = "".join(one if " " <= one <= "~" else " " if one.isspace() else "?" for one in value or "")
    plain = plain.translate(str.maketrans("[]=", "()-"))
    return " ".join(plain.upper().split())[:120].strip() or default


def identifier_item(keyword: str, value: str) -> Item:
    """Return an item whose value has only letters, digits, underscores and dashes (508.0-B-1, 5.2.9).

    Raises NotAMessage for other values.
    """
    wanted = value.strip().upper().replace(" ", "_")
    if not _IDENTIFIER.fullmatch(wanted):
        raise NotAMessage(
            f"{keyword} cannot be {value!r}.",
            hint="Use letters, digits, underscores and dashes.",
            reason="value",
            subject=keyword,
        )
    return Item(keyword, wanted)


def time_item(keyword: str, value: datetime) -> Item:
    """Return an item with a time in UTC, to the microsecond."""
    return Item(keyword, format_utc(value))


def format_utc(value: datetime) -> str:
    """Format a time with a time zone as messages write it."""
    return f"{value.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%f}"


def number_item(keyword: str, value: float, unit: str | None = None, shape: str = ".9f") -> Item:
    """Return an item with a number, formatted by ``shape``.

    Raises NotAMessage for a number that is not finite.
    """
    if not isfinite(value):
        raise NotAMessage(f"{keyword} is {value}, which is no number.", reason="number", subject=keyword)
    return Item(keyword, f"{value:{shape}}", unit)


def comment_items(*lines: str) -> tuple[Item, ...]:
    """Return items with comment lines."""
    return tuple(Item("COMMENT", line) for line in lines)


def as_kvn(version: Item, body: Block) -> str:
    """Write a message in keyword = value notation, with the version first."""
    lines = [f"{version.keyword} = {version.value}"]
    for item in _items(body):
        unit = f" [{item.unit}]" if item.unit else ""
        is_comment = item.keyword == "COMMENT"
        lines.append(f"COMMENT {item.value}" if is_comment else f"{item.keyword} = {item.value}{unit}")
    return "\n".join(lines) + "\n"


def as_xml(version: Item, body: Block) -> str:
    """Write a message in NDM/XML with the unqualified schema."""
    namespace = "http://www.w3.org/2001/XMLSchema-instance"
    opening = (
        f'<{body.tag} xmlns:xsi="{namespace}" xsi:noNamespaceSchemaLocation="{_SCHEMA}" '
        f'id="{version.keyword}" version="{version.value}">'
    )
    lines = [_HEAD, opening, *_elements(body, "  "), f"</{body.tag}>"]
    return "\n".join(lines) + "\n"


def _items(block: Block) -> Iterator[Item]:
    for part in block.parts:
        if isinstance(part, Item):
            yield part
        else:
            yield from _items(part)


def _elements(block: Block, indent: str) -> Iterator[str]:
    for part in block.parts:
        if isinstance(part, Block):
            yield f"{indent}<{part.tag}>"
            yield from _elements(part, indent + "  ")
            yield f"{indent}</{part.tag}>"
        else:
            unit = f' units="{part.unit}"' if part.unit else ""
            yield f"{indent}<{part.keyword}{unit}>{escape(part.value)}</{part.keyword}>"
