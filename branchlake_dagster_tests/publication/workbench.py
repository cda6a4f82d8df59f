"""Runs without Dagster: branches written through PyIceberg or Spark, and handed to the real publisher."""

from __future__ import annotations

import contextlib
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from pyiceberg.exceptions import NamespaceAlreadyExistsError
from pyiceberg.expressions import EqualTo
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.publication.ledger import Candidate, Published, Refused, Result, load_write_set
from branchlake_dagster.publication.publisher import Publisher
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.tables import spark_frames
from branchlake_dagster.tables import upserts as merge
from branchlake_dagster.tables.specification import TableSpec

SCHEMA = Schema(
    NestedField(1, "day", StringType(), required=False), NestedField(2, "id", LongType(), required=False)
)
BY_DAY = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "day"))
FLAT = PartitionSpec()
ARROW = pa.schema([("day", pa.string()), ("id", pa.int64())])
Rows = Sequence[tuple[str, int]]


def frame(rows: Rows) -> pa.Table:
    return pa.Table.from_pylist([{"day": day, "id": number} for day, number in rows], schema=ARROW)


@dataclass
class Run:
    """One run's branch."""

    bench: Workbench
    run_id: str
    base: str
    reads: frozenset[ContentKey] | None = None

    @property
    def name(self) -> str:
        return f"run-{self.run_id}"

    @property
    def catalog(self) -> NessieCatalog:
        return self.bench.lake.catalog(self.name)

    def properties(self, mode: str | None, keys: str = "") -> dict[str, str]:
        found = {"branchlake.run_id": self.run_id, "branchlake.write_mode": mode, "branchlake.keys": keys}
        return {key: value for key, value in found.items() if value}

    def table(self, name: str = "t") -> Table:
        return self.catalog.load_table((self.bench.namespace, name))

    def create(self, name: str = "t", spec: PartitionSpec = BY_DAY, schema: Schema = SCHEMA) -> Table:
        with contextlib.suppress(NamespaceAlreadyExistsError):
            self.catalog.create_namespace((self.bench.namespace,))
        return self.catalog.create_table((self.bench.namespace, name), schema, partition_spec=spec)

    def append(self, rows: Rows, name: str = "t", mode: str | None = "append") -> None:
        self.table(name).append(frame(rows), snapshot_properties=self.properties(mode))

    def replace(self, day: str, rows: Rows, name: str = "t") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.table(name).overwrite(
                frame(rows),
                overwrite_filter=EqualTo("day", day),
                snapshot_properties=self.properties("replace_partitions"),
            )

    def replace_table(self, rows: Rows, name: str = "t") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.table(name).overwrite(frame(rows), snapshot_properties=self.properties("replace_table"))

    def upsert(self, rows: Rows, *keys: str, by: str = "PyIceberg", name: str = "t") -> None:
        """As the IO manager writes the rows, by one of its two engines."""
        properties = self.properties("upsert", ",".join(keys))
        spec = TableSpec(identifier=(self.bench.namespace, name), write_mode="upsert", keys=keys)
        table = self.table(name)
        if by == "PyIceberg":
            planned = merge.plan_upsert(frame(rows), table, spec, None)
            assert isinstance(planned, merge.UpsertPlan), planned
            merge.write_upsert(planned, properties)
            return
        session = self.bench.lake.spark_session(self.name)
        try:
            source = session.createDataFrame(frame(rows))
            spark_frames.write_spark_frame(source, spec, table.schema(), None, properties)
        finally:
            session.stop()

    def sql(self, *statements: str, mode: str | None = None, keys: str = "") -> None:
        """Statements on `{t}` in a Spark session of the branch."""
        self.bench.sql(*statements, ref=self.name, properties=self.properties(mode, keys))

    def candidate(self, table_checks: frozenset[ContentKey] = frozenset()) -> Candidate:
        client = self.bench.lake.nessie
        head = client.reference(self.name)
        return Candidate(
            branch=self.name,
            head_hash=head.hash,
            base_hash=self.base,
            run_id=self.run_id,
            root_run_id=self.run_id,
            verdict="passed",
            changes=load_write_set(client, self.base, head),
            read_set=self.reads,
            fully_checked_tables=table_checks,
        )


@dataclass
class Workbench:
    """A namespace of the shared lake's `main`, and a publisher."""

    lake: Lakehouse
    namespace: str
    client: NessieClient | None = None
    runs: list[Run] = field(default_factory=list)

    @property
    def publisher(self) -> Publisher:
        return Publisher(self.client or self.lake.nessie, IcebergTableFormat(self.lake.catalog()))

    def key(self, name: str = "t") -> ContentKey:
        return ContentKey([self.namespace, name])

    def run(self, *, reads: Sequence[str] | None = None) -> Run:
        """A run that starts from `main` as it is now; with `reads` it is serializable."""
        nessie = self.lake.nessie
        base = nessie.reference(MAIN).hash
        run = Run(self, f"{self.namespace}-{uuid.uuid4().hex[:8]}", base)
        run.reads = None if reads is None else frozenset(self.key(name) for name in reads)
        nessie.create_branch(run.name, from_ref=MAIN, from_hash=base)
        self.runs.append(run)
        return run

    def publish(self, *runs: Run) -> list[Result | BranchlakeError]:
        """All at once, as one pass of the sensor would."""
        results = self.publisher.publish([run.candidate() for run in runs])
        return [results[run.name] for run in runs]

    def published(self, *runs: Run) -> list[Published]:
        found = []
        for result in self.publish(*runs):
            assert isinstance(result, Published), result
            found.append(result)
        return found

    def refused(self, run: Run) -> Refused:
        (result,) = self.publish(run)
        assert isinstance(result, Refused), result
        return result

    def seeded(self, rows: Rows, *, spec: PartitionSpec = BY_DAY, name: str = "t") -> None:
        """A table on `main` that holds `rows`."""
        first = self.run()
        first.create(name, spec)
        if rows:
            first.append(rows, name)
        self.published(first)

    def sql(
        self, *statements: str, ref: str = MAIN, properties: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Statements in one Spark session, by default on `main` as somebody from outside makes them.

        `{t}` stands for the table, `{name}` for its name as Iceberg's procedures take it.
        """
        session = self.lake.spark_session(ref)
        try:
            for key, value in properties.items():
                session.conf.set(f"spark.sql.iceberg.snapshot-property.{key}", value)
            for statement in statements:
                session.sql(statement.format(t=f"nessie.{self.namespace}.t", name=f"{self.namespace}.t"))
        finally:
            session.stop()

    def main(self, name: str = "t") -> Table:
        return self.lake.catalog().load_table((self.namespace, name))

    def rows(self, name: str = "t") -> list[tuple[Any, ...]]:
        found = self.main(name).scan().to_arrow().to_pylist()
        return sorted(tuple(row.values()) for row in found)

    def clean(self) -> None:
        nessie = self.lake.nessie
        for ref in list(nessie.references()):
            if self.namespace in ref.name:
                nessie.delete_branch(ref.name, expected_hash=ref.hash)
