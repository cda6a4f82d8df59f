"""The search for records that fail a batch: every one is found, and what passes is never accused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchlake_dagster.ingest.batch_context import PlannedBatch
from branchlake_dagster.ingest.batch_passes import PassResult, ingest_divided_batch
from branchlake_dagster.ingest.errors import ColumnsUnknown
from branchlake_dagster.ingest.offsets import OffsetRange, Ranges, TopicPartition, count_offsets
from branchlake_dagster.ingest.planning import BatchPlan
from branchlake_dagster.ingest.record_frames import (
    RecordPosition,
    exclude_records,
    find_unwritable_records,
    join_ranges,
    split_in_halves,
)
from branchlake_dagster.ingest.scan import ScanResult
from branchlake_dagster.ingest.schema_evolution import SchemaEvolution
from branchlake_dagster.nessie.errors import NessieUnavailable
from branchlake_dagster.spark.session import SparkGone

PARTS = [TopicPartition("t", "i", number) for number in range(3)]


def _positions(ranges: Ranges) -> list[RecordPosition]:
    return [(one, at) for one, span in sorted(ranges.items()) for at in range(span.start, span.end)]


_RANGES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60)), min_size=1, max_size=3).map(
    lambda spans: {
        one: OffsetRange(start, start + length) for one, (start, length) in zip(PARTS, spans, strict=False)
    }
)


@given(_RANGES, st.data())
def test_each_bad_record_is_found_and_no_other(ranges: Ranges, data: st.DataObject) -> None:
    every = _positions(ranges)
    bad = set(data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=6)))
    passes = 0

    def error_of(part: Ranges) -> Exception | None:
        nonlocal passes
        passes += 1
        hit = bad.intersection(_positions(part))
        return ValueError(str(hit)) if hit else None

    division = find_unwritable_records(ranges, error_of, max_passes=10_000)
    assert set(division.unwritable) == bad
    assert [one for part in division.resolved for one in _positions(part)] == every
    assert join_ranges(division.resolved) == ranges
    assert passes <= len(bad) * (2 * count_offsets(ranges).bit_length() + 3)


@given(_RANGES, st.data(), st.integers(1, 40))
def test_a_search_that_ends_early_resolves_a_prefix(ranges: Ranges, data: st.DataObject, most: int) -> None:
    every = _positions(ranges)
    bad = set(data.draw(st.lists(st.sampled_from(every), min_size=1)))
    passes = 0

    def error_of(part: Ranges) -> Exception | None:
        nonlocal passes
        passes += 1
        return ValueError() if bad.intersection(_positions(part)) else None

    division = find_unwritable_records(ranges, error_of, max_passes=most)
    resolved = [one for part in division.resolved for one in _positions(part)]
    assert resolved == every[: len(resolved)]
    assert set(division.unwritable) == bad.intersection(resolved)
    assert passes <= most + 2
    # With the default bound a batch of half a million records always gets on.
    if most >= count_offsets(ranges).bit_length() + 2:
        assert resolved


def test_a_cause_that_passes_accuses_no_record() -> None:
    ranges = {PARTS[0]: OffsetRange(0, 8)}
    failures = iter([True, True, True, True])

    def error_of(_: Ranges) -> Exception | None:
        return ValueError() if next(failures, False) else None

    division = find_unwritable_records(ranges, error_of)
    assert division.unwritable == {}
    assert join_ranges(division.resolved) == ranges


def test_records_that_fail_only_together_are_not_accused() -> None:
    ranges = {PARTS[0]: OffsetRange(0, 8)}
    division = find_unwritable_records(ranges, lambda part: ValueError() if count_offsets(part) > 4 else None)
    assert division.unwritable == {}
    assert len(division.resolved) > 1


@given(_RANGES, st.data())
def test_ranges_without_some_records(ranges: Ranges, data: st.DataObject) -> None:
    every = _positions(ranges)
    gone = set(data.draw(st.lists(st.sampled_from(every))))
    pieces = exclude_records(ranges, gone)
    assert sorted(one for piece in pieces for one in _positions(piece)) == [
        one for one in every if one not in gone
    ]
    assert all(count_offsets(piece) for piece in pieces)


@given(_RANGES)
def test_halves_are_what_they_are_made_of(ranges: Ranges) -> None:
    left, right = split_in_halves(ranges)
    assert _positions(left) + _positions(right) == _positions(ranges)
    assert abs(count_offsets(left) - count_offsets(right)) <= 1


def _planned_tables(*names: str) -> Any:
    """Tables of which only `old` has known columns."""
    return SimpleNamespace(
        identifiers=dict.fromkeys(names),
        declarations=dict.fromkeys(names),
        without_tables=lambda left_out: _planned_tables(*(one for one in names if one not in left_out)),
        without_unknown_columns=lambda: _planned_tables("old"),
    )


def _divide(records: int, bad: set[int], of_table: dict[str, set[int]], planned_tables: Any) -> PassResult:
    """Ingest offsets of one partition, of which `bad` ones fail. Those in `of_table` show a new table's columns."""

    def run(pieces: list[Ranges], tables: Any) -> PassResult:
        read = {offset for piece in pieces for _, offset in _positions(piece)}
        new_tables = {name for name, offsets in of_table.items() if not read & offsets}
        if unknown := min(new_tables & tables.identifiers.keys(), default=None):
            raise ColumnsUnknown("", table=unknown)
        if read & bad:
            raise ValueError
        # A table of a family becomes known after a pass, here from the route of the first record.
        if 0 in read and (unknown := min(new_tables - planned_tables.identifiers.keys(), default=None)):
            raise ColumnsUnknown("", table=unknown)
        targets: Any = None
        return PassResult(SchemaEvolution(tables, targets, ScanResult()), {})

    passes: Any = SimpleNamespace(
        undo_table_changes=lambda _: None,
        run_on_empty_record=lambda: None,
        run_on_ranges=run,
        with_dead_letters=lambda pass_result, unwritable: replace(pass_result, notes=(*unwritable,)),
    )
    progress: Any = None
    plan = BatchPlan({PARTS[0]: OffsetRange(0, records)}, lag=0)
    planned = PlannedBatch(planned_tables, progress, {}, plan)
    return ingest_divided_batch(planned, passes, "hash", ValueError("first"))[1]


@pytest.mark.parametrize(
    ("bad", "of_table", "tables"),
    [
        ({2}, {"new": {7}}, ("old", "new")),
        ({2}, {"raw.orders": {7}}, ("old",)),
        # No pass over a part has the columns of both.
        ({3, 4}, {"a": {0, 1, 2}, "b": {5, 6, 7}}, ("a", "b")),
    ],
)
def test_a_record_is_found_among_records_that_lack_the_columns_of_a_new_table(
    bad: set[int], of_table: dict[str, set[int]], tables: tuple[str, ...]
) -> None:
    pass_result = _divide(8, bad, of_table, _planned_tables(*tables))
    assert pass_result.notes == tuple((PARTS[0], offset) for offset in sorted(bad))
    assert pass_result.evolution.ingestion_tables.identifiers.keys() == set(tables)


def test_records_of_a_new_table_without_columns_are_not_passed_over() -> None:
    """If only the first part of a batch can be written, its offsets must not pass records without a table."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - its argument is compared below
        _divide(8, {*range(4, 8)}, {"new": {*range(4, 8)}}, _planned_tables("old", "new"))
    assert raised.value.args == ("first",)


@pytest.mark.parametrize("failure", [SparkGone("Spark is gone."), NessieUnavailable("away"), OSError("full")])
def test_a_server_that_fails_during_the_search_is_no_fault_of_a_record(failure: Exception) -> None:
    """The batch is then tried again; for a disk that is full, the first error is raised as before."""

    def fail() -> None:
        raise failure

    first = ValueError("a record could not be written")
    tables = SimpleNamespace(identifiers={}, without_unknown_columns=lambda: tables)
    planned: Any = SimpleNamespace(ingestion_tables=tables)
    passes: Any = SimpleNamespace(undo_table_changes=lambda _: None, run_on_empty_record=fail)
    with pytest.raises(ValueError if isinstance(failure, OSError) else type(failure)) as raised:
        ingest_divided_batch(planned, passes, "hash", first)
    assert raised.value is (first if isinstance(failure, OSError) else failure)
