"""The notation of table and column names in the SQL of `branchlake sql` and `connect()`."""

from __future__ import annotations

import re
from collections.abc import Sequence


def quote_sql_name(name: str) -> str:
    """Return a name in double quotes."""
    return '"' + name.replace('"', '""') + '"'


def sql_name(key: Sequence[str]) -> str:
    """Return a table's name as a query writes it, with quotes where needed.

    The inner levels of a deep namespace are one name: `a."b.c".t`.
    """
    parts = [key[0], ".".join(key[1:-1]), key[-1]] if len(key) > 3 else list(key)
    return ".".join(
        part if re.fullmatch(r"[a-z_][a-z0-9_]*", part) else quote_sql_name(part) for part in parts
    )
