"""How the SQL of `branchlake sql` and `connect()` writes the names of tables and columns."""

from __future__ import annotations

import re
from collections.abc import Sequence


def quote_sql_name(name: str) -> str:
    """An identifier for SQL, in quotes."""
    return '"' + name.replace('"', '""') + '"'


def sql_name(key: Sequence[str]) -> str:
    """How a query writes a table's name: quotes where they are needed, a deep namespace's levels together."""
    parts = [key[0], ".".join(key[1:-1]), key[-1]] if len(key) > 3 else list(key)
    return ".".join(
        part if re.fullmatch(r"[a-z_][a-z0-9_]*", part) else quote_sql_name(part) for part in parts
    )
