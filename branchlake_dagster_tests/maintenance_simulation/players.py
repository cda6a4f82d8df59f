"""The actors of a schedule. Each call is the work of one process, which may be killed at any request."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, NoSuchTableError
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.statistics import StatisticsFile

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.cleanup.reaper_rules import BranchOwner, OwnerState
from branchlake_dagster.cleanup.sweeper import Sweeper
from branchlake_dagster.compaction.compaction_plan import CompactionOptions
from branchlake_dagster.compaction.compactor import Compactor, plan_compactions
from branchlake_dagster.compaction.errors import CompactionNotClean, CompactionRowsDiffer
from branchlake_dagster.compaction.result import CompactedTable
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.expiry.manifest_rewrite import ManifestRewriter
from branchlake_dagster.expiry.retention import ExpiryPolicy
from branchlake_dagster.expiry.snapshot_expiry import ExpiryInvalid, SnapshotExpirer
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.garbage_collection.journal import JournalLost
from branchlake_dagster.garbage_collection.shared_warehouse import WarehouseShared
from branchlake_dagster.internals.pyiceberg import commit_files, write_data_files
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.publication.ledger import Published, Refused
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.runs.discarding import discard_branch
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.table_files import TableFiles
from branchlake_dagster.undo.find_publication import find_publication
from branchlake_dagster.undo.publication_undo import PublicationUndo
from branchlake_dagster.undo.undrop import undrop_table
from branchlake_dagster_tests.maintenance_simulation.row_changes import (
    DAYS,
    RUN_KINDS,
    ChangeKind,
    NeedsSpark,
    Row,
    RowChange,
    Rows,
)
from branchlake_dagster_tests.maintenance_simulation.simulated_spark import SimulatedRewrite, read_rows
from branchlake_dagster_tests.maintenance_simulation.stored_states import local_path, table_locations
from branchlake_dagster_tests.maintenance_simulation.world import (
    DISCARD_GRACE,
    GRACE,
    NAMESPACE,
    TABLES,
    World,
)
from branchlake_dagster_tests.publication.rebase.deleting import _Deleting
from branchlake_dagster_tests.publication.workbench import ARROW, Run, frame
from branchlake_dagster_tests.simulation.scheduler import Died

CHANGE_PROPERTY = "simulation.change"
"""The property of commits by others than runs: the number of the change."""
_TOLERATED = (
    BranchlakeError,
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchTableError,
    NeedsSpark,
)
"""Errors with which the work of a process may end."""
_PATH_ID, _POSITION_ID = 2147483546, 2147483545
"""The ids of the columns of position delete files."""


@dataclass
class Work:
    """One run, which may be open for several rounds. `done_changes` are written to its branch."""

    run: Run
    changes: list[RowChange]
    done_changes: list[RowChange] = field(default_factory=list)
    files_in_flight: list[DataFile] = field(default_factory=list)
    """Data files of the next change that are written and not committed."""
    state: str = "new"
    """One of `new`, `open`, `written`, `failed` and `ended`."""

    @property
    def is_alive(self) -> bool:
        """Whether the run's process is at work."""
        return self.state in ("new", "open")


@dataclass
class StagedFile:
    """A data file that an external writer has written, and will commit later."""

    table: str
    file: DataFile
    rows: Rows
    written_at: datetime


class Players:
    """All actors of one world, and what they have in progress between rounds."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.works: dict[str, Work] = {}
        """All runs, by run id."""
        self.other_changes: dict[str, RowChange] = {}
        """The changes by others than runs, by the number in the commit's property."""
        self.consumer_runs: set[str] = set()
        """The ids of the runs of the consumer with positions."""
        self._position_keeping_undos: set[str] = set()
        """The ids of runs whose undo was asked for with `keep_positions`."""
        self.staged: list[StagedFile] = []
        self._ids: list[int] = []
        self._next_id = 0

        self._actions: tuple[Callable[[], None], ...] = (
            self._create_tag,
            self._create_tag,
            self._tag_discarded_run,
            self._delete_tag,
            self._drop_table,
            self._restore_table,
            self._delete_positions,
            self._delete_positions,
            self._delete_positions,
            self._write_statistics,
            self._leave_stray_file,
            partial(self._stage_file, commit_at_once=True),
            partial(self._stage_file, commit_at_once=False),
            partial(self._stage_file, commit_at_once=False),
            self._commit_staged_file,
            self._commit_staged_file,
        )

    # -- drawing ---------------------------------------------------------------------------------------

    def _draw_rows(self, kind: ChangeKind, day: str) -> Rows:
        random = self.world.random
        count = random.randint(1, 2)
        if kind is ChangeKind.UPSERT and self._ids and random.random() < 0.8:
            ids = sorted(set(random.choices(self._ids, k=count)))
        else:
            ids = list(range(self._next_id, self._next_id + count))
            self._next_id += count
            self._ids += ids
        return tuple((day if kind is ChangeKind.REPLACE else random.choice(DAYS), number) for number in ids)

    def _draw_change(self) -> RowChange:
        random = self.world.random
        kind, day, table = random.choice(RUN_KINDS), random.choice(DAYS), random.choice(TABLES)
        rows = () if kind is ChangeKind.DELETE else self._draw_rows(kind, day)
        return RowChange(table, kind, rows, day)

    def draw_run(self) -> Work:
        """Return a new run."""
        random = self.world.random
        changes = [self._draw_change() for _ in range(random.choice((1, 1, 2, 3)))]
        if random.random() < 0.1:
            rows = self._draw_rows(ChangeKind.APPEND, "a")
            changes = [RowChange("v", ChangeKind.CREATE), RowChange("v", ChangeKind.APPEND, rows)]
        return self.add_run(changes)

    def add_run(self, changes: list[RowChange]) -> Work:
        """Return a new run that will make these changes."""
        work = Work(Run(self.world.bench, self.world.new_id(), ""), changes)
        self.works[work.run.run_id] = work
        return work

    # -- runs ------------------------------------------------------------------------------------------

    def write(self, work: Work, steps: int) -> None:
        """Let a run write some of its changes. Between rounds its process lives on."""
        world, run = self.world, work.run
        with self.ends_with_errors("run failed", lambda: self.fail(work)):
            if work.state == "new":
                self.begin(work)
            for change in work.changes[len(work.done_changes) :][:steps]:
                before = self._branch_contents(run)
                if not self._write_change(work, change):
                    world.note("commit in flight", str(change))
                    return
                # A statement that matched no row is not in the log, so a rebase does not repeat it. A run
                # that finds its table would have created it otherwise.
                is_written = self._branch_contents(run) != before or change.kind is ChangeKind.CREATE
                work.done_changes.append(change if is_written else replace(change, kind=ChangeKind.NOTHING))
                world.note("run wrote", str(work.done_changes[-1]))
            if len(work.done_changes) == len(work.changes):
                self.complete(work)

    def begin(self, work: Work) -> None:
        """Create the branch of a new run."""
        nessie, run = self.world.lake.nessie, work.run
        run.base = nessie.reference(MAIN).hash
        self.world.heartbeats.begin(run.name)
        nessie.create_branch(run.name, from_ref=MAIN, from_hash=run.base)
        work.state = "open"

    def complete(self, work: Work) -> None:
        """Let the process of a run end, after which the run is published."""
        work.state = "written"
        self.world.heartbeats.end(work.run.name)

    def _branch_contents(self, run: Run) -> Mapping[tuple[str, ...], str]:
        history = self.world.server.history
        return table_locations(history.contents_at(history.references[run.name].hash))

    def _write_change(self, work: Work, change: RowChange) -> bool:
        """Write a change to the run's branch. Return False if its files are written, but not committed yet."""
        run = work.run
        if work.files_in_flight:
            properties = run.properties("append")
            commit_files(
                run.table(change.table), added=work.files_in_flight, removed=[], properties=properties
            )
            work.files_in_flight = []
        elif change.kind is ChangeKind.APPEND and self.world.random.random() < 0.45:
            table, rows = run.table(change.table), frame(change.rows).cast(ARROW)
            numbers = itertools.count()
            work.files_in_flight = list(
                write_data_files(table.metadata, rows, table.io, commit=uuid.uuid4(), numbers=numbers)
            )
            return False
        else:
            change.write(run)
        return True

    def fail(self, work: Work) -> None:
        """Let the process of a run end with an error."""
        work.state = "failed"
        self.world.heartbeats.end(work.run.name)

    def publish(self) -> None:
        """Publish all runs that have written everything, as one pass of the sensor; discard the others."""
        world = self.world
        nessie = world.lake.nessie
        with self.ends_with_errors("publisher failed"):
            works = {work.run.name: work for work in self.works.values() if work.state == "written"}
            candidates = []
            for name, work in works.items():
                with suppress(ReferenceNotFound):  # another publisher has ended it
                    nessie.reference(name)
                    candidates.append(work.run.candidate())
            candidates = [candidate for candidate in candidates if candidate.changes]
            results = world.bench.publisher.publish(candidates) if candidates else {}
            for name, result in results.items():
                if isinstance(result, Published):
                    world.note("published", name)
                    with suppress(ReferenceNotFound):
                        nessie.delete_branch(name, expected_hash=nessie.reference(name).hash)
                elif isinstance(result, Refused):
                    world.note("refused", f"{name}: {result}")
                    self._discard(works[name])
                elif not isinstance(result, BranchlakeError):
                    world.require(False, f"the publication of {name} ended with {result!r}")
            self._end_works()
        with self.ends_with_errors("clean-up failed"):
            for work in list(self.works.values()):
                if work.state == "failed":
                    self._discard(work)

    def _end_works(self) -> None:
        """Find the works whose branches are gone."""
        references = self.world.server.history.references
        for work in self.works.values():
            if work.state in ("written", "failed") and work.run.name not in references:
                work.state = "ended"

    def _discard(self, work: Work) -> None:
        with suppress(ReferenceNotFound):
            discard_branch(self.world.lake.nessie, self.world.lake.nessie.reference(work.run.name))
            self.world.note("discarded", work.run.name)
        work.state = "ended"

    def forget_lost_runs(self) -> None:
        """End the runs whose branch a restored Nessie does not have, and discard those that it has again."""
        references = self.world.server.history.references
        self.staged = [one for one in self.staged if Path(local_path(one.file.file_path)).exists()]
        for work in self.works.values():
            if work.run.name in references:
                # What the run has written is not what its branch has.
                work.state = "failed"
            elif work.state != "new":
                work.state = "ended"
            self.world.heartbeats.end(work.run.name)

    def delete_leftovers(self) -> None:
        """Delete the references of ended and killed processes, as clean-ups do."""
        nessie = self.world.calm_lake.nessie
        for reference in list(nessie.references()):
            if reference.name.startswith(("discarded-", "sweeping-", "undrop-", "judged-")):
                nessie.delete_tag(reference.name, expected_hash=reference.hash)

    def sweep(self) -> None:
        """Delete the files of discarded branches, as the reaper's job does."""
        world = self.world
        with self.ends_with_errors("sweep failed"):
            sweeper = Sweeper(
                world.lake.nessie,
                TableFiles(world.lake.settings.file_io_properties()),
                self._find_owners,
                grace=DISCARD_GRACE,
                now=world.now,
            )
            for outcome in sweeper.run():
                world.note("swept" if outcome.done else "not swept", str(outcome))
                if outcome.files:
                    world.note("files of a discarded run deleted", f"{outcome.files}")

    def _find_owners(self, branches: Collection[str]) -> dict[str, BranchOwner]:
        """Return what Dagster knows of the runs of these branches."""
        owners = {}
        for work in self.works.values():
            if (name := run_branch_name(work.run.run_id)) in branches:
                state = OwnerState.ACTIVE if work.is_alive else OwnerState.UNPUBLISHED
                if work.state == "written":
                    state = OwnerState.AWAITING_PUBLICATION
                owners[name] = BranchOwner(work.run.run_id, state, base_hash=work.run.base)
        return owners

    # -- maintenance -----------------------------------------------------------------------------------

    def undo(self) -> None:
        """Undo a publication of `main`, sometimes with those that build on it."""
        world = self.world
        history = world.server.history
        run_ids = [
            run_id
            for commit in history.first_parents(history.references[MAIN].hash)
            for run_id in filter(None, commit.properties.get("branchlake.run_id", "").split(","))
            if run_id in self.works and "branchlake.publication_id" in commit.properties
        ]
        if not run_ids:
            return
        # The newest ones more often: they have fewer followers.
        run_id = run_ids[int(world.random.random() ** 2 * len(run_ids))]
        follow, keep = world.random.random() < 0.5, world.random.random() < 0.3
        if keep:
            self._position_keeping_undos.add(run_id)
        with self.ends_with_errors("undo refused or failed"):
            publication = find_publication(world.lake.nessie, run_id)
            undoer = PublicationUndo(world.lake.nessie, IcebergTableFormat(world.lake.catalog()))
            done = undoer.undo(publication, with_followers=follow, keep_positions=keep)
            world.note("undone" if done.is_new else "found undone", f"{run_id}, {len(done.publications)}")

    def has_exact_positions(self) -> bool:
        """Whether no undo on `main` has left the position of an undone run of the consumer where it was."""
        history = self.world.server.history
        for commit in history.first_parents(history.references[MAIN].hash):
            undone = set(commit.properties.get(LakeProperty.UNDONE_RUNS, "").split(","))
            if undone & self.consumer_runs and undone & self._position_keeping_undos:
                return False
        return True

    def expire(self) -> None:
        """Remove old snapshots of all tables, and merge small manifests."""
        world = self.world
        policy = ExpiryPolicy.from_settings(world.lake.settings)
        with self.ends_with_errors("expiry failed"):
            expirer = SnapshotExpirer(world.lake.nessie, world.lake.catalog(), clock=world.now)
            result = expirer.run(expirer.plan(policy=policy))
            world.require(not result.unreadable_tables, f"unreadable: {result.unreadable_tables}")
            for table in result.tables:
                self._require_tolerated(table.error)
                if table.error is None and table.expired_count:
                    world.note("snapshots expired", f"{table.expired_count} of {table.table}")
            for rewritten in ManifestRewriter.of_lake(world.lake).run(min_count=3):
                self._require_tolerated(rewritten.error)
                if rewritten.commit is not None:
                    world.note("manifests merged", rewritten.table)

    def _require_tolerated(self, error: Exception | None) -> None:
        is_wrong = isinstance(error, ExpiryInvalid | CompactionRowsDiffer | CompactionNotClean)
        is_tolerated = error is None or (isinstance(error, _TOLERATED) and not is_wrong)
        self.world.require(is_tolerated, f"maintenance of a table ended with {error!r}")

    def compact(self) -> None:
        """Compact all tables. Sometimes the rewrite does nothing, without an error."""
        world = self.world
        options = CompactionOptions(max_small_files=1, include_hot=True)
        rewrite = SimulatedRewrite(world.lake, world.random, idle_share=0.15)
        tables = IcebergTableFormat(world.lake.catalog())
        with self.ends_with_errors("compaction failed"):
            plan = plan_compactions(world.lake, None, options, now=world.now())
            world.require(not plan.unreadable, f"compaction cannot read {dict(plan.unreadable)}")
            compactor = Compactor(world.lake, tables, rewrite=rewrite, monotonic=world.clock.monotonic)
            for table in compactor.run(plan).tables:
                self._require_tolerated(table.error)
                self._check_compaction(table)
                for left in table.left:
                    world.note("partition left", f"{table.table} {left.partition}: {left.reason}")

    def _check_compaction(self, table: CompactedTable) -> None:
        """Require that a reported compaction is in its commit."""
        world = self.world
        if table.commit is None:
            world.require(not table.partitions, f"{table.table} has compacted partitions without a commit")
            return
        commit = world.server.history.commits[table.commit]
        before, after = (
            world.states.data_files(table_locations(contents)[tuple(table.table.split("."))])
            for contents in (world.server.history.contents_at(commit.parents[0]), commit.contents)
        )
        removed, added = sum(one.removed_files for one in table.partitions), len(after - before)
        world.require(
            removed == len(before - after) > 0 and added == sum(one.added_files for one in table.partitions),
            f"a compaction of {table.table} reports {table.partitions}, and removed {before - after}",
        )
        world.note("compacted beside others" if table.is_rebased else "compacted", table.table)
        if any(one.folded_rows for one in table.partitions):
            world.note("deletes folded", table.table)

    def collect(self, *, ahead: timedelta = timedelta(0), adopt_journal: bool = False) -> None:
        """Run one pass of the garbage collection. The clock of its machine may be ahead."""
        world = self.world
        world.stamp_files()  # a file whose time changes after a plan is not deleted
        collector = FileCollector.of_lake(
            world.lake, now=lambda: world.now() + ahead, sleep=world.network.sleep
        )
        collector._heartbeats = world.heartbeats
        collector._monotonic = world.clock.monotonic
        with self.ends_with_errors("collection failed"):
            try:
                result = collector.run(adopt_journal=adopt_journal)
            except JournalLost as error:
                world.require(world.is_journal_behind, f"a collection reports {error!r}")
                world.note("journal lost")
                return
            except WarehouseShared as error:
                world.require(False, f"a collection reports {error!r}")
                return
            metrics = result.plan.metrics
            unreadable = {*metrics.unreadable, *metrics.unreadable_states}
            # A killed restoration of a dropped table leaves a tag, perhaps of files that were deleted before.
            is_restoring = any(name.startswith("undrop-") for name in world.server.history.references)
            world.require(not unreadable or is_restoring, f"the collection cannot read {unreadable}")
            world.note("collection", f"{result.plan.file_count} planned, {result.deleted} deleted")

    # -- other writers ---------------------------------------------------------------------------------

    def _catalog(self, change: RowChange, ref: str = MAIN) -> NessieCatalog:
        """Return a catalog whose commits name the change."""
        number = str(len(self.other_changes))
        self.other_changes[number] = change
        properties = {f"commit.property.{CHANGE_PROPERTY}": number}
        return self.world.lake.catalog(ref, properties=properties)

    def meddle(self) -> None:
        """Do one thing that other tools and people do."""
        world = self.world
        action = world.random.choice(self._actions)
        with self.ends_with_errors("other writer failed"):
            action()

    def _load(self, catalog: NessieCatalog, name: str) -> Table:
        return catalog.load_table((NAMESPACE, name))

    def _create_tag(self) -> None:
        world = self.world
        history = world.server.history
        commits = itertools.islice(history.first_parents(history.references[MAIN].hash), 12)
        young = [commit.hash for commit in commits if world.now() - commit.time < timedelta(days=5)]
        if young:
            name = f"release-{world.random.getrandbits(32)}"
            world.lake.nessie.create_tag(name, from_ref=MAIN, from_hash=world.random.choice(young))
            world.note("tag created", name)

    def _tag_discarded_run(self) -> None:
        """Keep what a failed run has written, as somebody does who wants to examine it."""
        world = self.world
        references = world.server.history.references
        names = [name for name in references if name.startswith("discarded-")]
        if names:
            discarded = world.lake.nessie.reference(world.random.choice(names))
            name = f"release-{world.random.getrandbits(32)}"
            world.lake.nessie.create_tag(name, from_ref=discarded.name, from_hash=discarded.hash)
            world.note("discarded run tagged", name)

    def _delete_tag(self) -> None:
        world = self.world
        names = [
            name for name in world.server.history.references if name.startswith(("release-", "discarded-"))
        ]
        if names:
            tag = world.lake.nessie.reference(world.random.choice(names))
            world.lake.nessie.delete_tag(tag.name, expected_hash=tag.hash)
            world.note("tag deleted", tag.name)

    def _drop_table(self) -> None:
        name = self.world.random.choice((*TABLES, "v"))
        self._catalog(RowChange(name, ChangeKind.DROP)).drop_table((NAMESPACE, name))
        self.world.note("table dropped", name)

    def _restore_table(self) -> None:
        name = self.world.random.choice(TABLES)
        undrop_table(self.world.lake, f"{NAMESPACE}.{name}")
        self.world.note("table restored", name)

    def _delete_positions(self) -> None:
        """Delete the first row of a data file by a delete file, as other engines do (merge-on-read)."""
        world = self.world
        name = world.random.choice(TABLES)
        table = self._load(world.lake.catalog(), name)
        tasks = [task for task in table.scan().plan_files() if not task.delete_files]
        if not tasks:
            return
        # Paths differ from one play of a seed to the next, so the tasks are in the sequence of their rows.
        rows_by_task = [
            (read_rows(table, [task]).select(["day", "id"]).to_pylist(), number)
            for number, task in enumerate(tasks)
        ]
        rows, chosen = world.random.choice(sorted(rows_by_task, key=lambda item: repr(item[0])))
        task, day, number = tasks[chosen], rows[0]["day"], rows[0]["id"]
        change = RowChange(name, ChangeKind.DELETE_POSITIONS, ((day, number),))
        named_table = self._load(self._catalog(change), name)
        if named_table.metadata_location != table.metadata_location:
            return  # somebody was faster
        self._commit_position_delete(named_table, task.file)
        world.note("row deleted by position", f"{name} {day} {number}")

    def _commit_position_delete(self, table: Table, data_file: DataFile) -> None:
        path = f"{table.location()}/data/{uuid.uuid4()}-deletes.parquet"
        fields = [
            pa.field("file_path", pa.string(), metadata={"PARQUET:field_id": str(_PATH_ID)}),
            pa.field("pos", pa.int64(), metadata={"PARQUET:field_id": str(_POSITION_ID)}),
        ]
        rows = pa.table([[data_file.file_path], [0]], schema=pa.schema(fields))
        with table.io.new_output(path).create() as stream:
            pq.write_table(rows, stream)
        bound = data_file.file_path.encode()
        file = DataFile.from_args(
            content=DataFileContent.POSITION_DELETES,
            file_path=path,
            file_format=FileFormat.PARQUET,
            partition=data_file.partition,
            record_count=1,
            file_size_in_bytes=len(table.io.new_input(path)),
            lower_bounds={_PATH_ID: bound},
            upper_bounds={_PATH_ID: bound},
        )
        file.spec_id = table.spec().spec_id
        transaction = table.transaction()
        producer = _Deleting(Operation.DELETE, transaction, table.io)
        producer.append_data_file(file)
        producer.commit()
        # Engines that delete by position refuse a retry without the data file. PyIceberg would retry blindly.
        transaction._snapshot_producers.clear()
        transaction.commit_transaction()

    def _write_statistics(self) -> None:
        world = self.world
        name = world.random.choice(TABLES)
        table = self._load(self._catalog(RowChange(name, ChangeKind.NOTHING)), name)
        snapshot = table.current_snapshot()
        if snapshot is None:
            return
        path = f"{local_path(table.location())}/metadata/{uuid.uuid4()}.stats"
        Path(path).write_bytes(b"x")
        with table.update_statistics() as update:
            update.set_statistics(
                StatisticsFile(
                    snapshot_id=snapshot.snapshot_id,
                    statistics_path=f"file://{path}",
                    file_size_in_bytes=1,
                    file_footer_size_in_bytes=1,
                    blob_metadata=[],
                )
            )
        world.note("statistics written", name)

    def _leave_stray_file(self) -> None:
        world = self.world
        folders = sorted(path for path in (world.root / NAMESPACE).glob("*/data") if path.is_dir())
        if folders:
            path = world.random.choice(folders) / f"stray-{uuid.uuid4()}.parquet"
            path.write_bytes(b"x")
            world.note("stray file left")

    def _stage_file(self, *, commit_at_once: bool) -> None:
        """Write a data file as an external engine does, whose paths may be spelled differently."""
        world = self.world
        name, day = world.random.choice(TABLES), world.random.choice(DAYS)
        table = self._load(world.lake.catalog(), name)
        rows: tuple[Row, ...] = ((day, self._draw_rows(ChangeKind.APPEND, day)[0][1]),)
        (file,) = write_data_files(
            table.metadata, frame(rows).cast(ARROW), table.io, commit=uuid.uuid4(), numbers=itertools.count()
        )
        path = local_path(file.file_path)
        spellings = (path, f"file:{path}", f"file://{path}", f"FILE://{path}", f"file:///{path}")
        file._data[1] = world.random.choice(spellings)
        self.staged.append(StagedFile(name, file, rows, world.now()))
        world.note("file staged", name)
        if commit_at_once:
            self._commit_staged_file()

    def _commit_staged_file(self) -> None:
        """Commit the newest staged file. After the grace, its writer has given up."""
        world = self.world
        if not self.staged:
            return
        staged = self.staged.pop()
        if world.now() - staged.written_at > GRACE - timedelta(hours=6):
            world.note("staged file given up")
            return
        change = RowChange(staged.table, ChangeKind.APPEND, staged.rows)
        table = self._load(self._catalog(change), staged.table)
        if not local_path(staged.file.file_path).startswith(local_path(table.location())):
            return  # the table was dropped and created again
        commit_files(table, added=[staged.file], removed=[], properties={})
        age = world.now() - staged.written_at
        world.note("old staged file committed" if age > timedelta(days=1) else "staged file committed")

    # -- errors ----------------------------------------------------------------------------------------

    @contextmanager
    def ends_with_errors(self, what: str, also: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Let the work of a process end with an error that it may have, or with its death."""
        try:
            yield
        except _TOLERATED as error:
            self.world.note(what, f"{type(error).__name__}: {error}")
            also()
        except Died:
            also()
            raise
