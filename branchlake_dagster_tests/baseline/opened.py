"""The stored lake while its servers run: running its assets, its ingestion and its sensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dagster as dg

from branchlake_dagster.cli.dagster_home import dagster_home
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.receivers.landing_sink import LandingSink
from branchlake_dagster.receivers.records import ReceiverOrigin, Record
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.baseline import shop
from branchlake_dagster_tests.baseline.storage import without_secrets
from branchlake_dagster_tests.dagster_internals import (
    AssetDaemonCursor,
    InstigatorState,
    InstigatorStatus,
    InstigatorType,
    LoadableTargetOrigin,
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
    SensorInstigatorData,
    asset_daemon_cursor_from_instigator_serialized_cursor,
    asset_daemon_cursor_to_instigator_serialized_cursor,
)
from branchlake_dagster_tests.harness import Project

AUTOMATION = "publication_automation_sensor"
"""Evaluates automation conditions."""
FIRST_RECORD_S = 1_780_000_000
"""When the first record was sent; one comes each second."""


@dataclass
class Opened(Project):
    """The code location of the stored lake on its own Dagster home."""

    shop: shop.Shop

    def with_settings(self, **more: Any) -> Opened:
        """The same with other settings of behavior."""
        settings = self.lake.settings.model_copy(update=more)
        parts = shop.definitions(without_secrets(settings), self.shop)
        return Opened(Lakehouse(settings), self.instance, parts, self.shop)

    def ingest(self, *, job: str = "job", **options: Any) -> str:
        """Run the ingestion's job; the run id."""
        found = self.definitions.resolve_job_def(f"ingest_{shop.INGESTION}_{job}")
        result = found.execute_in_process(instance=self.instance, raise_on_error=False, **options)
        assert result.success, [e.message for e in result.all_events if e.is_failure]
        self.last = result
        return result.run_id

    def land(self, *values: Mapping[str, Any] | bytes) -> None:
        """Put records into the landing folder, as a receiver does."""
        folder = self.lake.settings.landing_folder
        sink = LandingSink(folder, shop.TOPIC, 0, ReceiverOrigin("receiver", "udp"), now_ns=lambda: 0)
        sink.open(resume=True)
        first = FIRST_RECORD_S + sink.next_offset
        sink.write(
            [
                Record(
                    one if isinstance(one, bytes) else json.dumps(one).encode(),
                    b"k",
                    (first + number) * 1_000_000_000,
                    b"host:1",
                    b"page 2",
                )
                for number, one in enumerate(values)
            ]
        )
        sink.close()

    # -- sensors ---------------------------------------------------------------------------------------

    def sensors(self) -> Sequence[dg.SensorDefinition]:
        """Those of the code location that have a function of ours."""
        found = self.definitions.get_repository_def().sensor_defs
        return [one for one in found if one.name != AUTOMATION]

    def tick(self, name: str, cursor: str | None) -> Any:
        """Evaluate a sensor as the daemon does, and report what it tells of assets."""
        repository = self.definitions.get_repository_def()
        sensor = repository.get_sensor_def(name)
        resources = self.definitions.resources or {}
        wanted = {key: resources[key] for key in sensor.required_resource_keys}
        with dg.build_sensor_context(
            self.instance, cursor=cursor, repository_def=repository, resources=wanted, sensor_name=name
        ) as context:
            data = sensor.evaluate_tick(context)
        for event in data.asset_events or ():
            self.instance.report_runless_asset_event(event)
        return data

    def requested(self, request: dg.RunRequest, *, ok: bool = True) -> str:
        """Launch what a sensor requests, as the daemon does; the run id."""
        tags = {**request.tags, "dagster/run_key": str(request.run_key)}
        keys = request.asset_selection or [key("prices")]
        return self.run(*keys, partition=request.partition_key, tags=tags, ok=ok)

    def automation_cursor(self, text: str) -> AssetDaemonCursor:
        """What the home remembers of the evaluations of automation conditions."""
        found = asset_daemon_cursor_from_instigator_serialized_cursor(text, self.graph)
        assert isinstance(found, AssetDaemonCursor)
        return found

    def evaluated(self) -> str:
        """Evaluate the automation conditions for the first time; the cursor as the daemon stores it."""
        result = dg.evaluate_automation_conditions(
            self.definitions, self.instance, dg.AssetSelection.assets(key("follower"))
        )
        return asset_daemon_cursor_to_instigator_serialized_cursor(result.cursor)

    def store_cursor(self, name: str, cursor: str | None) -> None:
        """Write what Dagster's daemon remembers of a sensor."""
        data = SensorInstigatorData(cursor=cursor)
        state = InstigatorState(_origin(name), InstigatorType.SENSOR, InstigatorStatus.RUNNING, data)
        selector_id = state.selector_id
        if self.instance.get_instigator_state(state.instigator_origin_id, selector_id) is None:
            self.instance.add_instigator_state(state)
        else:
            self.instance.update_instigator_state(state)

    def cursors(self) -> dict[str, str | None]:
        """By sensor, what the home remembers."""
        found = {}
        for state in self.instance.all_instigator_state():
            data = state.instigator_data
            assert isinstance(data, SensorInstigatorData)
            found[state.instigator_name] = data.cursor
        return found


def key(name: str) -> dg.AssetKey:
    """An asset of the shop."""
    return dg.AssetKey(["shop", name])


def _origin(name: str) -> RemoteInstigatorOrigin:
    location = ManagedGrpcPythonEnvCodeLocationOrigin(
        LoadableTargetOrigin(module_name="shop"), location_name="shop"
    )
    return RemoteInstigatorOrigin(RemoteRepositoryOrigin(location, "__repository__"), name)


@contextmanager
def opened(settings: Settings, *, spark: bool = False) -> Iterator[Opened]:
    """Start Nessie on the state folder and open its Dagster home. Stops what it has started."""
    lake = Lakehouse(settings)
    stock = shop.Shop()
    try:
        lake.endpoints(spark=spark)
        dagster_home(settings)
        with dg.DagsterInstance.get() as instance:
            yield Opened(lake, instance, shop.definitions(without_secrets(settings), stock), stock)
    finally:
        lake.nessie.close()
        lake.servers.stop_all()
