"""Which tables a Spark plan scans, from the text of `EXPLAIN EXTENDED`. Pure functions.

The analysed plan names every relation in full, wherever it hides: views, subqueries, common table
expressions, sources of INSERT and MERGE. Optimised plans do not: a count may come from metadata alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PART = r"(?:`(?:[^`]|``)+`|[A-Za-z0-9_]+)"
_NAME = rf"{_PART}(?:\.{_PART})*"
_PARTS = re.compile(_PART)
_ANALYSED = "== Analyzed Logical Plan =="
_OPTIMISED = "== Optimized Logical Plan =="
_TREE = re.compile(r"^[\s:|+*-]*")
# The columns stand first and may be called anything, so the name is what follows the last bracket.
_RELATION = re.compile(rf"RelationV2\[.*\] (?P<name>{_NAME})(?: (?:VERSION|TIMESTAMP) AS OF .*)?\s*$")
_RESOLVED = re.compile(rf"ResolvedTable \S+, .*?, (?P<name>{_NAME}), \[")
_BLIND = {
    "Call ": "a procedure",
    "StreamingRelation": "a stream",
    "StreamingDataSourceV2": "a stream",
}

Name = tuple[str, ...]
"""A name in parts, the catalogue first."""


@dataclass(frozen=True)
class Scanned:
    """The tables a plan scans by name, and what it reads that cannot be named.

    `merged` are the targets of a frame's `mergeInto`: its plan does not contain them.
    """

    tables: frozenset[Name] = frozenset()
    untold: frozenset[str] = frozenset()
    merged: frozenset[Name] = frozenset()

    def __or__(self, other: Scanned) -> Scanned:
        return Scanned(self.tables | other.tables, self.untold | other.untold, self.merged | other.merged)

    def __bool__(self) -> bool:
        return bool(self.tables or self.untold or self.merged)


def scanned(explained: str) -> Scanned:
    """What the plan of `EXPLAIN EXTENDED` scans. A target that is only written to is not among it."""
    tables: set[Name] = set()
    untold: set[str] = set()
    for line in _analysed(explained):
        node = _TREE.sub("", line)
        if node.startswith("RelationV2["):
            match = _RELATION.match(node)
            if match is None:
                untold.add("a relation without a name")
            else:
                tables.add(parts(match["name"]))
        elif node.startswith("ResolvedTable "):
            match = _RESOLVED.match(node)
            if match is None:
                untold.add("a relation without a name")
            else:
                tables.add(parts(match["name"]))
        else:
            untold |= {what for start, what in _BLIND.items() if node.startswith(start)}
    by_path = {name for name in tables if any("/" in part for part in name)}
    if by_path:
        untold.add("a table by its path")
    return Scanned(frozenset(tables - by_path), frozenset(untold))


def _analysed(explained: str) -> list[str]:
    """The lines of the analysed plan; all of them from there on when its end cannot be told."""
    _, _, rest = explained.partition(_ANALYSED)
    plan, found, after = rest.partition(_OPTIMISED)
    # A text in the query may look like the headline.
    return (rest if found and _OPTIMISED in after else plan).split("\n")


def parts(name: str) -> Name:
    """A dotted name apart, without its backticks."""
    found = _PARTS.findall(name)
    return tuple(p[1:-1].replace("``", "`") if p.startswith("`") else p for p in found)
