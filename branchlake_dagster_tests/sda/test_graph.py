import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import dagster as dg
import polars as pl
import pytest
from pyspark.sql import DataFrame

from branchlake_dagster import BranchSparkResource, LakehouseResource
from branchlake_dagster.automation.backlog import iter_consumers
from branchlake_dagster.sda import sources
from branchlake_dagster.sda.assets.catalogue import gp_ingest
from branchlake_dagster.sda.gp.records import EmptyCatalogueError, UnreadableCatalogueError
from branchlake_dagster.sda.graph import definitions
from branchlake_dagster.sda.graph.sensor_graph import sensor_assets, sensor_graph
from branchlake_dagster.sda.providers.pulled import GpProvider, Pull
from branchlake_dagster.sda.sensor_kinds.registered import DEFAULT_SENSOR_KINDS
from branchlake_dagster.sda.sources import (
    DEFAULT_SNAPSHOT,
    GpSource,
    UnknownSnapshotError,
    snapshot_id,
    snapshot_time,
)
from branchlake_dagster_tests.sda.test_gp import L1, L2, NAME
from branchlake_dagster_tests.suite.raised import raising

NOW = datetime(2026, 8, 8, 5, 5, tzinfo=UTC)


@pytest.fixture
def instance(tmp_path_factory):
    # On disk, because a schedule's context reaches its instance by reference.
    with dg.DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as made:
        yield made


def code_location(gp: GpSource) -> dg.Definitions:
    lakehouse = LakehouseResource()
    resources = {
        "gp": gp,
        "gp_provider": GpProvider(),
        "io_manager": dg.mem_io_manager,
        "lakehouse": lakehouse,
        "spark": BranchSparkResource(lakehouse=lakehouse),
    }
    graph = dg.Definitions(
        assets=definitions.fusion_assets,
        asset_checks=definitions.fusion_checks,
        jobs=definitions.fusion_jobs,
        schedules=[*definitions.fusion_schedules, definitions.pull_schedule(running=False)],
        sensors=definitions.fusion_sensors,
        resources=resources,
    )
    return dg.Definitions.merge(graph, sensor_graph(DEFAULT_SENSOR_KINDS))


OWN_ASSETS = [*definitions.fusion_assets, *sensor_assets(DEFAULT_SENSOR_KINDS)]
OWN_KEYS = {spec.key for one in OWN_ASSETS for spec in one.specs}


def test_groups_come_in_the_order_of_the_pipeline():
    graph = code_location(GpSource()).resolve_asset_graph()
    keys = [key for key in graph.toposorted_asset_keys if key in OWN_KEYS]
    first = {group: i for i, group in reversed([*enumerate(graph.get(key).group_name for key in keys)])}
    assert set(first) == {"catalogue", "observations", "fused_tracks", "conjunctions", "reports"}
    assert first["catalogue"] < first["observations"] < first["fused_tracks"]
    assert first["catalogue"] < first["conjunctions"] < first["reports"]
    assert all(key.path[0] == "sda" for key in keys)


def test_every_table_has_checks():
    graph = code_location(GpSource()).resolve_asset_graph()
    checked = {key.asset_key for key in graph.asset_check_keys}
    assert checked >= OWN_KEYS


def test_runs_of_sensors_wait_for_the_catalog():
    graph = code_location(GpSource()).resolve_asset_graph()
    waits = {
        one.key.path[-1]: {key.path[-1] for key in one.whole_inputs} for one in iter_consumers(graph, "")
    }
    assert waits["observations"] == waits["rejected_observations"] == {"objects"}
    assert waits["associations"] == waits["conjunction_risks"] == {"catalogue"}
    assert waits["fused_tracks"] == {"observations", "catalogue"}
    assert waits["conjunctions"] == waits["conjunction_alerts"] == set()


def ingest(session, gp: GpSource, snapshot: str) -> dict[str, pl.DataFrame]:
    context = dg.build_asset_context(partition_key=snapshot)
    outputs = gp_ingest(context, gp=gp, spark=SimpleNamespace(spark_session=session))
    # Frames are valid until the next output is asked for.
    return {output.output_name: pl.DataFrame(pl.from_arrow(output.value.toArrow())) for output in outputs}


@pytest.mark.spark
def test_ingest_of_a_file_and_of_simulated_snapshots(spark_session, tmp_path):
    (tmp_path / "tiny-20260808T0220Z.tle").write_text(f"{NAME}\n{L1}\n{L2}\nGARBAGE\n")
    gp = GpSource(catalogue_dir=str(tmp_path), simulated_objects=80)
    out = ingest(spark_session, gp, "tiny-20260808T0220Z")
    assert out["element_sets"].select("snapshot_id", "sat_no", "data_mode").rows() == [
        ("tiny-20260808T0220Z", 900, "REAL")
    ]
    assert out["rejected_records"].select("snapshot_id", "line_number", "reason").rows() == [
        ("tiny-20260808T0220Z", 4, "orphan_line")
    ]
    simulated = ingest(spark_session, gp, "sim-1")
    assert simulated["element_sets"]["data_mode"].unique().to_list() == ["SIMULATED"]
    assert simulated["element_sets"].height == 80
    bad = ingest(spark_session, gp, "sim-bad-1")["rejected_records"].group_by("reason").len()
    assert dict(bad.iter_rows()) == {"checksum": 10, "field": 8}


@pytest.mark.spark
def test_unknown_and_empty_snapshots_say_what_to_do(spark_session, tmp_path):
    (tmp_path / "empty.tle").write_text("\n")
    gp = GpSource(catalogue_dir=str(tmp_path))
    with raising(UnknownSnapshotError, tmp_path, source="nowhere"):
        ingest(spark_session, gp, "nowhere")
    with pytest.raises(EmptyCatalogueError):
        ingest(spark_session, gp, "empty")
    with raising(UnknownSnapshotError, source=str(tmp_path / "gone")):
        GpSource(catalogue_dir=str(tmp_path / "gone")).files()
    with raising(UnknownSnapshotError, "catalogue_dir", source="active"):
        ingest(spark_session, GpSource(), "active")


def test_a_file_whose_time_no_calendar_has_is_named(tmp_path):
    """Some file systems keep such times; others replace them."""
    with raising(UnreadableCatalogueError, source=str(tmp_path)):
        sources._modified_at(tmp_path, 300_000_000_000)


def test_snapshot_ids_are_names_without_endings(tmp_path):
    for name in ("a.tle.gz", "b.json", "c.KVN", "notes.md", "d.tle.part"):
        (tmp_path / name).touch()
    files = GpSource(catalogue_dir=str(tmp_path)).files()
    assert files == {
        name: [tmp_path / file] for name, file in [("a", "a.tle.gz"), ("b", "b.json"), ("c", "c.KVN")]
    }
    assert snapshot_id(tmp_path / "active-20260808T0220Z.tle.gz") == "active-20260808T0220Z"
    assert snapshot_time("active-20260808T0220Z") == datetime(2026, 8, 8, 2, 20, tzinfo=UTC)
    assert snapshot_time("sim-99999999T0000Z") is None


def test_two_files_of_one_snapshot_id_keep_no_other_file_away(instance, tmp_path):
    for name in ("a.tle", "a.json", "b.tle"):
        (tmp_path / name).touch()
    gp = GpSource(catalogue_dir=str(tmp_path))
    context = dg.build_sensor_context(instance=instance, resources={"gp": gp})
    (request,) = definitions.gp_snapshot_files(context).dynamic_partitions_requests
    assert request.partition_keys == ["b"]
    assert gp.read("b").source == str(tmp_path / "b.tle")
    with raising(UnknownSnapshotError, "a.json", "a.tle", source="a"):
        gp.read("a")


def test_an_unknown_partition_key_is_refused_before_the_source_is_asked(instance):
    job = code_location(GpSource()).resolve_job_def("catalogue_job")
    with pytest.raises(dg.DagsterUnknownPartitionError):
        job.execute_in_process(instance=instance, partition_key="never-registered")


def test_the_sensor_registers_files_and_starts_nothing(instance, tmp_path):
    def tick(gp: GpSource):
        return definitions.gp_snapshot_files(dg.build_sensor_context(instance=instance, resources={"gp": gp}))

    (request,) = tick(GpSource()).dynamic_partitions_requests
    assert request.partition_keys == [DEFAULT_SNAPSHOT]
    gp = GpSource(catalogue_dir=str(tmp_path))
    assert isinstance(tick(gp), dg.SkipReason)  # nothing is simulated beside a folder
    (tmp_path / "a.tle").touch()
    assert tick(gp).dynamic_partitions_requests[0].partition_keys == ["a"]
    assert not tick(gp).run_requests
    instance.add_dynamic_partitions("gp_snapshots", ["a"])
    assert isinstance(tick(gp), dg.SkipReason)


# Dagster 1.13 warns about its own tags of multi-dimensional partitions.
@pytest.mark.filterwarnings("ignore:Non-compliant tag keys:DeprecationWarning")
def test_a_file_whose_name_cannot_be_stored_keeps_no_other_file_from_being_registered(instance, tmp_path):
    for name in (b"a.tle", b"b\xff.tle", b"c.tle"):
        (tmp_path / os.fsdecode(name)).touch()
    context = dg.build_sensor_context(
        instance=instance, resources={"gp": GpSource(catalogue_dir=str(tmp_path))}
    )
    (request,) = definitions.gp_snapshot_files(context).dynamic_partitions_requests
    assert request.partition_keys == ["a", "c"]


def test_schedules_wait_for_a_current_catalogue(instance):
    def tick(schedule: dg.ScheduleDefinition, now: datetime = NOW):
        context = dg.build_schedule_context(
            instance=instance,
            scheduled_execution_time=now,
            repository_def=code_location(GpSource()).get_repository_def(),
        )
        return schedule.evaluate_tick(context)

    for schedule in definitions.fusion_schedules:
        assert "no GP snapshot" in tick(schedule).skip_message
    instance.add_dynamic_partitions("gp_snapshots", ["active-20260808T0220Z"])
    late = datetime(2026, 11, 21, 5, 5, tzinfo=UTC)
    for schedule in definitions.fusion_schedules:
        assert "7 days old" in tick(schedule, late).skip_message
    (window,) = tick(definitions.hourly_window).run_requests
    assert window.partition_key == "2026-08-08-04:00"
    (learnt,) = tick(definitions.daily_element_trust).run_requests
    assert (learnt.run_key, learnt.partition_key) == ("2026-08-08", None)
    instance.add_dynamic_partitions("gp_snapshots", ["sim-1"])
    assert "7 days old" in tick(definitions.hourly_window, late).skip_message
    # A file without a time in its name may be a current one.
    instance.add_dynamic_partitions("gp_snapshots", ["active"])
    assert tick(definitions.hourly_window, late).run_requests


class Fixed(GpProvider):
    """A provider that always gives the same."""

    text: str

    def pull(self, clock=None):
        return Pull("fixed", "all", "tle", self.text.encode(), NOW)


@pytest.mark.spark
def test_a_pull_becomes_a_file_a_partition_and_a_run_and_again_the_same(spark_session, instance, tmp_path):
    def tick(provider: GpProvider, folder: str | None = str(tmp_path / "gp")):
        with dg.build_schedule_context(
            instance=instance,
            scheduled_execution_time=NOW,
            resources={"gp": GpSource(catalogue_dir=folder), "gp_provider": provider},
        ) as context:
            return definitions.pull_schedule(running=True)(context)

    assert "BRANCHLAKE_GP_PULL" in tick(GpProvider()).skip_message
    provider = Fixed(text=f"{L1}\n{L2}\n")
    assert "catalogue_dir" in tick(provider, None).skip_message
    request, again = tick(provider), tick(provider)
    assert (request.partition_key, request.run_key) == (again.partition_key, again.run_key)
    assert request.partition_key == request.run_key == "fixed-all-20260808T0505Z"
    assert instance.get_dynamic_partitions("gp_snapshots") == ["fixed-all-20260808T0505Z"]
    out = ingest(spark_session, GpSource(catalogue_dir=str(tmp_path / "gp")), "fixed-all-20260808T0505Z")
    assert out["element_sets"]["sat_no"].to_list() == [900]
    states = [definitions.pull_schedule(running=r).default_status for r in (False, True)]
    assert states == [dg.DefaultScheduleStatus.STOPPED, dg.DefaultScheduleStatus.RUNNING]


def test_an_asset_of_kind_spark_returns_what_spark_computes():
    for definition in OWN_ASSETS:
        hints = get_type_hints(definition.op.compute_fn.decorated_fn)
        returned = hints.pop("return")
        # The registry's files are written by Spark's workers, so its outputs have no value.
        by_workers = returned == Iterator[dg.Output[None]] and all(
            hints[name] is DataFrame for name in definition.keys_by_input_name
        )
        for spec in definition.specs:
            computed_by_spark = returned in (DataFrame, Iterator[dg.Output[DataFrame]])
            assert ("spark" in spec.kinds) is (computed_by_spark or by_workers), spec.key


def test_the_documents_state_the_engine_of_each_table():
    page = (Path(__file__).parents[2] / "docs" / "fusion.md").read_text()
    rows = page.partition("| kind | assets | where |")[2].partition("\n\n")[0].splitlines()[2:]
    stated = {
        asset: kind
        for kinds, assets in (re.findall("[^|]+", row)[:2] for row in rows)
        for asset in re.findall("`([a-z_]+)`", assets)
        for kind in re.findall("`([a-z]+)`", kinds)
    }
    declared = {
        spec.key.path[-1]: next(iter(spec.kinds - {"iceberg"}))
        for definition in OWN_ASSETS
        for spec in definition.specs
    }
    assert stated == declared
