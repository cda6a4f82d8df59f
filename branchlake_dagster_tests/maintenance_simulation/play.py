"""Playing schedules by their seeds."""

from __future__ import annotations

import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

from branchlake_dagster.compaction.compaction_branch import remove_abandoned_branches
from branchlake_dagster.garbage_collection.journal import CollectionJournal
from branchlake_dagster.garbage_collection.live_history import CLOCK_TOLERANCE
from branchlake_dagster.garbage_collection.warehouse_files import WarehouseFiles
from branchlake_dagster_tests.maintenance_simulation.backup_player import BackupPlayer
from branchlake_dagster_tests.maintenance_simulation.main_history import MainHistory
from branchlake_dagster_tests.maintenance_simulation.players import Players
from branchlake_dagster_tests.maintenance_simulation.position_consumer import PositionConsumer
from branchlake_dagster_tests.maintenance_simulation.stored_states import NessieBackup, list_files
from branchlake_dagster_tests.maintenance_simulation.world import DELAY, GRACE, HORIZON, NAMESPACE, World

ROUNDS = 7
_PAUSES = (
    timedelta(minutes=5),
    timedelta(hours=3),
    timedelta(hours=26),
    timedelta(hours=40),
    timedelta(hours=80),
    timedelta(hours=80),
    timedelta(days=7),
)


class Violated(AssertionError):  # noqa: N818 - reads as a verdict
    """An invariant does not hold."""


@dataclass(frozen=True)
class Played:
    """One schedule. `failure` is the whole story with what is wrong, or None.

    `seen` counts what happened.
    """

    seed: int
    failure: str | None = None
    seen: Counter[str] = field(default_factory=Counter)


def play(seed: int) -> Played:
    """Play one schedule, and check its invariants after each round and at the end."""
    with tempfile.TemporaryDirectory(prefix="branchlake-simulation-") as folder:
        world = World(seed, Path(folder))
        failure = None
        try:
            with world.in_place():
                Schedule(world, Path(folder) / "backups").run()
        except Exception as error:  # noqa: BLE001 - whatever escapes is a finding
            where = "" if isinstance(error, Violated) else "".join(traceback.format_exception(error)[-6:])
            failure = f"{world.story()}\n{where}{type(error).__name__}: {error}"
        return Played(seed, failure, Counter(world.seen))


class Schedule:
    """The course of one schedule: rounds of concurrent actors, then a quiet end."""

    def __init__(self, world: World, backups: Path) -> None:
        self._world = world
        world.furnish()
        self._players = Players(world)
        self._main = MainHistory(world, self._players)
        self._consumer = PositionConsumer(world, self._players)
        self._backup: NessieBackup | None = None
        self._backup_player = BackupPlayer(world, backups)
        self._actor_count = 0

    def run(self) -> None:
        """Play all rounds and the end. Raises Violated."""
        world = self._world
        for _ in range(ROUNDS):
            self._play_round()
            world.let_time_pass(world.random.choice(_PAUSES))
            fate = world.random.random()
            if fate < 0.08:
                self._restore_nessie()
            elif fate < 0.14:
                self._restore_lake()
            elif world.random.random() < 0.3:
                self._backup = NessieBackup(world.server.history)
        self._end()

    def _spawn(self, name: str, actor: object) -> None:
        self._actor_count += 1
        self._world.scheduler.spawn(f"{name} {self._actor_count}", actor)

    def _play_round(self) -> None:
        world, players, random = self._world, self._players, self._world.random
        for work in players.works.values():
            if work.is_alive and random.random() < 0.3:
                self._spawn("run", partial(players.write, work, 3))
        for _ in range(random.randint(1, 3)):
            steps = 3 if random.random() < 0.7 else 1
            self._spawn("run", partial(players.write, players.draw_run(), steps))
        if random.random() < 0.4:
            world.scheduler.run()  # then the publisher and the maintenance meet them all
        for _ in range(random.choice((1, 1, 2))):
            self._spawn("publisher", players.publish)
        for name, actor, chance in (
            ("undo", players.undo, 0.45),
            ("expiry", players.expire, 0.35),
            ("compaction", players.compact, 0.45),
            ("sweeper", players.sweep, 0.45),
            ("backup", self._backup_player.save, 0.2),
            ("consumer", self._consumer.consume, 0.55),
            ("consumer", self._consumer.consume, 0.15),
            ("somebody", players.meddle, 0.8),
            ("somebody", players.meddle, 0.5),
        ):
            if random.random() < chance:
                self._spawn(name, actor)
        for _ in range(random.choice((0, 1, 1, 1, 2))):
            ahead = timedelta(days=20) if random.random() < 0.2 else timedelta(0)
            if ahead:
                world.note("clock ahead")
            self._spawn("collector", partial(players.collect, ahead=ahead))
        world.scheduler.run()
        world.network.flush()
        self._check()

    def _restore_nessie(self) -> None:
        """Set Nessie back to an earlier state, as after a disaster. No actor is at work."""
        world, players = self._world, self._players
        if self._backup is None:
            return
        files, present = world.live_files(), NessieBackup(world.server.history)
        self._backup.restore(world.server.history)
        if any(world.states.missing_files(location) for location in world.live_locations()):
            present.restore(world.server.history)
            world.note("backup too old", "files of it were deleted since")
            return
        world.is_journal_behind = self._has_lost_passes()
        if world.is_journal_behind:
            world.lost_files = (world.lost_files | files) - world.live_files()
            world.note("Nessie restored")
        else:
            world.note("Nessie restored, unnoticed")
        players.forget_lost_runs()
        self._backup = None

    def _has_lost_passes(self) -> bool:
        """Return whether the warehouse knows of a journal or of collections that Nessie does not have."""
        lake = self._world.calm_lake
        journal = CollectionJournal.of_lake(lake, WarehouseFiles.from_settings(lake.settings))
        marker = journal.read_marker()
        if marker is None:
            return False
        return journal._journal_id() != marker["journal"] or journal.count_passes() < marker["passes"]

    def _restore_lake(self) -> None:
        """Set Nessie and the warehouse back to a backup. No actor is at work."""
        if not self._backup_player.restore():
            return
        self._world.lost_files = frozenset()
        self._world.is_journal_behind = self._has_lost_passes()
        self._players.forget_lost_runs()
        self._backup = None

    def _check(self) -> None:
        world = self._world
        for location in sorted(world.live_locations()):
            missing = world.states.missing_files(location)
            world.require(not missing, f"the live state {location} lacks {missing}")
        if not world.violations:
            self._main.check()
            self._consumer.check()
        if world.violations:
            raise Violated("\n".join(world.violations))

    # -- the quiet end ---------------------------------------------------------------------------------

    def _end(self) -> None:
        """Let everything end without faults. Then two passes of the collector leave only reachable files."""
        world, players = self._world, self._players
        world.let_faults_end()
        world.note("healed")
        while works := [work for work in players.works.values() if work.is_alive]:
            for work in works:
                self._spawn("run", partial(players.write, work, 3))
            world.scheduler.run()
        for actor in (players.publish, players.publish, players.compact, players.expire):
            self._spawn("end", actor)
            world.scheduler.run()
        self._check()
        if world.is_journal_behind:
            self._collect()  # refused, until a person has accepted the loss
            world.lost_files, world.is_journal_behind = frozenset(), False
            self._collect(adopt_journal=True)
        self._check()
        world.let_time_pass(timedelta(days=2))
        remove_abandoned_branches(world.calm_lake.nessie, now=world.now())
        self._spawn("sweeper", players.sweep)
        world.scheduler.run()
        self._check()
        players.delete_leftovers()
        world.let_time_pass(HORIZON + GRACE)
        kept = world.live_files(HORIZON + CLOCK_TOLERANCE)
        self._collect()
        world.let_time_pass(DELAY + timedelta(hours=1))
        self._collect()
        self._check()
        left = list_files([world.root / NAMESPACE]) - kept
        world.require(not left, f"unreachable files are left: {sorted(left)}")
        lost = {path for path in world.live_files() if not Path(path).exists()}
        world.require(not lost, f"reachable files are gone: {sorted(lost)}")
        if world.violations:
            raise Violated("\n".join(world.violations))

    def _collect(self, *, adopt_journal: bool = False) -> None:
        self._spawn("collector", partial(self._players.collect, adopt_journal=adopt_journal))
        self._world.scheduler.run()
