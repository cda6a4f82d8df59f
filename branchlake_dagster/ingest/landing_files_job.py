"""A job that removes landing files whose records are on `main`, and its schedule."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg

from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.ingest_sensor import plan_batch_on_main
from branchlake_dagster.ingest.topic_source import common_offsets, remove_read_files
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.receivers.landing import Landing, LandingFile
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.wording import format_count


def remove_landing_files(
    topic: str, ingests: Sequence[Ingest], lake: Lakehouse, *, clock: Callable[[], float] = time.time
) -> list[LandingFile]:
    """Remove old files of a topic whose records all `ingests` have on `main`.

    Files that are younger than `landing_keep_h` hours stay. Raises the errors of `plan_next_batch` before
    anything is removed.
    """
    # A table that is filled again after a rollback needs files before the position of the other tables.
    planned_batches = [plan_batch_on_main(ingest, lake) for ingest in ingests]
    read_offsets = common_offsets(planned_batch.progress.start for planned_batch in planned_batches)
    finished_before = clock() - lake.settings.landing_keep_h * 3600
    return remove_read_files(
        Landing(lake.settings.landing_folder),
        [planned_batches[0].topics[topic]],
        read_offsets,
        finished_before=finished_before,
    )


def landing_files_job(ingests: Sequence[Ingest], *, lakehouse_key: str) -> dg.JobDefinition:
    """Build the job for all topics of these ingestions."""
    topics = sorted({topic for ingest in ingests for topic in ingest.topics})
    name = _job_name(ingests)

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={lakehouse_key},
        out=dg.Out(dg.Nothing),
        description="Removes landing files whose records are all on main, except the newest of a partition.",
    )
    def remove(context: dg.OpExecutionContext) -> None:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        for topic in topics:
            readers = [ingest for ingest in ingests if topic in ingest.topics]
            removed = remove_landing_files(topic, readers, resource.lakehouse)
            rows = sum(file.rows for file in removed)
            context.log.info(
                f"{topic}: removed {format_count(len(removed), 'file')} with {format_count(rows, 'record')}."
            )

    @dg.job(
        name=name,
        executor_def=dg.in_process_executor,
        description=f"Removes files of {', '.join(topics)} that main has, after BRANCHLAKE_LANDING_KEEP_H.",
    )
    def job() -> None:
        remove()

    return job


def landing_files_schedule(job: Any) -> dg.ScheduleDefinition:
    """Build the hourly schedule of the job. It is off by default."""
    return dg.ScheduleDefinition(
        name=f"{job.name}_schedule",
        job=job,
        cron_schedule="23 * * * *",
        default_status=dg.DefaultScheduleStatus.STOPPED,
    )


def _job_name(ingests: Sequence[Ingest]) -> str:
    """Return a name that no other group of ingestions in one code location has."""
    return f"landing_files_{min(ingest.name for ingest in ingests)}"
