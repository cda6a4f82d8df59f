"""Tables of `NessieCatalog` on a real Nessie, with files in a local folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchIcebergTableError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import ConfigurationError, ReadOnlyReference, Unsupported
from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster_tests.suite.raised import raising

SCHEMA = Schema(NestedField(1, "id", LongType()), NestedField(2, "p", StringType()))
BY_P = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "p"))
OpenCatalog = Callable[[str], NessieCatalog]


def rows(*ids: int, p: str = "a") -> pa.Table:
    return pa.table({"id": list(ids), "p": [p] * len(ids)})


def ids(table: Any) -> list[int]:
    return sorted(table.refresh().scan().to_arrow()["id"].to_pylist())


@pytest.fixture
def warehouse(tmp_path: Path) -> str:
    return f"file://{tmp_path}/wh"


@pytest.fixture
def open_catalog(client: NessieClient, warehouse: str) -> OpenCatalog:
    return lambda ref: NessieCatalog.from_client(client, ref, warehouse)


@pytest.fixture
def catalog(open_catalog: OpenCatalog, fresh_branch: str) -> NessieCatalog:
    opened = open_catalog(fresh_branch)
    opened.create_namespace("db")
    return opened


def content(client: NessieClient, catalog: NessieCatalog, *name: str) -> IcebergTable:
    found = client.content(catalog.ref, ContentKey(name))
    assert isinstance(found, IcebergTable)
    return found


def test_by_name_through_load_catalog(nessie_uri: str, fresh_branch: str, warehouse: str) -> None:
    with load_catalog(
        "nessie",
        **{
            "py-catalog-impl": "branchlake_dagster.catalog.NessieCatalog",
            "uri": nessie_uri,
            "ref": fresh_branch,
            "warehouse": warehouse,
            "token": "not-asked-for",
            "ssl.verify": "true",
            "commit.author": "me",
            "commit.property.run": "r1",
        },
    ) as catalog:
        catalog.create_namespace("db")
        table = catalog.create_table("db.t", SCHEMA)
        table.append(rows(1, 2))
        assert ids(catalog.load_table("db.t")) == [1, 2]
        assert "token" not in catalog.properties
        assert "not-asked-for" not in repr(table.io.properties)
        with NessieClient(nessie_uri) as client:
            commits = [entry.commit for entry in client.log(fresh_branch)]
    assert [commit.message for commit in commits] == [
        "Update table db.t: append",
        "Create table db.t",
        "Create namespace db",
    ]
    assert {commit.author for commit in commits} == {"me"}
    assert [commit.properties for commit in commits] == [{"run": "r1"}] * 3


def test_settings_that_are_missing() -> None:
    with raising(ConfigurationError, "uri"):
        NessieCatalog("nessie", ref="main")


def test_create_and_load(catalog: NessieCatalog, client: NessieClient, warehouse: str) -> None:
    table = catalog.create_table("db.t", SCHEMA, partition_spec=BY_P, properties={"owner": "me", "n": 3})
    assert table.name() == ("db", "t")
    assert table.properties == {"owner": "me", "n": "3", "gc.enabled": "false"}
    assert table.location() == f"{warehouse}/db/t_{table.metadata.table_uuid}"
    stored = content(client, catalog, "db", "t")
    assert stored.metadata_location == table.metadata_location
    assert (stored.snapshot_id, stored.schema_id, stored.spec_id, stored.sort_order_id) == (-1, 0, 0, 0)
    loaded = catalog.load_table(("db", "t"))
    assert loaded.metadata == table.metadata
    assert catalog.load_table(loaded.name()).metadata == table.metadata
    assert catalog.table_exists("db.t")
    assert catalog.list_tables("db") == [("db", "t")]


def test_creating_over_something(catalog: NessieCatalog) -> None:
    table = catalog.create_table("db.t", SCHEMA)
    with raising(TableAlreadyExistsError, "db.t"):
        catalog.create_table("db.t", SCHEMA)
    assert catalog.create_table_if_not_exists("db.t", SCHEMA).metadata == table.metadata
    catalog.create_namespace("db.inner")
    with pytest.raises(TableAlreadyExistsError):
        catalog.create_table("db.inner", SCHEMA)


@pytest.mark.parametrize("name", ["nowhere.t", "t", "db.nowhere.t"])
def test_creating_in_a_missing_namespace(catalog: NessieCatalog, name: str) -> None:
    with pytest.raises(NoSuchNamespaceError):
        catalog.create_table(name, SCHEMA)


def test_locations(catalog: NessieCatalog, tmp_path: Path) -> None:
    given = catalog.create_table("db.given", SCHEMA, location=f"file://{tmp_path}/mine/")
    assert given.location() == f"file://{tmp_path}/mine"
    catalog.create_namespace("placed", {"location": f"file://{tmp_path}/place/"})
    placed = catalog.create_table("placed.t", SCHEMA)
    assert placed.location() == f"file://{tmp_path}/place/t_{placed.metadata.table_uuid}"
    catalog.create_namespace("a.b.c")
    deep = catalog.create_table("a.b.c.t", pa.schema([("id", pa.int64()), ("p", pa.string())]))
    assert "/wh/a/b/c/t_" in deep.location()
    deep.append(rows(1))
    assert ids(catalog.load_table("a.b.c.t")) == [1]


@pytest.mark.parametrize("letter", ["a", "é", "漢"])
def test_names_that_are_longer_than_a_folder_s(catalog: NessieCatalog, letter: str) -> None:
    size = len(letter.encode())
    folders = set()
    for number in (1, 2):
        path = (letter * (260 // size) + str(number), letter * (225 // size))
        catalog.create_namespace(path[:1])
        table = catalog.create_table(path, SCHEMA)
        table.append(rows(number))
        assert ids(catalog.load_table(path)) == [number]
        *_, parent, folder = table.location().split("/")
        assert folder.endswith(f"_{table.metadata.table_uuid}")
        folders.add(parent)
    assert len(folders) == 2
    short = catalog.create_table("db.t", SCHEMA)
    assert short.location().endswith(f"/db/t_{short.metadata.table_uuid}")


def test_no_place_for_a_table(client: NessieClient, fresh_branch: str) -> None:
    catalog = NessieCatalog("nessie", client, ref=fresh_branch)
    catalog.create_namespace("db")
    with pytest.raises(ValueError, match="No default path"):
        catalog.create_table("db.t", SCHEMA)


def test_two_branches_that_create_one_table_share_no_location(
    open_catalog: OpenCatalog, new_branch: Callable[..., str]
) -> None:
    locations = set()
    for _ in range(2):
        catalog = open_catalog(new_branch())
        catalog.create_namespace("db")
        locations.add(catalog.create_table("db.t", SCHEMA).location())
        catalog.drop_table("db.t")
        locations.add(catalog.create_table("db.t", SCHEMA).location())
    assert len(locations) == 4


def test_create_transaction(catalog: NessieCatalog, client: NessieClient) -> None:
    with catalog.create_table_transaction("db.t", SCHEMA, partition_spec=BY_P) as transaction:
        transaction.append(rows(1, 2))
        transaction.set_properties(owner="me")
        assert not catalog.table_exists("db.t")
    table = catalog.load_table("db.t")
    assert ids(table) == [1, 2]
    assert table.properties["owner"] == "me"
    assert table.properties["gc.enabled"] == "false"
    assert content(client, catalog, "db", "t").snapshot_id == table.metadata.current_snapshot_id


def test_create_transaction_that_lost_the_name(catalog: NessieCatalog) -> None:
    transaction = catalog.create_table_transaction("db.t", SCHEMA)
    catalog.create_table("db.t", SCHEMA)
    with pytest.raises(CommitFailedException):
        transaction.commit_transaction()


def test_data_and_schema_change(catalog: NessieCatalog, client: NessieClient) -> None:
    table = catalog.create_table("db.t", SCHEMA, partition_spec=BY_P)
    first = content(client, catalog, "db", "t")
    table.append(rows(1, 2))
    table.append(rows(3, p="b"))
    table.delete("id = 1")
    table.overwrite(rows(4, p="b"), "p == 'b'")
    with table.update_schema() as update:
        update.add_column("z", StringType())
    assert ids(table) == [2, 4]
    stored = content(client, catalog, "db", "t")
    assert stored.content_id == first.content_id
    assert stored.metadata_location == table.metadata_location
    assert stored.snapshot_id == table.metadata.current_snapshot_id
    assert stored.schema_id == 1
    assert [f.name for f in catalog.load_table("db.t").schema().fields] == ["id", "p", "z"]


def test_a_commit_without_a_change_is_none(catalog: NessieCatalog, client: NessieClient) -> None:
    table = catalog.create_table("db.t", SCHEMA, properties={"a": "1"})
    before = client.reference(catalog.ref).hash
    answer = catalog.commit_table(table, (), ())
    assert answer.metadata_location == table.metadata_location
    assert client.reference(catalog.ref).hash == before


def test_old_metadata_is_kept_for_other_references(
    catalog: NessieCatalog, client: NessieClient, open_catalog: OpenCatalog
) -> None:
    eager = {
        "write.metadata.delete-after-commit.enabled": "true",
        "write.metadata.previous-versions-max": "1",
    }
    table = catalog.create_table("db.t", SCHEMA, properties=eager)
    table.append(rows(1))
    at = client.reference(catalog.ref).hash
    for i in range(2, 6):
        table.append(rows(i))
    assert ids(open_catalog(f"{catalog.ref}@{at}").load_table("db.t")) == [1]


def test_register(catalog: NessieCatalog, client: NessieClient) -> None:
    table = catalog.create_table("db.t", SCHEMA)
    table.append(rows(1))
    old = table.metadata_location
    table.append(rows(2))
    assert ids(catalog.register_table("db.copy", old)) == [1]
    with pytest.raises(TableAlreadyExistsError):
        catalog.register_table("db.t", old)
    before = content(client, catalog, "db", "t")
    assert ids(catalog.register_table("db.t", old, overwrite=True)) == [1]
    assert content(client, catalog, "db", "t").content_id == before.content_id
    with pytest.raises(NoSuchNamespaceError):
        catalog.register_table("nowhere.t", old)


def test_drop(catalog: NessieCatalog, client: NessieClient, open_catalog: OpenCatalog) -> None:
    table = catalog.create_table("db.t", SCHEMA)
    table.append(rows(1))
    at = client.reference(catalog.ref).hash
    catalog.drop_table("db.t")
    assert not catalog.table_exists("db.t")
    assert catalog.list_tables("db") == []
    for use in (catalog.load_table, catalog.drop_table):
        with raising(NoSuchTableError, "db.t"):
            use("db.t")
    with pytest.raises(NoSuchTableError):
        table.append(rows(2))
    assert ids(open_catalog(f"{catalog.ref}@{at}").load_table("db.t")) == [1]


def test_purge_is_refused(catalog: NessieCatalog) -> None:
    catalog.create_table("db.t", SCHEMA)
    with raising(Unsupported, "drop_table", table="db.t"):
        catalog.purge_table("db.t")
    assert catalog.table_exists("db.t")


def test_rename(catalog: NessieCatalog, client: NessieClient) -> None:
    catalog.create_namespace("other")
    table = catalog.create_table("db.t", SCHEMA)
    table.append(rows(1))
    before = content(client, catalog, "db", "t")
    renamed = catalog.rename_table("db.t", "other.u")
    assert renamed.name() == ("other", "u")
    assert ids(renamed) == [1]
    assert content(client, catalog, "other", "u") == before
    assert not catalog.table_exists("db.t")
    renamed.append(rows(2))
    catalog.create_table("db.x", SCHEMA)
    with pytest.raises(TableAlreadyExistsError):
        catalog.rename_table("db.x", "other.u")
    with pytest.raises(NoSuchTableError):
        catalog.rename_table("db.missing", "other.v")
    with pytest.raises(NoSuchNamespaceError):
        catalog.rename_table("db.x", "nowhere.x")


def test_what_is_no_table(catalog: NessieCatalog) -> None:
    catalog.create_namespace("db.inner")
    with pytest.raises(NoSuchIcebergTableError):
        catalog.load_table("db.inner")
    assert not catalog.table_exists("db.inner")
    assert not catalog.table_exists("nowhere.t")
    assert catalog.list_tables("db") == []
    with pytest.raises(NoSuchNamespaceError):
        catalog.list_tables("nowhere")
    with pytest.raises(NoSuchNamespaceError):
        catalog.list_tables(())


def test_views_are_refused(catalog: NessieCatalog) -> None:
    uses: list[Callable[[], Any]] = [
        lambda: catalog.list_views("db"),
        lambda: catalog.view_exists("db.v"),
        lambda: catalog.load_view("db.v"),
        lambda: catalog.drop_view("db.v"),
        lambda: catalog.register_view("db.v", "file:///v.json"),
        lambda: catalog.create_view("db.v", SCHEMA, None),
    ]
    for use in uses:
        with raising(Unsupported, "Spark"):
            use()


def test_tags_and_hashes_are_read_only(
    catalog: NessieCatalog, client: NessieClient, open_catalog: OpenCatalog
) -> None:
    catalog.create_table("db.t", SCHEMA).append(rows(1))
    at = client.reference(catalog.ref).hash
    tag = f"{catalog.ref}-tag"
    client.create_tag(tag, from_ref=catalog.ref, from_hash=at)
    try:
        for ref in (tag, f"{catalog.ref}@{at}", f"@{at}", at):
            fixed = open_catalog(ref)
            table = fixed.load_table("db.t")
            assert ids(table) == [1]
            assert fixed.list_tables("db") == [("db", "t")]
            changes: list[Callable[[], Any]] = [
                lambda fixed=fixed: fixed.create_namespace("x"),
                lambda fixed=fixed: fixed.drop_namespace("db"),
                lambda fixed=fixed: fixed.update_namespace_properties("db", updates={"a": "b"}),
                lambda fixed=fixed: fixed.create_table("db.u", SCHEMA),
                lambda fixed=fixed: fixed.create_table_transaction("db.u", SCHEMA),
                lambda fixed=fixed: fixed.drop_table("db.t"),
                lambda fixed=fixed: fixed.rename_table("db.t", "db.u"),
                lambda table=table: table.append(rows(2)),
            ]
            for change in changes:
                with pytest.raises(ReadOnlyReference):
                    change()
    finally:
        client.delete_tag(tag, expected_hash=at)


def test_a_missing_reference_is_not_a_missing_table(open_catalog: OpenCatalog) -> None:
    gone = open_catalog("no-such-branch")
    with pytest.raises(ReferenceNotFound):
        gone.table_exists("db.t")
    with pytest.raises(ReferenceNotFound):
        gone.namespace_exists("db")


def test_names_with_dots_and_foreign_alphabets(catalog: NessieCatalog) -> None:
    for name in ("a.b", "Ä 😀", 'it\'s "quoted"'):
        catalog.create_namespace(("db", name))
        table = catalog.create_table(("db", name, "t"), SCHEMA)
        table.append(rows(1))
        assert ids(catalog.load_table(("db", name, "t"))) == [1]
        assert catalog.list_tables(("db", name)) == [("db", name, "t")]
    assert len(catalog.list_namespaces("db")) == 3


@pytest.mark.parametrize("name", ["a?b", "a#b", "a&b+c%41d"])
def test_a_name_that_means_something_in_urls_has_a_location(catalog: NessieCatalog, name: str) -> None:
    catalog.create_namespace(("sign?#",))
    table = catalog.create_table(("sign?#", name), SCHEMA)
    table.append(rows(1))
    assert ids(catalog.load_table(("sign?#", name))) == [1]
