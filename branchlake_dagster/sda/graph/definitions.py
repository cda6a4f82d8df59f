"""The jobs, schedules and sensors of the Space Domain Awareness graph."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg

from branchlake_dagster import PublishedAssets, incremental_sensor, published_sensor
from branchlake_dagster.sda.assets.alerts import CONJUNCTION_ALERTS, conjunction_alerts
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.catalogue import (
    CATALOGUE,
    ELEMENT_SETS,
    REJECTED_RECORDS,
    SATELLITE_ENTRIES,
    gp_ingest,
)
from branchlake_dagster.sda.assets.conjunctions import CONJUNCTIONS, conjunctions
from branchlake_dagster.sda.assets.ephemerides import EPHEMERIS_CONJUNCTIONS, ephemeris_conjunctions
from branchlake_dagster.sda.assets.hour_reports import HOUR_REPORTS, hour_reports
from branchlake_dagster.sda.assets.observations import OBSERVATIONS, REJECTED_OBSERVATIONS
from branchlake_dagster.sda.assets.quarantine import QUARANTINED_OBJECTS, quarantined_objects
from branchlake_dagster.sda.assets.registry import (
    ELEMENT_HISTORY,
    MERGE_AUDIT,
    OBJECTS,
    SATELLITES,
    registry,
    satellites,
)
from branchlake_dagster.sda.assets.risks import CONJUNCTION_RISKS, conjunction_risks
from branchlake_dagster.sda.assets.tracks import FUSED_TRACKS
from branchlake_dagster.sda.assets.trust import ELEMENT_ERRORS, ELEMENT_JUMPS, OBJECT_ERRORS, element_trust
from branchlake_dagster.sda.assets.upkeep import MAX_CATALOGUE_AGE
from branchlake_dagster.sda.gp.encodings import is_unicode
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH
from branchlake_dagster.sda.graph.quality import fusion_checks
from branchlake_dagster.sda.partitions import gp_snapshots, windows
from branchlake_dagster.sda.providers.pulled import GpProvider
from branchlake_dagster.sda.registry.satcat import is_satcat
from branchlake_dagster.sda.sources import DEFAULT_SNAPSHOT, SIMULATED_PREFIX, GpSource, snapshot_time

__all__ = [
    "fusion_assets",
    "fusion_checks",
    "fusion_jobs",
    "fusion_schedules",
    "fusion_sensors",
    "pull_schedule",
]

fusion_assets: list[dg.AssetsDefinition] = [
    gp_ingest,
    registry,
    satellites,
    quarantined_objects,
    conjunction_risks,
    conjunction_alerts,
    hour_reports,
    element_trust,
    conjunctions,
    ephemeris_conjunctions,
]
"""The assets of the graph, without those of `sensor_graph`."""

catalogue_job = dg.define_asset_job(
    "catalogue_job",
    selection=dg.AssetSelection.assets(
        *(ELEMENT_SETS, REJECTED_RECORDS, SATELLITE_ENTRIES),
        *(CATALOGUE, OBJECTS, ELEMENT_HISTORY, MERGE_AUDIT),
    ),
    description="Ingest pulls and merge them into the catalog and the registry of objects.",
)
satellites_job = dg.define_asset_job(
    "satellites_job",
    selection=dg.AssetSelection.assets(SATELLITES),
    description="Compute the periods in which satellite catalogs stated facts about each object.",
)
observations_job = dg.define_asset_job(
    "observations_job",
    selection=dg.AssetSelection.assets(OBSERVATIONS),
    description="Convert the new raw measurements of one or several hours to observations.",
)
rejected_observations_job = dg.define_asset_job(
    "rejected_observations_job",
    selection=dg.AssetSelection.assets(REJECTED_OBSERVATIONS),
    description="Record which new raw measurements are rejected, with the reason.",
)
window_job = dg.define_asset_job(
    "window_job",
    selection=dg.AssetSelection.assets(QUARANTINED_OBJECTS, CONJUNCTION_RISKS),
    description="Compute one window's conjunction risks anew, by the current catalog and tracks.",
)
tracks_job = dg.define_asset_job(
    "tracks_job",
    selection=dg.AssetSelection.assets(ASSOCIATIONS, FUSED_TRACKS, CONJUNCTION_RISKS),
    description="Compute associations, tracks and conjunction risks from one window's new observations.",
)
alerts_job = dg.define_asset_job(
    "alerts_job",
    selection=dg.AssetSelection.assets(CONJUNCTION_ALERTS),
    description="Insert, correct and retract alerts for risks that have changed.",
)
reports_job = dg.define_asset_job(
    "reports_job",
    selection=dg.AssetSelection.assets(HOUR_REPORTS),
    description="Draw the pictures of one window.",
)
conjunctions_job = dg.define_asset_job(
    "conjunctions_job",
    selection=dg.AssetSelection.assets(CONJUNCTIONS),
    description="Find the close approaches of the next hours: for changed objects, or for all if necessary.",
)
ephemerides_job = dg.define_asset_job(
    "ephemerides_job",
    selection=dg.AssetSelection.assets(EPHEMERIS_CONJUNCTIONS),
    description="Screen a folder of own ephemerides against the catalog.",
)
element_trust_job = dg.define_asset_job(
    "element_trust_job",
    selection=dg.AssetSelection.assets(ELEMENT_ERRORS, OBJECT_ERRORS, ELEMENT_JUMPS),
    description="Derive the errors of element sets by age from their history.",
)
fusion_jobs = [
    catalogue_job,
    satellites_job,
    observations_job,
    rejected_observations_job,
    tracks_job,
    alerts_job,
    reports_job,
    window_job,
    element_trust_job,
    conjunctions_job,
    ephemerides_job,
]
"""The jobs. There are several because later jobs read what earlier ones published."""


def stale_catalogue(instance: dg.DagsterInstance, now: datetime) -> str | None:
    """Return why the registered GP snapshots are too old for a run at ``now``; None if they are not.

    The age is that of the newest time in the snapshots' ids. If an id has no time, the result is None,
    because that snapshot may be recent.
    """
    names = instance.get_dynamic_partitions("gp_snapshots")
    if not names:
        return "no GP snapshot is registered"
    times = [
        snapshot_time(name) or (REFERENCE_EPOCH if name.startswith(SIMULATED_PREFIX) else None)
        for name in names
    ]
    known_times = [time for time in times if time is not None]
    if len(known_times) < len(times):
        return None
    newest = max(known_times)
    if now - newest > MAX_CATALOGUE_AGE:
        age = f"more than {MAX_CATALOGUE_AGE.days} days old"
        return f"the newest GP snapshot is of {newest:%Y-%m-%d %H:%M}Z, {age}"
    return None


@dg.schedule(
    job=window_job,
    cron_schedule="20 * * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
)
def hourly_window(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
    """Compute the conjunction risks of the last full hour, from the present catalog and the hour's tracks."""
    if reason := stale_catalogue(context.instance, context.scheduled_execution_time):
        return dg.SkipReason(f"Nothing to screen: {reason}.")
    window = _last_window(context)
    # The risks also depend on the present catalog, so they are computed again even if no track has changed.
    return dg.RunRequest(run_key=window, partition_key=window, tags={"branchlake/rebuild": "true"})


def _last_window(context: dg.ScheduleEvaluationContext) -> str:
    hour = context.scheduled_execution_time.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    return (hour - timedelta(hours=1)).strftime(windows.fmt)


@dg.schedule(
    job=element_trust_job,
    cron_schedule="40 3 * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
)
def daily_element_trust(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
    """Compute the errors of element sets anew from their history. The list of close approaches uses them."""
    if reason := stale_catalogue(context.instance, context.scheduled_execution_time):
        return dg.SkipReason(f"Nothing new to learn: {reason}.")
    return dg.RunRequest(run_key=f"{context.scheduled_execution_time:%Y-%m-%d}")


fusion_schedules = [hourly_window, daily_element_trust]
"""The schedules. They run by default, but launch nothing without a current GP snapshot."""


def pull_schedule(*, running: bool) -> dg.ScheduleDefinition:
    """Build the schedule that pulls from the provider. `running` is its default state."""

    # Not on the hour, when many clients send requests.
    @dg.schedule(
        name="gp_pull",
        job=catalogue_job,
        cron_schedule="47 */2 * * *",
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING if running else dg.DefaultScheduleStatus.STOPPED,
        description="Download the provider's catalog to a file, register it and ingest it.",
    )
    def gp_pull(
        context: dg.ScheduleEvaluationContext, gp: GpSource, gp_provider: GpProvider
    ) -> dg.RunRequest | dg.SkipReason:
        pulled = gp_provider.pull()
        if pulled is None:
            return dg.SkipReason("No provider of catalogues is configured: set BRANCHLAKE_GP_PULL.")
        if gp.catalogue_dir is None:
            return dg.SkipReason("No folder to keep catalogues in: set the GP source's catalogue_dir.")
        # Each step can be repeated, and Dagster launches one run per run key. So the next tick completes a
        # failed tick, and a tick with a known snapshot launches nothing.
        pulled.write(Path(gp.catalogue_dir).expanduser())
        context.instance.add_dynamic_partitions("gp_snapshots", [pulled.snapshot_id])
        return dg.RunRequest(run_key=pulled.snapshot_id, partition_key=pulled.snapshot_id)

    return gp_pull


@dg.sensor(minimum_interval_seconds=30, default_status=dg.DefaultSensorStatus.RUNNING)
def gp_snapshot_files(context: dg.SensorEvaluationContext, gp: GpSource) -> dg.SensorResult | dg.SkipReason:
    """Register each file of the GP folder as a partition, or a simulated snapshot if there is no folder.

    The sensor launches no run: a person decides whether an old file should be ingested. A file whose name is
    not valid Unicode cannot be a partition, and files of one snapshot id cannot be distinguished: they are
    logged and left out.
    """
    wanted = [] if gp.catalogue_dir else [DEFAULT_SNAPSHOT]
    for name, paths in gp.files().items():
        if not is_unicode(name):
            context.log.warning(
                f"The name of file {name!a} is not valid Unicode. Rename the file to ingest it."
            )
        elif len(paths) > 1:
            files = " and ".join(path.name for path in paths)
            context.log.warning(
                f"{files} have the same snapshot id {name}. Rename all but one to ingest them."
            )
        else:
            wanted.append(name)
    if not wanted:
        return dg.SkipReason(f"No GP files in {gp.catalogue_dir}.")
    known = set(context.instance.get_dynamic_partitions("gp_snapshots"))
    new = [name for name in wanted if name not in known]
    if not new:
        return dg.SkipReason(f"No new GP snapshot; {len(wanted):,} registered already.")
    return dg.SensorResult(dynamic_partitions_requests=[gp_snapshots.build_add_request(new)])


conjunctions_sensor = incremental_sensor(
    "conjunctions_sensor",
    target=dg.AssetSelection.assets(CONJUNCTIONS),
    minimum_interval_seconds=15,
    # A run is refused if the registry or the error model was published meanwhile.
    retries=3,
    retry_delay_seconds=10.0,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
"""Launches a screening when the catalog has changed."""


def _of_satellite_catalogues(published: PublishedAssets) -> dg.RunRequest | None:
    """Request a run if the publication contains a satellite catalog.

    A GP snapshot does not change the entries.
    """
    names = published.partitions[SATELLITE_ENTRIES]
    return dg.RunRequest() if not names or any(is_satcat(name or "") for name in names) else None


satellite_catalogues = published_sensor(
    "satellite_catalogues",
    assets=[SATELLITE_ENTRIES],
    job=satellites_job,
    request=_of_satellite_catalogues,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Launches satellites_job when a satellite catalog was published.",
)

observations_sensor = incremental_sensor(
    "observations_sensor",
    target=dg.AssetSelection.assets(OBSERVATIONS, REJECTED_OBSERVATIONS),
    max_age_s=10.0,
    when_inputs_idle=True,
    min_rows=100_000,
    # The hour of a run that was killed may get no further measurement that would launch another run.
    retries=3,
    retry_delay_seconds=10.0,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
"""Launches runs that convert new raw measurements, also late ones, to observations."""

tracks_sensor = incremental_sensor(
    "tracks_sensor",
    target=dg.AssetSelection.assets(ASSOCIATIONS, FUSED_TRACKS, CONJUNCTION_RISKS),
    max_age_s=10.0,
    when_inputs_idle=True,
    min_rows=1_000_000,
    with_downstream=True,
    # A run is refused if the hourly run of another window was published meanwhile.
    retries=3,
    retry_delay_seconds=10.0,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
"""Launches a run for an hour with new observations: associations, tracks and risks, in one run."""

alerts_sensor = incremental_sensor(
    "alerts_sensor",
    target=dg.AssetSelection.assets(CONJUNCTION_ALERTS),
    retries=3,
    retry_delay_seconds=10.0,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
"""Launches a run that updates the alerts when risks have changed."""

reports_sensor = incremental_sensor(
    "reports_sensor",
    target=dg.AssetSelection.assets(HOUR_REPORTS),
    # Tracks and alerts of an hour are published separately.
    max_age_s=60.0,
    min_rows=10_000_000,
    retries=3,
    retry_delay_seconds=10.0,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
"""Launches a run that draws an hour's pictures when its associations, tracks or alerts have changed."""

fusion_sensors = [
    gp_snapshot_files,
    satellite_catalogues,
    conjunctions_sensor,
    observations_sensor,
    tracks_sensor,
    alerts_sensor,
    reports_sensor,
]
