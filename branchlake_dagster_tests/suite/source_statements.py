"""The statements of Python source, for tests that look at how the code is written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node, wherever they stand. Expressions are not looked into, which is most of the work."""
    pending = [tree]
    while pending:
        node = pending.pop()
        for name in _BLOCKS:
            pending += getattr(node, name, ())
        yield node


@cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The imports of a file, in no order."""
    tree = ast.parse(path.read_text(), str(path))
    return tuple(one for one in statements(tree) if isinstance(one, ast.Import | ast.ImportFrom))
