"""A live ingestion removes old snapshots with its batches, but none that a consumer or an open run needs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from branchlake_dagster.expiry import live_trim
from branchlake_dagster.expiry.live_trim import LiveTrimmer, build_history, live_policy
from branchlake_dagster.expiry.metadata_document import read_document
from branchlake_dagster.expiry.retention import MAX_AGE_PROPERTY, MIN_SNAPSHOTS_PROPERTY
from branchlake_dagster.expiry.roots import ConsumersUnreadable, RootsReader
from branchlake_dagster.history.capture import current_position
from branchlake_dagster.history.change import Position
from branchlake_dagster.ingest.batch_commit import BatchTableChange, _stage_change
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import IcebergTable
from branchlake_dagster_tests.expiry.test_snapshot_expiry import appended, consumed, ids, seeded
from branchlake_dagster_tests.publication.workbench import Workbench
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def trimmed(bench: Workbench, trimmer: LiveTrimmer, keep_count: int) -> list[int]:
    content = bench.lake.nessie.contents(MAIN, [bench.key()])[bench.key()]
    assert isinstance(content, IcebergTable)
    catalog = bench.lake.catalog()
    return trimmer.list_expired(
        bench.lake.nessie, catalog.properties, bench.key(), content, bench.main().metadata, keep_count
    )


def test_the_newest_stay(bench: Workbench) -> None:
    before = seeded(bench, 6)
    assert sorted(trimmed(bench, LiveTrimmer(), 4)) == sorted(before[:2])
    assert trimmed(bench, LiveTrimmer(), 5) == []  # not a quarter more


def test_a_position_is_not_trimmed(bench: Workbench) -> None:
    before = seeded(bench, 3)
    consumed(bench, current_position(bench.main()))
    appended(bench, 3, 4, 5, 6)
    assert sorted(trimmed(bench, LiveTrimmer(), 2)) == sorted(before[:2])


def test_a_position_far_behind_is_given_up(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    before = seeded(bench, 10)
    consumed(bench, Position(str(bench.main().metadata.table_uuid), before[0]))
    assert sorted(trimmed(bench, LiveTrimmer(), 2)) == sorted(before[:8])
    assert bench.key("totals").name in caplog.text
    assert live_policy(2_000).position_count == 8_000
    assert live_policy(2_000).position_age == timedelta(days=1)


def test_an_open_run_is_not_trimmed(bench: Workbench) -> None:
    before = seeded(bench, 3)
    run = bench.run()
    run.replace("b", [("b", 1)])
    appended(bench, 3, 4, 5, 6)
    assert sorted(trimmed(bench, LiveTrimmer(), 2)) == sorted(before[:2])
    bench.published(run)


def test_positions_are_read_once_for_many_batches(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    before = seeded(bench, 6)
    consumed(bench, Position(str(bench.main().metadata.table_uuid), before[0]))
    reads: list[Any] = []
    read = RootsReader.read
    monkeypatch.setattr(
        RootsReader, "read", lambda self, *args, **options: (reads.append(1), read(self, *args, **options))[1]
    )
    clock = Clock()
    trimmer = LiveTrimmer(clock=clock)
    for _ in range(50):  # the consumer holds all snapshots
        assert trimmed(bench, trimmer, 4) == []
    assert len(reads) == 1
    clock.now += 301
    assert trimmed(bench, trimmer, 4) == []
    assert len(reads) == 2


def test_nothing_is_trimmed_while_positions_are_not_known(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded(bench, 6)
    monkeypatch.setattr(live_trim, "_READ_LIMIT_S", -1.0)
    assert trimmed(bench, LiveTrimmer(), 2) == []

    def fail(*_: object, **__: object) -> None:
        raise ConsumersUnreadable("unreadable")

    monkeypatch.setattr(RootsReader, "read", fail)
    assert trimmed(bench, LiveTrimmer(), 2) == []


def test_both_readers_of_metadata_agree(bench: Workbench) -> None:
    before = seeded(bench, 4)
    bench.main().manage_snapshots().create_tag(before[1], "quarter").commit()
    with bench.main().transaction() as transaction:
        transaction.set_properties({MIN_SNAPSHOTS_PROPERTY: "3", MAX_AGE_PROPERTY: "1000"})
    table = bench.main()
    document = read_document(table.io, table.metadata_location)
    assert build_history(table.metadata) == document.history
    assert (document.history.min_snapshots, document.history.max_age_ms) == (3, 1000)
    assert ids(bench) == [one.snapshot_id for one in document.history.snapshots]


def test_a_batch_leaves_no_gap_and_keeps_parents(bench: Workbench) -> None:
    """A tag keeps an old snapshot. A query for a time after it must not get the tagged state."""
    before = seeded(bench, 6)
    bench.main().manage_snapshots().create_tag(before[1], "quarter").commit()
    table = bench.main()
    expired_ids = trimmed(bench, LiveTrimmer(), 2)
    assert sorted(expired_ids) == sorted([before[0], before[2], before[3]])
    change = BatchTableChange(bench.key().elements, table, table_properties={"p": "1"})
    staged = _stage_change(table, change, "i", expired_ids).table
    assert [one.snapshot_id for one in staged.metadata.snapshots] == [before[1], *before[4:]]
    assert [entry.snapshot_id for entry in staged.metadata.snapshot_log] == before[4:]
    oldest = staged.snapshot_by_id(before[4])
    assert oldest is not None
    assert oldest.parent_snapshot_id == before[3]
    between = table.snapshot_by_id(before[3])
    assert between is not None
    assert staged.snapshot_as_of_timestamp(between.timestamp_ms) is None
    assert staged.metadata.properties["p"] == "1"
    assert staged.metadata.refs["quarter"].snapshot_id == before[1]
