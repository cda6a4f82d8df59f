"""An ingestion driven batch by batch, without Dagster: each on a branch of its own, merged into `main`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyiceberg.table import Table
from pyspark.sql import SparkSession

from branchlake_dagster.catalog.options import NAMESPACE_CREATE
from branchlake_dagster.ingest.batch_context import (
    BatchContext,
    IngestionTables,
    PlannedBatch,
    load_ingestion_tables,
    plan_next_batch,
)
from branchlake_dagster.ingest.batch_tables import Identifier, table_identifiers
from branchlake_dagster.ingest.declaration import Ingest, expand_families
from branchlake_dagster.ingest.ingest_batch import BatchResult, ingest_batch
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.ingest.record_frames import KafkaRecords, Records
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.ledger import Candidate, Published, Refused, load_write_set
from branchlake_dagster.publication.publisher import build_publisher
from branchlake_dagster_tests.suite.kafka import Broker


class Driver:
    """One ingestion on a lake and a broker."""

    def __init__(self, lake: Lakehouse, kafka: Broker, session: SparkSession, ingest: Ingest) -> None:
        self.lake = lake
        self._session = session
        self._own: list[SparkSession] = []
        self.ingest = ingest
        self.topics = KafkaTopics(kafka.cluster)
        self.records: Records = KafkaRecords(kafka.cluster, self.topics)

    def look(self, ref: str = "main") -> PlannedBatch:
        return plan_next_batch(
            self.ingest, self.lake.nessie, self.lake.catalog(ref), self.topics, namespace="lake"
        )

    @property
    def known(self) -> IngestionTables:
        """The tables on `main`."""
        return load_ingestion_tables(self.ingest, self.lake.nessie, self.lake.catalog("main"), "lake")

    @property
    def wanted(self) -> Mapping[str, Identifier]:
        """Their identifiers, the dead letters last. Of families only `main` knows the tables, which takes time."""
        expanded = expand_families(self.ingest, {})
        return self.known.identifiers if expanded.families else table_identifiers(expanded, "lake")

    def place(self) -> BatchContext:
        """A branch of main's head."""
        name = f"ingest-{uuid.uuid4().hex[:8]}"
        base = self.lake.nessie.reference("main").hash
        self.lake.nessie.create_branch(name, from_ref="main", from_hash=base)
        catalog = self.lake.catalog(name, properties={NAMESPACE_CREATE: "true"})
        return BatchContext(self.lake, name, catalog, lambda: self._at(name), "run", {}, {})

    def _at(self, branch: str) -> SparkSession:
        """A session at the branch where rows are merged; else any, whose workers are there already."""
        if all(table.mode == "append" for table in self.ingest.tables):
            return self._session
        if not self._own:
            self._own.append(self.lake.spark_session(branch))
        return self._own[0]

    def stop_sessions(self) -> None:
        """Stop the sessions at the branches of batches."""
        while self._own:
            self._own.pop().stop()

    def batch(self, *, tasks: int = 2, publish: bool = True) -> BatchResult:
        """The next batch, published."""
        place = self.place()
        result = ingest_batch(self.look(place.branch), place, self.records, tasks=tasks)
        if publish:
            self.publish(place, result)
        return result

    def merge(self, place: BatchContext) -> bool:
        """Put the branch on `main` as it is; whether it went."""
        lake = self.lake.nessie
        merged = lake.merge(
            from_name=place.branch,
            from_hash=lake.reference(place.branch).hash,
            into="main",
            expected_hash=lake.reference("main").hash,
            message="published",
            properties={},
        )
        return merged.applied

    def publish(self, place: BatchContext, result: BatchResult) -> None:
        self.stop_sessions()
        assert self.merge(place)
        self.lake.nessie.delete_branch(place.branch, expected_hash=result.head.hash)

    def publish_run(self, place: BatchContext, base_hash: str) -> Published | Refused:
        """Publish the branch as the publisher does with a run's: onto whatever `main` is now."""
        head = self.lake.nessie.reference(place.branch)
        candidate = Candidate(
            branch=place.branch,
            head_hash=head.hash,
            base_hash=base_hash,
            run_id=place.run_id,
            root_run_id=place.run_id,
            verdict="passed",
            changes=load_write_set(self.lake.nessie, base_hash, head),
        )
        outcome = build_publisher(self.lake).publish([candidate])[place.branch]
        assert isinstance(outcome, Published | Refused), outcome
        return outcome

    def table(self, number: int = 0) -> Table:
        """A table by its place; the dead letters are the last one."""
        return self.lake.catalog("main").load_table(list(self.wanted.values())[number])

    def arrow(self, number: int = 0) -> pa.Table:
        return self.table(number).scan().to_arrow()

    def rows(self, number: int = 0, by: str | None = None) -> list[dict[str, Any]]:
        found = self.arrow(number).to_pylist()
        return sorted(found, key=lambda row: row[by]) if by else found

    def dead(self) -> list[dict[str, Any]]:
        """The dead letters by their offsets."""
        return sorted(self.rows(-1), key=lambda row: (row["topic"], row["partition"], row["offset"]))
