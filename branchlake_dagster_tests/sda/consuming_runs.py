"""The runs that the pipeline's consuming sensors launch, as the daemon would launch and publish them."""

from __future__ import annotations

from typing import Any

import dagster as dg

from branchlake_dagster import LakehouseResource, incremental_sensor
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.sda.assets.alerts import CONJUNCTION_ALERTS
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.observations import OBSERVATIONS, REJECTED_OBSERVATIONS
from branchlake_dagster_tests.harness import Project
from branchlake_dagster_tests.sda.shuffled_bytes import BY_HOUR, EVERY_RISK, LARGE_OBJECTS, QUIET

MAX_ROUNDS = 20
_OPS = {**LARGE_OBJECTS, **EVERY_RISK}


class ConsumingRuns:
    """The sensors of observations, tracks and alerts, with the graph's options but without their waits."""

    def __init__(self, p: Project, *, up_to_associations: bool = False) -> None:
        self._p = p
        self._cursors: dict[str, str | None] = {}
        self._sensors = [incremental_sensor("observations", target=[OBSERVATIONS, REJECTED_OBSERVATIONS])]
        if up_to_associations:
            self._sensors.append(incremental_sensor("associations", target=[ASSOCIATIONS]))
            return
        self._sensors += [
            incremental_sensor("tracks", target=BY_HOUR, with_downstream=True),
            incremental_sensor("alerts", target=[CONJUNCTION_ALERTS]),
        ]

    def follow(self) -> list[tuple[str, str | None]]:
        """Launch and publish runs until no sensor asks for one. Return their first assets and partitions."""
        runs: list[tuple[str, str | None]] = []
        for _ in range(MAX_ROUNDS):
            requests = [request for sensor in self._sensors for request in self._launch_requests(sensor)]
            if not requests:
                return runs
            runs += requests
        raise AssertionError(f"Sensors still launch runs after {MAX_ROUNDS} rounds: {runs}.")

    def _launch_requests(self, sensor: dg.SensorDefinition) -> list[tuple[str, str | None]]:
        with dg.build_sensor_context(
            self._p.instance,
            cursor=self._cursors.get(sensor.name),
            repository_def=self._p.definitions.get_repository_def(),
            resources={"lakehouse": LakehouseResource.from_settings(self._p.lake.settings)},
        ) as context:
            result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        self._cursors[sensor.name] = result.cursor
        return [self._launch(request) for request in result.run_requests or ()]

    def _launch(self, request: dg.RunRequest) -> tuple[str, str | None]:
        keys = list(request.asset_selection or ())
        job = self._p.definitions.resolve_implicit_global_asset_job_def()
        ops: dict[str, Any] = {
            name: config for name, config in _OPS.items() if any(name == "__".join(key.path) for key in keys)
        }
        done = job.execute_in_process(
            instance=self._p.instance,
            asset_selection=keys,
            partition_key=request.partition_key,
            tags={**request.tags, "dagster/run_key": str(request.run_key)},
            run_config={**QUIET, "ops": ops},
            raise_on_error=False,
        )
        assert done.success, [event.message for event in done.all_events if event.is_failure]
        state = self._p.settle(done.run_id).state
        assert state in (RunState.PUBLISHED, RunState.DISCARDED, RunState.UNCHANGED), state
        return keys[0].path[-1], request.partition_key
