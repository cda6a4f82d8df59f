"""A code location with one ingestion, whose Kafka is in the environment."""

from __future__ import annotations

import json
import uuid
from typing import Any

import dagster as dg

from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.definitions import ingest_definitions
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings


def one_table(topic: str) -> Ingest:
    name = f"i{uuid.uuid4().hex[:8]}"
    return Ingest(name=name, topics=[topic], tables=[IngestTable(key=[name, "a"], columns={"id": "bigint"})])


def value(number: int) -> bytes:
    return json.dumps({"id": number}).encode()


class Project:
    """A code location whose Kafka is in the environment."""

    def __init__(self, lake: Lakehouse, topic: str, instance: dg.DagsterInstance) -> None:
        self.ingest = one_table(topic)
        self.instance = instance
        settings = lake.settings.model_copy(update=dict.fromkeys(Settings.secret_names()))
        self.resource = LakehouseResource.from_settings(settings)
        self.definitions = branchlake_definitions(
            lakehouse=self.resource,
            definitions=dg.Definitions.merge(
                ingest_definitions(self.ingest), dg.Definitions(executor=dg.in_process_executor)
            ),
        )

    def run(self, kind: str) -> dg.ExecuteInProcessResult:
        name = f"ingest_{self.ingest.name}"
        config = {"ops": {f"{name}_batches": {"config": {"run_s": 0.1, "interval_s": 0.0}}}}
        job = self.definitions.resolve_job_def(f"{name}_{kind}")
        return job.execute_in_process(
            instance=self.instance, raise_on_error=False, run_config=config if kind == "live" else None
        )

    def tick(self, kind: str) -> Any:
        (sensor,) = [
            one
            for one in ingest_definitions(self.ingest).sensors or ()
            if one.name == f"ingest_{self.ingest.name}_{kind}"
        ]
        resources = {"lakehouse": self.resource}
        with dg.build_sensor_context(instance=self.instance, resources=resources) as context:
            return sensor.evaluate_tick(context)

    def told(self, result: dg.ExecuteInProcessResult) -> str:
        """All that Dagster has of a run."""
        events = self.instance.all_logs(result.run_id)
        return "\n".join([*map(dg.serialize_value, events), *(one.user_message for one in events)])
