"""Names and texts inside Spark SQL."""

from __future__ import annotations

from collections.abc import Iterable


def quoted(name: str) -> str:
    """One identifier, whatever it holds: dots, spaces and backticks included."""
    return f"`{name.replace('`', '``')}`"


def dotted(parts: Iterable[str]) -> str:
    """A name of several parts, such as catalogue, namespaces and table."""
    return ".".join(map(quoted, parts))


def text_literal(text: str) -> str:
    """A string literal. Backslashes are escapes in Spark's, so they are doubled."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
