"""The Dagster definitions of all maintenance, for a code location."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster import (
    AssetSelection,
    DefaultScheduleStatus,
    Definitions,
    ScheduleDefinition,
    define_asset_job,
)

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.maintenance.health_asset import HealthLimits, health_asset, health_key
from branchlake_dagster.maintenance.maintenance_jobs import (
    SCHEDULE_TIMES,
    maintenance_job,
    maintenance_schedule,
)
from branchlake_dagster.maintenance.maintenance_result import ALL_PARTS, MaintenancePart
from branchlake_dagster.maintenance.maintenance_run import MaintenanceOptions
from branchlake_dagster.settings import Settings


def maintenance_definitions(
    namespaces: Sequence[str | Sequence[str]] = (),
    *,
    options: MaintenanceOptions | None = None,
    limits: HealthLimits | None = None,
    cron_schedules: Mapping[MaintenancePart | str, str] | None = None,
    minutes: float = 60.0,
    timezone: str = "UTC",
    start_schedules: bool = False,
    settings: Settings | None = None,
    lakehouse_key: str = "lakehouse",
    prefix: str = "",
) -> Definitions:
    """Create jobs, schedules and assets that maintain the tables of a lake, to merge into a code location.

    - jobs `compact_tables`, `expire_snapshots` and `collect_files`, each with a schedule at night
    - for each namespace an asset that shows the health of its tables, with checks that warn, and the job
      `measure_tables`, which a schedule runs every hour

    Args:
        namespaces (Sequence[str | Sequence[str]]): Namespaces whose health is shown: dotted names, or their
            elements.
        options (Optional[MaintenanceOptions]): How tables are compacted, and how long snapshots are kept.
            Without an expiry policy, the settings decide how long, as for `branchlake maintain`.
        limits (Optional[HealthLimits]): Limits above which a check of a namespace's health warns.
        cron_schedules (Optional[Mapping]): Cron schedules by part, instead of 01:00, 03:00 and 04:00. Keys
            are `compaction`, `expiry` and `collection`.
        minutes (float): Minutes after which a scheduled compaction or collection begins no further work.
            The next run continues. An expiry has no limit. (default: 60)
        timezone (str): The time zone of the schedules. (default: UTC)
        start_schedules (bool): Whether the schedules run from the start. Otherwise they are turned on in the
            UI. (default: False)
        settings (Optional[Settings]): The settings of the lake. (default: from the environment)
        lakehouse_key (str): The resource key of the lake.
        prefix (str): A text before the names of jobs, schedules and assets, for a second lake.

    Returns:
        Definitions: They need the resource of the lake, which `branchlake_definitions` provides.

    Raises:
        ConfigurationError: `undo_age` of the expiry policy exceeds the history horizon, a key of
            `cron_schedules` is not a part of the maintenance, `namespaces` is a text or contains an empty
            name, or `minutes` is not positive.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import branchlake_definitions, maintenance_definitions

            defs = dg.Definitions.merge(
                branchlake_definitions(),
                maintenance_definitions(["shop"], start_schedules=True),
            )
    """
    options = options or MaintenanceOptions()
    options.choose_policy(settings or Settings())
    times = _parse_schedules(cron_schedules or {})
    keys = _parse_namespaces(namespaces)
    if not minutes > 0:
        raise ConfigurationError(
            f"minutes of the maintenance is {minutes}.",
            hint="Set a positive number. Without schedules, the jobs have the limits of their options.",
            reason="not_positive",
            subject="minutes",
        )
    status = DefaultScheduleStatus.RUNNING if start_schedules else DefaultScheduleStatus.STOPPED
    jobs = {
        part: maintenance_job(part, options, lakehouse_key=lakehouse_key, prefix=prefix) for part in ALL_PARTS
    }
    schedules = [
        maintenance_schedule(
            one, cron_schedule=times[part], minutes=minutes, timezone=timezone, status=status
        )
        for part, one in jobs.items()
    ]
    assets = [health_asset(key, limits, lakehouse_key=lakehouse_key, prefix=prefix) for key in keys]
    if not assets:
        return Definitions(jobs=list(jobs.values()), schedules=schedules)
    health_job = define_asset_job(
        f"{prefix}measure_tables",
        selection=AssetSelection.assets(*(health_key(key, prefix) for key in keys)),
    )
    health_schedule = ScheduleDefinition(
        name=f"{prefix}measure_tables_schedule",
        job=health_job,
        cron_schedule="15 * * * *",
        execution_timezone=timezone,
        default_status=status,
    )
    return Definitions(
        assets=assets, jobs=[*jobs.values(), health_job], schedules=[*schedules, health_schedule]
    )


def _parse_namespaces(namespaces: Sequence[str | Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the elements of each namespace, each namespace once."""
    if isinstance(namespaces, str):
        raise ConfigurationError(
            f"namespaces is the text {namespaces!r}.",
            hint=f"Write a list: maintenance_definitions([{namespaces!r}]).",
            reason="not_a_sequence",
            subject="namespaces",
        )
    keys = [tuple(name.split(".")) if isinstance(name, str) else tuple(name) for name in namespaces]
    for key in keys:
        if not all(key) or not key:
            raise ConfigurationError(
                f"{'.'.join(key)!r} is not a namespace.",
                hint="Write a dotted name such as raw.sensors, without empty parts.",
                reason="empty_name",
                subject=".".join(key),
            )
    return list(dict.fromkeys(keys))


def _parse_schedules(cron_schedules: Mapping[MaintenancePart | str, str]) -> dict[MaintenancePart, str]:
    unknown = [name for name in cron_schedules if name not in {*ALL_PARTS}]
    if unknown:
        raise ConfigurationError(
            f"{unknown[0]!r} is not a part of the maintenance.",
            hint=f"The parts are {', '.join(ALL_PARTS)}.",
            reason="unknown_part",
            subject=str(unknown[0]),
        )
    return {**SCHEDULE_TIMES, **{MaintenancePart(name): cron for name, cron in cron_schedules.items()}}
