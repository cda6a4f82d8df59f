"""Which commits on a run's branch are the run's own, without a server."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER

from branchlake_dagster.nessie.model import CommitMeta, ContentKey, IcebergTable, LogEntry, Put
from branchlake_dagster.runs.branch_commits import BranchCommits
from branchlake_dagster.stored_names import LakeProperty

KEY = ContentKey(["lake", "t"])
BASE = "base"
SPARK = {"application-type": "iceberg", "app-id": "local-1"}
OWN = {LakeProperty.RUN_ID: "r"}


def commit(hash_: str, properties: Mapping[str, str], snapshot_id: int | None = None) -> LogEntry:
    meta = CommitMeta(hash_, "Update table lake.t", datetime.now(UTC), properties, (), "somebody")
    content = IcebergTable("content", f"file:/{hash_}", snapshot_id or -1, 0, 0, 0)
    return LogEntry(meta, () if snapshot_id is None else (Put(KEY, content),))


def table(*snapshots: tuple[int, int | None, Mapping[str, str], Operation]) -> TableMetadata:
    """Table metadata with snapshots of (id, parent, summary, operation); the ids are the sequence numbers."""
    empty = new_table_metadata(Schema(), UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, "file:/t", {})
    made = [
        Snapshot(
            snapshot_id=number,
            parent_snapshot_id=parent,
            sequence_number=number,
            timestamp_ms=number,
            manifest_list="file:/list",
            summary=Summary(operation, **summary),
        )
        for number, parent, summary, operation in snapshots
    ]
    return empty.model_copy(update={"snapshots": made})


def objection(
    *newest_first: LogEntry,
    heads: Collection[str],
    tables: Mapping[str, TableMetadata] | None = None,
    base_snapshots: Mapping[str, int] | None = None,
    applications: Collection[str] = (),
) -> str | None:
    entries: Sequence[LogEntry] = newest_first
    commits = BranchCommits(
        "run-r", BASE, base_snapshots or {}, entries, heads, {"r", "parent"}, applications
    )
    return commits.find_objection(lambda location: (tables or {}).get(location.removeprefix("file:/")))


def test_own_commits_up_to_a_recorded_head_are_accepted() -> None:
    both = commit("b", OWN), commit("a", {LakeProperty.RUN_ID: "parent"})
    assert objection(*both, heads={"b"}) is None
    assert objection(*both, heads={"a", "b", BASE}) is None
    assert objection(heads=set()) is None
    assert objection(heads={BASE}) is None


@pytest.mark.parametrize("foreign", [{}, {LakeProperty.RUN_ID: "other"}, {"application-type": "trino"}])
def test_a_commit_without_the_run_s_id_is_refused(foreign: dict[str, str]) -> None:
    assert objection(commit("b", foreign), commit("a", OWN), heads={"a"}) is not None
    assert objection(commit("b", OWN), commit("a", foreign), heads={"b"}) is not None


def test_a_missing_and_a_late_commit_are_refused() -> None:
    assert objection(heads={"a"}) is not None
    assert objection(commit("b", OWN), heads={"a", "b"}) is not None
    assert objection(commit("b", OWN), commit("a", OWN), heads={"a"}) is not None
    assert objection(commit("a", OWN), heads=set()) is not None


@pytest.mark.parametrize(
    ("snapshots", "accepted"),
    [
        ([(2, 1, OWN, Operation.APPEND)], True),
        ([(2, 1, {}, Operation.APPEND)], False),
        ([(2, 1, {LakeProperty.RUN_ID: "other"}, Operation.OVERWRITE)], False),
        ([(2, 1, {}, Operation.REPLACE)], True),  # a compaction by Spark's procedure
        ([(2, 1, {}, Operation.APPEND), (3, 2, OWN, Operation.APPEND)], False),  # both in one commit
    ],
)
def test_a_commit_of_spark_is_judged_by_the_snapshots_that_it_added(
    snapshots: list[tuple[int, int, Mapping[str, str], Operation]], accepted: bool
) -> None:
    main = (1, None, {LakeProperty.RUN_ID: "earlier"}, Operation.APPEND)
    found = objection(
        commit("a", SPARK, snapshots[-1][0]),
        heads={"a"},
        tables={"a": table(main, *snapshots)},
        base_snapshots={"content": 1},
    )
    assert (found is None) is accepted


@pytest.mark.parametrize("summary", [OWN, {}])
def test_a_commit_whose_metadata_file_was_deleted_is_judged_by_the_newest_one(
    summary: dict[str, str],
) -> None:
    newest = table(
        (1, None, {}, Operation.APPEND), (2, 1, summary, Operation.APPEND), (3, 2, OWN, Operation.APPEND)
    )
    found = objection(
        commit("b", SPARK, 3),
        commit("a", SPARK, 2),
        heads={"b"},
        tables={"b": newest},
        base_snapshots={"content": 1},
    )
    assert (found is None) is (summary == OWN)


def test_a_commit_of_spark_whose_snapshot_cannot_be_found_is_refused() -> None:
    expired = table((3, 2, OWN, Operation.APPEND))
    for tables in ({"b": expired}, {}):
        found = objection(commit("b", SPARK, 3), commit("a", SPARK, 2), heads={"b"}, tables=tables)
        assert found is not None


def test_a_commit_of_spark_without_a_new_snapshot_reads_no_file() -> None:
    assert objection(commit("a", SPARK, 1), heads={"a"}, base_snapshots={"content": 1}) is None


def test_a_rollback_by_spark_adds_no_snapshot() -> None:
    history = table((1, None, {}, Operation.APPEND), (2, 1, {}, Operation.APPEND))
    rolled_back = objection(
        commit("a", SPARK, 1), heads={"a"}, tables={"a": history}, base_snapshots={"content": 2}
    )
    assert rolled_back is None


BY_SPARK = {"spark.app.id": "local-1"}


@pytest.mark.parametrize(
    ("summary", "operation", "applications", "accepted"),
    [
        (BY_SPARK, Operation.DELETE, {"local-1"}, True),
        (BY_SPARK, Operation.DELETE, {"local-0", "local-1"}, True),
        (BY_SPARK, Operation.DELETE, {"local-2"}, False),
        (BY_SPARK, Operation.DELETE, (), False),  # a run of an earlier version
        ({}, Operation.DELETE, {"local-1"}, False),
        (BY_SPARK, Operation.APPEND, {"local-1"}, False),
        (BY_SPARK, Operation.OVERWRITE, {"local-1"}, False),
        ({**BY_SPARK, "added-delete-files": "1"}, Operation.DELETE, {"local-1"}, False),
        ({**BY_SPARK, LakeProperty.RUN_ID: "other"}, Operation.DELETE, {"local-1"}, False),
        ({**BY_SPARK, LakeProperty.INSTANCE: "elsewhere"}, Operation.DELETE, {"local-1"}, False),
    ],
)
def test_a_delete_of_whole_files_is_accepted_from_an_application_that_the_run_recorded(
    summary: Mapping[str, str], operation: Operation, applications: Collection[str], accepted: bool
) -> None:
    tables = {"a": table((1, None, {}, Operation.APPEND), (2, 1, summary, operation))}
    found = objection(
        commit("a", SPARK, 2),
        heads={"a"},
        tables=tables,
        base_snapshots={"content": 1},
        applications=applications,
    )
    assert (found is None) is accepted


@pytest.mark.parametrize(
    ("commits", "head"),
    [
        ((("a", SPARK, 2), ("0", OWN)), "0"),  # made after the last commit that the run recorded
        ((("a", {"application-type": "trino"}, 2),), "a"),
    ],
    ids=["late", "another engine"],
)
def test_other_deletes_of_whole_files_are_not_accepted(commits: tuple[Any, ...], head: str) -> None:
    tables = {"a": table((1, None, {}, Operation.APPEND), (2, 1, BY_SPARK, Operation.DELETE))}
    found = objection(
        *(commit(*one) for one in commits),
        heads={head},
        tables=tables,
        base_snapshots={"content": 1},
        applications={"local-1"},
    )
    assert found is not None
