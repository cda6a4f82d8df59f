"""The two notations of navigation messages, from one tree: keyword = value, and XML.

What goes into a message is checked here and nowhere else: values are single lines of printable ASCII, so that
no name can add a line, a tag or a unit of its own (CCSDS 508.0-B-1, 6.2.2; 502.0-B-3, 7.2 to 7.4).
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
    """How a message is written; in file names by the value."""

    KVN = "kvn"
    XML = "xml"


@dataclass(frozen=True)
class Item:
    """A keyword with its value, and the value's unit where it has one."""

    keyword: str
    value: str
    unit: str | None = None

    def __post_init__(self) -> None:
        """Raise NotAMessage for a value that is empty, no single printable line, or too long for one."""
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
    """Items and blocks under an XML tag; the other notation shows the items alone."""

    tag: str
    parts: tuple[Item | Block, ...]


def text(value: str | None, default: str = "UNKNOWN") -> str:
    """Free text as a value: capital letters in one line, nothing that reads as a unit or an assignment."""
    plain = "".join(one if " " <= one <= "~" else " " if one.isspace() else "?" for one in value or "")
    plain = plain.translate(str.maketrans("[]=", "()-"))
    return " ".join(plain.upper().split())[:120].strip() or default


def identifier(keyword: str, value: str) -> Item:
    """Letters, digits, underscores and dashes, as identifiers must be (508.0-B-1, 5.2.9)."""
    wanted = value.strip().upper().replace(" ", "_")
    if not _IDENTIFIER.fullmatch(wanted):
        raise NotAMessage(
            f"{keyword} cannot be {value!r}.",
            hint="Use letters, digits, underscores and dashes.",
            reason="value",
            subject=keyword,
        )
    return Item(keyword, wanted)


def moment(keyword: str, value: datetime) -> Item:
    """A time in UTC, to the microsecond."""
    return Item(keyword, utc(value))


def utc(value: datetime) -> str:
    """A time with a zone as messages write it."""
    return f"{value.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%f}"


def number(keyword: str, value: float, unit: str | None = None, shape: str = ".9f") -> Item:
    """A finite number; of at most sixteen digits where ``shape`` is right for it."""
    if not isfinite(value):
        raise NotAMessage(f"{keyword} is {value}, which is no number.", reason="number", subject=keyword)
    return Item(keyword, f"{value:{shape}}", unit)


def comments(*lines: str) -> tuple[Item, ...]:
    """Comment lines."""
    return tuple(Item("COMMENT", line) for line in lines)


def as_kvn(version: Item, body: Block) -> str:
    """Keyword = value notation, with the version first."""
    lines = [f"{version.keyword} = {version.value}"]
    for item in _items(body):
        unit = f" [{item.unit}]" if item.unit else ""
        is_comment = item.keyword == "COMMENT"
        lines.append(f"COMMENT {item.value}" if is_comment else f"{item.keyword} = {item.value}{unit}")
    return "\n".join(lines) + "\n"


def as_xml(version: Item, body: Block) -> str:
    """NDM/XML with the unqualified schema."""
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
