"""Assets that commit data files which functions on Spark's workers wrote."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
import pickle
from collections.abc import Callable, Iterable

import dagster as dg
import pyarrow as pa
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import In
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from branchlake_dagster import LakehouseResource, WorkerTable, commit_worker_files, table_metadata
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.tables import replaced_rows
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import FREE
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse
DAYS = dg.StaticPartitionsDefinition(["mon", "tue", "wed"])
SCHEMA = Schema(
    NestedField(1, "day", StringType(), required=False), NestedField(2, "id", LongType(), required=False)
)
BY_DAY = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "day"))


def load_or_create(lakehouse: LakehouseResource, namespace: str) -> Table:
    catalog = lakehouse.catalog()
    try:
        return catalog.load_table((namespace, "t"))
    except NoSuchTableError:
        catalog.create_namespace_if_not_exists((namespace,))
        return catalog.create_table((namespace, "t"), SCHEMA, partition_spec=BY_DAY)


def write_on_worker(table: Table, settings: object, days: Iterable[str], first_id: int) -> list[DataFile]:
    """Write one row per day, as a worker does: from a pickled target, with pickled results."""
    target: WorkerTable = pickle.loads(pickle.dumps(WorkerTable.from_table(table, settings)))
    rows = pa.Table.from_pylist([{"day": day, "id": first_id + n} for n, day in enumerate(days)])
    return [pickle.loads(pickle.dumps(file)) for file in target.write(rows)]


def build_asset(
    namespace: str,
    first_id: Callable[[], int],
    *,
    load: Callable[[LakehouseResource, str], Table] = load_or_create,
) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "t"],
        partitions_def=DAYS,
        metadata={**table_metadata(**FREE), "partition_expr": "day"},
    )
    def worker_files(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> None:
        table, days = load(lakehouse, namespace), context.partition_keys
        removed = [task.file for task in table.scan(In("day", days)).plan_files()]
        files = write_on_worker(table, lakehouse.lakehouse.settings, days, first_id())
        commit_worker_files(context, lakehouse, table, added=files, removed=removed)

    return worker_files


def run_days(p: Project, first: str, last: str, *, ok: bool = True) -> str:
    return p.run(
        tags={"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}, ok=ok
    )


def sorted_rows(p: Project, namespace: str) -> list[tuple[str, int]]:
    return sorted((row["day"], row["id"]) for row in p.rows(namespace, "t"))


def test_a_range_of_partitions_is_replaced_and_recorded(lakehouse: Lakehouse, namespace: str) -> None:
    ids = iter((0, 100, 200))
    with project(lakehouse, build_asset(namespace, lambda: next(ids))) as p:
        assert p.settle(run_days(p, "mon", "wed")).publication
        assert sorted_rows(p, namespace) == [("mon", 0), ("tue", 1), ("wed", 2)]
        both, one = run_days(p, "mon", "tue"), p.run(partition="wed")
        assert p.settle(one).publication
        assert p.settle(both).publication  # rebased: `main` has another day by now
        assert sorted_rows(p, namespace) == [("mon", 100), ("tue", 101), ("wed", 200)]
        snapshot = lakehouse.catalog().load_table((namespace, "t")).current_snapshot()
        assert snapshot is not None
        assert snapshot.summary is not None
        recorded = snapshot.summary.additional_properties
        assert recorded["branchlake.partition"].split(",") == ["mon", "tue"]
        assert recorded["branchlake.run_id"] == both
        predicate = replaced_rows.from_json(recorded["branchlake.replaced"])
        assert len(predicate.slices) == 1


def test_two_runs_that_replace_the_same_partition(lakehouse: Lakehouse, namespace: str) -> None:
    ids = iter((0, 100, 200))
    with project(lakehouse, build_asset(namespace, lambda: next(ids))) as p:
        assert p.settle(run_days(p, "mon", "wed")).publication
        first, second = p.run(partition="mon"), p.run(partition="mon")
        assert p.settle(second).publication
        assert p.settle(first).publication is None
        assert sorted_rows(p, namespace) == [("mon", 200), ("tue", 1), ("wed", 2)]


def test_a_table_of_main_is_refused(lakehouse: Lakehouse, namespace: str) -> None:
    def load_from_main(resource: LakehouseResource, namespace: str) -> Table:
        load_or_create(resource, namespace)
        return resource.lakehouse.catalog().load_table((namespace, "t"))

    with project(lakehouse, build_asset(namespace, lambda: 0)) as p:
        assert p.settle(p.run(partition="mon")).publication
    head = lakehouse.nessie.reference(MAIN).hash
    with project(lakehouse, build_asset(namespace, lambda: 7, load=load_from_main)) as p:
        p.run(partition="mon", ok=False)
        p.failed_with(ConfigurationError)
    assert lakehouse.nessie.reference(MAIN).hash == head


def test_the_table_of_another_asset_is_refused(lakehouse: Lakehouse, namespace: str) -> None:
    def load_other(resource: LakehouseResource, namespace: str) -> Table:
        load_or_create(resource, namespace)
        return resource.catalog().create_table((namespace, "other"), SCHEMA, partition_spec=BY_DAY)

    with project(lakehouse, build_asset(namespace, lambda: 0, load=load_other)) as p:
        p.run(partition="mon", ok=False)
        p.failed_with(ConfigurationError)
