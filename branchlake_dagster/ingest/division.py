"""The search for records that fail a batch: it halves the offsets until one record is left.

Pure functions and plain values. To find one bad record among n takes about log2(n) + 3 passes, which read
about 2n records in total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from branchlake_dagster.ingest.offsets import OffsetRange, Ranges, TopicPartition, count_offsets

RecordPosition = tuple[TopicPartition, int]
"""The position of one record: its partition and its offset."""
MAX_PASSES = 64
"""The maximum number of passes of one search. Offsets that were not reached wait for the next batches."""


@dataclass(frozen=True)
class Division:
    """The result of a search.

    `resolved` are the parts that the batch may take, in order: a pass over each part succeeds, or the part is
    one unwritable record. The search did not reach the offsets after them. `unwritable` maps each record that
    fails alone to its error.
    """

    resolved: Sequence[Ranges]
    unwritable: Mapping[RecordPosition, Exception] = field(default_factory=dict)


def find_unwritable_records(
    failing_ranges: Ranges, error_of: Callable[[Ranges], Exception | None], *, max_passes: int = MAX_PASSES
) -> Division:
    """Find the records that make a batch fail.

    `failing_ranges` are the offsets of a batch that failed. `error_of` makes a pass over some of them and
    returns the error that their records caused, or None if the pass succeeds; an exception that it raises
    ends the search. A record is unwritable only if two passes over it alone fail, so that a temporary cause
    does not count.
    """
    search = _PassCounter(error_of, max_passes)
    resolved: list[Ranges] = []
    unwritable: dict[RecordPosition, Exception] = {}
    pending_parts = [(failing_ranges, True)]
    while pending_parts:
        part, fails = pending_parts.pop()
        if not fails:
            if search.is_exhausted:
                break
            if search.succeeds(part):
                resolved.append(part)
                continue
        if count_offsets(part) > 1:
            left, right = split_in_halves(part)
            if search.is_exhausted:
                break
            if search.succeeds(left):
                resolved.append(left)
                pending_parts.append((right, True))
            else:
                pending_parts += [(right, False), (left, True)]
            continue
        errors = [error for error in (search.run_pass(part), search.run_pass(part)) if error is not None]
        resolved.append(part)
        if len(errors) < _TRIES:
            continue
        unwritable[_single_record(part)] = errors[0]
        remaining_parts = [one for one, _ in reversed(pending_parts)]
        if remaining_parts and not search.is_exhausted and search.succeeds(join_ranges(remaining_parts)):
            return Division([*resolved, *remaining_parts], unwritable)
    return Division(resolved, unwritable)


_TRIES = 2


class _PassCounter:
    """Makes passes over parts of a batch and counts them."""

    def __init__(self, error_of: Callable[[Ranges], Exception | None], max_passes: int) -> None:
        self._error_of = error_of
        self._passes_left = max_passes

    @property
    def is_exhausted(self) -> bool:
        return self._passes_left <= 0

    def run_pass(self, part: Ranges) -> Exception | None:
        self._passes_left -= 1
        return self._error_of(part)

    def succeeds(self, part: Ranges) -> bool:
        return self.run_pass(part) is None


def split_in_halves(
    ranges: Ranges,
) -> tuple[dict[TopicPartition, OffsetRange], dict[TopicPartition, OffsetRange]]:
    """Split ranges into the first and the second half of their offsets, in order of partition and offset."""
    left: dict[TopicPartition, OffsetRange] = {}
    right: dict[TopicPartition, OffsetRange] = {}
    missing_records = count_offsets(ranges) // 2
    for partition, offset_range in sorted(ranges.items()):
        cut = offset_range.start + min(len(offset_range), missing_records)
        missing_records -= cut - offset_range.start
        if cut > offset_range.start:
            left[partition] = OffsetRange(offset_range.start, cut)
        if cut < offset_range.end:
            right[partition] = OffsetRange(cut, offset_range.end)
    return left, right


def join_ranges(parts: Iterable[Ranges]) -> dict[TopicPartition, OffsetRange]:
    """Join consecutive parts into one."""
    joined_ranges: dict[TopicPartition, OffsetRange] = {}
    for part in parts:
        for partition, offset_range in part.items():
            earlier_range = joined_ranges.get(partition, offset_range)
            joined_ranges[partition] = OffsetRange(earlier_range.start, offset_range.end)
    return joined_ranges


def exclude_records(ranges: Ranges, positions: Iterable[RecordPosition]) -> list[Ranges]:
    """Return the ranges without some records, as a list of ranges that may be empty.

    A list is needed because ranges hold only one span for each partition.
    """
    ranges_by_partition = {partition: [offset_range] for partition, offset_range in ranges.items()}
    for partition, offset in sorted(positions):
        last_range = ranges_by_partition[partition].pop()
        cut_ranges = [OffsetRange(last_range.start, offset), OffsetRange(offset + 1, last_range.end)]
        ranges_by_partition[partition] += cut_ranges
    remaining = {
        partition: [offset_range for offset_range in partition_ranges if len(offset_range)]
        for partition, partition_ranges in ranges_by_partition.items()
    }
    depth = max(map(len, remaining.values()), default=0)
    return [
        {
            partition: partition_ranges[number]
            for partition, partition_ranges in remaining.items()
            if number < len(partition_ranges)
        }
        for number in range(depth)
    ]


def _single_record(part: Ranges) -> RecordPosition:
    ((partition, offset_range),) = part.items()
    return partition, offset_range.start
