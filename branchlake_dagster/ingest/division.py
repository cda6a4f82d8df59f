"""The search for the records that fail a batch: halves of its offsets, until one record stands alone.

Pure functions and plain values. One bad record among n is found with about log2(n) + 3 passes over about 2n
records together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from branchlake_dagster.ingest.offsets import OffsetRange, Ranges, TopicPartition, records

Position = tuple[TopicPartition, int]
"""One record: its partition and its offset."""
MOST_PASSES = 64
"""Passes of one search. What is not divided by then is left to the next batches."""


@dataclass(frozen=True)
class Division:
    """What a search found.

    `resolved` are the parts, in order, that pass by themselves or are one unwritable record: the batch may
    take them. The offsets behind them were not reached. `unwritable` has the error of each record that fails
    alone.
    """

    resolved: Sequence[Ranges]
    unwritable: Mapping[Position, Exception] = field(default_factory=dict)


def divide(
    failing: Ranges, error_of: Callable[[Ranges], Exception | None], *, most_passes: int = MOST_PASSES
) -> Division:
    """Find the records that fail a batch by themselves.

    `failing` are the ranges of a batch that failed; `error_of` makes a pass over some of them and returns the
    error that their records caused, None where the pass succeeds. What it raises ends the search. A record is
    only called unwritable after it has failed alone, which is tried twice: a passing cause does not count.
    """
    search = _Search(error_of, most_passes)
    resolved: list[Ranges] = []
    unwritable: dict[Position, Exception] = {}
    waiting = [(failing, True)]
    while waiting:
        part, fails = waiting.pop()
        if not fails:
            if search.exhausted:
                break
            if search.passes(part):
                resolved.append(part)
                continue
        if records(part) > 1:
            left, right = halves(part)
            if search.exhausted:
                break
            if search.passes(left):
                resolved.append(left)
                waiting.append((right, True))
            else:
                waiting += [(right, False), (left, True)]
            continue
        errors = [error for error in (search.error(part), search.error(part)) if error is not None]
        resolved.append(part)
        if len(errors) < _TRIES:
            continue
        unwritable[_only(part)] = errors[0]
        rest = [one for one, _ in reversed(waiting)]
        if rest and not search.exhausted and search.passes(joined(rest)):
            return Division([*resolved, *rest], unwritable)
    return Division(resolved, unwritable)


_TRIES = 2


class _Search:
    """Passes over parts of a batch, counted."""

    def __init__(self, error_of: Callable[[Ranges], Exception | None], most_passes: int) -> None:
        self._error_of = error_of
        self._left = most_passes

    @property
    def exhausted(self) -> bool:
        return self._left <= 0

    def error(self, part: Ranges) -> Exception | None:
        self._left -= 1
        return self._error_of(part)

    def passes(self, part: Ranges) -> bool:
        return self.error(part) is None


def halves(ranges: Ranges) -> tuple[dict[TopicPartition, OffsetRange], dict[TopicPartition, OffsetRange]]:
    """The first and the second half of the offsets, in the order of partitions and offsets."""
    left: dict[TopicPartition, OffsetRange] = {}
    right: dict[TopicPartition, OffsetRange] = {}
    missing = records(ranges) // 2
    for one, span in sorted(ranges.items()):
        cut = span.start + min(len(span), missing)
        missing -= cut - span.start
        if cut > span.start:
            left[one] = OffsetRange(span.start, cut)
        if cut < span.end:
            right[one] = OffsetRange(cut, span.end)
    return left, right


def joined(parts: Iterable[Ranges]) -> dict[TopicPartition, OffsetRange]:
    """Parts that follow each other as one."""
    whole: dict[TopicPartition, OffsetRange] = {}
    for part in parts:
        for one, span in part.items():
            before = whole.get(one, span)
            whole[one] = OffsetRange(before.start, span.end)
    return whole


def without(ranges: Ranges, positions: Iterable[Position]) -> list[Ranges]:
    """The ranges without some records, as ranges with one span for each partition each; perhaps none."""
    spans: dict[TopicPartition, list[OffsetRange]] = {one: [span] for one, span in ranges.items()}
    for one, offset in sorted(positions):
        last = spans[one].pop()
        cut = [OffsetRange(last.start, offset), OffsetRange(offset + 1, last.end)]
        spans[one] += cut
    kept = {one: [span for span in found if len(span)] for one, found in spans.items()}
    depth = max(map(len, kept.values()), default=0)
    return [{one: found[at] for one, found in kept.items() if at < len(found)} for at in range(depth)]


def _only(part: Ranges) -> Position:
    ((one, span),) = part.items()
    return one, span.start
