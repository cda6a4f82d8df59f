"""Explanations of files and moments, and reports of passes, in an in-memory lake with real files."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import Table

from branchlake_dagster.errors import (
    ConfigurationError,
    MomentExpired,
)
from branchlake_dagster.garbage_collection import journal as journal_module
from branchlake_dagster.garbage_collection.explanation import FileExplanation, MomentExplanation
from branchlake_dagster.garbage_collection.summary import (
    explanation_to_json,
    format_explanation,
    format_plan,
    format_result,
    list_holder_rows,
    list_plan_rows,
    list_table_rows,
    plan_to_json,
    result_to_json,
)
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.stored_names import JOURNAL_BRANCH
from branchlake_dagster_tests.garbage_collection.collected_lake import (
    DAY,
    CollectedLake,
    open_lake,
)
from branchlake_dagster_tests.suite.raised import raising

pytestmark = pytest.mark.lake


def test_two_passes_may_remove_snapshots_of_the_journal_at_once(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyIceberg repeats the removal on the newer state, which lacks these snapshots."""
    monkeypatch.setattr(journal_module, "_KEPT_SNAPSHOTS", 2)
    journal, other_journal = lake.collector().journal, lake.collector().journal
    journal.open()
    now = datetime.now(UTC)
    for event in ("started", "planned", "executed", "finished"):
        journal.record_event("pass", event, now)
    expire_snapshots = journal_module._expire_snapshots
    calls: list[str] = []

    def expire_late(table: Table) -> None:
        calls.append(table.name()[-1])
        if calls == ["deleted_files", "collections"]:
            other_journal.trim("other pass", now)
        expire_snapshots(table)

    monkeypatch.setattr(journal_module, "_expire_snapshots", expire_late)
    journal.trim("pass", now)
    table = lake.lake.catalog(JOURNAL_BRANCH).load_table(("branchlake", "collections"))
    assert len(table.metadata.snapshots) == 2
    events = [event["event"] for event in journal.load_events()]
    assert sorted(events) == ["executed", "finished", "planned", "started"]


def test_a_pass_may_start_while_another_one_removes_old_rows_of_the_journal(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, other_journal = lake.collector().journal, lake.collector().journal
    journal.open()
    other_journal.open()
    now = datetime.now(UTC)
    for days in (120, 110, 100, 1):
        journal.record_event(f"pass {days}", "started", now - timedelta(days=days))
    change = journal_module.CollectionJournal._change
    others: list[journal_module.CollectionJournal] = [other_journal]

    def start_another_pass_after(self: journal_module.CollectionJournal, name: str, *rest: Any) -> None:
        change(self, name, *rest)
        if self is journal and name == "collections" and others:
            others.pop().record_event("other pass", "started", now)

    monkeypatch.setattr(journal_module.CollectionJournal, "_change", start_another_pass_after)
    journal.trim("pass", now)
    assert not others
    marker = journal.read_marker()
    assert marker is not None
    assert journal.count_passes() == 5 == marker["passes"]
    journal.verify(marker)


def test_a_file_is_explained(lake: CollectedLake) -> None:
    lake.tag("release-1")
    old = lake.append(2)
    (first,) = lake.data_files(ref="release-1")
    stray = lake.stray()
    lake.age()
    found = lake.collector().explain(f"file:{first}")
    assert isinstance(found, FileExplanation)
    assert {holder.reference for holder in found.holders} >= {MAIN, "release-1"}
    assert all(holder.snapshot_ids for holder in found.holders)
    on_main = lake.collector().explain(old)
    assert isinstance(on_main, FileExplanation)
    assert {holder.reference for holder in on_main.holders} == {MAIN}
    nobody = lake.collector().explain(stray)
    assert isinstance(nobody, FileExplanation)
    assert (nobody.holders, nobody.exists, nobody.state, nobody.due_at) == ((), True, "", None)
    planned_at = lake.collector(ago=2 * DAY).run().started_at
    planned = lake.collector().explain(stray)
    assert isinstance(planned, FileExplanation)
    assert (planned.state, planned.unreachable_since, planned.due_at) == (
        "planned",
        planned_at,
        planned_at + DAY,
    )
    lake.collector().run()
    deleted = lake.collector().explain(stray)
    assert isinstance(deleted, FileExplanation)
    assert (deleted.exists, deleted.state, deleted.due_at) == (False, "deleted", None)
    for explanation in (found, nobody, planned, deleted):
        json.dumps(explanation_to_json(explanation))
        assert format_explanation(explanation)
    assert len(list_holder_rows(found)) == len(found.holders)


def test_a_file_is_explained_by_the_name_of_a_link_to_it(lake: CollectedLake, tmp_path: Path) -> None:
    file = lake.append(2)
    direct = lake.collector().explain(file)
    link = tmp_path / "link.parquet"
    link.symlink_to(file)
    found = lake.collector().explain(str(link))
    assert isinstance(found, FileExplanation)
    assert isinstance(direct, FileExplanation)
    assert (found.holders, found.size, found.modified_at) == (direct.holders, direct.size, direct.modified_at)
    # The table names a link: another disk has the file.
    moved = tmp_path / "moved.parquet"
    Path(file).rename(moved)
    Path(file).symlink_to(moved)
    for path in (file, f"file:{file}"):
        found = lake.collector().explain(path)
        assert isinstance(found, FileExplanation)
        assert (found.holders, found.exists, found.size) == (direct.holders, True, direct.size)


def test_what_is_no_file_of_the_warehouses_storage_is_not_explained(lake: CollectedLake) -> None:
    """An answer such as "no reference leads to it" would invite somebody to delete it."""
    for folder in (lake.table_folder(), lake.root, lake.table_folder() / "data"):
        with raising(ConfigurationError, str(folder), reason="not_a_file", subject=str(folder)):
            lake.collector().explain(str(folder))
    pipe = lake.root / "pipe"
    os.mkfifo(pipe)
    with raising(ConfigurationError, str(pipe), reason="not_a_file", subject=str(pipe)):
        lake.collector().explain(str(pipe))
    with raising(ConfigurationError, reason="not_unicode", subject="'/lake/\\udcff'"):
        lake.collector().explain("/lake/\udcff")
    for location in ("s3://bucket/k.parquet", "hdfs://host/k.parquet"):
        with raising(ConfigurationError, location, reason="other_storage", subject=location):
            lake.collector().explain(location)


@pytest.mark.parametrize("moment", ["", "x", "0001-01-01T00:00+05:00", "9999-12-31T23:59:59-05:00"])
def test_a_moment_that_is_none_is_refused(lake: CollectedLake, moment: str) -> None:
    with raising(ConfigurationError, reason="not_a_moment", subject=f"shop.t@{moment}"):
        lake.collector().explain(f"shop.t@{moment}")


def test_a_moment_of_the_future_is_refused(lake: CollectedLake) -> None:
    moment = (datetime.now(UTC) + DAY).isoformat()
    with raising(ConfigurationError, reason="moment_in_future", subject=f"shop.t@{moment}"):
        lake.collector().explain(f"shop.t@{moment}")


def test_a_moment_is_explained(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    lake.at(datetime.now(UTC) - 60 * DAY)
    lake.create()
    lake.append(1)
    lake.at(datetime.now(UTC) - 40 * DAY)
    lake.append(2)
    lake.at(datetime.now(UTC) - 5 * DAY)
    lake.append(3)

    def explain(days: float) -> MomentExplanation:
        moment = (datetime.now(UTC) - days * DAY).isoformat()
        found = lake.collector().explain(f"shop.t@{moment}")
        assert isinstance(found, MomentExplanation)
        json.dumps(explanation_to_json(found))
        assert format_explanation(found)
        return found

    assert [explain(days).expired for days in (55, 35, 1)] == [True, False, False]
    oldest = explain(55).oldest_moment
    assert oldest is not None
    assert abs(datetime.now(UTC) - oldest - 30 * DAY) < timedelta(minutes=5)


def test_plans_and_results_are_reported(lake: CollectedLake) -> None:
    lake.stray()
    lake.age()
    collector = lake.collector(ago=2 * DAY)
    plan = collector.plan()
    planned = collector.run()
    result = lake.collector().run()
    assert len(list_table_rows(plan)) == 1
    assert len(list_plan_rows(lake.collector().status().open_plans)) == 0
    assert format_plan(plan)
    assert format_result(result)
    json.dumps([plan_to_json(plan), result_to_json(planned), result_to_json(result)])


def test_progress_is_reported(lake: CollectedLake) -> None:
    sentences: list[str] = []
    lake.collector(progress=sentences.append).plan()
    assert len(sentences) >= 3


def test_a_query_of_an_expired_moment_says_so(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    lake.at(datetime.now(UTC) - 60 * DAY)
    lake.create()
    lake.append(1)
    expired = lake.nessie.reference(MAIN).hash
    lake.at(datetime.now(UTC) - 40 * DAY)
    lake.append(2)
    at_horizon = lake.nessie.reference(MAIN).hash
    lake.at(datetime.now(UTC))
    lake.append(3)
    reader = LakeReader(lake.lake)
    assert len(reader.table("shop.t", at=expired).scan().to_arrow()) == 1
    lake.age(58)
    lake.collect()
    for read in (reader.table, lambda _, at: reader.sql("SELECT * FROM shop.t", at=at)):
        with pytest.raises(MomentExpired) as raised:
            read("shop.t", at=expired)
        assert raised.value.reason == "expired"
        assert abs(datetime.now(UTC) - raised.value.oldest_moment - 30 * DAY) < timedelta(minutes=1)
    assert len(reader.table("shop.t", at=at_horizon).scan().to_arrow()) == 2
    # A file that is missing at a moment that must be readable is no expiry.
    path = lake.table().metadata_location.removeprefix("file://")
    Path(path).unlink()
    with pytest.raises(FileNotFoundError):
        reader.table("shop.t")
