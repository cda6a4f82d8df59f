"""The journal of planned files, budgets and repeated passes, in an in-memory lake with real files."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import Transaction

from branchlake_dagster.errors import (
    JournalLost,
    WarehouseShared,
)
from branchlake_dagster.garbage_collection import collector as collector_module
from branchlake_dagster.garbage_collection import journal as journal_module
from branchlake_dagster.garbage_collection.collection_plan import OpenPlan, PlannedFile, plan_digest
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.garbage_collection.journal import JournaledPlan
from branchlake_dagster.garbage_collection.live_history import LiveHistory
from branchlake_dagster.garbage_collection.reachable_files import (
    ReachableFiles,
)
from branchlake_dagster.garbage_collection.summary import (
    format_plan,
    status_to_json,
)
from branchlake_dagster.garbage_collection.warehouse_files import Deletion
from branchlake_dagster.internals.pyiceberg import CachingTransaction
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.stored_names import JOURNAL_BRANCH
from branchlake_dagster_tests.garbage_collection.collected_lake import (
    DAY,
    CollectedLake,
    Killed,
    SavedLake,
    forget_repositories,
    open_lake,
)

pytestmark = pytest.mark.lake


def test_the_journal_survives_its_own_collections(lake: CollectedLake) -> None:
    for number in range(3):
        lake.stray(file=f"{number}.parquet")
        lake.age()
        lake.collect()
    status = lake.collector().status()
    assert (status.passes, status.deleted_files, status.open_plans) == (6, 3, ())
    assert status.last_pass_started_at is not None
    assert status.last_pass_ended_at is not None
    assert status.last_pass_ended_at > status.last_pass_started_at
    json.dumps(status_to_json(status))


@pytest.mark.parametrize("lost", ["branch", "tables"])
def test_nothing_is_deleted_if_the_journal_is_lost(lake: CollectedLake, lost: str) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    if lost == "branch":
        lake.delete(JOURNAL_BRANCH)
    else:
        for name in ("collections", "deleted_files", "table_folders"):
            lake.lake.catalog(JOURNAL_BRANCH).drop_table(("branchlake", name))
    before = lake.files()
    for call in (lake.collector().run, lake.collector().plan):
        with pytest.raises(JournalLost) as raised:
            call()
        assert raised.value.reason == "no_journal"
    assert lake.files() == before
    # A person accepts it. The plan is lost as well, so the files wait for another delay.
    adopted = lake.collector(ago=2 * DAY).run(adopt_journal=True)
    assert (adopted.executed, adopted.plan.file_count) == ((), 1)
    assert lake.collector().run().deleted == 1


@pytest.mark.parametrize("ending", [".metadata.json", ".avro", ".parquet"])
def test_nothing_is_deleted_if_files_of_the_journal_are_missing(lake: CollectedLake, ending: str) -> None:
    """As after a restore of Nessie from a backup that is older than the history horizon."""
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    for path in (lake.root / "branchlake").rglob(f"*{ending}"):
        path.unlink()
    before = lake.files()
    for call in (lake.collector().run, lake.collector().plan):
        with pytest.raises(JournalLost) as raised:
            call()
        assert raised.value.reason == "unreadable_journal"
    assert lake.files() == before
    # A person accepts it, and a new journal begins.
    adopted = lake.collector(ago=2 * DAY).run(adopt_journal=True)
    assert (adopted.executed, adopted.plan.file_count) == ((), 1)
    assert lake.collector().run().deleted == 1


def test_nothing_is_deleted_if_nessie_is_older_than_the_warehouse(lake: CollectedLake) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=3 * DAY).run()
    backup = lake.nessie.reference(JOURNAL_BRANCH).hash
    lake.collector(ago=2 * DAY).run()
    lake.delete(JOURNAL_BRANCH)
    lake.nessie.create_branch(JOURNAL_BRANCH, from_ref=MAIN, from_hash=backup)
    before = lake.files()
    with pytest.raises(JournalLost) as raised:
        lake.collector().run()
    assert raised.value.reason == "older_journal"
    assert lake.files() == before


def test_a_warehouse_of_another_nessie_is_left_alone(lake: CollectedLake, tmp_path: Path) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    other = open_lake(tmp_path / "other", {"warehouse": f"file://{lake.root}"})
    with pytest.raises(WarehouseShared):
        other.collector().run()
    forget_repositories(lake)
    with pytest.raises(JournalLost) as raised:
        other.collector().run()
    assert raised.value.reason == "no_journal"
    other.collector(ago=2 * DAY).journal.open(adopt=True)
    with pytest.raises(WarehouseShared):
        lake.collector().run()
    forget_repositories(lake)
    with pytest.raises(JournalLost) as raised:
        lake.collector().run()
    assert raised.value.reason == "other_journal"


def test_a_plan_whose_rows_are_not_those_that_were_planned_is_abandoned(lake: CollectedLake) -> None:
    lake.stray()
    lake.age()
    first = lake.collector(ago=2 * DAY).run()
    collector = lake.collector()
    victim = replace(first.plan.sample[0], path=lake.stray())
    lake.age()
    collector.journal.record_files(first.plan.plan_id, [victim], "planned", datetime.now(UTC))
    before = lake.files()
    result = collector.run()
    assert [(each.state, each.deleted) for each in result.executed] == [("damaged", 0)]
    assert lake.files() == before
    assert collector.run().plan.file_count == 2


def test_a_journaled_file_outside_the_tables_folders_is_kept(lake: CollectedLake, tmp_path: Path) -> None:
    """Although the plan is complete: somebody else wrote it, or a bug did."""
    victims = [tmp_path / "mine.csv", lake.root / "_branchlake" / "x.parquet", lake.root / "x.parquet"]
    for path in victims:
        lake.write(path)
    files = [PlannedFile(str(path), "", "unreferenced", 1, 0) for path in victims]
    stamp = (datetime.now(UTC) - 20 * DAY).timestamp()
    for path in victims:
        os.utime(path, (stamp, stamp))
    files = [replace(file, modified_us=int(Path(file.path).stat().st_mtime_ns // 1000)) for file in files]
    collector, planned_at = lake.collector(), datetime.now(UTC) - 2 * DAY
    collector.journal.open()
    collector.journal.record_files("p", files, "planned", planned_at)
    plan = OpenPlan("p", planned_at, planned_at + DAY, len(files), 3)
    rules = collector.rules.digest
    journaled = JournaledPlan(plan, plan_digest("h", rules, files), rules, "h")
    details = {"due_at": plan.due_at.isoformat()}
    collector.journal.record_event("x", "planned", planned_at, plan=journaled, details=details)
    (executed,) = lake.collector().run().executed
    assert (executed.state, executed.deleted, executed.kept) == ("executed", 0, 3)
    assert all(path.exists() for path in victims)


def test_a_plan_of_other_settings_is_abandoned(lake: CollectedLake) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    collector = lake.collector(horizons={"release-*": 365 * DAY})
    before = lake.files()
    result = collector.run()
    assert [each.state for each in result.executed] == ["outdated"]
    assert lake.files() == before


@pytest.mark.long
def test_a_pass_that_was_killed_anywhere_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each write to the journal, and before each deletion."""
    monkeypatch.setattr(collector_module, "BATCH_FILES", 2)
    # PyIceberg's own property copies all metadata each time.
    monkeypatch.setattr(Transaction, "_cached_metadata", None, raising=False)
    monkeypatch.setattr(Transaction, "table_metadata", CachingTransaction.table_metadata)
    lake = open_lake(tmp_path)
    lake.create()
    lake.append(1)
    kept = lake.files()
    for number in range(3):
        lake.stray(file=f"{number}.parquet")
    lake.age()
    saved = SavedLake(lake)
    steps = []
    for ago, later in ((6 * DAY, (2 * DAY, 0 * DAY)), (4 * DAY, (0 * DAY,))):
        # a pass that plans, and then one that deletes
        for step in itertools.count():
            saved.restore()
            try:
                killed_at(step, lake.collector(ago=ago)).run()
            except Killed:
                for each in later:
                    lake.collector(ago=each).run()
                assert lake.files() == kept, (ago, step)
                assert lake.rows() == [1]
            else:
                steps.append(step)
                break
        saved = SavedLake(lake)  # the next pass begins where this one, which was not killed, ended
    assert lake.files() == kept
    assert lake.rows() == [1]
    assert min(steps) >= 4, steps
    assert max(steps) >= 8, steps


def killed_at(step: int, collector: FileCollector) -> FileCollector:
    """Let a collector end at the write to the journal, or before the deletion, with this number."""
    points = itertools.count()
    append, delete_file = collector.journal._append, collector._files._delete_file

    def point() -> None:
        if next(points) == step:
            raise Killed

    def append_or_die(*args: Any) -> None:
        append(*args)
        point()

    def delete_or_die(path: str) -> Deletion:
        point()
        return delete_file(path)

    collector.journal._append = append_or_die
    collector._files._delete_file = delete_or_die
    return collector


def test_a_deletion_whose_reply_is_lost_counts_as_done(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, refused, gone = lake.stray(), lake.stray(), lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    collector = lake.collector()
    delete_one = collector._files._delete_one

    def delete(path: str) -> None:
        if path == refused:
            raise PermissionError("no")
        delete_one(path)
        if path == lost:
            raise TimeoutError("no reply")

    monkeypatch.setattr(collector._files, "_delete_one", delete)
    result = collector.run()
    (executed,) = result.executed
    assert (executed.deleted, executed.failed, executed.state) == (2, 1, "executed")
    assert refused in executed.errors[0]
    assert not Path(gone).exists()
    assert Path(refused).exists()
    # It is still an orphan, so a later plan has it.
    assert lake.collect() == {refused}


def test_a_pass_ends_with_its_budget_and_the_next_one_continues(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "BATCH_FILES", 1)
    for name in ("u", "v"):
        lake.create(name)
    strays = {lake.stray(name) for name in ("t", "u", "v")}
    lake.age()
    planned = set()
    for number in range(8):
        result = lake.collector(ago=(5 - number / 10) * DAY, budget_s=1e-9).run()
        assert result.plan.metrics.listed_folders == 1
        planned |= {file.path for file in result.plan.sample}
        if planned == strays:
            break
    assert planned == strays
    assert number >= 2  # a pass has only one of the three folders
    before = lake.files()
    # One batch is deleted whatever the budget is, so that passes whose marking takes long get on.
    assert lake.collector(ago=DAY / 10, budget_s=1e-9).run().deleted == 1
    lake.collector().run()
    assert before - lake.files() == strays


def test_the_budget_begins_when_everything_is_marked(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("u", "v"):
        lake.create(name)
        lake.stray(name)
    lake.age()
    collector = lake.collector(budget_s=60.0)
    monotonic, passed = collector._monotonic, [0.0]
    collector._monotonic = lambda: monotonic() + sum(passed)
    add_states = ReachableFiles.add_states

    def add_slowly(self: ReachableFiles, states: Any) -> None:
        add_states(self, states)
        passed.append(1000.0)

    monkeypatch.setattr(ReachableFiles, "add_states", add_slowly)
    plan = collector.plan()
    assert (plan.metrics.skipped_folders, plan.file_count) == (0, 2)


def test_marking_ends_with_the_budget_although_commits_go_on(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    update, updates = LiveHistory.update, [0]

    def update_and_commit(self: LiveHistory) -> Any:
        lake.append(updates[0])
        updates[0] += 1
        return update(self)

    monkeypatch.setattr(LiveHistory, "update", update_and_commit)
    result = lake.collector(budget_s=1e-9).run()
    assert result.deleted == 1
    assert updates[0] == 3  # to begin with, after the listing, and before the batch


def test_a_plan_has_a_limit_and_the_next_pass_plans_the_rest(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    strays = {lake.stray(file=f"{number}.parquet") for number in range(5)}
    lake.age()
    monkeypatch.setattr(collector_module, "MAX_PLANNED_FILES", 2)
    plans = [lake.collector(ago=(3 - number / 10) * DAY).run().plan for number in range(3)]
    assert [(plan.file_count, plan.metrics.left_files) for plan in plans] == [(2, 3), (2, 1), (1, 0)]
    assert {file.path for plan in plans for file in plan.sample} == strays
    assert format_plan(plans[0])
    before = lake.files()
    lake.collector().run()
    assert before - lake.files() == strays


def test_old_rows_and_snapshots_of_the_journal_are_removed(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_KEPT_SNAPSHOTS", 2)
    lake.stray()
    lake.age(400)
    lake.at(datetime.now(UTC) - 200 * DAY)
    for number in range(4):
        lake.collector(ago=(200 - 2 * number) * DAY).run()
    lake.at(datetime.now(UTC))
    collector = lake.collector()
    collector.run()
    collector.run()
    journal = collector.journal
    assert journal.count_passes() >= 6
    assert [event for event in journal.load_events() if event["event"] == "planned"] == []
    assert all(
        len(journal._load_table(name).metadata.snapshots) <= 4
        for name in ("collections", "deleted_files", "table_folders")
    )
    collector.run()
