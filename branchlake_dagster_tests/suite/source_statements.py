"""The statements of Python source, for tests that inspect the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Return all statements below a node at any depth. Expressions are not visited, which saves most of the time."""
    pending = [tree]
    while pending:
        node = pending.pop()
        for name in _BLOCKS:
            pending += getattr(node, name, ())
        yield node


@cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return the imports of a file in any order."""
    tree = ast.parse(path.read_text(), str(path))
    return tuple(one for one in statements(tree) if isinstance(one, ast.Import | ast.ImportFrom))
