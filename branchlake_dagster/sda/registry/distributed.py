"""Merge pulls on Spark's workers, which also write the registry's tables.

All inputs are one frame of `INPUT_COLUMNS`, which Spark shuffles by ``sat_no``. So the rows of an object meet
in one task. The task merges them by the rules in `merge` and `life_cycle`, and writes the results to data
files of all tables (`WorkerTable`). It sends back only the names of the files, counts, and the objects that
must be merged again with their sets of all pulls. So rows travel once, and no table is computed twice.

The state of an object depends on the latest sightings of all objects, which are known after the merge only.
The merge assumes them from those before and the times of the pulls, and each task reports those of its own
objects. If the assumption was wrong, the merge is repeated with the reported ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import reduce

import polars as pl
import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster import WorkerTable
from branchlake_dagster.sda.registry.life_cycle import (
    FACT_COLUMNS,
    OBJECT_COLUMNS,
    LatestSightings,
    update_objects,
)
from branchlake_dagster.sda.registry.merge import (
    AUDIT_COLUMNS,
    CATALOGUE_COLUMNS,
    PULLED_COLUMNS,
    SET_KEY,
    merge_pulled_sets,
    select_new_sets,
)
from branchlake_dagster.sda.registry.periods import arrow_schema
from branchlake_dagster.sda.registry.satcat import ENTRY_COLUMNS
from branchlake_dagster.sda.registry.sources import feed_name, source_name
from branchlake_dagster.sda.registry.table_files import pack_file, unpack_file
from branchlake_dagster.sda.shipping import map_in_arrow
from branchlake_dagster.sda.sources import snapshot_time

Batches = Iterable[pa.RecordBatch]

_UTC = pl.Datetime("us", "UTC")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FEW_OBJECTS = 2_000
"""The largest number of objects that are looked up by a list of their catalog numbers."""

PULLED, CURRENT, HISTORY = "pulled", "current", "history"
OBJECTS_BEFORE, ENTRIES, ALL_PULLS = "objects", "entries", "all_pulls"
COLUMNS_OF_INPUT: dict[str, dict[str, pl.DataType]] = {
    PULLED: PULLED_COLUMNS,
    CURRENT: CATALOGUE_COLUMNS,
    HISTORY: {name: PULLED_COLUMNS[name] for name in SET_KEY},
    OBJECTS_BEFORE: OBJECT_COLUMNS,
    ENTRIES: {
        **{name: ENTRY_COLUMNS[name] for name in ("sat_no", "object_name", "object_id", *FACT_COLUMNS)},
        "collected_at": _UTC,
    },
    ALL_PULLS: PULLED_COLUMNS,
}
"""The columns that the merge reads:

- pulled: the element sets of the run's pulls.
- current: the catalog before.
- history: the known sets since the first epoch of the pulls.
- objects: the objects before.
- entries: the run's entries of satellite catalogs.
- all_pulls: the sets of uncertain objects in all pulls; only in the second merge.
"""
INPUT_COLUMNS: dict[str, pl.DataType] = {
    "input": pl.String(),
    **{name: kind for columns in COLUMNS_OF_INPUT.values() for name, kind in columns.items()},
}

CATALOGUE_ROWS, OBJECT_ROWS, HISTORY_ROWS, AUDIT_ROWS = "catalogue", "objects", "element_history", "audit"
COLUMNS_OF_TABLE: dict[str, dict[str, pl.DataType]] = {
    CATALOGUE_ROWS: CATALOGUE_COLUMNS,
    OBJECT_ROWS: OBJECT_COLUMNS,
    HISTORY_ROWS: PULLED_COLUMNS,
    AUDIT_ROWS: AUDIT_COLUMNS,
}
"""The tables that a merge writes. Catalog and objects are written whole, history and audit by new rows."""

_FILE, _REPORT = "file", "report"
_SENT_BACK = pa.schema([("kind", pa.string()), ("table", pa.string()), ("payload", pa.binary())])


@dataclass(frozen=True)
class PulledSnapshots:
    """The snapshots with pulled sets, by the metadata of their files.

    ``collected_at`` has the latest collection time in each snapshot, or None if it is unknown. ``stated_at``
    is the latest collection time of the run's satellite catalogs, or None. ``first_epoch`` is a lower bound
    of all epochs in microseconds since 1970, or None if it is unknown.
    """

    collected_at: Mapping[str, datetime | None]
    stated_at: datetime | None = None
    first_epoch: int | None = None


@dataclass(frozen=True)
class MergedRows:
    """The rows of some objects in all tables (`COLUMNS_OF_TABLE`), and what changed.

    ``uncertain_sat_nos`` are the objects whose sets of all pulls are needed. Their rows are left out, unless
    the merge had these sets. ``counts`` has the numbers of `MergeReport`. ``latest`` are the latest sightings
    of these objects.
    """

    rows: Mapping[str, pl.DataFrame]
    counts: Mapping[str, int]
    uncertain_sat_nos: Sequence[int]
    latest: LatestSightings


@dataclass(frozen=True)
class MergeReport:
    """The files and counts of a merge on workers.

    ``files`` are the data files of each table, which no snapshot names yet. ``counts`` has ``pulled`` and
    ``new`` sets, the rows of ``catalogue`` and ``objects``, ``changed_sets``, ``withdrawn_sets``,
    ``changed_objects``, ``conflicts``, ``outcome/<outcome>`` and ``state/<state>``. ``looked_up`` is the
    number of objects that were merged with their sets of all pulls. ``latest`` are the latest sightings after
    the pulls. ``unused_files`` were written under a wrong assumption about them.
    """

    files: Mapping[str, Sequence[DataFile]]
    counts: Counter[str]
    latest: LatestSightings
    looked_up: int = 0
    unused_files: Sequence[tuple[str, DataFile]] = ()

    def counts_of(self, kind: str) -> dict[str, int]:
        """Return the counts of ``<kind>/<name>`` by name."""
        prefix = f"{kind}/"
        return {
            name.removeprefix(prefix): count
            for name, count in sorted(self.counts.items())
            if name.startswith(prefix)
        }


@dataclass(frozen=True)
class Merge:
    """The input that all tasks of a merge share.

    ``snapshot_ids`` are the snapshots with pulled sets. ``latest`` are the latest sightings after the pulls,
    as far as they are known. ``tables`` are the tables to write, by the names of `COLUMNS_OF_TABLE`.
    """

    snapshot_ids: Sequence[str]
    latest: LatestSightings
    tables: Mapping[str, WorkerTable] = field(repr=False)
    has_all_pulls: bool = False


def merge_pulls(
    inputs: Mapping[str, DataFrame],
    pulls: PulledSnapshots,
    tables: Mapping[str, WorkerTable],
    read_all_pulls: Callable[[], DataFrame],
    latest_before: LatestSightings | None = None,
) -> MergeReport:
    """Merge pulls with the registry, and write data files of its tables. Nothing is committed.

    Runs one Spark query. Others follow if objects are uncertain, if the latest sightings before are not
    given, and if the assumed ones after the pulls were wrong.

    Args:
        inputs: frames by the names of `COLUMNS_OF_INPUT`, without all pulls. Tables that do not exist yet are
            left out.
        pulls: the snapshots with pulled sets.
        tables: the tables by the names of `COLUMNS_OF_TABLE`.
        read_all_pulls: returns the element sets of all pulls, this run's pulls included; called if objects
            are uncertain.
        latest_before: the latest sightings before the pulls; None if they must be computed from the objects.

    """
    snapshot_ids = sorted(pulls.collected_at)
    if latest_before is None:
        latest_before = find_latest_sightings(inputs.get(OBJECTS_BEFORE))
    merge = Merge(snapshot_ids, assume_latest_sightings(latest_before, pulls), tables)
    first = _merge_on_workers(inputs, merge)
    unused_files: list[tuple[str, DataFile]] = []
    if not _agree(merge.latest, first.latest):
        unused_files = [(name, file) for name, files in first.files.items() for file in files]
        merge = Merge(snapshot_ids, first.latest, tables)
        first = _merge_on_workers(inputs, merge)
    if not first.uncertain_sat_nos:
        return MergeReport(first.files, first.counts, first.latest, unused_files=unused_files)
    of_uncertain = {
        name: _select_objects(frame, first.uncertain_sat_nos)
        for name, frame in {**inputs, ALL_PULLS: read_all_pulls()}.items()
    }
    second = _merge_on_workers(of_uncertain, replace(merge, has_all_pulls=True))
    files = {name: [*first.files[name], *second.files[name]] for name in COLUMNS_OF_TABLE}
    counts, looked_up = first.counts + second.counts, len(first.uncertain_sat_nos)
    return MergeReport(files, counts, first.latest, looked_up, unused_files)


def _agree(assumed: LatestSightings, reported: LatestSightings) -> bool:
    """Return whether the assumed sightings give all objects the same states as the reported ones."""
    return assumed.newest == reported.newest and all(
        assumed.by_feed.get(feed) == time for feed, time in reported.by_feed.items()
    )


def _select_objects(frame: DataFrame, sat_nos: Sequence[int]) -> DataFrame:
    if len(sat_nos) <= _FEW_OBJECTS:
        return frame.where(F.col("sat_no").isin(list(sat_nos)))
    chosen = frame.sparkSession.createDataFrame(pa.table({"sat_no": pa.array(sat_nos, pa.int64())}))
    return frame.join(F.broadcast(chosen), on="sat_no", how="left_semi")


@dataclass
class _WorkerReports:
    """The files and counts that the tasks of one merge sent back."""

    files: dict[str, list[DataFile]] = field(default_factory=lambda: {name: [] for name in COLUMNS_OF_TABLE})
    counts: Counter[str] = field(default_factory=Counter)
    uncertain_sat_nos: list[int] = field(default_factory=list)
    latest: LatestSightings = field(default_factory=lambda: LatestSightings({}, None))


def _merge_on_workers(inputs: Mapping[str, DataFrame], merge: Merge) -> _WorkerReports:
    merged = map_in_arrow(combine_inputs(inputs).repartition("sat_no"), build_merge(merge), _SENT_BACK)
    reports = _WorkerReports()
    for row in merged.toArrow().to_pylist():
        if row["kind"] == _FILE:
            reports.files[row["table"]].append(unpack_file(row["payload"]))
        else:
            report = json.loads(row["payload"])
            reports.counts.update(report["counts"])
            reports.uncertain_sat_nos += report["uncertain"]
            times = [*_list_times(reports.latest), *_list_times(load_sightings(report["latest"]))]
            reports.latest = _latest_of(times)
    return reports


def combine_inputs(frames: Mapping[str, DataFrame]) -> DataFrame:
    """Return one frame of `INPUT_COLUMNS`. `frames` are keyed by the names of `COLUMNS_OF_INPUT`."""
    types = {column.name: column.dataType for column in from_arrow_schema(arrow_schema(INPUT_COLUMNS))}
    selected = []
    for name, frame in frames.items():
        # Tables of earlier versions lack some columns.
        present = {*COLUMNS_OF_INPUT[name]} & {*frame.columns}
        selected.append(
            frame.select(
                F.lit(name).alias("input"),
                *(
                    (F.col(column) if column in present else F.lit(None)).cast(kind).alias(column)
                    for column, kind in types.items()
                    if column != "input"
                ),
            )
        )
    return reduce(DataFrame.unionAll, selected)


def find_latest_sightings(objects: DataFrame | None) -> LatestSightings:
    """Return when each feed last listed objects of the table. Runs one query, unless `objects` is None."""
    if objects is None:
        return LatestSightings({}, None)
    feeds = objects.groupBy("feed").agg(
        F.unix_micros(F.max("last_seen")).alias("seen"), F.unix_micros(F.max("satcat_at")).alias("stated")
    )
    times = [
        (feed, _from_micros(micros))
        for row in feeds.collect()
        for feed, micros in ((row["feed"], row["seen"]), (None, row["stated"]))
        if micros is not None
    ]
    return _latest_of(times)


def assume_latest_sightings(before: LatestSightings, pulls: PulledSnapshots) -> LatestSightings:
    """Return the latest sightings after the pulls, if no feed loses its latest ones by the merge.

    A feed loses them if all objects of its latest pull are seen later in other feeds.
    """
    times = _list_times(before)
    times += [(feed_name(name), time) for name, time in pulls.collected_at.items() if time is not None]
    return _latest_of(times if pulls.stated_at is None else [*times, (None, pulls.stated_at)])


def dump_sightings(latest: LatestSightings) -> str:
    """Return latest sightings as JSON, for `load_sightings`."""
    return json.dumps([(feed, _to_micros(time)) for feed, time in _list_times(latest)])


def load_sightings(text: str) -> LatestSightings:
    """Return the latest sightings that `dump_sightings` wrote."""
    return _latest_of([(feed, _from_micros(micros)) for feed, micros in json.loads(text)])


def _latest_of(times: Iterable[tuple[str | None, datetime]]) -> LatestSightings:
    """Combine times with their feeds. Times of satellite catalogs have no feed."""
    by_feed: dict[str, datetime] = {}
    newest: datetime | None = None
    for feed, time in times:
        if feed is not None:
            by_feed[feed] = max(time, by_feed.get(feed, time))
        newest = time if newest is None else max(time, newest)
    return LatestSightings(by_feed, newest)


def _list_times(latest: LatestSightings) -> list[tuple[str | None, datetime]]:
    return [*latest.by_feed.items(), *([] if latest.newest is None else [(None, latest.newest)])]


def _from_micros(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def _to_micros(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1)


def build_merge(merge: Merge) -> Callable[[Batches], Iterator[pa.RecordBatch]]:
    """Build the function for Spark's ``mapInArrow``: it merges the rows of a partition and writes them."""

    def merge_batches(batches: Batches) -> Iterator[pa.RecordBatch]:
        filled_batches = [batch for batch in batches if batch.num_rows]
        if not filled_batches:
            return
        rows = pl.DataFrame(pl.from_arrow(pa.Table.from_batches(filled_batches)))
        del filled_batches
        merged = merge_rows(
            rows.select(pl.col(name).cast(kind) for name, kind in INPUT_COLUMNS.items()), merge
        )
        sent = [
            (_FILE, name, pack_file(file))
            for name, table in merge.tables.items()
            for file in table.write(_to_arrow(merged.rows[name]))
        ]
        report = {
            "counts": merged.counts,
            "uncertain": merged.uncertain_sat_nos,
            "latest": dump_sightings(merged.latest),
        }
        sent.append((_REPORT, "", json.dumps(report).encode()))
        columns = zip(*sent, strict=True)
        yield pa.RecordBatch.from_arrays(
            [pa.array(values, column.type) for values, column in zip(columns, _SENT_BACK, strict=True)],
            schema=_SENT_BACK,
        )

    return merge_batches


def _to_arrow(rows: pl.DataFrame) -> pa.Table:
    return rows.to_arrow(compat_level=pl.CompatLevel.oldest())


def merge_rows(rows: pl.DataFrame, merge: Merge) -> MergedRows:
    """Merge the rows (`INPUT_COLUMNS`) of some objects."""
    by_input = rows.partition_by("input", as_dict=True, include_key=False)

    def select_input(name: str) -> pl.DataFrame:
        frame = by_input.get((name,), rows.clear()).select(*COLUMNS_OF_INPUT[name])
        return complete_pulls(frame) if {*PULLED_COLUMNS} <= {*frame.columns} else frame

    pulled, catalogue_before, all_pulls = map(select_input, (PULLED, CURRENT, ALL_PULLS))
    objects_before = select_input(OBJECTS_BEFORE)
    merged = merge_pulled_sets(
        catalogue_before,
        pulled,
        merge.snapshot_ids,
        lambda sat_nos: all_pulls.filter(pl.col("sat_no").is_in(sat_nos.implode())),
    )
    objects = update_objects(objects_before, merged.winners, pulled, select_input(ENTRIES), merge.latest)
    catalogue = merged.winners.join(objects.select("sat_no", "state"), on="sat_no", how="left")
    new_sets = select_new_sets(select_input(HISTORY), pulled)
    unfinished = pl.Series(dtype=pl.Int64) if merge.has_all_pulls else merged.uncertain_sat_nos

    def keep_finished(frame: pl.DataFrame) -> pl.DataFrame:
        if not unfinished.len():
            return frame
        return frame.join(unfinished.to_frame("sat_no"), on="sat_no", how="anti", maintain_order="left")

    merged_rows = {
        name: keep_finished(frame).select(*COLUMNS_OF_TABLE[name])
        for name, frame in {
            CATALOGUE_ROWS: catalogue,
            OBJECT_ROWS: objects,
            HISTORY_ROWS: new_sets,
            AUDIT_ROWS: merged.audit,
        }.items()
    }
    counts = _count_rows(merged_rows, keep_finished(catalogue_before), keep_finished(objects_before))
    # Sightings and facts are final, also of uncertain objects.
    feeds = objects.drop_nulls("feed").group_by("feed").agg(pl.col("last_seen").max())
    stated_at = objects["satcat_at"].drop_nulls()
    latest = _latest_of([*feeds.iter_rows(), *((None, time) for time in stated_at.sort().tail(1))])
    return MergedRows(merged_rows, counts, merged.uncertain_sat_nos.to_list(), latest)


def _count_rows(
    rows: Mapping[str, pl.DataFrame], catalogue_before: pl.DataFrame, objects_before: pl.DataFrame
) -> dict[str, int]:
    catalogue, objects, audit = rows[CATALOGUE_ROWS], rows[OBJECT_ROWS], rows[AUDIT_ROWS]
    withdrawn = catalogue_before.select("sat_no").join(catalogue, on="sat_no", how="anti")
    counts = {
        "pulled": audit.height,
        "new": rows[HISTORY_ROWS].height,
        "catalogue": catalogue.height,
        "objects": objects.height,
        "changed_sets": _count_changed(catalogue_before, catalogue),
        "withdrawn_sets": withdrawn.height,
        "changed_objects": _count_changed(objects_before, objects),
        "conflicts": int(audit["conflict"].sum()),
    }
    for kind, values in (("outcome", audit["outcome"]), ("state", objects["state"])):
        counts |= {f"{kind}/{name}": count for name, count in values.value_counts().iter_rows()}
    return counts


def _count_changed(before: pl.DataFrame, after: pl.DataFrame) -> int:
    """Count the rows of `after` that `before` does not contain with equal values."""
    return after.join(before, on=after.columns, how="anti", nulls_equal=True).height


def complete_pulls(pulls: pl.DataFrame) -> pl.DataFrame:
    """Complete the source and the time of collection, which tables of earlier versions lack.

    Both are derived from the snapshot's id. If the id has no time, the epoch is used as the time.
    """
    if not pulls["collected_at"].null_count():
        return pulls
    names = pulls["snapshot_id"].unique().to_list()
    times = pl.col("snapshot_id").replace_strict(
        {name: snapshot_time(name) for name in names}, return_dtype=_UTC
    )
    sources = pl.col("snapshot_id").replace_strict(
        {name: source_name(name) for name in names}, return_dtype=pl.String
    )
    return pulls.with_columns(
        collected_at=pl.coalesce("collected_at", times, "epoch"), source=pl.coalesce("source", sources)
    )
