"""The one pass over a batch's records: converted by Spark, written by its workers, counted on the way."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

from pyiceberg.manifest import DataFile
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster.ingest.converting.formats import Format
from branchlake_dagster.ingest.declaring.families import Expanded
from branchlake_dagster.ingest.positions.offsets import Offsets
from branchlake_dagster.ingest.scanning.prepared import FOR, Prepared, fields_taken, row_columns
from branchlake_dagster.ingest.scanning.targets import Evolving, Target
from branchlake_dagster.ingest.scanning.writer import SENT_BACK, Work, WorkerTarget, writing

_ARROW = "spark.sql.execution.arrow"
_MOST_RECORDS, _MOST_BYTES = 2_500, 64 << 20
"""Of what Spark sends to its workers at once. The bytes it bounds by adding up all columns after each record,
which was a sixth of a batch's time. So it is asked to only where records may be large: in a session's first
batch, after one with large records, and after one that failed. Without that bound, 2,500 records of a
megabyte are more than a vector of Arrow holds."""
_NO_BOUND = (1 << 31) - 1
_small: WeakSet[SparkSession] = WeakSet()
"""Sessions whose last batch had small records."""
_cut_by: WeakKeyDictionary[SparkSession, int] = WeakKeyDictionary()
"""What each session bounds the bytes by."""


@dataclass
class Scanned:
    """What a pass found: data files by target, counts, and by `topic/partition` the latest time, in ms."""

    files: dict[int, list[DataFile]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    latest: dict[str, int] = field(default_factory=dict)

    def rows(self, target: int) -> int:
        """The rows written for a target."""
        return self.counts[f"rows/{target}"]

    def evolving(self) -> dict[int, Evolving]:
        """What the records want of the tables, by target."""
        found: dict[int, dict[str, set[str]]] = {}
        for name in self.counts:
            if name.startswith("evolve/"):
                _, target, how, what = name.split("/", 3)
                found.setdefault(int(target), {}).setdefault(how, set()).add(what)
        return {
            target: Evolving(**{how: frozenset(names) for how, names in wanted.items()})
            for target, wanted in found.items()
        }

    def names(self, families: Sequence[str]) -> dict[str, set[str]]:
        """What records have put into the names of tables that are not known, by family."""
        found: dict[str, set[str]] = {}
        for told in self.counts:
            if told.startswith("new/"):
                _, number, name = told.split("/", 2)
                found.setdefault(families[int(number)], set()).add(name)
        return found


def scan(
    records: DataFrame,
    ingest: Expanded,
    reading: Format,
    targets: Sequence[Target],
    floors: Mapping[str, Offsets],
    work: Work,
) -> Scanned:
    """Convert the records, write them to data files of the targets, and count.

    `floors` are by table the offsets before which it takes nothing; `targets` end with the dead letters.
    """
    session = records.sparkSession
    _cut_batches(session, _NO_BOUND if session in _small else _MOST_BYTES)
    _small.discard(session)
    frame = reading.read(records)
    letters = list(zip(work.topics, work.incarnations, strict=True)) if FOR in records.columns else []
    prepared = Prepared(ingest, reading, targets[:-1], floors, floors.get(targets[-1].name), letters)
    frame = prepared.columns(frame)
    sent = frame.mapInArrow(writing(work), from_arrow_schema(SENT_BACK)).toArrow()
    found = Scanned()
    for row in sent.to_pylist():
        if row["kind"] == "file":
            # Made by our own function on our own workers a moment ago.
            found.files.setdefault(row["target"], []).append(pickle.loads(row["payload"]))  # noqa: S301
        else:
            told = json.loads(row["payload"])
            found.counts.update(told["counts"])
            for name, at in told["latest"].items():
                found.latest[name] = max(at, found.latest.get(name, at))
    if found.counts["bytes"] * _MOST_RECORDS < _MOST_BYTES * found.counts["records"]:
        _small.add(session)
    return found


def _cut_batches(session: SparkSession, most_bytes: int) -> None:
    """Let a session bound the bytes by this; it is asked where that is new."""
    if _cut_by.get(session) != most_bytes:
        session.conf.set(f"{_ARROW}.maxRecordsPerBatch", str(_MOST_RECORDS))
        session.conf.set(f"{_ARROW}.maxBytesPerBatch", str(most_bytes))
        _cut_by[session] = most_bytes


def worker_targets(
    targets: Sequence[Target], staged: Mapping[int, tuple[str, Mapping[str, str]]]
) -> list[WorkerTarget]:
    """The targets as workers need them.

    `staged` has by target the metadata of its staging table, and that one's columns for what the record says
    of itself, by attribute.
    """
    rows = row_columns(targets[:-1])
    made = [
        WorkerTarget(
            staged[number][0] if number in staged else one.table.metadata.model_dump_json(),
            rows[number],
            {
                **(one.declared.attributes if one.declared else {}),
                **(
                    {column: attribute for attribute, column in staged[number][1].items()}
                    if number in staged
                    else {}
                ),
            },
            one.name,
            frozenset(fields_taken(one)),
        )
        for number, one in enumerate(targets[:-1])
    ]
    return [*made, WorkerTarget(targets[-1].table.metadata.model_dump_json(), None, {}, targets[-1].name)]
