"""Compaction, expiry and collection as users meet them: by command, by job, and in definitions."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlparse

import dagster as dg
import pyarrow as pa
import pytest
from click.testing import CliRunner

from branchlake_dagster import MaintenanceOptions, branchlake_definitions, maintenance_definitions
from branchlake_dagster.cli.main import main as command
from branchlake_dagster.compaction.compaction_plan import CompactionOptions, Strategy
from branchlake_dagster.compaction.compactor import Compactor, plan_compactions
from branchlake_dagster.errors import ConfigurationError, StoredFileDamaged, TableMissing
from branchlake_dagster.expiry.retention import ExpiryPolicy
from branchlake_dagster.garbage_collection.collection_plan import CollectionResult
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.maintenance import maintenance_run
from branchlake_dagster.maintenance.definitions import ALL_PARTS
from branchlake_dagster.maintenance.maintenance_jobs import maintenance_job
from branchlake_dagster.maintenance.maintenance_result import MaintenancePart, MaintenancePlan
from branchlake_dagster.maintenance.maintenance_run import plan_maintenance, run_maintenance
from branchlake_dagster.maintenance.summary import Section, list_plan_sections, plan_to_json
from branchlake_dagster.runs.heartbeats import HeartbeatStore, send_heartbeats
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings
from branchlake_dagster.waiting import holds_within
from branchlake_dagster_tests.garbage_collection.collected_lake import trust_modification_times
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.json_contract import check_output
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse

SHORT = MaintenanceOptions(
    CompactionOptions(max_small_files=2, include_hot=True),
    ExpiryPolicy(keep_count=1, keep_age=timedelta(0), undo_age=timedelta(0)),
)


@pytest.fixture
def table(lakehouse: Lakehouse, namespace: str) -> Iterator[str]:
    """A table of four small files and four snapshots."""
    catalog = lakehouse.catalog()
    catalog.create_namespace((namespace,))
    rows = pa.table({"n": pa.array([1], pa.int64())})
    table = catalog.create_table((namespace, "t"), schema=rows.schema)
    for _ in range(4):
        table.append(rows)
    yield f"{namespace}.t"
    catalog.drop_table((namespace, "t"))


def load(lake: Lakehouse, name: str) -> Any:
    return lake.catalog().load_table(tuple(name.split(".")))


# -- parts ---------------------------------------------------------------------------------------------


def test_a_plan_has_all_parts_and_changes_nothing(lakehouse: Lakehouse, table: str) -> None:
    head = lakehouse.nessie.reference("main").hash
    plan = plan_maintenance(lakehouse, tables=[table], options=SHORT)
    assert plan.compaction is not None
    assert [one.measured.table for one in plan.compaction.partitions] == [table]
    assert plan.expiry is not None
    assert [(one.table, one.expired_count) for one in plan.expiry.tables] == [(table, 3)]
    assert plan.collection is not None
    assert not plan.errors
    assert lakehouse.nessie.reference("main").hash == head
    assert [section.part for section in list_plan_sections(plan)] == [*ALL_PARTS]
    json.dumps(plan_to_json(plan))


def test_an_expiry_leaves_files_to_the_collection(lakehouse: Lakehouse, table: str) -> None:
    lists = [snapshot.manifest_list for snapshot in load(lakehouse, table).metadata.snapshots]
    result = run_maintenance(
        lakehouse, [MaintenancePart.EXPIRY, MaintenancePart.COLLECTION], tables=[table], options=SHORT
    )
    assert not result.has_failed
    assert result.compaction is None
    assert result.expiry is not None
    assert [(one.expired_count, one.kept_count) for one in result.expiry.tables] == [(3, 1)]
    assert len(load(lakehouse, table).metadata.snapshots) == 1
    assert load(lakehouse, table).scan().to_arrow().num_rows == 4
    # They are younger than the grace, and earlier commits of main still have them.
    assert result.collection is not None
    assert result.collection.plan.file_count == 0
    assert all(Path(urlparse(location).path).exists() for location in lists)


def test_the_error_of_one_part_does_not_stop_the_others(
    lakehouse: Lakehouse, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoredFileDamaged("damaged", file="f")

    monkeypatch.setattr(maintenance_run, "plan_compactions", fail)
    plan = plan_maintenance(lakehouse, options=SHORT)
    assert {part: type(error) for part, error in plan.errors.items()} == {
        MaintenancePart.COMPACTION: StoredFileDamaged
    }
    assert plan.expiry is not None
    assert plan.collection is not None
    result = run_maintenance(lakehouse, tables=[table], options=SHORT)
    assert result.has_failed
    assert result.expiry is not None


def test_a_paused_run_begins_no_further_part(lakehouse: Lakehouse, table: str) -> None:
    result = run_maintenance(lakehouse, tables=[table], options=SHORT, may_continue=lambda: False)
    assert (result.compaction, result.expiry, result.collection) == (None, None, None)
    assert len(load(lakehouse, table).metadata.snapshots) == 4


def test_an_undo_of_a_publication_older_than_the_horizon_is_refused() -> None:
    options = MaintenanceOptions(expiry=ExpiryPolicy(undo_age=timedelta(days=31)))
    with raising(ConfigurationError, reason="horizon_too_short", subject="undo_age"):
        maintenance_definitions(options=options, settings=Settings())
    maintenance_definitions(options=options, settings=Settings(history_horizon_days=31))


@pytest.mark.parametrize("name", ["keep_age", "position_age"])
def test_snapshots_may_stay_longer_than_earlier_commits(name: str) -> None:
    """The files of all snapshots in the newest metadata stay anyway."""
    policy = ExpiryPolicy(**{name: timedelta(days=365)})
    options = MaintenanceOptions(expiry=policy)
    assert options.choose_policy(Settings()) == policy
    maintenance_definitions(options=options, settings=Settings())


def test_the_settings_decide_without_a_policy() -> None:
    assert MaintenanceOptions().choose_policy(Settings()) == ExpiryPolicy()
    settings = Settings(snapshot_keep_count=7, snapshot_keep_days=90, undo_days=2, position_days=60)
    policy = ExpiryPolicy(7, timedelta(days=90), timedelta(days=60), timedelta(days=2))
    for options in (MaintenanceOptions(), MaintenanceOptions(CompactionOptions(include_hot=True))):
        assert options.choose_policy(settings) == policy
    short = Settings(history_horizon_days=3, orphan_file_grace_h=72)
    assert MaintenanceOptions().choose_policy(short).undo_age == timedelta(days=3)
    maintenance_definitions(settings=short)


def test_the_policy_of_the_settings_reaches_the_expiry(lakehouse: Lakehouse, table: str) -> None:
    few = lakehouse.settings.model_copy(
        update={"snapshot_keep_count": 2, "snapshot_keep_days": 0.0, "undo_days": 0.0}
    )
    lake = copy(lakehouse)
    lake.settings = few
    plan = plan_maintenance(lake, [MaintenancePart.EXPIRY], tables=[table])
    assert plan.expiry is not None
    assert [one.expired_count for one in plan.expiry.tables] == [2]
    result = run_maintenance(lake, [MaintenancePart.EXPIRY], tables=[table])
    assert result.expiry is not None
    assert [one.kept_count for one in result.expiry.tables] == [2]


def test_a_name_that_main_lacks_fails_each_part(lakehouse: Lakehouse, table: str) -> None:
    for part in (MaintenancePart.COMPACTION, MaintenancePart.EXPIRY):
        for run in (plan_maintenance, run_maintenance):
            errors = run(lakehouse, [part], tables=[table, "no.table"]).errors
            assert [type(error) for error in errors.values()] == [TableMissing]
    assert len(load(lakehouse, table).metadata.snapshots) == 4


def test_a_section_escapes_and_cuts_its_table() -> None:
    section = Section(MaintenancePart.EXPIRY, "Two rows.", ("a", "b"), [("x|y", "1"), ("z", "2")])
    text = section.to_markdown(max_rows=1)
    assert "x\\|y" in text
    assert "z" not in text
    assert list_plan_sections(MaintenancePlan()) == []


# -- commands ------------------------------------------------------------------------------------------


@pytest.fixture
def environment(lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = lakehouse.settings
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(settings.state_dir))
    monkeypatch.setenv("BRANCHLAKE_NESSIE_URI", lakehouse.nessie.uri)
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(settings.state_dir)


def call(*words: str, exit_code: int = 0) -> Any:
    result = CliRunner().invoke(command, ["maintain", *words, "--json"])
    assert result.exit_code == exit_code, result.output
    check_output(["maintain", *words, "--json"], result.stdout)
    return json.loads(result.stdout)


@pytest.mark.usefixtures("environment")
def test_the_commands(lakehouse: Lakehouse, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = call("plan", table)
    assert plan["collection"] is None
    assert [one["table"] for one in plan["expiry"]["tables"]] == [table]
    assert call("plan", "--only", "collection")["collection"]["file_count"] == 0
    done = call("run", table, "--only", "expiry", "--only", "collection")
    assert done["errors"] == []
    assert done["collection"]["plan"]["file_count"] == 0
    assert call("status")["passes"] == 1
    location = load(lakehouse, table).metadata_location
    kept = call("explain", location)
    assert [holder["reference"] for holder in kept["holders"]][:1] == ["main"]
    path = Path(location.removeprefix("file://"))
    monkeypatch.chdir(path.parent)
    assert call("explain", path.name)["holders"] == kept["holders"]
    # A relative path of a file that is lost: main still needs it.
    path.rename(path.with_suffix(".lost"))
    lost = call("explain", path.name)
    assert (lost["exists"], lost["holders"][0]["reference"]) == (False, "main")
    path.with_suffix(".lost").rename(path)
    shown = CliRunner().invoke(command, ["maintain", "plan", table])
    assert shown.exit_code == 0
    for part in ("compaction", "expiry"):
        missing = CliRunner().invoke(command, ["maintain", "run", "no.table", "--only", part])
        assert missing.exit_code == 1
        assert "no.table" in missing.output


@pytest.mark.parametrize("words", [["some.table"], ["--only", "expiry"]])
def test_a_journal_is_adopted_only_with_a_collection(words: list[str]) -> None:
    result = CliRunner().invoke(command, ["maintain", "run", *words, "--adopt-journal"])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)


# -- in Dagster ----------------------------------------------------------------------------------------


def run_job(lake: Lakehouse, part: MaintenancePart, **config: Any) -> dg.ExecuteInProcessResult:
    job = maintenance_job(part, SHORT)
    with dg.DagsterInstance.ephemeral() as instance:
        return job.execute_in_process(
            run_config={"ops": {f"{job.name}_op": {"config": config}}},
            resources={"lakehouse": LakehouseResource.from_settings(lake.settings)},
            instance=instance,
        )


def test_the_job_of_the_expiry(lakehouse: Lakehouse, table: str) -> None:
    assert run_job(lakehouse, MaintenancePart.EXPIRY, tables=[table], dry_run=True).success
    assert len(load(lakehouse, table).metadata.snapshots) == 4
    result = run_job(lakehouse, MaintenancePart.EXPIRY, tables=[table])
    assert result.success
    assert len(load(lakehouse, table).metadata.snapshots) == 1


def test_the_job_of_the_collection(lakehouse: Lakehouse, table: str) -> None:
    assert run_job(lakehouse, MaintenancePart.COLLECTION, minutes=5).success


def test_the_job_of_the_collection_deletes_files_although_its_own_run_is_alive(
    lakehouse: Lakehouse, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's run sends heartbeats for a branch that never exists. So does a live ingestion meanwhile."""
    settings = lakehouse.settings.model_copy(update={"deletion_delay_h": 0.0})
    store = HeartbeatStore.from_settings(settings)
    monkeypatch.setattr(LakehouseResource, "effective", lambda _: settings)
    collect = FileCollector.run

    def wait_and_collect(self: FileCollector, **options: bool) -> CollectionResult:
        assert holds_within(10.0, lambda: len(store.all()) == 2, every_s=0.02)
        return collect(self, **options)

    monkeypatch.setattr(FileCollector, "run", wait_and_collect)
    trust_modification_times(monkeypatch)
    folder = Path(urlparse(load(lakehouse, table).location()).path) / "data"
    stray, young = folder / "stray.parquet", folder / "young.parquet"
    for path, days in ((stray, 20), (young, 1)):
        path.write_bytes(b"x")
        stamp = (datetime.now(UTC) - timedelta(days=days)).timestamp()
        os.utime(path, (stamp, stamp))
    with send_heartbeats(store, "run-of-a-live-ingestion", run_id="live", interval_s=10.0):
        assert run_job(lakehouse, MaintenancePart.COLLECTION).success
        assert stray.exists()
        status = FileCollector.of_lake(lakehouse).status()
        assert [plan.file_count for plan in status.open_plans] == [1]
        assert len(cast(list[str], status.last_metrics["claimants"])) == 2
        assert run_job(lakehouse, MaintenancePart.COLLECTION).success
    assert not stray.exists()
    assert young.exists()


@pytest.mark.spark
def test_the_job_of_the_compaction(lakehouse: Lakehouse, table: str) -> None:
    """The session's lake, because Spark cannot read a Nessie in memory."""
    assert len(list(load(lakehouse, table).scan().plan_files())) == 4
    assert run_job(lakehouse, MaintenancePart.COMPACTION, tables=[table]).success
    assert len(list(load(lakehouse, table).scan().plan_files())) == 1
    assert load(lakehouse, table).scan().to_arrow().num_rows == 4


def test_the_definitions_of_a_code_location() -> None:
    definitions = maintenance_definitions(
        ["shop", ("raw", "sensors")],
        cron_schedules={"expiry": "30 2 * * *"},
        minutes=10,
        start_schedules=True,
        settings=Settings(),
        prefix="second_",
    )
    merged = branchlake_definitions(Settings(), definitions)
    assert merged.resolve_asset_graph().get_all_asset_keys() == {
        dg.AssetKey(["second_table_health", "shop"]),
        dg.AssetKey(["second_table_health", "raw", "sensors"]),
    }
    schedules = {one.name: one for one in definitions.schedules or ()}
    assert set(schedules) == {
        f"second_{name}_schedule"
        for name in ("compact_tables", "expire_snapshots", "collect_files", "measure_tables")
    }
    expiry = schedules["second_expire_snapshots_schedule"]
    assert isinstance(expiry, dg.ScheduleDefinition)
    assert expiry.cron_schedule == "30 2 * * *"
    assert expiry.default_status is dg.DefaultScheduleStatus.RUNNING
    with raising(ConfigurationError, reason="unknown_part", subject="vacuum"):
        maintenance_definitions(cron_schedules={"vacuum": "0 0 * * *"}, settings=Settings())


@pytest.mark.parametrize(
    ("options", "reason", "subject"),
    [
        ({"namespaces": "shop"}, "not_a_sequence", "namespaces"),
        ({"namespaces": [""]}, "empty_name", ""),
        ({"namespaces": ["shop."]}, "empty_name", "shop."),
        ({"namespaces": [()]}, "empty_name", ""),
        *(({"minutes": minutes}, "not_positive", "minutes") for minutes in (0, -1, math.nan)),
    ],
)
def test_definitions_that_could_not_run_are_refused(
    options: dict[str, Any], reason: str, subject: str
) -> None:
    with raising(ConfigurationError, reason=reason, subject=subject):
        maintenance_definitions(**options, settings=Settings())


@pytest.mark.parametrize("seconds", [0, -1, math.nan])
def test_a_maintenance_has_time(seconds: float) -> None:
    with raising(ConfigurationError, reason="not_positive", subject="max_seconds"):
        MaintenanceOptions(max_seconds=seconds)


def test_a_namespace_is_measured_once() -> None:
    definitions = maintenance_definitions(["shop", ("shop",)], settings=Settings())
    assert len(list(definitions.assets or ())) == 1


def test_an_unreadable_table_does_not_stop_the_compaction_of_others(
    lakehouse: Lakehouse, table: str, namespace: str
) -> None:
    broken = lakehouse.catalog().create_table((namespace, "broken"), schema=load(lakehouse, table).schema())
    broken.append(load(lakehouse, table).scan().to_arrow())
    snapshot = broken.current_snapshot()
    assert snapshot is not None
    Path(urlparse(snapshot.manifest_list).path).unlink()
    plan = plan_compactions(lakehouse, options=SHORT.compaction)
    assert [one.measured.table for one in plan.partitions] == [table]
    assert [*plan.unreadable] == [f"{namespace}.broken"]
    result = Compactor.of_lake(lakehouse).run(replace(plan, partitions=()))
    assert [(one.table, one.commit) for one in result.tables] == [(f"{namespace}.broken", None)]
    assert len(result.errors) == 1


@pytest.mark.parametrize("columns", [("nothing",), ("N DESC NULLS LAST", "nothing")])
def test_an_unknown_column_is_refused_before_spark_starts(
    lakehouse: Lakehouse, table: str, columns: tuple[str, ...]
) -> None:
    options = CompactionOptions(strategy=Strategy.SORT, sort_columns=columns)
    with raising(ConfigurationError, table, reason="unknown_column", subject="nothing"):
        plan_compactions(lakehouse, [table], options)


def test_an_undeclared_error_is_reported_and_not_replaced_by_a_later_one(
    lakehouse: Lakehouse, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception) -> Any:
        def raise_error(*_: object) -> None:
            raise error

        return raise_error

    monkeypatch.setattr(maintenance_run, "_run_expiry", fail(ValueError("hostile metadata")))
    monkeypatch.setattr(maintenance_run, "_merge_manifests", fail(KeyError("later")))
    parts = (MaintenancePart.EXPIRY, MaintenancePart.COLLECTION)
    result = run_maintenance(lakehouse, parts, tables=[table], options=SHORT)
    assert {part: type(error) for part, error in result.errors.items()} == {
        MaintenancePart.EXPIRY: ValueError
    }
    assert result.collection is not None
