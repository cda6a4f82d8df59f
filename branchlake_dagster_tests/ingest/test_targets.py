"""What a table must be like to be ingested into: said by its name, before a record is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.exceptions import NoSuchNamespaceError, TableAlreadyExistsError
from pyiceberg.schema import Schema
from pyiceberg.types import ListType, LongType, NestedField, StringType, StructType

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.batch_assets import build_asset_specs
from branchlake_dagster.ingest.batch_tables import prepare_targets
from branchlake_dagster.ingest.declaration import Ingest, IngestTable, expand_families
from branchlake_dagster.ingest.spark_expressions import NAME_MAPPING, columns_of
from branchlake_dagster_tests.history.snapshot_tables import SCHEMA, catalogue
from branchlake_dagster_tests.suite.raised import raising

NESTED = Schema(
    NestedField(1, "id", LongType()),
    NestedField(
        2,
        "site",
        StructType(NestedField(3, "name", StringType()), NestedField(4, "tags", ListType(5, StringType()))),
    ),
)


def mapping(**nested: Any) -> dict[str, str]:
    """A name mapping of `NESTED`; `nested` are the names of the fields in `site`."""
    fields = [
        {"field-id": 3, "names": nested.get("name", ["name"])},
        {
            "field-id": 4,
            "names": nested.get("tags", ["tags"]),
            "fields": [{"field-id": 5, "names": ["element"]}],
        },
    ]
    top = [{"field-id": 1, "names": ["id", "orderId"]}, {"field-id": 2, "names": ["site"], "fields": fields}]
    return {NAME_MAPPING: json.dumps(top)}


def test_a_table_of_another_format_than_parquet_is_refused_before_a_record_is_read(tmp_path: Path) -> None:
    declared = IngestTable(key=["shop", "t"], columns={"day": "string"})
    with catalogue(tmp_path) as catalog:
        table = catalog.create_table("shop.t", SCHEMA, properties={"write.format.default": "orc"})
        known = {"shop.t": table, "shop.dead": catalog.create_table("shop.dead", SCHEMA)}
        wanted = {name: tuple(name.split(".")) for name in known}
        ingest = expand_families(Ingest(name="shop", topics=["t"], tables=[declared]), {})
        with pytest.raises(ConfigurationError) as raised:
            prepare_targets(ingest, catalog, known, wanted, {})  # any catalog does
        assert raised.value.table == "shop.t"


@pytest.mark.parametrize(
    ("error", "reason"), [(TableAlreadyExistsError, "name_in_use"), (NoSuchNamespaceError, "no_namespace")]
)
def test_a_table_whose_name_is_in_use_for_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], reason: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    declared = IngestTable(key=["shop", "t"], columns={"day": "string"})
    ingest = expand_families(Ingest(name="shop", topics=["t"], tables=[declared]), {})
    with catalogue(tmp_path) as catalog:
        known = {"shop.t": catalog.create_table("shop.t", SCHEMA), "shop.dead": None}
        monkeypatch.setattr(catalog, "record_prefixes", lambda _: None, raising=False)
        monkeypatch.setattr(catalog, "create_table", refuse)
        with raising(ConfigurationError, "shop.dead", table="shop.dead", reason=reason):
            prepare_targets(ingest, catalog, known, {name: tuple(name.split(".")) for name in known}, {})


def test_a_declared_table_of_another_format_is_refused_when_definitions_load() -> None:
    with pytest.raises(ConfigurationError) as raised:
        IngestTable(key=["shop", "t"], properties={"write.format.default": "avro"})
    assert raised.value.table == "shop/t"


def test_a_name_mapping_may_repeat_the_names_of_nested_fields() -> None:
    fields = [column.fields for column in columns_of(NESTED, mapping(), table="shop.t")]
    assert fields == [("id", "orderId"), ("site",)]


def test_a_field_without_names_in_a_mapping_has_its_own() -> None:
    properties = {NAME_MAPPING: '[{"field-id": 1}, {"names": ["x"]}]'}
    assert [column.fields for column in columns_of(NESTED, properties, table="shop.t")] == [
        ("id",),
        ("site",),
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layout": ["bucket(0, id)"]}, "layout_width"),
        ({"layout": ["day(at)", "day(at)"]}, "layout_twice"),
        ({"layout": "day(at)"}, "layout"),
        ({"mode": "upsert", "keys": ["id", "id"]}, "keys_twice"),
        ({"mode": "upsert", "keys": "id"}, "not_a_list"),
    ],
)
def test_a_table_that_cannot_be_created_is_refused_when_definitions_load(
    options: dict[str, Any], reason: str
) -> None:
    with raising(ConfigurationError, reason=reason):
        IngestTable(key=["shop", "t"], columns={"id": "long", "at": "timestamptz"}, **options)


@pytest.mark.parametrize("nested", [{"name": ["Name"]}, {"name": ["name", "Name"]}, {"tags": ["labels"]}])
def test_a_name_mapping_with_other_names_for_nested_fields_is_refused(nested: dict[str, list[str]]) -> None:
    """Records are converted to a struct by the names of its fields, so theirs would be null."""
    with pytest.raises(ConfigurationError) as raised:
        columns_of(NESTED, mapping(**nested), table="shop.t")
    assert raised.value.table == "shop.t"


@pytest.mark.parametrize("text", ["{", "[1]", '[{"field-id": 2, "names": ["site"], "fields": 7}]'])
def test_a_name_mapping_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        columns_of(NESTED, {NAME_MAPPING: text}, table="shop.t")
    assert raised.value.table == "shop.t"


def test_all_tables_of_an_ingestion_are_computed_on_spark() -> None:
    declared = IngestTable(key=["shop", "t"])
    specs = list(build_asset_specs(Ingest(name="shop", topics=["t"], tables=[declared])))
    assert len(specs) == 2
    assert all("spark" in spec.kinds for spec in specs)
