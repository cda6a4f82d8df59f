"""The expiry of snapshots on a lake: what stays, who goes on, and what a lost reply does."""

from __future__ import annotations

import contextlib
import errno
import json
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table.update import RemoveSnapshotsUpdate

from branchlake_dagster.compaction.compaction_branch import new_branch_name
from branchlake_dagster.errors import StoredFileDamaged
from branchlake_dagster.expiry import retention
from branchlake_dagster.expiry import roots as roots_module
from branchlake_dagster.expiry.forward_commit import ExpiryContended, ExpiryUnknown, ForwardCommit
from branchlake_dagster.expiry.result import (
    ExpiredTable,
    ExpiryPlan,
    expiry_plan_to_json,
    expiry_result_to_json,
    list_plan_columns,
    list_result_columns,
)
from branchlake_dagster.expiry.retention import ExpiryPolicy, KeptBy
from branchlake_dagster.expiry.roots import ConsumersUnreadable, RootsReader
from branchlake_dagster.expiry.snapshot_expiry import ExpiryInvalid, SnapshotExpirer
from branchlake_dagster.history.capture import capture_change, current_position, snapshots_between
from branchlake_dagster.history.change import ChangeLost, LossReason, Position
from branchlake_dagster.incremental.positions import ConsumptionRecord
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieOutcomeUnknown, NessieUnavailable, ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.publication.ledger import NeedsChecks, Published, iter_publications
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.publication.table_change import load_table_change
from branchlake_dagster.stored_names import LakeProperty, ReferencePrefix
from branchlake_dagster.undo.find_publication import find_publication
from branchlake_dagster.undo.publication_undo import PublicationUndo
from branchlake_dagster.undo.result import UndoRefused
from branchlake_dagster_tests.publication.workbench import Run, Workbench
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse
pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match")
STRICT = ExpiryPolicy(keep_count=2, keep_age=timedelta(0), undo_age=timedelta(0))


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


def in_days(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def expirer(bench: Workbench, *, days: float = 0, client: NessieClient | None = None) -> SnapshotExpirer:
    return SnapshotExpirer(client or bench.lake.nessie, bench.lake.catalog(), clock=lambda: in_days(days))


def planned(bench: Workbench, policy: ExpiryPolicy = STRICT, **options: Any) -> ExpiryPlan:
    return expirer(bench, **options).plan([bench.key().name], policy)


def test_a_lake_without_tables_has_nothing_to_expire(in_memory_nessie: NessieClient, tmp_path: Path) -> None:
    lake = memory.open_lake(in_memory_nessie, tmp_path / "state")
    plan = SnapshotExpirer(lake.nessie, lake.catalog()).plan()
    assert (plan.tables, plan.errors) == ((), {})


def expired(bench: Workbench, policy: ExpiryPolicy = STRICT, **options: Any) -> ExpiredTable:
    """The result of the table `t`; errors are raised."""
    plan = planned(bench, policy, **options)
    result = expirer(bench, **options).run(plan)
    for error in result.errors.values():
        raise error
    return result.tables[0] if result.tables else ExpiredTable(bench.key().name)


def appended(bench: Workbench, *numbers: int, day: str = "a") -> list[Run]:
    runs = []
    for number in numbers:
        run = bench.run()
        run.append([(day, number)])
        bench.published(run)
        bench.lake.nessie.delete_branch(run.name, expected_hash=bench.lake.nessie.reference(run.name).hash)
        runs.append(run)
    return runs


def ids(bench: Workbench, name: str = "t") -> list[int]:
    return [snapshot.snapshot_id for snapshot in bench.main(name).metadata.snapshots]


def seeded(bench: Workbench, count: int = 6) -> list[int]:
    """A table of `count` snapshots, of which no run's branch is left."""
    bench.seeded([])
    first = bench.runs[0]
    bench.lake.nessie.delete_branch(first.name, expected_hash=bench.lake.nessie.reference(first.name).hash)
    appended(bench, *range(count))
    return ids(bench)


def consumed(bench: Workbench, position: Position, name: str = "totals") -> None:
    """A consumer's table on `main` that records a position of `t`."""
    run = bench.run()
    table = run.create(name)
    record = ConsumptionRecord({bench.key().name: position}, run.run_id, run.base)
    with table.transaction() as transaction:
        transaction.set_properties({LakeProperty.CONSUMED: record.to_json()})
    bench.published(run)
    bench.lake.nessie.delete_branch(run.name, expected_hash=bench.lake.nessie.reference(run.name).hash)


@memory.ON_BOTH
def test_old_snapshots_go_in_one_commit_and_no_file_does(bench: Workbench) -> None:
    before = seeded(bench)
    old = bench.main()
    files = {snapshot.manifest_list for snapshot in old.metadata.snapshots} | {old.metadata_location}
    publications = len(list(iter_publications(bench.lake.nessie)))
    done = expired(bench)
    assert (done.expired_count, done.kept_count, done.bytes_after < done.bytes_before) == (4, 2, True)
    table = bench.main()
    assert ids(bench) == before[-2:]
    assert table.metadata.properties["gc.enabled"] == "false"
    assert [entry.snapshot_id for entry in table.metadata.snapshot_log] == before[-2:]
    assert table.metadata.metadata_log[-1].metadata_file == old.metadata_location
    assert table.metadata.snapshots[0].parent_snapshot_id == before[-3]
    assert bench.rows() == [("a", number) for number in range(6)]
    assert all(table.io.new_input(file).exists() for file in files)
    entry = next(iter(bench.lake.nessie.log(MAIN)))
    assert entry.commit.hash == done.commit
    assert LakeProperty.EXPIRY_ID in entry.commit.properties
    assert LakeProperty.PUBLICATION_ID not in entry.commit.properties
    assert len(list(iter_publications(bench.lake.nessie))) == publications
    assert expired(bench).expired_count == 0
    appended(bench, 6)
    assert bench.rows() == [("a", number) for number in range(7)]


def test_a_plan_changes_nothing_and_says_why(bench: Workbench) -> None:
    before = seeded(bench)
    head = bench.lake.nessie.reference(MAIN).hash
    plan = planned(bench)
    assert (bench.lake.nessie.reference(MAIN).hash, ids(bench)) == (head, before)
    (table,) = plan.tables
    assert (table.snapshot_count, table.expired_count, table.oldest_id) == (6, 4, before[-2])
    assert (plan.main_hash, table.kept_by) == (head, KeptBy.COUNT)
    values = json.loads(json.dumps(expiry_plan_to_json(plan)))
    assert values["tables"][0]["expired_snapshots"] == 4
    assert len(list_plan_columns(table)) == 5
    result = expirer(bench).run(plan)
    values = json.loads(json.dumps(expiry_result_to_json(result)))
    assert values["tables"][0]["commit"] == result.tables[0].commit
    assert len(list_result_columns(result.tables[0])) == 6


def test_all_tables_are_planned(bench: Workbench) -> None:
    seeded(bench)
    run = bench.run()
    run.create("other")
    bench.published(run)
    names = [table.table for table in expirer(bench).plan(policy=STRICT).tables]
    assert bench.key().name in names
    assert bench.key("other").name not in names  # it has no snapshot


# -- open runs -----------------------------------------------------------------------------------------


@memory.ON_BOTH
def test_a_run_that_was_open_before_is_published_after(bench: Workbench) -> None:
    before = seeded(bench, 4)
    run = bench.run()
    run.append([("b", 100)])
    appended(bench, 4, 5, 6)
    done = expired(bench)
    assert done.expired_count == 3
    assert ids(bench)[0] == before[3]
    bench.published(run)
    assert bench.rows() == [*(("a", number) for number in range(7)), ("b", 100)]


@memory.ON_BOTH
def test_a_run_that_replaced_is_compared_with_what_came_between(bench: Workbench) -> None:
    seeded(bench, 4)
    run, loser = bench.run(), bench.run()
    run.replace("b", [("b", 100)])
    loser.replace("a", [("a", 100)])
    appended(bench, 4)
    expired(bench)
    bench.published(run)
    assert bench.refused(loser).codes
    assert bench.rows() == [*(("a", number) for number in range(5)), ("b", 100)]


def test_a_run_that_opens_after_the_plan_is_published(bench: Workbench) -> None:
    seeded(bench)
    plan = planned(bench)
    run = bench.run()
    run.append([("b", 100)])
    appended(bench, 6, 7, 8)
    assert not expirer(bench).run(plan).errors
    bench.published(run)
    assert ("b", 100) in bench.rows()


@memory.ON_BOTH
@pytest.mark.parametrize("prefix", [ReferencePrefix.DISCARDED, ReferencePrefix.CLAIM])
def test_tags_of_runs_keep_their_base(bench: Workbench, prefix: str) -> None:
    before = seeded(bench, 4)
    run = bench.run()
    run.append([("b", 100)])
    nessie, head = bench.lake.nessie, bench.lake.nessie.reference(run.name).hash
    tag = nessie.create_tag(f"{prefix}{uuid.uuid4()}", from_ref=run.name, from_hash=head)
    nessie.delete_branch(run.name, expected_hash=head)
    appended(bench, 4, 5, 6)
    try:
        expired(bench)
        assert ids(bench)[0] == before[3]
        (table,) = planned(bench).tables
        assert (table.kept_by, table.holder) == (KeptBy.BASE, tag.name)
    finally:
        nessie.delete_tag(tag.name, expected_hash=head)


def test_a_compaction_keeps_its_base(bench: Workbench) -> None:
    before = seeded(bench, 4)
    nessie, name = bench.lake.nessie, new_branch_name()
    head = nessie.reference(MAIN).hash
    nessie.create_branch(name, from_ref=MAIN, from_hash=head)
    appended(bench, 4, 5, 6)
    try:
        (table,) = planned(bench).tables
        assert (table.oldest_id, table.kept_by, table.holder) == (before[3], KeptBy.BASE, name)
    finally:
        nessie.delete_branch(name, expected_hash=head)


@pytest.mark.parametrize("is_discarded", [False, True], ids=["branch", "tag"])
def test_a_base_at_which_the_table_was_empty_keeps_the_whole_chain(
    bench: Workbench, is_discarded: bool
) -> None:
    bench.seeded([])
    run = bench.run()
    run.append([("b", 100)])
    nessie, head = bench.lake.nessie, bench.lake.nessie.reference(run.name).hash
    tag = nessie.create_tag(f"{ReferencePrefix.DISCARDED}{uuid.uuid4()}", from_ref=run.name, from_hash=head)
    if is_discarded:
        nessie.delete_branch(run.name, expected_hash=head)
    else:
        nessie.delete_tag(tag.name, expected_hash=head)
    first = bench.runs[0]
    nessie.delete_branch(first.name, expected_hash=nessie.reference(first.name).hash)
    appended(bench, *range(5))
    try:
        assert expired(bench).expired_count == 0
        (table,) = planned(bench).tables
        assert (table.oldest_id, table.kept_by) == (ids(bench)[0], KeptBy.BASE)
        assert table.holder == (tag.name if is_discarded else run.name)
    finally:
        if is_discarded:
            nessie.delete_tag(tag.name, expected_hash=head)
    if not is_discarded:
        bench.published(run)
        assert ("b", 100) in bench.rows()


def test_an_undo_of_the_first_rows_keeps_the_whole_chain(bench: Workbench) -> None:
    bench.seeded([])
    pause = datetime.now(UTC)
    appended(bench, *range(4))
    age = datetime.now(UTC) - pause
    policy = ExpiryPolicy(keep_count=1, keep_age=timedelta(0), undo_age=age)
    first = bench.runs[0]
    nessie = bench.lake.nessie
    nessie.delete_branch(first.name, expected_hash=nessie.reference(first.name).hash)
    one = SnapshotExpirer(nessie, bench.lake.catalog(), clock=lambda: pause + age)
    (table,) = one.plan([bench.key().name], policy).tables
    assert (table.expired_count, table.kept_by, table.holder) == (0, KeptBy.BASE, "undo")


def test_a_consumer_that_is_published_while_the_roots_are_read_is_found(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = seeded(bench, 3)
    run = bench.run()
    table = run.create("totals")
    record = ConsumptionRecord({bench.key().name: current_position(bench.main())}, run.run_id, run.base)
    with table.transaction() as transaction:
        transaction.set_properties({LakeProperty.CONSUMED: record.to_json()})
    appended(bench, 3, 4, 5)
    nessie = bench.lake.nessie
    find_horizon = RootsReader._find_horizon

    def publish_first(reader: RootsReader, policy: ExpiryPolicy, now: datetime) -> str | None:
        """After `main` was read, and before the references are listed."""
        if any(one.name == run.name for one in nessie.references()):
            bench.published(run)
            nessie.delete_branch(run.name, expected_hash=nessie.reference(run.name).hash)
        return find_horizon(reader, policy, now)

    monkeypatch.setattr(RootsReader, "_find_horizon", publish_first)
    (found,) = planned(bench).tables
    assert (found.oldest_id, found.kept_by) == (before[2], KeptBy.POSITION)


def test_branches_of_users_do_not_keep_snapshots(bench: Workbench) -> None:
    seeded(bench, 4)
    nessie, name = bench.lake.nessie, f"experiment-{bench.namespace}"
    nessie.create_branch(name, from_ref=MAIN, from_hash=nessie.reference(MAIN).hash)
    appended(bench, 4, 5, 6)
    assert expired(bench).kept_count == 2
    old = bench.lake.catalog(name).load_table(bench.key())
    assert len(old.metadata.snapshots) == 4
    assert old.scan().to_arrow().num_rows == 4


# -- consumers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_cleared", [True, False], ids=["PyIceberg", "parent ids stay"])
def test_a_change_of_a_cut_history_is_not_complete(bench: Workbench, is_cleared: bool) -> None:
    bench.seeded([])
    empty = bench.main()
    appended(bench, *range(5))
    before = ids(bench)
    assert load_table_change(empty, bench.main(), None).is_complete
    assert load_table_change(None, bench.main(), None).is_complete
    if is_cleared:
        with bench.main().transaction() as transaction:
            transaction._apply((RemoveSnapshotsUpdate(snapshot_ids=before[:2]),))
    else:
        bench.lake.nessie.delete_branch(
            bench.runs[0].name, expected_hash=bench.lake.nessie.reference(bench.runs[0].name).hash
        )
        expired(bench)
    table = bench.main()
    oldest = table.metadata.snapshots[0]
    assert (oldest.parent_snapshot_id is None) is is_cleared
    for start in (empty, None):
        assert not load_table_change(start, table, None).is_complete
    newer_id = ids(bench)[-2]
    assert [one.snapshot_id for one in snapshots_between(table.metadata, newer_id, ids(bench)[-1])[0]] == [
        ids(bench)[-1]
    ]


def test_a_replaced_table_has_a_complete_history(bench: Workbench) -> None:
    """Its first snapshot has no parent, but nothing has expired."""
    bench.seeded([("a", 1)])
    bench.main().append(bench.main().scan().to_arrow())
    metadata = bench.main().metadata
    first, second = metadata.snapshots
    replaced = metadata.model_copy(
        update={"snapshots": [first, second.model_copy(update={"parent_snapshot_id": None})]}
    )
    assert snapshots_between(replaced, None, second.snapshot_id)[1]
    cut = replaced.model_copy(update={"snapshots": replaced.snapshots[1:]})
    assert not snapshots_between(cut, None, second.snapshot_id)[1]


@memory.ON_BOTH
def test_a_consumer_goes_on_exactly(bench: Workbench) -> None:
    before = seeded(bench, 3)
    position = current_position(bench.main())
    consumed(bench, position)
    appended(bench, 3, 4, 5)
    done = expired(bench)
    assert (done.expired_count, ids(bench)[0]) == (2, before[2])
    change = capture_change(bench.main(), position, name="t")
    assert [file.rows for file in change.added] == [1, 1, 1]
    assert change.removed == ()


def test_an_old_position_is_given_up_by_name(bench: Workbench) -> None:
    seeded(bench, 3)
    position = current_position(bench.main())
    consumed(bench, position)
    appended(bench, 3, 4, 5)
    (table,) = planned(bench, days=31).tables
    assert [one.consumer for one in table.given_up] == [bench.key("totals").name]
    done = expired(bench, days=31)
    assert [one.consumer for one in done.given_up] == [bench.key("totals").name]
    with pytest.raises(ChangeLost) as caught:
        capture_change(bench.main(), position, name="t")
    assert caught.value.loss is LossReason.EXPIRED


def test_positions_are_found_after_a_rename(bench: Workbench) -> None:
    before = seeded(bench, 3)
    consumed(bench, current_position(bench.main()))
    appended(bench, 3, 4, 5)
    bench.lake.catalog().rename_table(bench.key(), bench.key("renamed"))
    plan = expirer(bench).plan([bench.key("renamed").name], STRICT)
    assert plan.tables[0].oldest_id == before[2]


def damage(bench: Workbench, name: str, kind: str) -> None:
    table = bench.main(name)
    table.io.delete(table.metadata_location)
    if kind == "damaged":
        with table.io.new_output(table.metadata_location).create() as stream:
            stream.write(b"{")


@pytest.mark.parametrize("kind", ["missing", "damaged"])
def test_an_unreadable_table_is_reported_and_the_others_expire(bench: Workbench, kind: str) -> None:
    """The unreadable table is a consumer that cannot continue, so its position keeps nothing."""
    seeded(bench, 3)
    consumed(bench, current_position(bench.main()))
    appended(bench, 3, 4, 5)
    damage(bench, "totals", kind)
    name = bench.key("totals").name
    plan = expirer(bench).plan([bench.key().name, name], STRICT)
    assert {table.table: table.expired_count for table in plan.tables} == {bench.key().name: 4, name: 0}
    assert {table: type(error) for table, error in plan.errors.items()} == {
        name: FileNotFoundError if kind == "missing" else StoredFileDamaged
    }
    assert plan.unreadable_tables == (name,)
    as_json = {table["table"]: table["error"] for table in expiry_plan_to_json(plan)["tables"]}
    assert as_json == {bench.key().name: None, name: type(plan.errors[name]).__name__}
    assert [list_plan_columns(table)[1] for table in plan.tables] == ["6", ""]
    result = expirer(bench).run(plan)
    assert [*result.errors] == [name]
    assert result.unreadable_tables == (name,)
    assert expiry_result_to_json(result)["unreadable_tables"] == [name]
    assert len(ids(bench)) == 2


def test_a_consumer_that_is_unreadable_at_the_horizon_of_undo_is_reported(bench: Workbench) -> None:
    seeded(bench, 3)
    consumed(bench, current_position(bench.main()))
    table = bench.main("totals")
    pause = datetime.now(UTC)
    with table.transaction() as transaction:
        transaction.set_properties({"changed": "later"})
    table.io.delete(table.metadata.metadata_log[-1].metadata_file)
    appended(bench, 3, 4, 5)
    age = datetime.now(UTC) - pause
    policy = ExpiryPolicy(keep_count=1, keep_age=timedelta(0), undo_age=age)
    at_pause = SnapshotExpirer(bench.lake.nessie, bench.lake.catalog(), clock=lambda: pause + age)
    plan = at_pause.plan([bench.key().name], policy)
    assert plan.unreadable_tables == (bench.key("totals").name,)
    assert not plan.errors
    assert not at_pause.run(plan).errors


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "no answer"), PermissionError("denied"), StoredFileDamaged("", file="f")]
)
def test_a_storage_that_does_not_answer_ends_the_pass(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The file is not to blame if memory is short while it is read."""
    seeded(bench, 3)
    consumed(bench, current_position(bench.main()))
    appended(bench, 3, 4, 5)
    if isinstance(error, StoredFileDamaged):
        error.__cause__ = MemoryError()
    location = bench.main("totals").metadata_location
    read = roots_module.read_document

    def fail(io: Any, path: str) -> Any:
        if path == location:
            raise error
        return read(io, path)

    monkeypatch.setattr(roots_module, "read_document", fail)
    with pytest.raises(ConsumersUnreadable) as caught:
        planned(bench)
    assert caught.value.table == bench.key("totals").name


def test_any_error_of_one_table_does_not_stop_the_others(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded(bench, 4)
    bench.seeded([("a", 1)], name="z")
    for _ in range(3):
        bench.main("z").append(bench.main("z").scan().to_arrow().slice(0, 1))
    for run in bench.runs:
        with contextlib.suppress(ReferenceNotFound):
            head = bench.lake.nessie.reference(run.name).hash
            bench.lake.nessie.delete_branch(run.name, expected_hash=head)
    prepare = SnapshotExpirer._prepare

    def fail(one: SnapshotExpirer, key: ContentKey, *rest: Any) -> Any:
        if key == bench.key():
            raise ZeroDivisionError
        return prepare(one, key, *rest)

    monkeypatch.setattr(SnapshotExpirer, "_prepare", fail)
    plan = expirer(bench).plan([bench.key().name, bench.key("z").name], STRICT)
    result = expirer(bench).run(plan)
    assert {name: type(error) for name, error in result.errors.items()} == {
        bench.key().name: ZeroDivisionError
    }
    assert len(ids(bench, "z")) == 2


# -- undo ----------------------------------------------------------------------------------------------


def test_an_undo_works_within_its_horizon_and_is_refused_afterwards(bench: Workbench) -> None:
    seeded(bench, 2)
    (run,) = appended(bench, 2)
    appended(bench, 3, 4, 5)
    publication = find_publication(bench.lake.nessie, run.run_id)
    undoer = PublicationUndo(bench.lake.nessie, IcebergTableFormat(bench.lake.catalog()))
    policy = ExpiryPolicy(keep_count=1, keep_age=timedelta(0), undo_age=timedelta(days=7))
    assert expired(bench, policy).expired_count == 0
    assert undoer.plan(publication).dependencies == ()
    assert expired(bench, policy, days=8).kept_count == 1
    with pytest.raises(UndoRefused) as caught:
        undoer.undo(publication)
    assert {one.reason.code for one in caught.value.dependencies} == {"history_lost"}


@memory.ON_BOTH
def test_the_horizon_of_undo_keeps_what_was_current_then(bench: Workbench) -> None:
    before = seeded(bench, 2)
    pause = datetime.now(UTC)
    (run,) = appended(bench, 2)
    appended(bench, 3, 4, 5)
    age = datetime.now(UTC) - pause
    policy = ExpiryPolicy(keep_count=1, keep_age=timedelta(0), undo_age=age)
    plan = SnapshotExpirer(bench.lake.nessie, bench.lake.catalog(), clock=lambda: pause + age).plan(
        [bench.key().name], policy
    )
    assert (plan.tables[0].oldest_id, plan.tables[0].kept_by) == (before[1], KeptBy.BASE)
    SnapshotExpirer(bench.lake.nessie, bench.lake.catalog(), clock=lambda: pause + age).run(plan)
    undoer = PublicationUndo(bench.lake.nessie, IcebergTableFormat(bench.lake.catalog()))
    assert undoer.undo(find_publication(bench.lake.nessie, run.run_id)).commit is not None
    assert bench.rows() == [("a", number) for number in (0, 1, 3, 4, 5)]


# -- Iceberg's own references --------------------------------------------------------------------------


def test_tags_of_the_table_stay_readable(bench: Workbench) -> None:
    before = seeded(bench)
    bench.main().manage_snapshots().create_tag(before[1], "quarter").commit()
    expired(bench)
    table = bench.main()
    assert ids(bench) == [before[1], *before[-2:]]
    assert table.scan(snapshot_id=before[1]).to_arrow().num_rows == 2


def test_unused_schemas_go_except_the_newest(bench: Workbench) -> None:
    seeded(bench, 2)
    for name in ("x", "y"):
        with bench.main().update_schema() as update:
            update.add_column(name, bench.main().schema().find_type("id"))
        table = bench.main()
        table.append(table.scan().to_arrow().slice(0, 1))
    assert [one.schema_id for one in bench.main().metadata.schemas] == [0, 1, 2]
    expired(bench, ExpiryPolicy(keep_count=1, keep_age=timedelta(0), undo_age=timedelta(0)))
    assert [one.schema_id for one in bench.main().metadata.schemas] == [2]
    assert bench.main().scan().to_arrow().num_rows == 4


# -- lost replies, and writers meanwhile ---------------------------------------------------------------


class FaultyClient(NessieClient):
    """The lake's client, whose commits to `main` fail as the test says."""

    def __init__(self, real: NessieClient, faults: Sequence[str], meanwhile: Any = None) -> None:
        self.__dict__ = real.__dict__
        self._real, self._faults, self._meanwhile = real, list(faults), meanwhile

    def commit(self, branch: str, **arguments: Any) -> Any:
        fault = self._faults.pop(0) if self._faults else ""
        if fault == "meanwhile":
            self._meanwhile()
        if fault == "lost":  # it arrived, and the reply did not
            self._real.commit(branch, **arguments)
            raise NessieOutcomeUnknown("lost", branch=branch)
        if fault == "dropped":  # it never arrived
            raise NessieOutcomeUnknown("dropped", branch=branch)
        if fault == "down":
            raise NessieUnavailable("down", branch=branch)
        return NessieClient.commit(self._real, branch, **arguments)


def faulty(bench: Workbench, *faults: str, meanwhile: Any = None) -> SnapshotExpirer:
    import copy

    real = bench.lake.nessie
    client = FaultyClient.__new__(FaultyClient)
    client.__dict__ = {**copy.copy(real.__dict__)}
    client.__dict__ |= {"_real": real, "_faults": list(faults), "_meanwhile": meanwhile}
    return SnapshotExpirer(client, bench.lake.catalog())


def expiries(bench: Workbench) -> int:
    entries = [one.commit for one in bench.lake.nessie.log(MAIN) if bench.namespace in one.commit.message]
    return sum(LakeProperty.EXPIRY_ID in commit.properties for commit in entries)


@memory.ON_BOTH
def test_a_lost_reply_is_found_in_the_log(bench: Workbench) -> None:
    seeded(bench)
    result = faulty(bench, "lost").run(planned(bench))
    assert not result.errors
    assert result.tables[0].commit == bench.lake.nessie.reference(MAIN).hash
    assert (result.tables[0].expired_count, expiries(bench)) == (4, 1)


def test_a_commit_that_never_arrived_is_sent_again(bench: Workbench) -> None:
    seeded(bench)
    result = faulty(bench, "dropped").run(planned(bench))
    assert not result.errors
    assert (result.tables[0].expired_count, expiries(bench)) == (4, 1)


@pytest.mark.parametrize("faults", [("dropped",) * 5, ("lost", "down"), ("dropped", "down")])
def test_an_unknown_outcome_has_its_own_error(
    bench: Workbench, faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded(bench)
    plan = planned(bench)

    def unreadable(_: object) -> None:
        raise NessieUnavailable("down", branch=MAIN)

    if faults[0] == "lost":  # the log cannot be read either
        monkeypatch.setattr(ForwardCommit, "_find_commit", unreadable)
    result = faulty(bench, *faults).run(plan)
    assert [type(error) for error in result.errors.values()] == [ExpiryUnknown]
    assert bench.rows() == [("a", number) for number in range(6)]


def test_a_writer_meanwhile_makes_it_plan_again(bench: Workbench) -> None:
    seeded(bench)
    result = faulty(bench, "meanwhile", meanwhile=lambda: appended(bench, 6)).run(planned(bench))
    assert not result.errors
    assert result.tables[0].expired_count == 5
    assert bench.rows() == [("a", number) for number in range(7)]


def test_a_writer_that_never_pauses_is_not_disturbed(bench: Workbench) -> None:
    seeded(bench)
    numbers = iter(range(6, 99))
    plan = planned(bench)
    files = bench.main().metadata.location
    result = faulty(bench, *["meanwhile"] * 5, meanwhile=lambda: appended(bench, next(numbers))).run(plan)
    assert [type(error) for error in result.errors.values()] == [ExpiryContended]
    assert expiries(bench) == 0
    assert files == bench.main().metadata.location


def test_a_refused_commit_leaves_no_file(bench: Workbench) -> None:
    seeded(bench)
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        discard = SnapshotExpirer._discard
        patch.setattr(SnapshotExpirer, "_discard", lambda self, at: (written.append(at), discard(self, at)))
        result = faulty(bench, "down").run(planned(bench))
    assert [type(error) for error in result.errors.values()] == [NessieUnavailable]
    assert written
    assert not any(bench.main().io.new_input(one).exists() for one in written)


def test_a_dropped_table_is_reported(bench: Workbench) -> None:
    seeded(bench)
    plan = planned(bench)
    bench.lake.catalog().drop_table(bench.key())
    (table,) = expirer(bench).run(plan).tables
    assert (table.is_gone, table.commit) == (True, None)


@pytest.mark.parametrize("is_created_anew", [False, True])
@pytest.mark.parametrize("at_commit", [False, True])
def test_a_table_that_is_renamed_meanwhile_keeps_its_snapshots(
    bench: Workbench, at_commit: bool, is_created_anew: bool
) -> None:
    before = seeded(bench)
    plan = planned(bench)
    schema = bench.main().schema()

    def rename() -> None:
        bench.lake.catalog().rename_table(bench.key(), bench.key("renamed"))
        if is_created_anew:
            bench.lake.catalog().create_table(bench.key(), schema)

    if not at_commit:
        rename()
    (table,) = faulty(bench, *["meanwhile"] * at_commit, meanwhile=rename).run(plan).tables
    assert (table.is_gone, table.commit, table.error) == (not is_created_anew, None, None)
    assert ids(bench, "renamed") == before
    (table,) = expirer(bench).run(expirer(bench).plan([bench.key("renamed").name], STRICT)).tables
    assert table.expired_count == 4


# -- planted bugs --------------------------------------------------------------------------------------


def test_a_forgotten_run_loses_its_history(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the roots are for: without them, the run of the first test of open runs is refused."""
    monkeypatch.setattr(roots_module.RootsReader, "_order_bases", lambda *_: {})
    seeded(bench, 4)
    run = bench.run()
    run.replace("a", [("a", 100)])
    appended(bench, 4, 5, 6)
    expired(bench)
    assert bench.refused(run).codes == ("history_lost",)


def test_a_forgotten_position_loses_its_change(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots_module.LakeRoots, "positions_of", lambda *_: [])
    seeded(bench, 3)
    position = current_position(bench.main())
    consumed(bench, position)
    appended(bench, 3, 4, 5)
    expired(bench)
    with pytest.raises(ChangeLost):
        capture_change(bench.main(), position, name="t")


def test_a_forgotten_tag_is_noticed_before_the_commit(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_list_referenced", lambda *_: set())
    before = seeded(bench)
    bench.main().manage_snapshots().create_tag(before[1], "quarter").commit()
    with pytest.raises(ExpiryInvalid):
        expired(bench)
    assert ids(bench) == before


def test_a_consumers_other_snapshots(bench: Workbench) -> None:
    """A position on a branch names snapshots that came to `main` under other ids."""
    before = seeded(bench, 3)
    consumed(bench, Position(str(bench.main().metadata.table_uuid), before[1], (12345,)))
    appended(bench, 3, 4, 5)
    (table,) = planned(bench).tables
    assert (table.oldest_id, table.kept_by, table.holder) == (
        before[1],
        KeptBy.POSITION,
        bench.key("totals").name,
    )


# -- an expiry makes no run fail -----------------------------------------------------------------------


def test_a_serializable_run_has_read_the_same_rows(bench: Workbench) -> None:
    seeded(bench)
    reader, late = bench.run(reads=["t"]), bench.run(reads=["t"])
    for run in (reader, late):
        run.create(f"of_{run.run_id[-8:]}")
    assert expired(bench, STRICT).expired_count == 4
    bench.published(reader)
    appended(bench, 6)
    assert bench.refused(late).codes == ("read_and_changed",)


def test_a_check_of_the_whole_table_is_not_repeated(bench: Workbench) -> None:
    seeded(bench)
    first, second = bench.run(), bench.run()
    first.append([("b", 1)])
    second.append([("b", 2)])
    expired(bench)
    keys = frozenset({bench.key()})
    results = bench.publisher.publish([first.candidate(keys)])
    assert isinstance(results[first.name], Published)
    # Now rows of another run are on main, which no check of the second has seen.
    results = bench.publisher.publish([second.candidate(keys)])
    assert isinstance(results[second.name], NeedsChecks)


def test_two_checked_runs_of_one_commit_are_not_confused(bench: Workbench) -> None:
    seeded(bench)
    first, second = bench.run(), bench.run()
    first.append([("b", 1)])
    second.append([("b", 2)])
    expired(bench)
    keys = frozenset({bench.key()})
    results = bench.publisher.publish([first.candidate(keys), second.candidate(keys)])
    assert isinstance(results[first.name], Published)
    assert isinstance(results[second.name], NeedsChecks)


def test_what_cannot_be_replayed_is_published_as_the_run_left_it(bench: Workbench) -> None:
    before = seeded(bench)
    run = bench.run()
    run.replace_table([("z", 1)])
    expired(bench)
    kept = set(ids(bench))
    bench.published(run)
    assert bench.rows() == [("z", 1)]
    assert kept < set(ids(bench))
    assert not (set(before) - kept) & set(ids(bench))  # the expired ones do not come back


def test_a_batch_that_expires_itself_is_published_after_an_expiry(bench: Workbench) -> None:
    """As live ingestion does: its batch removes snapshots in the commit that adds rows."""
    before = seeded(bench)
    run = bench.run()
    run.append([("b", 100)])
    with run.table().transaction() as transaction:
        transaction._apply((RemoveSnapshotsUpdate(snapshot_ids=before[:2]),))
    expired(bench)
    bench.published(run)
    assert ("b", 100) in bench.rows()


def test_a_refusal_names_the_run_and_not_the_expiry(bench: Workbench) -> None:
    seeded(bench)
    loser = bench.run()
    loser.replace("a", [("a", 100)])
    (winner,) = appended(bench, 6)
    expired(bench)
    assert bench.refused(loser).runs == (winner.run_id,)
