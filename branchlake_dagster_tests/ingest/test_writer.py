"""What workers write, without Spark: the same rows however the records are divided into batches."""

from __future__ import annotations

import base64
import itertools
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog.memory import InMemoryCatalog

from branchlake_dagster.ingest import scan as unpublished_files
from branchlake_dagster.ingest import worker_writer as writer
from branchlake_dagster.ingest.batch_tables import DEAD_LETTER_SCHEMA
from branchlake_dagster.ingest.scan import FailedScans
from branchlake_dagster.ingest.worker_writer import Work, WorkerTarget, _without_invalid_times, build_writer
from branchlake_dagster_tests.history.snapshot_tables import catalogue

_REASON = pa.struct([("kind", pa.string()), ("detail", pa.string())])
_ROW = pa.struct([("id", pa.int64()), ("text", pa.string())])
_REST = pa.struct(
    [
        ("offset", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.string()),
        ("lost", _REASON),
    ]
)
_RECORDS = pa.schema(
    [
        ("__topic", pa.int32()),
        ("__partition", pa.int32()),
        ("__timestamp", pa.timestamp("us", "UTC")),
        ("__offset", pa.int64()),
        ("__op", pa.string()),
        ("__rest", _REST),
        ("__unknown", pa.string()),
        ("__mine_0", pa.int64()),
        ("__row0", _ROW),
        ("__row0_why", _REASON),
    ]
)
HEADERS = json.dumps([{"key": "h", "value": base64.b64encode(b"\xff").decode()}, {"key": "none"}])


def _record(offset: int, kind: str, moment: int = 1_767_323_045_000_000) -> dict[str, Any]:
    """A record that is good for the first table, the second, both, bad for both, or nobody's."""
    bad = kind == "bad"
    rest = {
        "offset": offset,
        "key": b"k" if bad else None,
        "value": f"v{offset}".encode(),
        "headers": HEADERS if bad else None,
        "lost": {"kind": "route", "detail": "nowhere"} if kind == "lost" else None,
    }
    return {
        "__topic": offset % 2,
        "__partition": offset % 3,
        "__timestamp": moment + offset * 1000,
        "__offset": offset,
        "__op": "update",
        "__rest": rest if bad or kind == "lost" else None,
        "__unknown": '["x", "text"]' if kind == "both" else None,
        "__mine_0": {"first": 1, "second": 2, "both": 3, "bad": 3}.get(kind, 0),
        "__row0": None if bad else {"id": offset, "text": f"t{offset}"},
        "__row0_why": {"kind": "conversion", "detail": "id is not a valid int."} if bad else None,
    }


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[InMemoryCatalog]:
    with catalogue(tmp_path) as found:
        yield found


def _work(catalog: InMemoryCatalog) -> Work:
    def made(name: str, schema: pa.Schema) -> str:
        return catalog.create_table_if_not_exists(("shop", name), schema).metadata.model_dump_json()

    plain = pa.schema([("text", pa.string()), ("id", pa.int64()), ("at", pa.int64()), ("late", pa.string())])
    beside = [
        ("__op", pa.string()),
        ("__topic", pa.string()),
        ("__partition", pa.int32()),
        ("__offset", pa.int64()),
    ]
    staged = pa.schema([*_ROW, *(pa.field(name, kind) for name, kind in beside)])
    known = frozenset({"id", "text"})
    targets = [
        WorkerTarget(made("first", plain), "__row0", {"at": "offset"}, "shop.first", mapped_fields=known),
        WorkerTarget(
            made("staged", staged),
            "__row0",
            {f"__{one}": one for one in ("op", "topic", "partition", "offset")},
            "shop.second",
            mapped_fields=known,
        ),
        WorkerTarget(made("dead", DEAD_LETTER_SCHEMA), None, {}, "shop.dead"),
    ]
    return Work("b1", ["t", "u"], ["i", "j"], targets, {}, 5)


def _written(
    work: Work, parts: list[list[dict[str, Any]]]
) -> tuple[dict[int, list[dict[str, Any]]], dict[str, Any], int]:
    batches = [pa.RecordBatch.from_pylist(part, schema=_RECORDS) for part in parts]
    (sent,) = build_writer(work)(batches)
    rows: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
    told: dict[str, Any] = {}
    files = 0
    for one in sent.to_pylist():
        if one["kind"] == "told":
            told = json.loads(one["payload"])
            continue
        file = pickle.loads(one["payload"])
        found = pq.read_table(file.file_path.removeprefix("file://")).to_pylist()
        assert file.record_count == len(found) > 0
        rows[one["target"]] += found
        files += 1
    return rows, told, files


_KINDS = st.lists(st.sampled_from(["first", "second", "both", "bad", "lost"]), max_size=40)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_KINDS, st.lists(st.integers(0, 40), max_size=5))
def test_any_division_into_batches_writes_the_same(
    catalog: InMemoryCatalog, kinds: list[str], cuts: list[int]
) -> None:
    records = [_record(offset, kind) for offset, kind in enumerate(kinds)]
    edges = [0, *sorted(cut % (len(records) + 1) for cut in cuts), len(records)]
    parts = [records[begin:end] for begin, end in itertools.pairwise(edges)]
    rows, told, _ = _written(_work(catalog), parts)
    first = [offset for offset, kind in enumerate(kinds) if kind in ("first", "both")]
    second = [offset for offset, kind in enumerate(kinds) if kind in ("second", "both")]
    assert sorted(rows[0], key=lambda row: row["id"]) == [
        {"text": f"t{n}", "id": n, "at": n, "late": None} for n in first
    ]
    assert sorted(rows[1], key=lambda row: row["id"]) == [
        {
            "id": n,
            "text": f"t{n}",
            "__op": "update",
            "__topic": "tu"[n % 2],
            "__partition": n % 3,
            "__offset": n,
        }
        for n in second
    ]
    letters = sorted((row["offset"], row["table"] or "") for row in rows[2])
    assert letters == sorted(
        (n, table)
        for n, kind in enumerate(kinds)
        for table in {"bad": ("shop.first", "shop.second"), "lost": ("",)}.get(kind, ())
    )
    for row in rows[2]:
        n = row["offset"]
        bad = kinds[n] == "bad"
        assert (row["topic"], row["incarnation"], row["partition"]) == ("tu"[n % 2], "ij"[n % 2], n % 3)
        assert row["value"] == f"v{n}".encode()
        assert row["headers"] == (
            [{"key": "h", "value": b"\xff"}, {"key": "none", "value": None}] if bad else []
        )
        assert (row["error_kind"], row["batch"]) == ("conversion" if bad else "route", "b1")
    counts = Counter(told["counts"])
    expected = Counter(kinds)
    assert counts["records"] == len(kinds)
    assert (counts["rows/0"], counts["rows/1"]) == (len(first), len(second))
    assert counts["dead"] == 2 * expected["bad"] + expected["lost"] == len(rows[2])
    assert counts["dead_of/shop.first"] == counts["dead_of/shop.second"] == expected["bad"]
    assert (counts["dead/conversion"], counts["dead/route"]) == (2 * expected["bad"], expected["lost"])
    # A field that the tables know is none that they lack.
    assert {name for name in counts if name.startswith("evolve/")} == (
        {"evolve/0/add/x", "evolve/1/add/x"} if expected["both"] else set()
    )
    latest: dict[str, int] = {}
    for n in range(len(kinds)):
        latest[f"{'tu'[n % 2]}/{n % 3}"] = 1_767_323_045_000 + n
    assert told["latest"] == latest


def test_files_are_written_before_memory_runs_out(
    catalog: InMemoryCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_FLUSH_BYTES", 200)
    parts = [[_record(n, "first") for n in range(start, start + 10)] for start in range(0, 50, 10)]
    rows, _, files = _written(_work(catalog), parts)
    assert files == 5
    assert sorted(row["id"] for row in rows[0]) == [*range(50)]


def test_a_time_that_python_has_not_got_breaks_nothing(catalog: InMemoryCatalog) -> None:
    far = 400_000 * 365 * 86_400 * 1_000_000 // 2
    rows, told, _ = _written(_work(catalog), [[_record(0, "first", far)]])
    assert len(rows[0]) == 1
    assert told["latest"] == {}


def test_a_record_without_a_time_has_none_in_a_table(catalog: InMemoryCatalog) -> None:
    batch = pa.RecordBatch.from_pylist(
        [_record(0, "first", -1_000), _record(1, "first", 0), {**_record(2, "first"), "__timestamp": None}],
        schema=_RECORDS,
    )
    times = _without_invalid_times(batch).column("__timestamp").cast(pa.int64())
    assert times.to_pylist() == [None, 1_000, None]
    _, told, _ = _written(_work(catalog), [[_record(0, "first", -1_000)]])
    assert told["latest"] == {}


def test_what_a_table_cannot_take_yet_is_not_written(catalog: InMemoryCatalog) -> None:
    batch = pa.RecordBatch.from_pylist([_record(n, "first") for n in range(3)], schema=_RECORDS)
    wants = pa.array([None, "widen/id\nrelax/text", None], pa.string())
    whole = pa.RecordBatch.from_arrays([*batch.columns, wants], [*batch.schema.names, "__row0_evolve"])
    (sent,) = build_writer(_work(catalog))([whole])
    told = json.loads(sent.to_pylist()[-1]["payload"])["counts"]
    assert (told["rows/0"], told["evolve/0/widen/id"], told["evolve/0/relax/text"]) == (2, 1, 1)


@pytest.mark.parametrize("searched", [True, False])
def test_the_files_of_failed_scans_and_no_others_are_deleted(
    catalog: InMemoryCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searched: bool
) -> None:
    """Tables with very many files are not searched."""
    if not searched:
        monkeypatch.setattr(unpublished_files, "MAX_LISTED_FILES", -1)
    records, files, works = [[_record(0, "both"), _record(1, "bad")]], [set[Path]()], []
    for _ in range(3):
        works.append(_work(catalog))
        _written(works[-1], records)
        files.append({*tmp_path.rglob("*.parquet")})
    failed = FailedScans()
    io = catalog.load_table(("shop", "first")).io
    for work in (works[0], works[2]):
        with pytest.raises(RuntimeError), failed.remember_failure(work, io):
            raise RuntimeError("lost")
    with failed.remember_failure(works[1], io):
        pass
    failed.delete_files()
    assert len(files[1]) == 3
    assert {*tmp_path.rglob("*.parquet")} == (files[2] - files[1] if searched else files[3])
