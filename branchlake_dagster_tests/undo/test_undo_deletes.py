"""The undo of publications that wrote delete files: their rows come back, or the undo is refused."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import EqualTo
from pyiceberg.manifest import DataFile, DataFileContent, ManifestContent, ManifestEntryStatus
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation

from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.change import ChangeLost, LossReason
from branchlake_dagster.history.manifests import read_entries, read_live_files
from branchlake_dagster.internals.column_metrics import DataPaths
from branchlake_dagster.internals.pyiceberg import as_compaction, build_snapshot, write_data_files
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.ledger import Published
from branchlake_dagster.publication.table_change import (
    ChangeMode,
    DeleteFile,
    File,
    Layout,
    LayoutColumn,
    SnapshotChange,
    TableChange,
)
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.replaced_rows import ReplacedRows, StringSet, ValueRange
from branchlake_dagster.undo import later_steps, table_undo
from branchlake_dagster.undo.result import UndoRefused
from branchlake_dagster.undo.table_undo import plan_table_undo
from branchlake_dagster.undo.undo_plan import DependencyFound, OwnChange, TableUndo
from branchlake_dagster_tests.publication.rebase.deleting import (
    commit_deletes,
    delete_at,
    delete_equal,
    merge_delete_manifests,
    write_position_deletes,
)
from branchlake_dagster_tests.publication.workbench import ARROW, FLAT, Run, Workbench, frame
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.undo.test_undo import (
    FIRST_SEED,
    HISTORIES,
    History,
    Step,
    appended,
    check_history,
    codes,
    refused,
    replaced,
    run_ids,
    undo,
)

lakehouse = memory.lakehouse
pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match")


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


# -- the plan ------------------------------------------------------------------------------------------

LAYOUT = Layout(
    columns=(LayoutColumn(1, "day", "string", False), LayoutColumn(2, "id", "long", False)),
    spec=(("day", "identity", "day"),),
)
OLD, NEW, LATER = File("old", "day=a"), File("new", "day=a"), File("later", "day=a")
BY_POSITION = DeleteFile("by-position", "day=a", DataPaths(b"old", b"old"))
BY_VALUE = DeleteFile("by-value", "day=a", by_value=True)
WROTE = SnapshotChange(1, ChangeMode.ROW_DELETES, deletes=(BY_POSITION,), run_id="wrong")
LATER_DELETE = DeleteFile("later-delete", "day=b", DataPaths(b"b", b"b"))


def planned(*steps: SnapshotChange, own: frozenset[int] = frozenset({1})) -> TableUndo:
    change = TableChange(LAYOUT, LAYOUT, steps)
    return plan_table_undo("n.t", change, OwnChange(own, {}, {}, LAYOUT, LAYOUT), {})


def reason(*steps: SnapshotChange, own: frozenset[int] = frozenset({1})) -> tuple[str, tuple[str, ...]]:
    with pytest.raises(DependencyFound) as caught:
        planned(*steps, own=own)
    return caught.value.dependency.reason.code, caught.value.dependency.run_ids


def later(mode: ChangeMode, **fields: Any) -> SnapshotChange:
    return SnapshotChange(2, mode, run_id="later", **fields)


@pytest.mark.parametrize("delete_file", [BY_POSITION, BY_VALUE])
def test_the_plan_removes_the_delete_files(delete_file: DeleteFile) -> None:
    undo = planned(replace(WROTE, deletes=(delete_file,), added=(NEW,)))
    assert (set(undo.removed_deletes), set(undo.removed)) == ({delete_file.path}, {"new"})
    assert undo.changes_files


@pytest.mark.parametrize(
    "step",
    [
        later(ChangeMode.APPEND, added=(LATER,)),
        later(ChangeMode.COMPACT, added=(File("c", "day=b"),), removed=(File("b", "day=b"),)),
        later(
            ChangeMode.ROW_DELETES,
            deletes=(DeleteFile("value", "day=a", by_value=True),),
            properties={LakeProperty.WRITE_MODE: "upsert"},
        ),
        later(ChangeMode.UPSERT, key_columns=("day", "id"), added=(File("u", "day=b"),)),
    ],
    ids=["append", "compaction of another file", "deletes by value", "upsert of another partition"],
)
def test_a_later_step_is_independent(step: SnapshotChange) -> None:
    assert set(planned(WROTE, step).removed_deletes) == {"by-position"}


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (later(ChangeMode.REWRITE, removed=(OLD,), added=(LATER,)), "rewritten_since"),
        (later(ChangeMode.REPLACE_PARTITIONS, removed=(OLD,)), "rewritten_since"),
        (later(ChangeMode.COMPACT, removed=(OLD,), added=(LATER,)), "compacted"),
        (later(ChangeMode.COMPACT, removed_deletes=(BY_POSITION,), deletes=(LATER_DELETE,)), "compacted"),
        (
            later(ChangeMode.ROW_DELETES, removed_deletes=(BY_POSITION,), deletes=(LATER_DELETE,)),
            "rewritten_since",
        ),
        (later(ChangeMode.ROW_DELETES, deletes=(LATER_DELETE,)), "rows_changed_since"),
        (later(ChangeMode.ROW_DELETES, deletes=(BY_VALUE, LATER_DELETE)), "rows_changed_since"),
        (later(ChangeMode.ROW_DELETES, deletes=(BY_VALUE,)), "rows_changed_since"),
        (later(ChangeMode.REWRITE, added=(File("u", "day=b"),)), "rows_changed_since"),
        (
            later(ChangeMode.UPSERT, key_columns=("day", "id"), added=(File("u", "day=a"),)),
            "rows_changed_since",
        ),
        (later(ChangeMode.UPSERT, key_columns=("id",), added=(File("u", "day=b"),)), "rows_changed_since"),
        (later(ChangeMode.OLD_LAYOUT, added=(LATER,)), "older_partition_spec"),
    ],
)
def test_a_later_step_depends_on_it(step: SnapshotChange, code: str) -> None:
    assert reason(WROTE, step) == (code, ("later",))


def test_a_file_between_two_delete_files_is_not_newer_than_both() -> None:
    """The second delete file may delete rows of it, so a later step that rewrites it depends on the undo."""
    between = later(ChangeMode.APPEND, added=(LATER,))
    second = SnapshotChange(3, ChangeMode.ROW_DELETES, deletes=(replace(BY_VALUE, path="second"),))
    rewriting = SnapshotChange(4, ChangeMode.REWRITE, removed=(LATER,), run_id="last")
    own = frozenset({1, 3})
    assert reason(WROTE, between, second, rewriting, own=own) == ("rewritten_since", ("last",))
    appending = SnapshotChange(4, ChangeMode.APPEND, added=(File("next", "day=a"),))
    compacting = SnapshotChange(5, ChangeMode.COMPACT, removed=appending.added, added=(File("c", "day=a"),))
    assert len(planned(WROTE, between, second, appending, compacting, own=own).removed_deletes) == 2


def test_replaced_position_deletes_come_back() -> None:
    earlier = DeleteFile("earlier", "day=a", DataPaths(b"old", b"old"))
    undo = planned(replace(WROTE, removed_deletes=(earlier,)))
    assert (set(undo.removed_deletes), set(undo.restored_deletes)) == ({"by-position"}, {"earlier"})


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (replace(WROTE, removed_deletes=(BY_VALUE,)), "wrote_delete_files"),
        (replace(WROTE, mode=ChangeMode.COMPACT), "wrote_delete_files"),
        (replace(WROTE, mode=ChangeMode.DELETION_VECTORS), "wrote_deletion_vectors"),
    ],
    ids=["replaced equality deletes", "rewrote delete files", "deletion vectors"],
)
def test_the_publication_itself_stays_refused(step: SnapshotChange, code: str) -> None:
    assert reason(step) == (code, ())


@pytest.mark.parametrize("mode", [ChangeMode.REWRITE, ChangeMode.ROW_DELETES])
@pytest.mark.parametrize(("day", "is_moved"), [("day=b", True), ("day=a", False)])
def test_rows_that_a_statement_moved_to_another_partition_are_left(
    mode: ChangeMode, day: str, is_moved: bool
) -> None:
    replacing = SnapshotChange(
        1,
        ChangeMode.REPLACE_PARTITIONS,
        added=(NEW,),
        recorded_predicate=ReplacedRows(((StringSet(1, frozenset({"a"})),),)),
        partition_names=("a",),
    )
    deletes = (DeleteFile("d", "day=a", DataPaths(b"new", b"new")),)
    statement = SnapshotChange(
        2,
        mode,
        added=(File("moved", day),),
        removed=(NEW,) if mode is ChangeMode.REWRITE else (),
        deletes=deletes if mode is ChangeMode.ROW_DELETES else (),
        run_id="later",
    )
    steps = (replacing, statement, replace(replacing, snapshot_id=3, added=(LATER,), removed=(NEW,)))
    if is_moved:
        assert reason(*steps)[1] == ("later",)
    else:
        assert planned(*steps).is_superseded


HOUR_US = 3_600_000_000


@pytest.mark.parametrize(
    ("low", "high", "transform", "is_superseded"),
    [
        (0, HOUR_US, "hour", True),
        (0, HOUR_US // 2, "hour", False),
        (0, HOUR_US, "day", False),
        (0, 24 * HOUR_US, "day", True),
        (0, 24 * HOUR_US, "bucket[4]", False),
    ],
)
def test_a_statement_within_a_partition_may_have_moved_rows_to_another_window(
    low: int, high: int, transform: str, is_superseded: bool
) -> None:
    layout = Layout(
        columns=(LayoutColumn(1, "at", "timestamptz", False),), spec=(("at", transform, "at_part"),)
    )
    replacing = SnapshotChange(
        1,
        ChangeMode.REPLACE_PARTITIONS,
        added=(NEW,),
        recorded_predicate=ReplacedRows(((ValueRange(1, "time", low, high),),)),
        partition_names=("a",),
        run_id="wrong",
    )
    statement = SnapshotChange(2, ChangeMode.REWRITE, added=(File("moved", "day=a"),), removed=(NEW,))
    steps = (replacing, statement, replace(replacing, snapshot_id=3, added=(LATER,), removed=(NEW,)))
    own = OwnChange(frozenset({1}), {}, {}, layout, layout)
    try:
        result = plan_table_undo("t", TableChange(layout, layout, steps), own, {})
    except DependencyFound:
        assert not is_superseded
    else:
        assert result.is_superseded is is_superseded


def test_both_publications_that_wrote_the_same_deletes_are_undone_together() -> None:
    second = DeleteFile("second", "day=a", DataPaths(b"old", b"old"))
    step = SnapshotChange(2, ChangeMode.ROW_DELETES, deletes=(second,), removed_deletes=(BY_POSITION,))
    undo = planned(WROTE, step, own=frozenset({1, 2}))
    assert (set(undo.removed_deletes), set(undo.restored_deletes)) == ({"second"}, set())


# -- real files ----------------------------------------------------------------------------------------


def published(bench: Workbench, change: Callable[[Run], None]) -> Run:
    run = bench.run()
    change(run)
    bench.published(run)
    return run


def deleted_by_value(bench: Workbench, number: int, day: str = "a", mode: str | None = None) -> Run:
    return published(
        bench,
        lambda run: delete_equal(run.table(), "id", number, day, run.properties(mode, "id" if mode else "")),
    )


def deleted_by_position(bench: Workbench, path: str, position: int) -> Run:
    return published(
        bench, lambda run: delete_at(run.table(), path, position, properties=run.properties(None))
    )


def live_deletes(bench: Workbench) -> list[DataFile]:
    table = bench.main()
    return list(read_live_files(table.io, table.current_snapshot(), ManifestContent.DELETES))


def read_rows(bench: Workbench) -> list[tuple[str, int]]:
    """The rows of the table by the rules of Iceberg's specification: PyIceberg reads no deletes by value.

    A delete file concerns data files of its partition: by position those of its paths, up to its own sequence number; by
    value (of `id`) those with smaller sequence numbers.
    """
    table, rows = bench.main(), []
    entries = [
        entry
        for entry in read_entries(table.io, table.current_snapshot())
        if entry.status != ManifestEntryStatus.DELETED
    ]
    files = [entry for entry in entries if entry.data_file.content == DataFileContent.DATA]
    deletes = [entry for entry in entries if entry.data_file.content != DataFileContent.DATA]
    for entry in files:
        values = read_parquet(table, entry.data_file, "id")
        positions, deleted_values = set[int](), set[int]()
        for delete in deletes:
            file = delete.data_file
            if file.partition != entry.data_file.partition:
                continue
            if file.content == DataFileContent.EQUALITY_DELETES:
                if entry.sequence_number < delete.sequence_number:
                    deleted_values |= {*read_parquet(table, file, "id")}
            elif entry.sequence_number <= delete.sequence_number:
                pairs = zip(
                    read_parquet(table, file, "file_path"), read_parquet(table, file, "pos"), strict=True
                )
                positions |= {pos for path, pos in pairs if path == entry.data_file.file_path}
        rows += [
            (entry.data_file.partition[0], value)
            for number, value in enumerate(values)
            if number not in positions and value not in deleted_values
        ]
    return sorted(rows)


def read_parquet(table: Table, file: DataFile, column: str) -> list[Any]:
    with table.io.new_input(file.file_path).open() as stream:
        return pq.read_table(stream, columns=[column]).column(0).to_pylist()


def path_of(bench: Workbench, day: str) -> str:
    (task,) = bench.main().scan(EqualTo("day", day)).plan_files()
    return str(task.file.file_path)


@memory.ON_BOTH
def test_rows_that_were_deleted_by_position_come_back(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("a", 2), ("b", 3)])
    path = path_of(bench, "a")
    earlier = deleted_by_position(bench, path_of(bench, "b"), 0)
    wrong = deleted_by_position(bench, path, 1)
    appended(bench, [("a", 4)])
    assert bench.rows() == [("a", 1), ("a", 4)]
    (table,) = undo(bench, wrong).tables
    assert (table.action, table.removed_delete_files, table.removed_files) == ("changed", 1, 0)
    assert bench.rows() == [("a", 1), ("a", 2), ("a", 4)]
    assert undo(bench, wrong).is_new is False
    # The other delete file stays, and its publication can be undone as well.
    assert len(live_deletes(bench)) == 1
    summary = bench.main().current_snapshot().summary
    assert (summary["removed-position-delete-files"], summary["total-delete-files"]) == ("1", "1")
    appended(bench, [("b", 5)])
    undo(bench, earlier)
    assert bench.rows() == [("a", 1), ("a", 2), ("a", 4), ("b", 3), ("b", 5)]
    assert bench.main().current_snapshot().summary["total-delete-files"] == "0"


def test_others_delete_files_in_the_same_manifest_keep_their_sequence_numbers(bench: Workbench) -> None:
    """A delete file by value with a newer sequence number would also delete the row that came later."""
    bench.seeded([("a", 1), ("a", 2), ("a", 3)])
    deleted_by_value(bench, 1)
    appended(bench, [("a", 1)])
    wrong = deleted_by_value(bench, 2)
    merge_delete_manifests(bench.main())
    assert len(live_deletes(bench)) == 2
    assert read_rows(bench) == [("a", 1), ("a", 3)]
    undo(bench, wrong)
    assert len(live_deletes(bench)) == 1
    assert read_rows(bench) == [("a", 1), ("a", 2), ("a", 3)]


def test_later_deletes_by_value_stay_and_concern_the_rows_that_come_back(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("a", 2), ("a", 3)])
    path = path_of(bench, "a")
    wrong = deleted_by_position(bench, path, 0)
    deleted_by_value(bench, 2, mode="upsert")
    deleted_by_value(bench, 1, mode="upsert")
    undo(bench, wrong)
    assert read_rows(bench) == [("a", 3)]


def test_a_later_statement_with_deletes_by_value_may_have_missed_the_rows(bench: Workbench) -> None:
    """An engine may write the values of the rows that it sees, such as those of `DELETE WHERE day = 'a'`."""
    bench.seeded([("a", 1), ("a", 2), ("a", 3)])
    wrong = deleted_by_position(bench, path_of(bench, "a"), 0)
    later = deleted_by_value(bench, 2)
    with pytest.raises(UndoRefused) as caught:  # PyIceberg cannot read the rows
        undo(bench, wrong)
    assert (codes(caught.value), run_ids(caught.value)) == ({"rows_changed_since"}, {later.run_id})


def test_a_later_delete_by_position_may_have_missed_the_rows(bench: Workbench) -> None:
    """Without the publication, its statement might have deleted them, too."""
    bench.seeded([("a", 1), ("a", 2), ("b", 3)])
    wrong = deleted_by_position(bench, path_of(bench, "a"), 0)
    later = deleted_by_position(bench, path_of(bench, "b"), 0)
    error = refused(bench, wrong)
    assert (codes(error), run_ids(error)) == ({"rows_changed_since"}, {later.run_id})
    undo(bench, wrong, with_followers=True)
    assert bench.rows() == [("a", 1), ("a", 2), ("b", 3)]


def test_a_rewritten_or_compacted_file_refuses_the_undo(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("a", 2)])
    wrong = deleted_by_position(bench, path_of(bench, "a"), 0)
    appended(bench, [("b", 7)])
    later = published(bench, lambda run: replaced(run, "a", [("a", 9)]))
    error = refused(bench, wrong)
    assert (codes(error), run_ids(error)) == ({"rewritten_since"}, {later.run_id})


def test_a_run_that_rewrote_the_file_before_the_undo_is_refused(bench: Workbench) -> None:
    """Its new file lacks the row that came back, so its publication would delete the row again."""
    bench.seeded([("a", 1), ("a", 2)])
    wrong = deleted_by_position(bench, path_of(bench, "a"), 0)
    waiting, other = bench.run(), bench.run()
    waiting.replace("a", [("a", 2), ("a", 5)])
    other.append([("b", 6)])
    undo(bench, wrong)
    assert "main_wrote_delete_files" in bench.refused(waiting).codes
    (result,) = bench.publish(other)
    assert isinstance(result, Published)
    assert bench.rows() == [("a", 1), ("a", 2), ("b", 6)]


def test_consumers_read_the_undo_or_learn_that_they_cannot(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("a", 2)])
    before = current_position(bench.main())
    wrong = deleted_by_position(bench, path_of(bench, "a"), 0)
    between = current_position(bench.main())
    appended(bench, [("a", 4)])
    undo(bench, wrong)
    table = bench.main()
    change = capture_change(table, before, name="t")
    assert (len(change.added), change.removed, change.deletes) == (1, (), ())
    with pytest.raises(ChangeLost) as caught:
        capture_change(table, between, name="t")
    assert caught.value.loss is LossReason.DELETES_UNDONE
    assert capture_change(table, current_position(table), name="t").empty


def test_replaced_delete_files_are_added_again(bench: Workbench) -> None:
    """A later delete file of a data file has the positions of the former one too, which it replaces."""
    bench.seeded([("a", 1), ("a", 2), ("a", 3)], spec=FLAT)
    path = path_of(bench, "a")
    first = deleted_by_position(bench, path, 0)
    (earlier,) = live_deletes(bench)
    second = published(
        bench,
        lambda run: delete_at(run.table(), path, 0, 1, properties=run.properties(None), replaces=[earlier]),
    )
    assert bench.rows() == [("a", 3)]
    assert run_ids(refused(bench, first)) == {second.run_id}
    undo(bench, second)
    assert bench.rows() == [("a", 2), ("a", 3)]
    assert [file.file_path for file in live_deletes(bench)] == [earlier.file_path]
    undo(bench, first)
    assert bench.rows() == [("a", 1), ("a", 2), ("a", 3)]


# -- random histories ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowStep(Step):
    """A DELETE or UPDATE by delete files. Its rows are those with one of `ids`; an update moves them to `day`."""

    ids: frozenset[int] = frozenset()
    replaces: bool = False
    """Whether the new delete file of a data file replaces the former one, as Spark does."""

    def write(self, run: Run, name: str) -> None:
        table, deletes, replaced_deletes = run.table(name), list[DataFile](), list[DataFile]()
        matched_ids: list[int] = []
        for task in table.scan().plan_files():
            values = read_parquet(table, task.file, "id")
            days = read_parquet(table, task.file, "day")
            former_positions = {
                position
                for delete_file in task.delete_files
                for path, position in zip(
                    read_parquet(table, delete_file, "file_path"),
                    read_parquet(table, delete_file, "pos"),
                    strict=True,
                )
                if path == task.file.file_path
            }
            positions = {
                number
                for number, value in enumerate(values)
                if number not in former_positions and self.matches(days[number], value)
            }
            if positions:
                matched_ids += [values[number] for number in sorted(positions)]
                if self.replaces:
                    positions |= former_positions
                    replaced_deletes += task.delete_files
                deletes.append(write_position_deletes(table, task.file, sorted(positions)))
        if deletes:
            rows = frame([(self.day, number) for number in matched_ids]).cast(ARROW)
            added = (
                write_data_files(
                    table.metadata, rows, table.io, commit=uuid.uuid4(), numbers=itertools.count()
                )
                if self.kind == "update rows"
                else ()
            )
            commit_deletes(
                table,
                deletes,
                properties=run.properties(None),
                added=list(added),
                replaces=replaced_deletes,
            )

    def matches(self, day: str, number: int) -> bool:
        return day == self.day if self.kind == "delete day" else number in self.ids

    def apply(self, rows: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        kept = [row for row in rows if not self.matches(*row)]
        matched = [(self.day, number) for day, number in rows if self.matches(day, number)]
        return sorted([*kept, *(matched if self.kind == "update rows" else [])])


@dataclass(frozen=True)
class CompactStep(Step):
    """A compaction of all files of a partition to one, without deleted rows. The delete files stay."""

    def write(self, run: Run, name: str) -> None:
        table = run.table(name)
        scan = table.scan(EqualTo("day", self.day)) if table.spec().fields else table.scan()
        tasks, rows = list(scan.plan_files()), scan.to_arrow()
        if len(tasks) < 2 or not rows.num_rows:
            return
        added = write_data_files(
            table.metadata, rows.cast(ARROW), table.io, commit=uuid.uuid4(), numbers=itertools.count()
        )
        updates = build_snapshot(
            table,
            added=list(added),
            removed=[task.file for task in tasks],
            operation=Operation.OVERWRITE,
            properties=run.properties(None),
            written_paths=[],
        )
        transaction = table.transaction()
        transaction._apply(tuple(map(as_compaction, updates)))
        transaction.commit_transaction()

    def apply(self, rows: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        return list(rows)


class RowHistory(History):
    """Draws appends, replacements, compactions, and deletes and updates by delete files."""

    def step(self) -> Step:
        kinds = ["append", "append", "replace", "compact", "delete rows", "delete rows", "update rows"]
        kind, day = self.random.choice([*kinds, "delete day"]), self.random.choice("abc")
        if kind == "compact":
            return CompactStep(kind, day, ())
        if kind in ("append", "replace"):
            first, self.next_id = self.next_id, self.next_id + self.random.randrange(1, 4)
            numbers = range(first, self.next_id)
            self.ids += numbers
            days = [day if kind == "replace" else self.random.choice("abc") for _ in numbers]
            return Step(kind, day, tuple(zip(days, numbers, strict=True)))
        count = self.random.randrange(1, 4)
        ids = frozenset(self.random.choice([-1, -2, -3, *self.ids]) for _ in range(count))
        return RowStep(kind, day, (), ids, replaces=self.random.random() < 0.5)


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + HISTORIES))
def test_undone_or_refused_but_never_wrong(bench: Workbench, seed: int) -> None:
    check_history(bench, seed, RowHistory)


def _forget_replaced_deletes(undo: TableUndo, step: SnapshotChange) -> None:
    ADD_OWN_STEP(undo, replace(step, removed_deletes=()))


ADD_OWN_STEP = table_undo._add_own_step
BUGS: dict[str, tuple[int, ModuleType, str, Any]] = {
    "rewritten files do not count": (9, later_steps, "_require_live_deletes", lambda *_: None),
    "later statements do not count": (6, later_steps, "_require_independent_returns", lambda *_: None),
    "replaced delete files stay away": (15, table_undo, "_add_own_step", _forget_replaced_deletes),
}
"""A planted bug -> the seed of a history that finds it, and what is replaced by what."""


@pytest.mark.parametrize("bug", BUGS)
def test_the_histories_find_a_planted_bug(
    bench: Workbench, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_seed, module, name, replacement = BUGS[bug]
    monkeypatch.setattr(module, name, replacement)
    for seed in range(first_seed, 100):
        try:
            check_history(bench, seed, RowHistory)
        except AssertionError:  # wrong rows
            return
    pytest.fail(f"No history of 100 finds: {bug}.")
