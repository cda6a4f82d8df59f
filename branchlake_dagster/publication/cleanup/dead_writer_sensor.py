"""The sensor that ends runs whose process is gone, minutes after it went.

Dagster's default launcher sees the end of a run's process within seconds, but only while the code server
that started it lives. Without it, a run would stay "started" until somebody ended it by hand.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.
"""

import time
from datetime import UTC, datetime

from dagster import (
    DagsterInstance,
    DefaultSensorStatus,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)

from branchlake_dagster.branching.liveness.failure_detector import Liveness, by_timestamp
from branchlake_dagster.branching.liveness.heartbeat_store import Heartbeat, HeartbeatStore
from branchlake_dagster.branching.liveness.silence_watch import look_again, this_clock
from branchlake_dagster.branching.reaping.origin import instance_id
from branchlake_dagster.branching.reaping.rules import Reaping
from branchlake_dagster.branching.resources.lakehouse_resource import LakehouseResource
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.cleanup.reaping import end_dead
from branchlake_dagster.settings import Settings


def dead_writers(
    lake: Lakehouse, instance: DagsterInstance, told: str | None, *, clock: str, now: float, at: datetime
) -> tuple[list[Heartbeat], str]:
    """The instance's writers that are dead, and what the next look needs; `at` is the wall clock's time."""
    here = instance_id(instance)
    beats = [beat for beat in HeartbeatStore.of(lake.settings).all() if beat.instance in ("", here)]
    suspects = [beat for beat, pulse in by_timestamp(beats, at).items() if pulse is Liveness.SUSPECT]
    return look_again(told, suspects, clock=clock, now=now)


def dead_writer_sensor(
    settings: Settings, lakehouse_key: str = "lakehouse", prefix: str = ""
) -> SensorDefinition:
    """Looks at silent writers every `watch_interval_s`, ends the runs of dead ones and fences them.

    `lakehouse_key` is the key of the lake's resource, `prefix` is put before the sensor's name.
    """

    @sensor(
        name=f"{prefix}dead_writer_sensor",
        required_resource_keys={lakehouse_key},
        minimum_interval_seconds=settings.watch_interval_s,
        default_status=DefaultSensorStatus.RUNNING,
        description="Ends runs whose process is gone without a word, and fences their branches.",
    )
    def dead_writer_sensor_(context: SensorEvaluationContext, **_: object) -> SkipReason:
        # `_`: called like a function, as in tests, Dagster passes the resources by name too.
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        lake = resource.lakehouse
        now, at = time.monotonic(), datetime.now(UTC)
        dead, remembered = dead_writers(
            lake, context.instance, context.cursor, clock=this_clock(), now=now, at=at
        )
        told: list[Reaping] = list(end_dead(lake, context.instance, dead)) if dead else []
        for one in told:
            context.log.info(str(one))
        context.update_cursor(remembered)
        if not dead:
            return SkipReason("Every writer sends heartbeats, or is being observed.")
        writers = ", ".join(sorted(f"process {beat.pid} on {beat.host}" for beat in dead)[:20])
        return SkipReason(f"{len(dead)} dead: {writers}. {' | '.join(map(str, told[:20]))}")

    return dead_writer_sensor_
