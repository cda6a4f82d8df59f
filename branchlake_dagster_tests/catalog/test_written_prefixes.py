"""Where writers put files, for whoever searches for files that nobody names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.types import LongType, NestedField

from branchlake_dagster.catalog import NessieCatalog, stored_files
from branchlake_dagster.catalog.stored_files import list_prefixes, load_prefixes, record_prefixes
from branchlake_dagster.nessie import NessieClient

SCHEMA = Schema(NestedField(1, "n", LongType()))
UUID = "61eb40df-1caa-49f6-af47-4899b82b7e39"


def metadata(location: str) -> TableMetadata:
    return new_table_metadata(SCHEMA, UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, location, {})


@pytest.mark.unit
@pytest.mark.parametrize(
    ("location", "properties", "prefixes"),
    [
        pytest.param(f"s3://b/wh/shop/orders_{UUID}", {}, ["s3://b/wh/shop/orders_"], id="chosen"),
        pytest.param(
            f"s3://b/wh/shop/orders__staged_5d3c4ec46da8575c_{UUID}",
            {},
            ["s3://b/wh/shop/orders__staged_"],
            id="staging",
        ),
        pytest.param("s3://b/own/orders/", {}, ["s3://b/own/orders/"], id="given"),
        pytest.param(f"s3://b/own/{UUID}", {}, [f"s3://b/own/{UUID}/"], id="only-a-uuid"),
        pytest.param(f"s3://b/orders_{UUID}_old", {}, [f"s3://b/orders_{UUID}_old/"], id="uuid-within"),
        pytest.param(
            "s3://b/own/orders",
            {"write.data.path": "s3://fast/orders", "write.metadata.path": "s3://b/own/orders/md"},
            ["s3://b/own/orders/", "s3://fast/orders/"],
            id="paths",
        ),
    ],
)
def test_prefixes_hold_whatever_a_table_writes(
    location: str, properties: dict[str, str], prefixes: list[str]
) -> None:
    assert list_prefixes(location, properties) == tuple(prefixes)


@pytest.mark.unit
def test_a_prefix_is_written_once_and_again_where_a_power_cut_has_emptied_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_files, "_recorded_prefixes", set())
    io, warehouse = PyArrowFileIO(), tmp_path.as_uri()
    assert load_prefixes(io, warehouse) == frozenset()
    record_prefixes(io, warehouse, metadata("s3://b/own/orders"))
    record_prefixes(None, warehouse, metadata("s3://b/own/orders"))  # no request
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    written = file.stat().st_mtime_ns
    stored_files._recorded_prefixes.clear()
    record_prefixes(io, warehouse, metadata("s3://b/own/orders"))
    assert file.stat().st_mtime_ns == written
    file.write_bytes(b"")
    assert load_prefixes(io, warehouse) == frozenset()
    stored_files._recorded_prefixes.clear()
    record_prefixes(io, warehouse, metadata("s3://b/own/orders"))
    assert load_prefixes(io, warehouse) == {"s3://b/own/orders/"}


@pytest.mark.nessie
def test_files_of_dropped_and_moved_tables_are_within_recorded_prefixes(
    client: NessieClient, fresh_branch: str, tmp_path: Path
) -> None:
    warehouse, elsewhere = (tmp_path / "wh").as_uri(), (tmp_path / "fast" / "t").as_uri()
    catalog = NessieCatalog.from_client(client, fresh_branch, warehouse)
    catalog.create_namespace("db")
    rows: Any = pa.table({"n": [1]})
    table = catalog.create_table("db.t", SCHEMA)
    table.append(rows)
    with table.transaction() as transaction:
        transaction.set_properties({"write.data.path": elsewhere})
    table.append(rows)
    with table.transaction() as transaction:
        transaction.remove_properties("write.data.path")
    catalog.drop_table("db.t")
    with catalog.create_table_transaction("db.u", SCHEMA) as creation:
        creation.append(rows)
    found = load_prefixes(PyArrowFileIO(), warehouse)
    assert found == {f"{warehouse}/db/t_", f"{elsewhere}/", f"{warehouse}/db/u_"}
    files = {
        path.as_uri() for path in tmp_path.rglob("*.*") if path.is_file() and "_branchlake" not in path.parts
    }
    assert len(files) > 10
    assert [file for file in files if not file.startswith(tuple(found))] == []
