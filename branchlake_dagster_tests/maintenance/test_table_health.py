"""The health of tables is measured from metadata, shown by an asset, and judged by checks that warn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlparse

import dagster as dg
import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from branchlake_dagster.errors import JournalLost
from branchlake_dagster.garbage_collection.journal import CollectionJournal
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.maintenance.health_asset import (
    HealthLimits,
    evaluate_health,
    format_health,
    health_asset,
    health_key,
)
from branchlake_dagster.maintenance.table_health import (
    AGES,
    SMALL_FILE_BYTES,
    TableHealth,
    UnreadableHealth,
    measure_tables,
    sum_health,
)
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster_tests.publication.rebase.deleting import delete_equal
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

SCHEMA = Schema(
    NestedField(1, "day", StringType(), required=False), NestedField(2, "n", LongType(), required=False)
)
BY_DAY = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "day"))


def frame(day: str, *numbers: int) -> pa.Table:
    return pa.table({"day": [day] * len(numbers), "n": pa.array(numbers, pa.int64())})


@pytest.fixture
def catalog(lakehouse: Lakehouse, namespace: str) -> Iterator[Catalog]:
    catalog = lakehouse.catalog()
    catalog.create_namespace((namespace,))
    yield catalog
    for identifier in catalog.list_tables((namespace,)):
        catalog.drop_table(identifier)


def make_table(catalog: Catalog, namespace: str, name: str = "t") -> Table:
    table = catalog.create_table((namespace, name), schema=SCHEMA, partition_spec=BY_DAY)
    for number in range(3):
        table.append(frame("monday", number))
    table.append(frame("tuesday", 9))
    return table


def measure(lakehouse: Lakehouse, namespace: str, now: datetime | None = None) -> list[object]:
    return list(measure_tables(lakehouse, (namespace,), now=now or datetime.now(UTC)))


def test_files_ages_snapshots_and_manifests_are_counted(
    lakehouse: Lakehouse, catalog: Catalog, namespace: str
) -> None:
    table = make_table(catalog, namespace)
    (health,) = measure(lakehouse, namespace)
    assert isinstance(health, TableHealth)
    files = list(table.scan().plan_files())
    size = sum(file.file.file_size_in_bytes for file in files)
    assert health == TableHealth(
        f"{namespace}.t",
        data_files=4,
        small_files=4,
        data_bytes=size,
        snapshots=4,
        manifests=4,
        metadata_bytes=Path(urlparse(table.metadata_location).path).stat().st_size,
        most_small_files=3,
        crowded_partition="day=monday",
        bytes_by_age={**dict.fromkeys(AGES, 0), AGES[0]: size},
    )
    table.delete("day = 'monday'")
    (later,) = measure(lakehouse, namespace, datetime.now(UTC) + timedelta(days=8))
    assert isinstance(later, TableHealth)
    assert (later.data_files, later.snapshots, later.crowded_partition) == (1, 5, "day=tuesday")
    assert later.bytes_by_age == {**dict.fromkeys(AGES, 0), AGES[2]: later.data_bytes}


def test_delete_files_without_data_files_are_counted_apart(
    lakehouse: Lakehouse, catalog: Catalog, namespace: str
) -> None:
    delete_equal(make_table(catalog, namespace), "n", 1, "monday")
    (health,) = measure(lakehouse, namespace)
    assert isinstance(health, TableHealth)
    assert (health.delete_files, health.dangling_deletes) == (1, 0)
    catalog.load_table((namespace, "t")).delete("day = 'monday'")
    (later,) = measure(lakehouse, namespace)
    assert isinstance(later, TableHealth)
    assert (later.delete_files, later.dangling_deletes, later.data_files) == (1, 1, 1)


def test_bytes_that_are_planned_for_deletion_are_shown(
    lakehouse: Lakehouse, catalog: Catalog, namespace: str
) -> None:
    for name in ("t", "u"):
        make_table(catalog, namespace, name)
    planned = {f"{namespace}.t": 2_500_000, "elsewhere.t": 9}
    tables = [
        table
        for table in measure_tables(lakehouse, (namespace,), now=datetime.now(UTC), unreachable_bytes=planned)
        if isinstance(table, TableHealth)
    ]
    assert [table.unreachable_bytes for table in tables] == [2_500_000, 0]
    assert sum_health(tables).unreachable_bytes == 2_500_000
    assert format_health(tables).splitlines()[2].endswith("| 2.5 |")


@pytest.mark.parametrize(("error", "shown"), [(None, True), (JournalLost("lost"), False)])
def test_the_health_is_shown_without_the_journal(
    lakehouse: Lakehouse,
    catalog: Catalog,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception | None,
    shown: bool,
) -> None:
    def load(_: object) -> dict[str, int]:
        if error is not None:
            raise error
        return {f"{namespace}.t": 7}

    monkeypatch.setattr(CollectionJournal, "load_planned_bytes", load)
    make_table(catalog, namespace)
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize(
            [health_asset((namespace,))],
            instance=instance,
            resources={"lakehouse": LakehouseResource.from_settings(lakehouse.settings)},
        )
    (materialization,) = result.asset_materializations_for_node("table_health__" + namespace)
    assert ("unreachable bytes" in materialization.metadata) == shown


def test_an_empty_table_is_healthy(lakehouse: Lakehouse, catalog: Catalog, namespace: str) -> None:
    catalog.create_table((namespace, "empty"), schema=SCHEMA)
    (health,) = measure(lakehouse, namespace)
    assert isinstance(health, TableHealth)
    assert (health.data_files, health.snapshots, health.manifests) == (0, 0, 0)
    assert all(result.passed for result in evaluate_health([health], [], HealthLimits()))


def test_a_table_that_cannot_be_read_does_not_hide_the_others(
    lakehouse: Lakehouse, catalog: Catalog, namespace: str
) -> None:
    broken = make_table(catalog, namespace, "broken")
    make_table(catalog, namespace, "whole")
    snapshot = broken.current_snapshot()
    assert snapshot is not None
    Path(urlparse(snapshot.manifest_list).path).unlink()
    kinds = {type(health): health for health in measure(lakehouse, namespace)}
    assert set(kinds) == {TableHealth, UnreadableHealth}
    unreadable = kinds[UnreadableHealth]
    assert isinstance(unreadable, UnreadableHealth)
    assert unreadable.table == f"{namespace}.broken"


def test_metadata_that_contradicts_its_manifests_does_not_hide_the_other_tables(
    lakehouse: Lakehouse, catalog: Catalog, namespace: str
) -> None:
    """Its partition spec has a field that its manifests lack."""
    broken = catalog.create_table((namespace, "broken"), schema=SCHEMA)
    broken.append(frame("2026-11-01", 1))
    make_table(catalog, namespace, "whole")
    path = Path(urlparse(broken.metadata_location).path)
    metadata = json.loads(path.read_text())
    field = {"source-id": 1, "field-id": 1000, "name": "day", "transform": "identity"}
    path.write_text(json.dumps(metadata | {"partition-specs": [{"spec-id": 0, "fields": [field]}]}))
    found = {(type(health), health.table) for health in measure(lakehouse, namespace)}
    assert found == {(UnreadableHealth, f"{namespace}.broken"), (TableHealth, f"{namespace}.whole")}


@pytest.mark.parametrize(
    ("health", "failed"),
    [
        (
            TableHealth("t", most_small_files=50, snapshots=5_000, metadata_bytes=10**7, delete_files=100),
            None,
        ),
        (TableHealth("t", most_small_files=51), "small_files"),
        (TableHealth("t", snapshots=5_001), "snapshots"),
        (TableHealth("t", metadata_bytes=10**7 + 1), "metadata_size"),
        (TableHealth("t", delete_files=101), "delete_files"),
        (TableHealth("t", delete_files=101, dangling_deletes=1), None),
        (UnreadableHealth("t", "gone"), "readable"),
    ],
)
def test_a_check_warns_above_its_limit(health: TableHealth | UnreadableHealth, failed: str | None) -> None:
    tables = [health] if isinstance(health, TableHealth) else []
    unreadable = [health] if isinstance(health, UnreadableHealth) else []
    results = evaluate_health(tables, unreadable, HealthLimits())
    assert {result.severity for result in results} == {dg.AssetCheckSeverity.WARN}
    assert [result.check_name for result in results if not result.passed] == ([failed] if failed else [])


def test_the_sums_of_a_namespace() -> None:
    first = TableHealth("a", data_files=3, small_files=2, most_small_files=2, crowded_partition="day=1")
    second = TableHealth("b", data_files=4, most_small_files=1, bytes_by_age={AGES[3]: 7})
    total = sum_health([first, second])
    assert (total.data_files, total.small_files, total.most_small_files) == (7, 2, 2)
    assert (total.crowded_partition, total.bytes_by_age[AGES[3]]) == ("day=1", 7)
    assert sum_health([]).data_files == 0


def test_the_asset_shows_the_tables_of_its_namespace(
    lakehouse: Lakehouse, catalog: Catalog, namespace: str
) -> None:
    make_table(catalog, namespace)
    health = health_asset((namespace,), HealthLimits(small_files=2))
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize(
            [health],
            instance=instance,
            resources={"lakehouse": LakehouseResource.from_settings(lakehouse.settings)},
        )
        assert result.success
        (materialization,) = result.asset_materializations_for_node("table_health__" + namespace)
        assert materialization.asset_key == health_key((namespace,))
        assert materialization.metadata["data files"].value == 4
        assert f"{namespace}.t" in str(materialization.metadata["health"].value)
        failed = [one.check_name for one in result.get_asset_check_evaluations() if not one.passed]
        assert failed == ["small_files"]
    assert not [one.name for one in lakehouse.nessie.references() if one.name.startswith("run-")]


def test_files_are_small_below_32_mib() -> None:
    assert SMALL_FILE_BYTES == 32 * 1024 * 1024
