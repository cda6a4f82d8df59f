"""What JSON values become, value by value: rows, or dead letters with their bytes."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.suite.kafka import Broker, Message

COLUMNS = {
    "id": "bigint",
    "n": "int",
    "price": "decimal(10,2)",
    "f": "double",
    "r": "float",
    "ok": "boolean",
    "at": "timestamp",
    "local": "timestamp_ntz",
    "day": "date",
    "text": "string",
    "raw": "binary",
    "in-side": "struct<a: int, b: string>",
    "many": "array<int>",
    "by": "map<string,int>",
    "cost": "struct<of: decimal(10,2)>",
    "long": "decimal(38,9)",
    "of": "struct<at: timestamp, day: date, local: timestamp_ntz, label: string>",
    "days": "array<date>",
    "until": "map<string,timestamp>",
}
_COST = "cost is not a valid struct<`of`: decimal(10,2)>."
_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
_SYNTAX, _OBJECT = (
    ("syntax", "The value is not valid JSON."),
    ("syntax", "The value is JSON, but not an object."),
)
_TEXT = ("encoding", "The value is not valid UTF-8.")
_HALF = ("encoding", "The value has half of a character (a lone surrogate).")
_OF = "of is not a valid struct<`at`: timestamp, `day`: date, `local`: timestamp_ntz, `label`: string>."
Row = dict[str, Any]
_WHOLE = (
    b'{"n":2,"price":10.25,"f":1.5,"r":2.5,"ok":true,"at":"2026-01-02T03:04:05Z","day":"2026-01-02",'
    b'"text":"\\u00e9\xc3\xa9","raw":"aGk=","in-side":{"a":1,"b":"x"},"many":[1,null],"by":{"k":1}}'
)
_WHOLE_ROW: Row = {
    "n": 2,
    "price": Decimal("10.25"),
    "f": 1.5,
    "r": 2.5,
    "ok": True,
    "at": _AT,
    "day": date(2026, 1, 2),
    "text": "éé",
    "raw": b"hi",
    "in-side": {"a": 1, "b": "x"},
    "many": [1, None],
    "by": [("k", 1)],
}
CASES: list[tuple[bytes | None, Row | tuple[str, str]]] = [
    # as it is
    (_WHOLE, _WHOLE_ROW),
    # one field of another type: the others are what they are without it
    (_WHOLE[:-1] + b',"id":"7"}', {**_WHOLE_ROW, "id": 7}),
    (_WHOLE[:-1] + b',"id":"x"}', ("conversion", "id is not a valid bigint.")),
    (b'{"id":1,"id":"2"}', _SYNTAX),
    (b"{}", {}),
    (b'{"id":null,"in-side":null}', {}),
    (b'{"id":1,"other":{"x":[1]},"__corrupt":"x"}', {"id": 1}),
    (b'{"ID":1}', {}),
    (b'{"id":1,"id":2}', {"id": 2}),
    (b' \n{"id":1}\n ', {"id": 1}),
    # numbers
    (b'{"id":9223372036854775807}', {"id": 9223372036854775807}),
    (b'{"id":9223372036854775808}', ("conversion", "id is not a valid bigint.")),
    (b'{"n":3000000000}', ("conversion", "n is not a valid int.")),
    (b'{"id":"2","n":"-3"}', {"id": 2, "n": -3}),
    (b'{"id":4.0}', {"id": 4}),
    (b'{"n":1.5}', ("conversion", "n is not a valid int.")),
    (b'{"n":"1.5"}', ("conversion", "n is not a valid int.")),
    (b'{"id":9007199254740992.25}', ("conversion", "id is not a valid bigint.")),
    (b'{"id":1e-20}', ("conversion", "id is not a valid bigint.")),
    (b'{"id":038}', _SYNTAX),
    (b'{"price":"10.25"}', {"price": Decimal("10.25")}),
    (b'{"price":1.005}', {"price": Decimal("1.01")}),
    (b'{"price":12345678901.00}', ("conversion", "price is not a valid decimal(10,2).")),
    (b'{"f":"1.5"}', {"f": 1.5}),
    (b'{"f":"abc"}', ("conversion", "f is not a valid double.")),
    (b'{"f":NaN}', {"f": math.nan}),
    (b'{"f":"NaN"}', {"f": math.nan}),
    (b'{"f":-Infinity}', {"f": -math.inf}),
    (b'{"f":1e400}', {"f": math.inf}),
    # truth
    (b'{"ok":"false"}', {"ok": False}),
    (b'{"ok":"perhaps"}', ("conversion", "ok is not a valid boolean.")),
    # times
    (b'{"at":"2026-01-02T05:04:05.5+02:00"}', {"at": _AT.replace(microsecond=500000)}),
    (b'{"at":"2026-01-02 03:04:05"}', {"at": _AT}),
    (b'{"at":"2026-01-02"}', {"at": datetime(2026, 1, 2, tzinfo=UTC)}),
    (b'{"at":1767323045}', {"at": _AT}),
    (b'{"at":1767}', {"at": datetime(1970, 1, 1, 0, 29, 27, tzinfo=UTC)}),
    (b'{"at":1767323045000}', ("conversion", "at is not a valid timestamp.")),
    (b'{"at":1767323045000000}', ("conversion", "at is not a valid timestamp.")),
    (b'{"at":"nonsense"}', ("conversion", "at is not a valid timestamp.")),
    (b'{"at":"2026-02-30T00:00:00Z"}', ("conversion", "at is not a valid timestamp.")),
    (b'{"local":"2026-01-02 03:04:05"}', {"local": _AT.replace(tzinfo=None)}),
    (b'{"local":"2026-01-02T05:04:05+02:00"}', {"local": _AT.replace(tzinfo=None)}),
    (b'{"day":"2026-02-30"}', ("conversion", "day is not a valid date.")),
    (b'{"day":20000}', ("conversion", "day is not a valid date.")),
    # what Spark has and nobody can write, or what it takes for another day
    (b'{"day":"20260102"}', ("conversion", "day is not a valid date.")),
    (b'{"day":"12"}', ("conversion", "day is not a valid date.")),
    (b'{"day":"45000"}', ("conversion", "day is not a valid date.")),
    (b'{"day":"+45000-01-01"}', ("conversion", "day is not a valid date.")),
    (b'{"day":"0000-01-01"}', ("conversion", "day is not a valid date.")),
    (b'{"at":"9999-12-31T23:59:59-05:00"}', ("conversion", "at is not a valid timestamp.")),
    (b'{"at":"+45000-01-01T00:00:00Z"}', ("conversion", "at is not a valid timestamp.")),
    (b'{"local":"9999-12-31T23:59:59-05:00"}', ("conversion", "local is not a valid timestamp_ntz.")),
    # times without a date, for which Spark takes the present day, and other text after a date
    (b'{"at":"03:04:05Z"}', ("conversion", "at is not a valid timestamp.")),
    (b'{"at":" T03:04:05"}', ("conversion", "at is not a valid timestamp.")),
    (b'{"local":"03:04:05"}', ("conversion", "local is not a valid timestamp_ntz.")),
    (b'{"day":"2026-01-02Tgarbage"}', ("conversion", "day is not a valid date.")),
    (b'{"day":"2026-01-02 garbage"}', ("conversion", "day is not a valid date.")),
    (b'{"day":"2026-01-02T03:04:05Z"}', {"day": date(2026, 1, 2)}),
    # the same inside of other values
    (
        b'{"of":{"at":"2026-01-02T03:04:05Z","day":"2026-01-02","label":"03:04"},"days":["2026-01-02"]}',
        {
            "of": {"at": _AT, "day": date(2026, 1, 2), "local": None, "label": "03:04"},
            "days": [date(2026, 1, 2)],
        },
    ),
    (b'{"until":{"03:04":"2026-01-02T03:04:05Z"}}', {"until": [("03:04", _AT)]}),
    (b'{"of":{"at":"03:04:05"}}', ("conversion", _OF)),
    (b'{"of":{"local":"03:04:05"},"id":"1"}', ("conversion", _OF)),
    (b'{"of":{"day":"12"}}', ("conversion", _OF)),
    (b'{"of":{"day":"2026-01-02Tgarbage"}}', ("conversion", _OF)),
    (b'{"of":{"day":"45000-01-01"}}', ("conversion", "of.day is not a valid date.")),
    (b'{"of":{"at":"+45000-01-01T00:00:00Z"}}', ("conversion", "of.at is not a valid timestamp.")),
    (b'{"days":["2026-01-02","12"]}', ("conversion", "days is not a valid array<date>.")),
    (b'{"days":["0000-01-01"]}', ("conversion", "days.element is not a valid date.")),
    (
        b'{"until":{"x":"9999-12-31T23:59:59-05:00"}}',
        ("conversion", "until.value is not a valid timestamp."),
    ),
    # commas that do not separate groups of three digits: the reader would remove them
    (b'{"price":"9,90"}', ("conversion", "price is not a valid decimal(10,2).")),
    (b'{"price":"1.234,50"}', ("conversion", "price is not a valid decimal(10,2).")),
    (b'{"price":",50"}', ("conversion", "price is not a valid decimal(10,2).")),
    (b'{"price":"1,234,567.5"}', {"price": Decimal("1234567.50")}),
    (b'{"text":"9,90","price":"9.90"}', {"text": "9,90", "price": Decimal("9.90")}),
    (b'{"cost":{"of":"9,90"}}', ("conversion", _COST)),
    (b'{"cost":{"of":"1,234.5"}}', {"cost": {"of": Decimal("1234.50")}}),
    # numbers that would be written out for minutes
    (b'{"price":1e2}', {"price": Decimal("100.00")}),
    (b'{"price":1e30000000}', ("conversion", "price is not a valid decimal(10,2).")),
    (b'{"price":1e-30000000}', {"price": Decimal("0.00")}),
    (b'{"price":"1,234.50"}', {"price": Decimal("1234.50")}),
    (b'{"long":123456789012345678.123456789}', {"long": Decimal("123456789012345678.123456789")}),
    (b'{"long":"123456789012345678.123456789"}', {"long": Decimal("123456789012345678.123456789")}),
    (
        b'{"long":1.5,"text":"sha256:3e10293","raw":"aGk="}',
        {"long": Decimal("1.5"), "text": "sha256:3e10293", "raw": b"hi"},
    ),
    (b'{"price":"1e-30000000"}', ("conversion", "price is not a valid decimal(10,2).")),
    (b'{"id":"1","price":1e-30000000}', {"id": 1, "price": Decimal("0.00")}),
    (b'{"cost":{"of":1.5}}', {"cost": {"of": Decimal("1.50")}}),
    (b'{"cost":{"of":1e-30000000}}', {"cost": {"of": Decimal("0.00")}}),
    (b'{"cost":{"of": 1e30000000}}', ("conversion", _COST)),
    (b'{"cost":{"of":"1e30000000"}}', ("conversion", _COST)),
    (b'{"cost":{"of":1.5},"text":"a,4e00123456"}', {"cost": {"of": Decimal("1.50")}, "text": "a,4e00123456"}),
    (b'{"text":"1e30000000"}', {"text": "1e30000000"}),
    # text and bytes
    (b'{"text":5}', {"text": "5"}),
    (b'{"text":12345678901234567890123}', {"text": "12345678901234567890123"}),
    (b'{"text":true}', {"text": "true"}),
    (b'{"text":{"a":[1,2]}}', {"text": '{"a":[1,2]}'}),
    (b'{"text":""}', {"text": ""}),
    (b'{"text":"' + b"x" * (1 << 20) + b'"}', {"text": "x" * (1 << 20)}),
    (b'{"raw":"no base64!"}', ("conversion", "raw is not a valid binary.")),
    (b'{"raw":5}', ("conversion", "raw is not a valid binary.")),
    # half of a character, which Spark would replace
    (b'{"text":"\\ud83d\\ude00"}', {"text": "\U0001f600"}),
    (b'{"text":"\\\\ud83d"}', {"text": "\\ud83d"}),
    (b'{"text":"\\ud83d"}', _HALF),
    (b'{"text":"\\ude00\\uD83D"}', _HALF),
    (b'{"in-side":{"b":"\\udfff"}}', _HALF),
    # nested
    (b'{"in-side":{"b":"x","c":5}}', {"in-side": {"a": None, "b": "x"}}),
    (b'{"in-side":{"a":"x"}}', ("conversion", "in-side is not a valid struct<`a`: int, `b`: string>.")),
    (b'{"in-side":5}', ("conversion", "in-side is not a valid struct<`a`: int, `b`: string>.")),
    (b'{"id":"1","in-side":{"a":1}}', {"id": 1, "in-side": {"a": 1, "b": None}}),
    (b'{"many":[1,"x"]}', ("conversion", "many is not a valid array<int>.")),
    (b'{"many":5}', ("conversion", "many is not a valid array<int>.")),
    (b'{"by":{"k":"x"}}', ("conversion", "by is not a valid map<string,int>.")),
    # no object in UTF-8
    (b'{"text":"\xff"}', _TEXT),
    (b'\xff\xfe{\x00"\x00', _TEXT),
    (b"", _SYNTAX),
    (b" ", _SYNTAX),
    (b"not json", _SYNTAX),
    (b'{"id":1', _SYNTAX),
    (b'{"id":1}{"id":2}', _SYNTAX),
    (b'{"id":1} and more', _SYNTAX),
    (b"{'id':1}", _SYNTAX),
    (b"[1]", _OBJECT),
    (b'"x"', _OBJECT),
    (b"5", _OBJECT),
    (b"null", _OBJECT),
    (None, ("empty", "The record has no value.")),
]


def test_each_value_is_a_row_or_a_dead_letter_with_its_bytes(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns=COLUMNS, attributes={"at_offset": "offset"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    headers = [("trace", b"\x00\xff"), ("none", None), ("trace", b"2")]
    kafka.send(topic, [Message(value, b"k\xff", headers, at=1767323045000) for value, _ in CASES])
    result = drive.batch()

    good = {n: told for n, (_, told) in enumerate(CASES) if isinstance(told, dict)}
    found = {row.pop("at_offset"): row for row in drive.rows()}
    assert {n: _plain(row) for n, row in found.items()} == {n: _plain(row) for n, row in good.items()}

    bad = {n: told for n, (_, told) in enumerate(CASES) if isinstance(told, tuple)}
    letters = {row["offset"]: row for row in drive.dead()}
    assert {n: (row["error_kind"], row["error"]) for n, row in letters.items()} == bad
    for number, letter in letters.items():
        assert letter["value"] == CASES[number][0]
        assert letter["key"] == b"k\xff"
        assert [(one["key"], one["value"]) for one in letter["headers"]] == headers
        assert (letter["topic"], letter["partition"], letter["timestamp"]) == (topic, 0, _AT)
        assert (letter["table"], letter["batch"]) == (f"{namespace}.t", result.commit_id)
    assert (result.record_count, result.dead_letter_count) == (len(CASES), len(bad))


def _plain(row: Row) -> Row:
    """Without nulls, and with NaN as a word: it equals nothing."""
    return {
        name: "NaN" if isinstance(value, float) and math.isnan(value) else value
        for name, value in row.items()
        if value is not None
    }
