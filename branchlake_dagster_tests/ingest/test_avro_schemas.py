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


def _field(**more: Any) -> dict[str, Any]:
    return {"type": "record", "name": "I", "fields": [{"name": "a", "type": "int", **more}]}


INNER = _record("Inner", "long")
C = _record("C", "int")
ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
FIXED = {"type": "fixed", "name": "F", "size": 4}
DATE = {"type": "int", "logicalType": "date"}
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
    _record("R", _field(), _field(type={"type": "int", "doc": "d"})),
    _record("R", _field(), _field(doc="d", aliases=["b"], order="ASCENDING")),
    _record("R", _field(default=1, x=1), _field(x=1, default=1)),
    _record("R", _field(type="double", default="1d"), _field(type="double", default=1.0)),
    _record("R", _field(type=DATE), _field(type=DATE)),
    _record("R", {**C, "x": 1, "type": "error"}, {**C, "x": 1, "doc": "d", "aliases": ["D"]}),
    _record("R", C, _record("I", "C"), _record("I", C)),
    _record("R", _record("I", C), _record("I", "C"), _record("I", {"type": "C"})),
    _record("R", C, _record("I", "C"), _record("I", "n.C"), namespace="n"),
    _record("R", _record("I", C), _record("I", {**C, "doc": "d"})),
    _record("R", _record("I", ["null", C]), _record("I", ["null", "C"])),
    _record(
        "R",
        _record("I", {"type": "array", "items": "int"}),
        _record("I", {"type": "array", "items": {"type": "int"}}),
    ),
    _record("R", ENUM, {**ENUM, "doc": "d", "default": "A", "aliases": ["G"]}),
    _record("R", {**FIXED, "name": "fixed"}, ["null", "fixed"]),
    _record("R", {**ENUM, "name": "enum"}, ["null", "enum"]),
    _record("R", {**C, "name": "record"}, ["null", "record"]),
    _record("R", {**FIXED, "name": "array"}, ["null", "array"]),
    _record("R", {**FIXED, "name": "n.int"}, ["null", "int", "n.int"], namespace="n"),
    *[
        _record("R", _field(type="double", default=default))
        for default in ("1d", "1F", " 1\n", "0x1p3", "0x.8P-2d", "NaN", "+Infinity", "1.", ".5e3f")
    ],
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
    _record("R", _field(), _field(default=1)),
    _record("R", _field(default=2), _field(default=1)),
    _record("R", _field(type=["null", "int"]), _field(type=["null", "int"], default=None)),
    _record("R", _field(), _field(order="descending")),
    _record("R", _field(), _field(type=DATE)),
    _record("R", _field(), _field(x=1)),
    _record("R", _field(), {**ENUM, "name": "I"}),
    _record("R", C, {**C, "x": 1}),
    _record("R", _record("I", _record("a.C", "int")), _record("I", _record("b.C", "int"))),
    _record("R", ENUM, {**ENUM, "symbols": ["B", "A"]}),
    _record("R", FIXED, {**FIXED, "size": 5}),
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
    *[
        _record("R", _field(type="double", default=default))
        for default in ("", ".", "1e", "1dd", "0x1", "nan", "inf", "1_0", "Infinityd", "\u0661", "\u00a01")
    ],
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
