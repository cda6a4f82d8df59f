"""Schedules of runs, consumers and all maintenance, with lost replies, killed processes and restored backups.

One schedule by its seed: `python -m branchlake_dagster_tests.maintenance_simulation SEED`.
`BRANCHLAKE_TEST_MAINTENANCE_SCHEDULES` sets how many random ones `make test-soak` plays.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from branchlake_dagster.backup import lake_backup
from branchlake_dagster.cleanup.sweep_plan import SweepPlanner
from branchlake_dagster.compaction import table_publication
from branchlake_dagster.compaction.compaction_plan import PlannedPartition
from branchlake_dagster.compaction.compactor import Compactor
from branchlake_dagster.compaction.result import CompactedPartition, CompactedTable
from branchlake_dagster.expiry.roots import LakeRoots
from branchlake_dagster.garbage_collection import collector as collector_module
from branchlake_dagster.garbage_collection import reachable_files
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.garbage_collection.journal import CollectionJournal
from branchlake_dagster.garbage_collection.live_history import LiveHistory, LiveState
from branchlake_dagster.garbage_collection.orphan_rule import OrphanRule
from branchlake_dagster.garbage_collection.reachable_files import StateFiles
from branchlake_dagster.garbage_collection.warehouse_files import to_microseconds
from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, NessieOutcomeUnknown
from branchlake_dagster.nessie.model import ContentKey, Reference
from branchlake_dagster.undo.undrop import undrop_table
from branchlake_dagster_tests.maintenance_simulation.play import Played, play
from branchlake_dagster_tests.maintenance_simulation.players import Players
from branchlake_dagster_tests.maintenance_simulation.position_consumer import PositionConsumer
from branchlake_dagster_tests.maintenance_simulation.row_changes import ChangeKind, RowChange
from branchlake_dagster_tests.maintenance_simulation.world import DELAY, GRACE, HORIZON, NAMESPACE, World

pytestmark = pytest.mark.chaos

SEED = 0
MORE_SEEDS = (2, 4, 371170476)
"""In the last one, a restored Nessie has lost passes of the collector, but no files."""
RANDOM_SCHEDULES = int(os.environ.get("BRANCHLAKE_TEST_MAINTENANCE_SCHEDULES", "150"))
_WANTED = (
    "published",
    "refused",
    "discarded",
    "undone",
    "snapshots expired",
    "manifests merged",
    "compacted",
    "compacted beside others",
    "deletes folded",
    "collection",
    "file deleted",
    "journal lost",
    "Nessie restored",
    "lake saved",
    "lake restored",
    "change consumed",
    "swept",
    "clock ahead",
    "old staged file committed",
    "statistics written",
    "table dropped",
    "table restored",
    "tag created",
    "killed",
    "reply of a deletion lost",
)
"""What must have happened in many schedules: those in which nothing happens prove nothing."""
_MANY_SCHEDULES = 1_000
"""The rarest events of `_WANTED` happen in one of a hundred schedules."""


@cache
def play_once(seed: int) -> Played:
    """Play a schedule without a planted bug."""
    return play(seed)


@pytest.mark.parametrize(
    "seed",
    [SEED, *(pytest.param(seed, marks=pytest.mark.soak) for seed in MORE_SEEDS)],  # the same with other draws
)
def test_a_schedule(seed: int) -> None:
    played = play_once(seed)
    assert played.failure is None, played.failure
    assert {"published", "collection", "file deleted"} <= played.seen.keys()


@pytest.mark.soak
@pytest.mark.timeout(600 + 10 * RANDOM_SCHEDULES)
def test_random_schedules() -> None:
    first = random.randrange(1 << 32)
    seen: Counter[str] = Counter()
    for seed in range(first, first + RANDOM_SCHEDULES):
        played = play(seed)
        assert played.failure is None, played.failure
        seen += played.seen
    assert RANDOM_SCHEDULES < _MANY_SCHEDULES or [name for name in _WANTED if not seen[name]] == [], first


def test_a_seed_is_one_schedule() -> None:
    assert play(SEED).seen == play_once(SEED).seen


# -- planted bugs --------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def forget_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root is forgotten."""
    walk = LiveHistory._walk

    def walk_branches(self: LiveHistory, ref: Reference) -> None:
        if ref.type == "BRANCH":
            walk(self, ref)

    monkeypatch.setattr(LiveHistory, "_walk", walk_branches)


def forget_run_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root is forgotten."""
    walk = LiveHistory._walk

    def walk_others(self: LiveHistory, ref: Reference) -> None:
        if not ref.name.startswith("run-"):
            walk(self, ref)

    monkeypatch.setattr(LiveHistory, "_walk", walk_others)


def ignore_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers without heartbeats are protected by the grace alone, so claims are ignored as well."""
    ignore_claims(monkeypatch)
    monkeypatch.setattr(OrphanRule, "newest_change_us", property(lambda rule: to_microseconds(rule.now)))


def ignore_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a commit in flight are not protected."""
    monkeypatch.setattr(collector_module, "load_claims", lambda *_: [])


def adopt_every_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is lost, and nobody notices it."""
    verify = CollectionJournal.verify
    monkeypatch.setattr(
        CollectionJournal, "verify", lambda self, marker, **_: verify(self, marker, adopt=True)
    )


def take_lost_replies_for_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply is lost, and the files of the commit are deleted as if it had failed."""
    commit = NessieClient.commit

    def commit_or_fail(self: NessieClient, ref: str, *args: Any, **named: Any) -> object:
        try:
            return commit(self, ref, *args, **named)
        except NessieOutcomeUnknown as error:
            raise NessieConflict(error.message) from error

    monkeypatch.setattr(NessieClient, "commit", commit_or_fail)


def trust_the_fastest_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is ahead makes files old, and plans of it wait too long."""
    monkeypatch.setattr(collector_module, "min", max, raising=False)


def compare_spellings_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchlake_dagster.tables.location_keys.canonical_location", lambda p: p)


def forget_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = reachable_files.parse_state

    def parse_without(metadata: Any) -> StateFiles:
        return replace(parse(metadata), statistics=())

    monkeypatch.setattr(reachable_files, "parse_state", parse_without)


def bring_deleted_rows_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compaction that folded deletes in is published beside runs, and reversed for them."""
    monkeypatch.setattr(table_publication, "_find_irreversible", lambda *_, **__: None)
    for module in ("compaction_reversal", "conflicts"):
        monkeypatch.setattr(f"branchlake_dagster.publication.{module}.has_same_rows", lambda *_: True)


def believe_the_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Success is reported although no file was rewritten."""
    publish = Compactor._publish

    def report_success(
        self: Compactor,
        compacted: CompactedTable,
        rewritten: Any,
        planned: Sequence[PlannedPartition],
        *rest: Any,
    ) -> CompactedTable:
        result = publish(self, compacted, rewritten, planned, *rest)
        done = tuple(
            CompactedPartition(one.measured.partition, one.files, one.bytes, 1, one.bytes, 1, 0)
            for one in planned
        )
        return replace(result, partitions=done, left=())

    monkeypatch.setattr(Compactor, "_publish", report_success)


def copy_files_before_nessie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup names files that were written after it had copied the warehouse."""
    list_folders = lake_backup.list_lake_folders
    monkeypatch.setattr(
        lake_backup, "list_lake_folders", lambda *arguments: tuple(reversed(list_folders(*arguments)))
    )


def sweep_files_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep deletes files of a discarded run that a tag still has."""
    monkeypatch.setattr(SweepPlanner, "_find_other_tables", lambda *_: {})


def forget_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expiry removes snapshots since the position of a consumer."""
    monkeypatch.setattr(LakeRoots, "positions_of", lambda *_: [])


def delete_without_a_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that became reachable between the plan and its execution is deleted."""
    monkeypatch.setattr(FileCollector, "_select_orphans", lambda self, one, batch: (list(batch), frozenset()))


def forget_dropped_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a dropped table that a tag still has are not protected, nor those of a run's new table."""
    update, add_content = LiveHistory.update, LiveHistory._add_content
    present: set[ContentKey] = set()

    def read_names_and_update(self: LiveHistory) -> list[LiveState]:
        present.clear()
        present.update(entry.key for entry in self._client.entries("main"))
        return update(self)

    def add_present(self: LiveHistory, key: ContentKey, *rest: Any) -> None:
        if key in present or key[0] == "branchlake":
            add_content(self, key, *rest)

    monkeypatch.setattr(LiveHistory, "update", read_names_and_update)
    monkeypatch.setattr(LiveHistory, "_add_content", add_present)


FILE_LOST = (" deleted ", " lacks ")
"""What is reported of a file that something still needs: at its deletion, or when a commit names it later."""
PLANTED: list[tuple[Plant, int, tuple[str, ...]]] = [
    (forget_tags, 0, FILE_LOST),
    (forget_run_branches, 12, FILE_LOST),
    (ignore_the_grace, 2, FILE_LOST),
    (ignore_claims, 0, FILE_LOST),
    (adopt_every_journal, 4, (" which Nessie had lost",)),
    (take_lost_replies_for_failures, 2, FILE_LOST),
    (trust_the_fastest_clock, 2, FILE_LOST),
    (compare_spellings_literally, 2, FILE_LOST),
    (forget_statistics, 1, FILE_LOST),
    (bring_deleted_rows_back, 51, (" instead of ",)),
    (believe_the_rewrite, 0, ("compact",)),
    (copy_files_before_nessie, 0, (" the backup has ",)),
    (sweep_files_in_use, 0, FILE_LOST),
]
"""A planted bug, a seed whose schedule finds it, and parts of what is reported then."""


@pytest.mark.parametrize(("plant", "seed", "reports"), PLANTED, ids=[plant.__name__ for plant, *_ in PLANTED])
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, seed: int, reports: tuple[str, ...]
) -> None:
    plant(monkeypatch)
    failure = play(seed).failure
    assert failure is not None
    _, violated, violations = failure.rpartition("Violated: ")
    assert violated
    assert any(report in violations for report in reports), violations


def test_the_grace_protects_writers_without_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule with which the ignored grace is found has no other failure without claims."""
    ignore_claims(monkeypatch)
    assert play(next(seed for plant, seed, _ in PLANTED if plant is ignore_the_grace)).failure is None


def collect_beside_a_restored_table(folder: Path) -> list[str]:
    """Bring a dropped table back between the plan to delete its files and the next pass; return violations."""
    world = World(0, folder)
    world.let_faults_end()
    with world.in_place():
        world.furnish()
        players = Players(world)
        world.lake.catalog().drop_table((NAMESPACE, "t"))
        world.let_time_pass(HORIZON + GRACE)
        players.collect()
        world.let_time_pass(DELAY + timedelta(hours=1))
        undrop_table(world.lake, f"{NAMESPACE}.t")
        players.collect()
    assert world.seen["collection"] == 2
    return world.violations


def test_a_second_pass_judges_planned_files_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect_beside_a_restored_table(tmp_path / "sound") == []
    delete_without_a_second_look(monkeypatch)
    violations = collect_beside_a_restored_table(tmp_path / "planted")
    assert any(" deleted " in violation for violation in violations)


def expire_beside_a_position(folder: Path) -> list[str]:
    """Expire snapshots that only the position of a consumer needs; return violations."""
    world = World(0, folder)
    world.let_faults_end()
    with world.in_place():
        world.furnish()
        players = Players(world)
        consumer = PositionConsumer(world, players)
        consumer.consume()
        players.publish()
        for number in range(3):
            change = RowChange("t", ChangeKind.REPLACE, (("a", number),), "a")
            players.write(players.add_run([change]), 1)
            players.publish()
        world.let_time_pass(timedelta(days=2, hours=12))
        players.expire()
        consumer.check()
    assert world.seen["published"] == 4
    return world.violations


def test_an_expiry_keeps_what_a_consumer_has_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expire_beside_a_position(tmp_path / "sound") == []
    forget_positions(monkeypatch)
    violations = expire_beside_a_position(tmp_path / "planted")
    assert any(" is lost" in violation for violation in violations)


def collect_beside_a_tag(folder: Path) -> list[str]:
    """Collect files of a dropped table that a tag still has; return violations."""
    world = World(0, folder)
    world.let_faults_end()
    with world.in_place():
        world.furnish()
        players = Players(world)
        nessie = world.lake.nessie
        nessie.create_tag("release-1", from_ref="main", from_hash=nessie.reference("main").hash)
        world.lake.catalog().drop_table((NAMESPACE, "t"))
        world.let_time_pass(HORIZON + GRACE)
        players.collect()
        world.let_time_pass(DELAY + timedelta(hours=1))
        players.collect()
    assert world.seen["collection"] == 2
    return world.violations


def test_files_of_a_dropped_table_that_a_tag_still_has_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert collect_beside_a_tag(tmp_path / "sound") == []
    forget_dropped_tables(monkeypatch)
    violations = collect_beside_a_tag(tmp_path / "planted")
    assert any(" deleted " in violation for violation in violations)
