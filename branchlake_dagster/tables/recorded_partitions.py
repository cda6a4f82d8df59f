"""Record in a snapshot which partitions a step wrote, and parse such records.

A record lists at most `MAX_LISTED` keys, because every reader of a table loads the snapshot summaries. Keys
are separated by commas. If a key contains a comma, the record is a JSON list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

MAX_LISTED = 20
"""The largest number of partition keys in a record."""
_MORE = "…"
"""The first character of the last entry if the record does not list all keys: `… 335 in all`."""
_MORE_SUFFIX = " in all"


def format_partitions(keys: Sequence[str]) -> str:
    """Return the record of the partition keys; empty without keys."""
    entries = [*keys[:MAX_LISTED]]
    if len(keys) > MAX_LISTED:
        entries.append(f"{_MORE} {len(keys)}{_MORE_SUFFIX}")
    if any("," in entry for entry in entries) or (entries and entries[0].startswith("[")):
        return json.dumps(entries, ensure_ascii=False)
    return ",".join(entries)


def parse_entries(record: str) -> tuple[str, ...]:
    """Return the keys of a record. If it does not list all keys, the last entry has their number."""
    return _parse_list(record) or tuple(entry for entry in record.split(",") if entry)


def is_shortened(entries: Sequence[str]) -> bool:
    """Return whether the entries of a record do not list all keys."""
    return any(entry.startswith(_MORE) for entry in entries)


def _parse_list(record: str) -> tuple[str, ...] | None:
    if not record.startswith("["):
        return None
    try:
        return tuple(map(str, json.loads(record)))
    except (ValueError, RecursionError):
        return None  # a key of an older record starts with a bracket


@dataclass(frozen=True)
class RecordedPartitions:
    """The partitions that a snapshot names.

    `names` are the listed keys, and `count` is the number of written partitions, which may be larger. If
    `may_hold_commas` is true, a comma may have been part of a key: older versions did not mark that.
    """

    names: tuple[str, ...]
    count: int
    may_hold_commas: bool

    @classmethod
    def parse(cls, record: str) -> RecordedPartitions:
        """Parse a record of `format_partitions`, or of an older version."""
        entries = parse_entries(record)
        names, count = entries, len(entries)
        if is_shortened(entries):
            names, note = entries[:-1], entries[-1].removeprefix(_MORE).removesuffix(_MORE_SUFFIX).strip()
            count = int(note) if note.isdecimal() else len(names) + 1
        return cls(names, count, may_hold_commas=_parse_list(record) is None)

    @property
    def is_complete(self) -> bool:
        """Whether all written partitions are listed."""
        return len(self.names) == self.count
