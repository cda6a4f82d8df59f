"""Hostile records by seed: names, depths, widths, numbers, times and encodings that no producer should send."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from branchlake_dagster_tests.suite.kafka import Message

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Everything",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "text", "type": ["null", "string"], "default": None},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "clock", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {
            "name": "price",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 4},
        },
        {"name": "f", "type": "double"},
        {"name": "small", "type": "float"},
        {"name": "ok", "type": "boolean"},
        {"name": "raw", "type": "bytes"},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["a", "b"]}},
        {"name": "code", "type": {"type": "fixed", "name": "Code", "size": 4}},
        {"name": "many", "type": {"type": "array", "items": "long"}},
        {"name": "nothing", "type": {"type": "array", "items": "null"}},
        {"name": "by", "type": {"type": "map", "values": ["null", "double"]}},
        {
            "name": "inside",
            "type": {"type": "record", "name": "In", "fields": [{"name": "s", "type": "string"}]},
        },
    ],
}
"""An Avro schema with each of its types."""
_NAMES = [
    "",
    " ",
    ".",
    "..",
    "a.b",
    "id",
    "ID",
    "Id ",
    "text",
    "é",
    "e\u0301",
    "ß",
    "SS",
    "\u0131",
    "İ",
    "☃",
    "_x2603",
    "😀",
    "_x1F600",
    "`",
    "``",
    "'",
    '"',
    "'\"",
    "\\",
    "\n",
    "a\n",
    "\t",
    "\x00",
    "\x7f",
    "$",
    "$.v",
    "[0]",
    "['a']",
    "a,b",
    "a: BIGINT",
    "OBJECT<",
    ">",
    "element",
    "key",
    "value",
    "__value",
    "__row0",
    "__op",
    "__offset",
    "_corrupt_record",
    "__corrupt",
    "v",
    "at_day",
    "select",
    "1",
    "1a",
    "-",
    "a/b",
    "a" * 300,
    "{route}",
    "o",
]
_TEXTS = [
    "",
    "a",
    "a\n",
    "to-x\n",
    "\u2028",
    "\ud800",
    "\udc00\ud800",
    "\x00",
    "é" * 100,
    "x" * 20_000,
    "45000",
    "+45000-01-01",
    "0000-00-00",
    "9999-12-31T23:59:60Z",
    "1e99999",
    "1e-99999999",
    "NaN",
    "-Infinity",
    "0x1F",
    "1,234.5",
    "true",
    "null",
    "{}",
    "[1]",
    "aGk=",
    "====",
    "2026-01-02T03:04:05+99:99",
    "-290308-12-21T19:59:05Z",
]
_NUMBERS = [
    "0",
    "-0",
    "-0.0",
    "1",
    "4.0",
    "1.5",
    "2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775809",
    "1" * 39,
    "1" * 400,
    "1e5",
    "1e400",
    "-1e400",
    "1e-400",
    "1e99999",
    "1E+2147483648",
    "1e-2147483649",
    "0.1234567890123456789012345678901234567890",
    "1767323045000",
    "1767323045000000",
    "-62135596800",
    "253402300800",
    "NaN",
    "Infinity",
    "01",
    ".5",
    "5.",
    "+1",
]
_COLUMNS = ["id", "n", "price", "f", "r", "ok", "at", "local", "day", "text", "raw", "in", "many", "by"]
_TIMES = [0, 1, 1_767_323_045, 1_767_323_045_000, 1_767_323_045_000_000, 253_402_300_800_000]
UNREADABLE_TIMES = [9_223_372_036_854_776, 1_767_323_045_000_000_000, (1 << 63) - 1]
"""Milliseconds that are more microseconds than 64 bits hold: Spark's Kafka source fails on them."""


def json_records(chance: Random, count: int) -> Iterator[Message]:
    """Objects whose fields nobody has foreseen, and what is no object at all."""
    for _ in range(count):
        text = _object(chance, 0).encode("utf-8", "surrogatepass")
        yield _message(chance, _damaged(chance, text) if chance.random() < 0.2 else text)


def debezium_records(chance: Random, count: int) -> Iterator[Message]:
    """The same in Debezium's envelope, with and without Kafka Connect's."""
    for _ in range(count):
        before, after = (
            _object(chance, 1) if chance.random() < 0.8 else chance.choice(["null", "1", '"x"', "[]"])
            for _ in range(2)
        )
        op = chance.choice(['"c"', '"u"', '"d"', '"r"', '"d\\n"', '"t"', "null", "5", "{}"])
        text = f'{{"before": {before}, "after": {after}, "op": {op}}}'
        if chance.random() < 0.3:
            text = f'{{"schema": {{}}, "payload": {text}}}'
        value = text.encode("utf-8", "surrogatepass")
        yield _message(chance, _damaged(chance, value) if chance.random() < 0.1 else value)


def avro_records(chance: Random, count: int) -> Iterator[Message]:
    """Values of `SCHEMA` with numbers at the edges of their types, bits turned, and claims of any length."""
    return _binary_records(
        chance, count, lambda: b"".join(_avro_field(chance, one["type"]) for one in SCHEMA["fields"])
    )


def protobuf_records(chance: Random, count: int, valid: Callable[[Random], bytes]) -> Iterator[Message]:
    """Messages that `valid` makes, and what is left of them after damage."""
    return _binary_records(chance, count, lambda: valid(chance))


def any_number(chance: Random) -> int:
    """A whole number of 64 bits, often one at an edge."""
    edges = [0, 1, -1, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, -(1 << 63), 253_402_300_800_000_000]
    return chance.choice(edges) if chance.random() < 0.5 else chance.randrange(-(1 << 63), 1 << 63)


def any_text(chance: Random) -> str:
    """A text that may be no text in UTF-8."""
    return chance.choice(_TEXTS)


def _binary_records(chance: Random, count: int, valid: Callable[[], bytes]) -> Iterator[Message]:
    for _ in range(count):
        value = valid()
        yield _message(chance, _damaged(chance, value) if chance.random() < 0.6 else value)


def _message(chance: Random, value: bytes) -> Message:
    luck = chance.random()
    key = chance.choice([None, b"", b"k", b"\xff\xfe"])
    at = chance.choice(_TIMES) if luck < 0.2 else 1_767_323_045_000
    return Message(None if luck > 0.99 else value, key, at=at)


def _object(chance: Random, level: int) -> str:
    width = chance.choice([0, 1, 1, 2, 3, 5, 8] if level else [1, 2, 3, 5, 8, 40])
    fields = []
    for _ in range(width):
        name = chance.choice(_COLUMNS if chance.random() < 0.6 and level < 2 else _NAMES)
        if chance.random() < 0.02:
            name = f"new{chance.randrange(500)}"
        fields.append(f"{json.dumps(name, ensure_ascii=chance.random() < 0.5)}: {_value(chance, level)}")
    return "{" + ", ".join(fields) + "}"


def _value(chance: Random, level: int) -> str:
    luck = chance.random()
    if luck < 0.35:
        return chance.choice(_NUMBERS)
    if luck < 0.7:
        return json.dumps(chance.choice(_TEXTS), ensure_ascii=chance.random() < 0.5)
    if luck < 0.75:
        return chance.choice(["true", "false", "null", "[]", "{}", "[null]", "[{}]", '{"x": null}'])
    if luck < 0.78:
        depth = chance.choice([15, 19, 20, 21, 25, 31, 40, 90, 500, 1_100])
        begin, end = chance.choice([("[", "]"), ('{"a": ', "}"), ('[{"a": ', "}]"), ('{"": ', "}")])
        return begin * depth + "1" + end * depth
    if level > 3:
        return "1"
    if luck < 0.88:
        return "[" + ", ".join(_value(chance, level + 1) for _ in range(chance.randrange(4))) + "]"
    return _object(chance, level + 1)


def _damaged(chance: Random, value: bytes) -> bytes:
    kind = chance.randrange(8)
    at = chance.randrange(len(value) + 1)
    if kind == 0:
        return value[:at]
    if kind == 1:
        return value + bytes([chance.randrange(256) for _ in range(chance.randrange(1, 9))])
    if kind == 2:
        return value.decode("utf-8", "replace").encode(
            chance.choice(["utf-16", "utf-32", "cp037"]), "replace"
        )
    if kind == 3:
        return b"\xef\xbb\xbf" + value
    if kind == 4:
        return value[:at] + _avro_long(any_number(chance)) + value[at:]
    if kind == 5:
        return bytes(chance.randrange(256) for _ in range(chance.randrange(40)))
    changed = bytearray(value)
    for _ in range(chance.randrange(1, 5)):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _avro_long(number: int) -> bytes:
    rest, encoded = ((number << 1) ^ (number >> 63)) & ((1 << 64) - 1), b""
    while rest > 127:
        encoded, rest = encoded + bytes([rest & 127 | 128]), rest >> 7
    return encoded + bytes([rest])


def _avro_bytes(value: bytes) -> bytes:
    return _avro_long(len(value)) + value


def _avro_field(chance: Random, kind: Any) -> bytes:
    if isinstance(kind, list):
        place = chance.randrange(len(kind))
        return _avro_long(place) + _avro_field(chance, kind[place])
    if isinstance(kind, dict):
        return _avro_nested(chance, kind)
    text = any_text(chance).encode("utf-8", "surrogatepass")
    written: dict[str, bytes] = {
        "null": b"",
        "long": _avro_long(any_number(chance)),
        "int": _avro_long(chance.choice([0, 20_000, -719_163, 2_932_896, (1 << 31) - 1, -(1 << 31)])),
        "double": struct.pack("<d", chance.choice([0.0, -0.0, 1e308, float("inf"), float("nan")])),
        "float": struct.pack("<f", chance.choice([0.0, 3e38, float("-inf"), float("nan")])),
        "boolean": bytes([chance.randrange(2)]),
        "string": _avro_bytes(text if chance.random() < 0.9 else b"\xff\xc0"),
        "bytes": _avro_bytes(bytes(chance.randrange(256) for _ in range(chance.choice([0, 1, 9, 40])))),
    }
    return written[kind]


def _avro_nested(chance: Random, kind: dict[str, Any]) -> bytes:
    if kind["type"] == "enum":
        return _avro_long(chance.choice([0, 1, 1, 2, -1]))
    if kind["type"] == "fixed":
        return bytes(chance.randrange(256) for _ in range(kind["size"]))
    if kind["type"] == "record":
        return b"".join(_avro_field(chance, one["type"]) for one in kind["fields"])
    if kind["type"] in ("array", "map"):
        count = chance.choice([0, 0, 1, 3])
        if kind.get("items") == "null" and chance.random() < 0.05:
            return _avro_long(chance.choice([1_000, 20_000_000, 2_000_000_000, (1 << 31) - 1])) + b"\x00"
        block = b"".join(
            (_avro_bytes(b"k%d" % n) if kind["type"] == "map" else b"")
            + _avro_field(chance, kind.get("items") or kind["values"])
            for n in range(count)
        )
        return (_avro_long(count) + block if count else b"") + b"\x00"
    return _avro_field(chance, kind["type"])
