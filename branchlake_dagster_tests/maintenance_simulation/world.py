"""One schedule: a lake in memory with real Iceberg files, its writers, and its maintenance.

The publisher, undo, expiry, compaction and garbage collection are the product's own. Simulated are Nessie,
Spark's part of a compaction, heartbeats, and the clock. Rounds of concurrent actors alternate with pauses
of hours or days, in which nobody but open runs and external writers has anything in progress.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyiceberg.table
import pyiceberg.table.snapshots
import pyiceberg.table.update
from pyiceberg.expressions import BooleanExpression
from pyiceberg.expressions.visitors import bind
from pyiceberg.io.pyarrow import PyArrowFileIO, expression_to_pyarrow
from pyiceberg.utils.concurrent import ExecutorFactory

from branchlake_dagster.backup import file_copy
from branchlake_dagster.catalog import stored_files
from branchlake_dagster.cleanup import sweeper
from branchlake_dagster.compaction import compaction_branch, compactor, open_runs, row_proof
from branchlake_dagster.garbage_collection import warehouse_files
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.garbage_collection.journal import CollectionJournal
from branchlake_dagster.garbage_collection.shared_warehouse import require_sole_repository
from branchlake_dagster.garbage_collection.warehouse_files import WarehouseFiles
from branchlake_dagster.history import manifests
from branchlake_dagster.internals.pyiceberg import CachingTransaction
from branchlake_dagster.lakehouse import lakehouse as lakehouses
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie import NessieClient, RetryPolicy
from branchlake_dagster.publication import replay
from branchlake_dagster.runs import temporary_tags
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster.tables import upserts
from branchlake_dagster.undo import publication_undo
from branchlake_dagster_tests.maintenance_simulation.inline_executor import InlineExecutor
from branchlake_dagster_tests.maintenance_simulation.mortal_network import MortalNetwork
from branchlake_dagster_tests.maintenance_simulation.simulated_spark import (
    SimulatedHeartbeats,
    SimulatedSession,
    checksum_in_memory,
)
from branchlake_dagster_tests.maintenance_simulation.stored_states import (
    LiveStates,
    StoredStates,
    local_path,
    table_locations,
)
from branchlake_dagster_tests.publication.workbench import BY_DAY, FLAT, Workbench
from branchlake_dagster_tests.simulation.faults import ALL, Fault, Faults
from branchlake_dagster_tests.simulation.nessie import InMemoryNessie
from branchlake_dagster_tests.simulation.scheduler import Clock, Scheduler
from branchlake_dagster_tests.suite.memory import NamedTransport

NAMESPACE = "shop"
TABLES = ("t", "u")
COPY = "copy"
"""The table of the consumer with positions."""
START = datetime(2020, 1, 1, tzinfo=UTC)
"""Simulated time is always in the past, so a file that was not given a simulated time yet counts as young."""
GRACE, DELAY, HORIZON = timedelta(hours=72), timedelta(hours=24), timedelta(days=6)
DISCARD_GRACE = timedelta(hours=24)
_GREGORIAN_EPOCH = datetime(1582, 10, 15, tzinfo=UTC)


class World:
    """Everything that exists in one schedule. `folder` is empty at the start."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        self.clock = Clock()
        self.clock.advance((START - self.clock.now()).total_seconds())
        self.scheduler = Scheduler(random)
        self.server = InMemoryNessie(clock=self.clock.now, seed=seed)
        kinds = tuple(fault for fault in ALL if random.random() < 0.6)
        self.faults = Faults(random, rate=random.choice((0.0, 0.05, 0.1, 0.2)), kinds=kinds)
        self._kills_at_files = Fault.DEATH_AFTER in kinds and self.faults._rate > 0
        self.network = MortalNetwork(
            self.server, self.faults, self.scheduler, self.clock, random, self._check_new_states
        )
        self.states = StoredStates()
        self._live_states = LiveStates()
        self._checked_locations: set[str] = set()
        self.violations: list[str] = []
        """What was seen to be wrong while actors were at work."""
        self.seen: dict[str, int] = {}
        """How often each thing happened: a schedule in which nothing happens proves nothing."""
        self.heartbeats = SimulatedHeartbeats(self.clock)
        self.lost_files: frozenset[str] = frozenset()
        """Files that a restored Nessie has lost, until a person has accepted the loss."""
        self.is_journal_behind = False
        """Whether a restored journal lacks passes that its marker counts, until a person has accepted the loss."""
        self.marker_passes = 0
        self._clients: list[NessieClient] = []
        self._folder = folder
        retry = random.choice((RetryPolicy(()), RetryPolicy((1.0,)), RetryPolicy()))
        uri = f"http://{uuid.uuid4().hex}.invalid/api/v2"
        self.lake = self._open_lake(self.network.named_client(uri, retry))
        calm_transport = NamedTransport(self.server, uri.replace("/api", "/calm/api"))
        self.calm_lake = self._open_lake(NessieClient(calm_transport.uri, transport=calm_transport))
        self.bench = Workbench(self.lake, NAMESPACE)
        self.root = folder / "state" / "warehouse"

    def _open_lake(self, client: NessieClient) -> Lakehouse:
        """Return a lake whose client is found by its address, as in `suite.memory`."""
        lakehouses._clients[os.getpid(), client.uri, None, True] = client
        self._clients.append(client)  # the lakehouse has only a weak reference
        settings = Settings(
            state_dir=self._folder / "state",
            nessie_uri=client.uri,
            orphan_file_grace_h=GRACE.total_seconds() / 3600,
            deletion_delay_h=DELAY.total_seconds() / 3600,
            history_horizon_days=HORIZON.total_seconds() / 86400,
            undo_days=2,
            snapshot_keep_count=2,
            snapshot_keep_days=1,
            position_days=self.random.choice((3, 9)),
        )
        return Lakehouse(settings, start=False)

    def furnish(self) -> None:
        """Create the tables on `main`."""
        ensure_main_has_commit(self.calm_lake.nessie)
        for lake in (self.calm_lake, self.lake):
            lake.catalog().record_repository()
        bench = Workbench(self.calm_lake, NAMESPACE)
        for number, name in enumerate(TABLES):
            spec = FLAT if self.random.random() < 0.3 else BY_DAY
            bench.seeded([("a", -number - 1), ("b", -number - 11)], spec=spec, name=name)
        bench.seeded([], spec=FLAT, name=COPY)
        bench.clean()  # the branches of these runs

    # -- what happened ---------------------------------------------------------------------------------

    def note(self, what: str, how: str = "") -> None:
        """Add a line to the story, and count it."""
        self.seen[what] = self.seen.get(what, 0) + 1
        self.network.note(what, how)

    def require(self, condition: object, text: str) -> None:
        """Record a violation unless the condition holds. It is raised at the end of the round."""
        if not condition:
            self.violations.append(f"{self.scheduler.current or 'nobody'}: {text}")
            self.network.note("VIOLATED", text)

    def story(self) -> str:
        """Return what happened, for the report of a failure."""
        lines = [
            f"{actor or '-':>14}  {what}{f' -> {how}' if how else ''}"
            for actor, what, how in self.network.trace
        ]
        return "\n".join([f"seed {self.seed}", *lines])

    def let_faults_end(self) -> None:
        """From now on nothing fails, and no process is killed."""
        self.faults.heal()
        self.network.lost_share = 0.0
        self._kills_at_files = False

    # -- time ------------------------------------------------------------------------------------------

    def now(self) -> datetime:
        """Return the simulated time."""
        return self.clock.now()

    def stamp_files(self) -> None:
        """Give a simulated time to all files that have none yet."""
        stamp = self.now().timestamp()
        for path in self.root.rglob("*"):
            if path.is_file() and path.stat().st_mtime > stamp + 1e6:
                os.utime(path, (stamp, stamp))

    def let_time_pass(self, duration: timedelta) -> None:
        """Move the clock on."""
        self.stamp_files()
        self.clock.advance(duration.total_seconds())
        self.note("time passed", str(duration))

    def _new_time_uuid(self, *_: object, **__: object) -> uuid.UUID:
        """Return a UUID of version 1 at the simulated time."""
        units = (self.now() - _GREGORIAN_EPOCH) // timedelta(microseconds=1) * 10
        fields = (units & 0xFFFFFFFF, units >> 32 & 0xFFFF, units >> 48 & 0x0FFF, 0x80, 1)
        return uuid.UUID(fields=(*fields, self.random.getrandbits(47)), version=1)

    def new_id(self) -> str:
        """Return the id of a run."""
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))

    # -- files -----------------------------------------------------------------------------------------

    def live_files(self, horizon: timedelta = HORIZON) -> set[str]:
        """Return all files that some reference may still lead to."""
        files: set[str] = set()
        for location in self.live_locations(horizon):
            files |= self.states.files(location)
        return files

    def live_locations(self, horizon: timedelta = HORIZON) -> set[str]:
        """Return the metadata files of the states that must be readable."""
        return self._live_states.find(self.server.history, self.now() - horizon)

    def _before_deletion(self, location: str) -> None:
        path = local_path(location)
        for metadata_location in self.live_locations():
            if path in self.states.files(metadata_location):
                self.require(False, f"deleted {path}, which {metadata_location} needs")
                return
        self.require(path not in self.lost_files, f"deleted {path}, which Nessie had lost")

    def _check_new_states(self) -> None:
        """Require that all states of the references' heads can be read, after a change in Nessie."""
        history = self.server.history
        for name, pointer in list(history.references.items()):
            commit = history.commits.get(pointer.hash)
            if name.startswith("undrop-"):
                continue  # it protects what is left while that is examined
            for location in table_locations(commit.contents).values() if commit else ():
                if location not in self._checked_locations:
                    self._checked_locations.add(location)
                    missing = self.states.missing_files(location)
                    self.require(not missing, f"{name} has {location}, which lacks {missing}")

    def _kill_actor(self) -> None:
        self.note("killed")
        self.network.kill()

    def _delete_one(self, original: Callable[..., None], files: WarehouseFiles, path: str) -> None:
        """Delete a file of a collection; the reply may be lost, and the process may be killed."""
        self.scheduler.pause()
        self.network.require_alive()
        fate = self.random.random() if self._kills_at_files and self.scheduler.current else 1.0
        if fate < 0.02:
            self._kill_actor()
        self._before_deletion(path)
        original(files, path)
        self.note("file deleted", path.rpartition("/")[2])
        if fate < 0.04:
            self._kill_actor()
        if fate < 0.08:
            self.note("reply of a deletion lost")
            raise TimeoutError("no reply")

    def _delete_through_io(self, original: Callable[..., None], io: PyArrowFileIO, location: Any) -> None:
        """Delete a file of a discarded run, or of a commit that failed; the process may be killed before."""
        self.scheduler.pause()
        self.network.require_alive()
        if self._kills_at_files and self.scheduler.current and self.random.random() < 0.02:
            self._kill_actor()
        self._before_deletion(location if isinstance(location, str) else location.location)
        original(io, location)
        self.note("file discarded")

    def _write_marker(
        self, original: Callable[..., datetime], files: WarehouseFiles, content: bytes
    ) -> datetime:
        self.network.require_alive()
        original(files, content)
        self.marker_passes += 1
        return self.now()

    def _require_sole_repository(self, *_: FileCollector) -> str | None:
        require_sole_repository(WarehouseFiles.from_settings(self.lake.settings), self.server.created_at)
        return self.server.created_at

    def _load_journal(
        self,
        journal: CollectionJournal,
        name: str,
        row_filter: BooleanExpression | None = None,
        columns: tuple[str, ...] = ("*",),
    ) -> list[dict[str, Any]]:
        """Read a table of the journal, as `CollectionJournal._load` does."""
        table = journal._find_table(name)
        if table is None:
            return []
        rows = self.states.arrow_rows(table.metadata)
        if row_filter is not None:
            rows = rows.filter(expression_to_pyarrow(bind(table.schema(), row_filter, case_sensitive=True)))
        return (rows if columns == ("*",) else rows.select(columns)).to_pylist()

    # -- the simulated surroundings --------------------------------------------------------------------

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the product see the simulated clock, files and Spark."""
        simulated_now = SimpleNamespace(now=lambda _: self.now())
        io_delete, delete_one = PyArrowFileIO.delete, WarehouseFiles._delete_one
        copy_file = file_copy._copy_file
        replacements: list[tuple[object, str, object]] = [
            (pyiceberg.table.snapshots, "time", SimpleNamespace(time=lambda: self.now().timestamp())),
            (pyiceberg.table.update, "datetime_to_millis", lambda _: int(self.now().timestamp() * 1000)),
            (
                pyiceberg.table,
                "time",
                SimpleNamespace(sleep=self.network.sleep, monotonic=self.clock.monotonic),
            ),
            (stored_files, "_synchronize_file", lambda _: None),
            (stored_files, "_synchronize_folder", lambda _: None),
            (warehouse_files, "last_change_ns", lambda status: status.st_mtime_ns),
            (ExecutorFactory, "get_or_create", staticmethod(InlineExecutor)),
            *(
                (module, "ThreadPoolExecutor", InlineExecutor)
                for module in (
                    manifests,
                    open_runs,
                    publication_undo,
                    replay,
                    sweeper,
                    upserts,
                    warehouse_files,
                )
            ),
            # PyIceberg's own property copies all metadata each time.
            (pyiceberg.table.Transaction, "_cached_metadata", None),
            (pyiceberg.table.Transaction, "table_metadata", CachingTransaction.table_metadata),
            (temporary_tags, "datetime", SimpleNamespace(now=simulated_now.now, strptime=datetime.strptime)),
            (compaction_branch, "uuid1", self._new_time_uuid),
            (compactor, "datetime", simulated_now),
            (file_copy, "_copy_file", lambda *arguments: (self.scheduler.pause(), copy_file(*arguments))[1]),
            (row_proof, "checksum_files", partial(checksum_in_memory, self.lake)),
            # Without a request, whose faults would show nothing: an error of Nessie ends the pass.
            (FileCollector, "_require_sole_repository", self._require_sole_repository),
            (Lakehouse, "spark_session", lambda _, ref: SimulatedSession(ref)),
            (CollectionJournal, "_load", lambda *args, **named: self._load_journal(*args, **named)),
            (
                PyArrowFileIO,
                "delete",
                lambda io, location: self._delete_through_io(io_delete, io, location),
            ),
            (
                WarehouseFiles,
                "_delete_one",
                lambda files, path: self._delete_one(delete_one, files, path),
            ),
            (
                WarehouseFiles,
                "write_marker",
                lambda files, content, original=WarehouseFiles.write_marker: self._write_marker(
                    original, files, content
                ),
            ),
        ]
        with ExitStack() as stack:
            for target, name, value in replacements:
                stack.enter_context(patch.object(target, name, value, create=name.startswith("_cached")))
            yield
