"""Avro schemas that Spark cannot read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.avro_schemas import describe_unreadable
from branchlake_dagster.ingest.binary_formats import Avro, RegistryAvro, avro_field_names


def _record(name: str, *types: Any, **more: Any) -> dict[str, Any]:
    fields = [{"name": f"f{number}", "type": kind} for number, kind in enumerate(types)]
    return {"type": "record", "name": name, "fields": fields, **more}


INNER = _record("Inner", "long")
READABLE = [
    _record("R", "long", ["null", "string"], {"type": "bytes", "logicalType": "decimal", "precision": 4}),
    _record("R", INNER, "Inner", {"type": "array", "items": "Inner"}, {"type": "map", "values": "Inner"}),
    _record("R", _record("a.Inner", "int"), _record("b.Inner", "a.Inner")),
    _record("R", INNER, "x.Inner", namespace="x"),
    _record("R", {"type": "enum", "name": "E", "symbols": ["A"]}, "E"),
    _record("R", {"type": "string", "logicalType": "decimal", "precision": 64, "scale": 2}),
    _record("R", {"type": "fixed", "name": "F", "size": 4}, "F"),
    _record("R", _record("Other", "Inner"), INNER),
    _record("a.R_1", {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 6}),
    _record("R", {"type": "fixed", "name": "F", "size": 16, "logicalType": "decimal", "precision": 50}),
    _record(
        "R", [_record("a.I", "int"), _record("b.I", "int"), "long", "int", {"type": "map", "values": "int"}]
    ),
    _record("R", {"type": "enum", "name": "E", "symbols": ["A", "B"], "default": "B", "namespace": "x.y"}),
    _record("R", {"type": "fixed", "name": "x.F", "size": 4, "aliases": ["y.G"]}, ["null", "x.F"]),
    _record("R", {"type": "int", "items": "Missing"}, values="Missing", aliases=["S"]),
    _record("R", "int", namespace=""),
    _record("R", INNER, INNER, {"type": "fixed", "name": "x.F", "size": 4}),
    _record(
        "R",
        {"type": "fixed", "name": "x.F", "size": 4},
        {"type": "fixed", "name": "x.F", "size": 4, "doc": "d"},
    ),
    _record(".R", _record("I", "int"), "I"),
    _record("ä", "int"),
]
UNREADABLE = [
    _record("R", ["null", "R"]),
    _record("R", {"type": "array", "items": "x.R"}, namespace="x"),
    _record("R", {"type": "map", "values": _record("In", ["null", "R"])}),
    _record("R", ["null", _record("A", ["null", _record("B", ["null", "A"])])]),
    _record("R", "Missing"),
    _record("R", {"type": "Missing"}),
    _record("R", {"type": {"type": "enum", "name": "E", "symbols": ["A"]}}),
    _record("R", {"type": ["null", "string"]}),
    _record("R", {"type": "bytes", "logicalType": "decimal", "precision": 50}),
    _record("R", {"type": "fixed", "name": "F", "size": 32, "logicalType": "decimal", "precision": 50}),
    _record("R", {"type": "enum", "name": "E", "symbols": ["a-b"]}),
    _record("a-b.R", "int"),
    {"type": "record", "name": "R", "fields": [{"name": "a.b", "type": "int"}]},
    {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}, {"name": "A", "type": "int"}]},
    _record("R", {"type": "array", "items": {**_record("I"), "fields": [{"name": "ä", "type": "int"}] * 2}}),
    _record("R", {"type": "enum", "name": "E", "symbols": ["A", "B", "A"]}),
    _record("R", {"type": "enum", "name": "E", "symbols": ["A"], "default": "B"}),
    _record("R", {"type": "enum", "name": "E", "symbols": "AB"}),
    _record("R", {"type": "enum", "name": "E"}),
    _record("R", {"type": "enum", "name": "E", "symbols": ["A"], "namespace": "a-b"}),
    _record("R", {"type": "enum", "name": "E", "symbols": ["A"], "aliases": ["a-b"]}),
    _record("R", {"type": "fixed", "name": "F", "size": 4, "namespace": "a..b"}),
    _record("R", {"type": "fixed", "name": "F", "size": 4}, namespace="a-b"),
    _record("R", {"type": "fixed", "name": "F", "size": "4"}),
    _record("R", {"type": "fixed", "name": "F", "size": -1}),
    _record("R", {"type": "fixed", "name": "F"}),
    _record("R", ["int", "int"]),
    _record("R", ["int", {"type": "int", "logicalType": "date"}]),
    _record("R", [{"type": "array", "items": "int"}, {"type": "array", "items": "long"}]),
    _record("R", [{"type": "map", "values": "int"}, {"type": "map", "values": "long"}]),
    _record("R", [_record("x.I", "int"), "I"], namespace="x"),
    _record("R", ["null", ["int", "null"]]),
    _record("R", _record("I", "int"), _record("I", "long")),
    _record("R", {"type": "array"}),
    _record("R", {"type": "map"}),
    _record("R", _record("string", "int")),
    _record("R²", "int"),
    _record("\U0001d4b3", "int"),
    _record("R", aliases=["1"]),
    _record("R", aliases="S"),
    {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int", "order": "up"}]},
    {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int", "order": None}]},
    {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int", "aliases": [1]}]},
    {"type": "record", "name": "R", "fields": [{"name": "a", "type": "double", "default": "x"}]},
]


@pytest.mark.parametrize("schema", READABLE, ids=json.dumps)
def test_a_schema_without_recursion_is_readable(schema: dict[str, Any]) -> None:
    assert describe_unreadable(json.dumps(schema)) is None
    Avro(json.dumps(schema))


@pytest.mark.parametrize("schema", UNREADABLE, ids=json.dumps)
def test_a_schema_that_spark_cannot_read_is_refused(schema: dict[str, Any]) -> None:
    assert describe_unreadable(json.dumps(schema))
    with pytest.raises(ConfigurationError):
        Avro(json.dumps(schema))


def _answers(schemas: dict[int, dict[str, Any]]) -> RegistryAvro:
    def get(url: str) -> Any:
        version = url.rpartition("/")[2]
        if version == "versions":
            return [*schemas]
        return {"id": int(version), "schema": json.dumps(schemas[int(version)])}

    return RegistryAvro("http://registry", "s-value", get)


def test_only_readable_versions_are_read() -> None:
    reading = _answers({7: READABLE[0], 8: UNREADABLE[0], 9: UNREADABLE[-1]})
    assert reading.schema_field_names(has_envelope=False) == ["f0", "f1", "f2"]


def test_a_subject_without_readable_versions_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        _answers({8: UNREADABLE[0]}).schema_field_names(has_envelope=False)


VALUE = _record("Value", "long", ["null", "string"])
ENVELOPES = [
    _record("Envelope", namespace="s.orders")
    | {
        "fields": [
            {"name": "before", "type": ["null", VALUE], "default": None},
            {"name": "after", "type": ["null", after], "default": None},
            {"name": "op", "type": "string"},
        ]
    }
    for after in ("Value", "s.orders.Value", {**VALUE, "name": "Other"})
]


@pytest.mark.parametrize("schema", ENVELOPES, ids=["name", "full_name", "definition"])
def test_the_row_of_an_envelope_may_be_named(schema: dict[str, Any]) -> None:
    """Debezium defines the row in `before`, and names it in `after`."""
    reading = Avro(json.dumps(schema))
    assert reading.schema_field_names(has_envelope=True) == ["f0", "f1"]


@pytest.mark.parametrize("before", [None, "long", _record("Other", "long")], ids=json.dumps)
def test_the_version_that_gives_columns_has_the_whole_envelope(before: Any) -> None:
    """Rows need `before` too. Columns of a version without rows would never be filled."""
    newer = {"name": "after", "type": _record("Value", "long", "string", "string")}
    fields = [newer] if before is None else [{"name": "before", "type": before}, newer]
    incomplete = _record("Envelope") | {"fields": fields}
    reading = _answers({7: ENVELOPES[0], 8: incomplete})
    assert reading.schema_field_names(has_envelope=True) == ["f0", "f1"]
    for alone in (_answers({8: incomplete}), Avro(json.dumps(incomplete))):
        with pytest.raises(ConfigurationError):
            alone.schema_field_names(has_envelope=True)


@pytest.mark.parametrize("kind", ["long", ["null", "string"], "Missing", ["null", "Kind"]])
def test_a_field_that_is_not_a_record_has_no_row(kind: Any) -> None:
    enum = {"name": "k", "type": {"type": "enum", "name": "Kind", "symbols": ["A"]}}
    schema = json.dumps({"type": "record", "name": "R", "fields": [enum, {"name": "after", "type": kind}]})
    with pytest.raises(ConfigurationError):
        avro_field_names(schema, "after")
