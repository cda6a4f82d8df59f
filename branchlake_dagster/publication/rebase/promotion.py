"""Which column types Iceberg reads files of an older type as. Types are given as Iceberg prints them."""

from __future__ import annotations

import re

_WIDER = {("int", "long"), ("float", "double")}
_DECIMAL = re.compile(r"decimal\((\d+), (\d+)\)")


def readable_as(written: str, now: str) -> bool:
    """Whether values of files written as one type are the same values when they are read as the other.

    Nested types are readable as themselves only.
    """
    if written == now or (written, now) in _WIDER:
        return True
    before, after = _DECIMAL.fullmatch(written), _DECIMAL.fullmatch(now)
    if before is None or after is None:
        return False
    return before[2] == after[2] and int(before[1]) <= int(after[1])
